// lockstep audit RECORDING...: does what an engine decided damage memory, whichever engine it was?
//
// Follows every slot and every recurrent state from the recorded decisions
// (properties/audit/audit.h) and checks every read. No model decides and no page is written, so it
// takes recordings of engines without a profile. `lockstep conform` compares the decisions with the
// model instead.
//
// Findings, hits and skipped files of all recordings are added up. A recording that the audit
// cannot follow is reported as skipped and does not fail the command.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/conform_inputs.h"
#include "cli/options/decisions_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "properties/audit/audit.h"
#include "properties/judge/recording_check.h"

namespace lockstep {
namespace {

constexpr std::size_t kFindingsShown = 20;

struct AuditOptions {
  std::vector<std::string> paths;
  ReportOptions reports;
  double min_hit_share = 0;  // percent of the tokens in the pool; 0: any share passes
  std::string policy = "on";
  // "off": only rules about memory, for an engine whose policy differs on purpose.
  AuditedRules rules() const { return rules_of_policy(policy); }
};

// The sum over all recordings.
struct AuditTotals {
  std::vector<AuditFile> files{};      // audited or skipped
  std::vector<RefusedFile> refused{};  // could not be read
  std::int64_t others = 0;             // files of folders that are not recordings
  // Recordings audited without a finding, and recordings that were not audited.
  std::int64_t clean = 0;
  std::int64_t skipped = 0;
  std::int64_t steps = 0;
  std::int64_t reads = 0;
  HitTotals hits{};
  std::vector<AuditFinding> findings{};
  bool told = false;  // the findings are already printed
  AuditedRules rules = AuditedRules::all;
  std::int64_t num_findings(RuleGroup group) const {
    return std::ranges::count(findings, group,
                              [](const AuditFinding& finding) { return group_of(finding.rule); });
  }
};

// A skipped file may have findings: a stop signal that interrupts its audit also skips it.
void add(AuditFile file, AuditTotals& totals) {
  totals.steps += file.steps;
  totals.reads += file.reads_checked;
  totals.hits += file.hits;
  if (!file.skipped.empty())
    ++totals.skipped;
  else if (file.findings.empty())
    ++totals.clean;
  totals.findings.insert(totals.findings.end(), file.findings.begin(), file.findings.end());
  totals.files.push_back(std::move(file));
}

// Audits every recording in the files and folders. An unreadable file is refused and the others are
// still audited. A stop signal ends the loop; the totals cover the files before it. Errors: nothing
// to audit.
Result<AuditTotals> audit_all(const std::vector<std::string>& paths, AuditedRules rules) {
  LS_ASSIGN_OR_RETURN(auto inputs, find_conform_inputs(paths));
  if (inputs.schedules.empty() && inputs.refused.empty())
    return fail("nothing to audit: no recordings of schedules found");
  AuditTotals totals;
  totals.rules = rules;
  totals.refused = std::move(inputs.refused);
  totals.others = inputs.others + std::ssize(inputs.layouts);
  std::int64_t done = 0;
  Progress progress("auditing", static_cast<std::int64_t>(inputs.schedules.size()));
  for (const std::string& path : inputs.schedules) {
    if (stop_requested()) break;
    Result<AuditFile> file = audit_recording(path, rules);
    progress.at(++done, path);
    if (!file) {
      totals.refused.push_back({path, file.error().message});
      continue;
    }
    add(std::move(*file), totals);
  }
  sort_and_unite(totals.refused);
  return totals;
}

// Audits one recording from standard input while it is being written, and prints each finding as
// soon as a step shows it.
Result<AuditTotals> audit_stream(AuditedRules rules) {
  AuditTotals totals{.told = true, .rules = rules};
  LS_ASSIGN_OR_RETURN(auto file,
                      audit_recording("/dev/stdin", rules, [](const AuditFinding& finding) {
                        fmt::print("{}\n", line_of(finding));
                        std::fflush(stdout);
                      }));
  add(std::move(file), totals);
  return totals;
}

// Returns the finding's stable line, which can be searched for, and then its file.
std::string finding_text(const AuditFinding& finding) {
  std::string text = fmt::format("\n{}\n  in {}\n", line_of(finding), finding.file);
  if (finding.count > 1)
    text += fmt::format("  seen {} times, last in step {}\n", with_commas(finding.count),
                        finding.last_step);
  return text;
}

// "prefix hits 62.5 %: 5,000 of 8,000 tokens that were in the pool". Empty: no request looked
// anything up, or a KV connector took part.
std::string hits_text(const HitTotals& hits) {
  if (hits.lookups == 0) return {};
  std::string text =
      fmt::format("prefix hits {:.1f} %: {} of {} tokens that were in the pool; {} for {} tokens\n",
                  hit_share(hits), with_commas(hits.hit), with_commas(hits.there),
                  counted(hits.lookups, "look-up"), with_commas(hits.tokens));
  const std::string losses = losses_text(hits);
  return losses.empty() ? text : text + fmt::format("  not hit: {}\n", losses);
}

// Only the first skipped file has its reason printed; --junit has all of them.
std::string not_audited_text(const AuditTotals& totals) {
  for (const AuditFile& file : totals.files)
    if (!file.skipped.empty())
      return fmt::format("\nnot audited: {} ({}): {}\n", counted(totals.skipped, "recording"),
                         "the first is " + file.file, file.skipped);
  return {};
}

std::string groups_text(const AuditTotals& totals) {
  const auto text = [&](RuleGroup group) { return counted(totals.num_findings(group), "finding"); };
  return fmt::format(
      "rules about memory: {}; rules about policy: {}\n", text(RuleGroup::memory),
      totals.rules == AuditedRules::all ? text(RuleGroup::policy) : "not checked (--policy off)");
}

// Returns what no audit checks, as properties/audit/audit.h lists it, and what this run left out.
std::vector<std::string> not_checked_of(const AuditTotals& totals) {
  std::vector<std::string> not_checked = {
      "memory: which addresses kernels read and write, and which bytes a connector moves",
      "a draft model's KV entries, except that no hit ends before a different next token",
      "the content of ring buffers of keys"};
  if (totals.rules == AuditedRules::memory)
    not_checked.emplace_back("rules about policy (--policy off)");
  if (totals.others > 0)
    not_checked.push_back("files of folders that are not recordings, and links to folders");
  if (totals.skipped > 0)
    not_checked.push_back(
        fmt::format("{} that the audit does not follow", counted(totals.skipped, "recording")));
  // Without counts, and sorted: a campaign unites the lists of its parts.
  std::set<std::string> of_files;
  for (const AuditFile& file : totals.files)
    of_files.insert(file.not_checked.begin(), file.not_checked.end());
  not_checked.insert(not_checked.end(), of_files.begin(), of_files.end());
  std::ranges::sort(not_checked);
  return not_checked;
}

std::string totals_text(const AuditTotals& totals) {
  const auto audited = static_cast<std::int64_t>(totals.files.size()) - totals.skipped;
  std::string text = fmt::format(
      "audited {} of {}: {} clean, {}\n{} steps, {} reads of slots and states checked\n", audited,
      counted(static_cast<std::int64_t>(totals.files.size()), "recording"), totals.clean,
      counted(static_cast<std::int64_t>(totals.findings.size()), "finding"),
      with_commas(totals.steps), with_commas(totals.reads));
  text += cut_off_lines(totals.files);
  text += groups_text(totals);
  text += hits_text(totals.hits);
  if (totals.told)
    return text + not_audited_text(totals) + not_checked_text(not_checked_of(totals));
  for (std::size_t i = 0; i < std::min(totals.findings.size(), kFindingsShown); ++i)
    text += finding_text(totals.findings[i]);
  // `lockstep explain` replays a case, and sessions cannot be replayed.
  const auto explained = std::ranges::find_if(totals.files, [](const AuditFile& file) {
    return !file.findings.empty() && !file.has_sessions;
  });
  if (explained != totals.files.end())
    text += fmt::format("\n`lockstep explain {}` shows what led to the first finding.\n",
                        shell_word(explained->file));
  if (totals.findings.size() > kFindingsShown)
    text += fmt::format("\n... and {} more; --json FILE lists them all\n",
                        totals.findings.size() - kFindingsShown);
  text += not_audited_text(totals);
  text += refused_text(totals.refused);
  return text + not_checked_text(not_checked_of(totals));
}

// null: no request has held the block.
nlohmann::ordered_json holder_json(const BlockHolder& holder) {
  if (holder.request.empty()) return nullptr;
  return {{"request", holder.request}, {"since", holder.since}};
}

std::string totals_json(const AuditTotals& totals) {
  nlohmann::ordered_json json;
  json["files"] = totals.files.size();
  json["not_recordings"] = totals.others;
  json["clean"] = totals.clean;
  json["not_audited"] = totals.skipped;
  json["skipped"] = nlohmann::ordered_json::array();
  for (const AuditFile& file : totals.files)
    if (!file.skipped.empty())
      json["skipped"].push_back({{"file", file.file}, {"why", file.skipped}});
  json["steps"] = totals.steps;
  json["reads"] = totals.reads;
  json["cut_off"] = cut_off_json(totals.files);
  json["hits"] = json_of(totals.hits);
  json["memory_findings"] = totals.num_findings(RuleGroup::memory);
  if (totals.rules == AuditedRules::all)
    json["policy_findings"] = totals.num_findings(RuleGroup::policy);
  else
    json["policy_findings"] = nullptr;  // not checked
  json["findings"] = nlohmann::ordered_json::array();
  for (const AuditFinding& f : totals.findings)
    json["findings"].push_back({{"rule", name_of(f.rule)},
                                {"file", f.file},
                                {"step", f.step},
                                {"request", f.request},
                                {"group", f.group},
                                {"token", f.token},
                                {"entry", f.entry},
                                {"block", f.block},
                                {"holder", holder_json(f.holder)},
                                {"holder_before", holder_json(f.holder_before)},
                                {"count", f.count},
                                {"last_step", f.last_step},
                                {"what", f.what},
                                {"line", line_of(f)}});
  json["not_checked"] = not_checked_of(totals);
  json["refused"] = totals.refused.size();
  json["refusals"] = refused_json(totals.refused);
  return json_text(json);
}

// Adds an item per file, audited, skipped or refused. A file with several findings is one item: the
// first is its line, the others are its details.
void add_items(const AuditTotals& totals, CommandReport& report) {
  for (const AuditFile& file : totals.files) {
    ReportedItem item{.name = file.file, .file = file.file};
    if (!file.skipped.empty() && file.findings.empty()) {
      item.kind = ItemKind::skipped;
      item.line = file.skipped;
    } else if (!file.findings.empty()) {
      const AuditFinding& first = file.findings.front();
      item.kind = ItemKind::failed;
      item.check = fmt::format("audit.{}", name_of(first.rule));
      item.line = line_of(first);
      for (const AuditFinding& finding : file.findings) item.details += line_of(finding) + "\n";
      item.again = report.again({.arguments = {file.file}});
    }
    report.add(std::move(item));
  }
  add_refused(totals.refused, report);
}

Result<int> audit(const AuditOptions& options, CommandReport& report) {
  watch_stop_signals();
  const bool is_stream = std::ranges::find(options.paths, "-") != options.paths.end();
  if (is_stream && options.paths.size() > 1)
    return fail("-: standard input is one recording; give no other path");
  LS_ASSIGN_OR_RETURN(const auto totals, is_stream ? audit_stream(options.rules())
                                                   : audit_all(options.paths, options.rules()));
  if (!totals.files.empty()) fmt::print("{}", totals_text(totals));
  if (report.wants_json()) report.set_json(totals_json(totals));
  add_items(totals, report);
  // Without look-ups the share is 100 %: an empty pool does not fail the option.
  const bool hits_too_little = hit_share(totals.hits) < options.min_hit_share;
  if (hits_too_little)
    fmt::print(
        "\nHit rate too low: {:.1f} % of the cached tokens; --min-hit-share requires {} %.\n",
        hit_share(totals.hits), options.min_hit_share);
  if (hits_too_little)
    report.add({.name = "prefix hits",
                .kind = ItemKind::failed,
                .check = "audit.hit_share",
                .line = fmt::format(
                    "hit rate {:.1f} % of the cached tokens; --min-hit-share requires {} %",
                    hit_share(totals.hits), options.min_hit_share)});
  // A run that audited nothing has no verdict.
  if (!totals.files.empty() && totals.skipped == std::ssize(totals.files) &&
      totals.findings.empty())
    return refuse("no recording was audited: " + totals.files.front().skipped);
  return judged_exit_code(totals.refused, std::ssize(totals.files),
                          hits_too_little || !totals.findings.empty());
}

}  // namespace

void add_audit_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<AuditOptions>();
  CLI::App* command =
      app.add_subcommand("audit", "Check what any engine's recorded decisions do to memory");
  command->footer(
      "A file that cannot be checked is refused with a reason; the others are still checked.\n"
      "Exit status: 0 all clean; 1 a finding, or the hit rate is too low; 2 a file is refused, "
      "whatever else is found.");
  command
      ->add_option(
          "PATH", options->paths,
          "recordings or folders of them; -: one from standard input, checked as it is written")
      ->required();
  command
      ->add_option("--min-hit-share", options->min_hit_share,
                   "minimum hit rate in percent of the cached tokens; below it, exit with 1")
      ->check(CLI::Range(0.0, 100.0).description(""))
      ->type_name("P");
  declare_audit_policy(*command, "--policy,--audit-policy", options->policy);
  declare_reports(*command, options->reports, "the result as JSON");
  run_when_chosen(*command, options, exit_code, audit);
}

}  // namespace lockstep
