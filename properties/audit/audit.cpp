#include "properties/audit/audit.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/number_text.h"
#include "base/stop_signal.h"
#include "properties/audit/auditor.h"
#include "reference/plan/limits.h"

namespace lockstep {

RuleGroup group_of(AuditRule rule) {
  const bool is_policy = rule == AuditRule::hits || rule == AuditRule::victim ||
                         rule == AuditRule::standstill || rule == AuditRule::limits ||
                         rule == AuditRule::excess_blocks;
  return is_policy ? RuleGroup::policy : RuleGroup::memory;
}

std::string line_of(const AuditFinding& finding) {
  std::string line = fmt::format("audit.{}", name_of(finding.rule));
  const auto add = [&](std::string_view what, std::int64_t value) {
    if (value >= 0) line += fmt::format(" {} {}", what, value);
  };
  add("step", finding.step);
  if (!finding.request.empty()) line += " request " + finding.request;
  add("group", finding.group);
  add("token", finding.token);
  add("entry", finding.entry);
  add("block", finding.block);
  return on_one_line(line + ": " + finding.what);
}

static bool has_roles(const RecordingHeader& header) {
  return std::ranges::any_of(header.groups,
                             [](const KVCacheGroupSpec& group) { return !group.role.empty(); });
}

std::string why_not_audited(const RecordingHeader& header) {
  if (has_roles(header)) return "readers of a group that has a role are not followed";
  const EngineConfig& config = header.options.config;
  const bool keeps_states = has_states(header.groups);
  // Releases that free blocks by processed outputs have a runner that counts on the device.
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  const bool counts_on_device =
      profile != nullptr && profile->retire_basis == RetireBasis::processed;
  if (keeps_states && config.async_scheduling && config.num_spec_tokens > 0 && !counts_on_device)
    return "with drafts in flight only the worker knows which entry of the table holds a running "
           "state";
  return {};
}

static Result<AuditFile> audit_steps(const std::string& path, const RecordingHeader& header,
                                     RecordedSteps steps, AuditedRules rules,
                                     const TellFinding& tell) {
  AuditFile file;
  file.file = path;
  if (auto sound = check_limits(header.options.config, header.groups, header.num_blocks); !sound)
    return fail(fmt::format("{}:1: {}", path, sound.error().message));
  if (has_roles(header))
    return fail(fmt::format("{}:1: role: readers of a group of that role are not followed", path));
  file.skipped = why_not_audited(header);
  if (!file.skipped.empty()) return file;
  Auditor auditor(header, AuditScope::whole_recording, rules);
  const auto take = [&] {
    for (AuditFinding& finding : auditor.take_findings()) {
      finding.file = path;
      if (tell) tell(finding);
      file.findings.push_back(std::move(finding));
    }
  };
  RecordedStep step;
  while (!stop_requested()) {
    const Result<bool> more = steps.next(step);
    if (!more && stop_requested()) break;
    if (!more) return tl::unexpected(more.error());
    if (!*more) break;
    auditor.step(step);
    file.has_sessions |= std::ranges::any_of(step.before, &RecordedEvent::is_session);
    ++file.steps;
    if (tell) take();
  }
  if (stop_requested()) {
    file.skipped = fmt::format("interrupted after {} steps", file.steps);
  } else {
    auditor.end(steps.end());
    file.cut_off = cut_off_text(steps.end());
    if (file.steps == 0) file.skipped = file.cut_off.empty() ? "it has no step" : file.cut_off;
  }
  file.reads_checked = auditor.reads_checked();
  file.hits = auditor.hits();
  file.not_checked = auditor.not_checked();
  take();
  return file;
}

Result<AuditFile> audit_recording(const std::string& path, AuditedRules rules,
                                  const TellFinding& tell) {
  LS_ASSIGN_OR_RETURN(auto reader, RecordingReader::open(path));
  const RecordingHeader header = reader.header();
  return audit_steps(path, header, RecordedSteps(std::move(reader)), rules, tell);
}

Result<AuditFile> audit_recording(const std::string& path,
                                  std::shared_ptr<const Recording> recording, AuditedRules rules) {
  return audit_steps(path, recording->header, RecordedSteps(recording, path), rules, {});
}

}  // namespace lockstep
