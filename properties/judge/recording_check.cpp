#include "properties/judge/recording_check.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "base/check.h"
#include "base/number_text.h"
#include "reference/plan/capacity.h"

namespace lockstep {
namespace {

// A recording with one cause may have hundreds of findings; the first few explain it.
constexpr std::size_t kFindingsShown = 5;
constexpr std::size_t kValueChars = 60;

// A mismatch without a step concerns the header or the end line.
std::string place_of(const ConformMismatch& parts) {
  if (parts.step >= 0) return fmt::format("in step {}", parts.step);
  return parts.what.starts_with("end") ? "at its end line" : "in its header";
}

// Shortens a recorded value, which may be a whole table.
std::string shown(const std::string& value) {
  return value.size() <= kValueChars ? value : value.substr(0, kValueChars) + "...";
}

std::string audit_summary(const RecordingCheck& check) {
  if (!check.not_audited.empty()) return "not audited";
  return "audit: " + counted(std::ssize(check.findings), "finding");
}

}  // namespace

// The auditor holds for the whole recording: a scope for running engines would skip rules about its
// end.
RecordingAudit::RecordingAudit(std::shared_ptr<const Recording> recording, AuditedRules rules)
    : recording_(std::move(recording)) {
  open(recording_->header, AuditScope::whole_recording, rules);
}

// The run ends after a finding, so a second call with findings is a bug of the loop.
bool RecordingAudit::decided(const StepView& view) {
  LS_CHECK(findings().empty(), "{} findings, and step {} is decided", findings().size(),
           view.decision.step);
  if (!is_over()) audit(recording_->steps[static_cast<std::size_t>(view.decision.step)]);
  return findings().empty();
}

CheckFailure failure_of(const AuditFinding& finding) {
  return {.check = fmt::format("audit.{}", name_of(finding.rule)),
          .step = finding.step,
          .what = finding.what,
          .request = finding.request};
}

Verdict RecordingCheck::verdict() const {
  if (!findings.empty()) return Verdict::audit;
  return parts || !not_compared.empty() ? Verdict::parted : Verdict::agreed;
}

// The two checks read the recording independently of each other and of any run.
RecordingCheck check_recording(const std::string& path, std::shared_ptr<const Recording> recording,
                               AuditedRules rules) {
  RecordingCheck check;
  if (auto model = conform_recording(path, recording, {}))
    check.parts = std::move(model->mismatch);
  else
    check.not_compared = model.error().message;
  if (auto audit = audit_recording(path, recording, rules)) {
    check.findings = std::move(audit->findings);
    check.not_audited = audit->skipped;
  } else {
    check.not_audited = audit.error().message;
  }
  return check;
}

std::string summary_of(const RecordingCheck& check) {
  const std::string model =
      !check.not_compared.empty() ? "the recording was not compared with the model"
      : check.parts ? fmt::format("the recording differs from the model {}", place_of(*check.parts))
                    : "the recording holds the same decisions";
  return fmt::format("{}; {}", model, audit_summary(check));
}

std::string details_of(const RecordingCheck& check) {
  std::string text;
  if (check.parts)
    text += fmt::format("  {}: {}: recorded {}, model {}\n", place_of(*check.parts),
                        check.parts->what, shown(check.parts->recorded), shown(check.parts->model));
  if (!check.not_compared.empty()) text += fmt::format("  not compared: {}\n", check.not_compared);
  for (std::size_t i = 0; i < std::min(kFindingsShown, check.findings.size()); ++i)
    text += fmt::format("  {}\n", line_of(check.findings[i]));
  if (check.findings.size() > kFindingsShown)
    text += fmt::format("  ... and {} more findings; `lockstep audit` lists them\n",
                        check.findings.size() - kFindingsShown);
  if (!check.not_audited.empty()) text += fmt::format("  not audited: {}\n", check.not_audited);
  return text;
}

std::string parting_of(const ConformMismatch& parts) {
  return fmt::format(
      "The recording and the model differ here ({}: recorded {}, model {}). The rest is the "
      "model's run, not the recording's.",
      parts.what, shown(parts.recorded), shown(parts.model));
}

nlohmann::ordered_json json_of(const RecordingCheck& check) {
  using Json = nlohmann::ordered_json;
  Json json = {{"parts", nullptr},
               {"not_compared", check.not_compared},
               {"not_audited", check.not_audited},
               {"findings", Json::array()}};
  if (check.parts)
    json["parts"] = {{"step", check.parts->step},
                     {"what", check.parts->what},
                     {"recorded", check.parts->recorded},
                     {"model", check.parts->model}};
  for (const AuditFinding& finding : check.findings)
    json["findings"].push_back({{"rule", name_of(finding.rule)},
                                {"step", finding.step},
                                {"request", finding.request},
                                {"what", finding.what},
                                {"line", line_of(finding)}});
  return json;
}

// Full attention in one group without drafts loses hits to evictions only.
bool RunAudit::counts_hits_of(const LockstepConfig& config) {
  const std::vector<KVCacheGroupSpec>& groups = config.backend.plan.groups;
  return config.engine.enable_prefix_caching &&
         (groups.size() > 1 || config.engine.num_spec_tokens > 0 ||
          !std::ranges::all_of(
              groups, [](const KVCacheGroupSpec& group) { return grows_with_length(group.spec); }));
}

// An engine without a release profile must not be audited by the rules of a release.
void RunAudit::open(const LockstepConfig& config, const DecisionSource& decisions, AuditScope scope,
                    AuditedRules rules) {
  const KVCacheConfig& plan = config.backend.plan;
  RecordingHeader header = recorder_.header(config.engine, plan.groups, plan.num_blocks, decisions,
                                            config.connector.load_failure_policy);
  if (const auto name = decisions.name_without_profile(); !name.empty())
    header.engine = {.name = std::string(name), .version = "1"};
  scope_ = scope;
  StepAudit::open(header, scope, rules);
}

bool RunAudit::has_ended() const {
  return is_over() || (scope_ == AuditScope::hits_only && auditor_->hits().tokens > kTokensMax);
}

bool RunAudit::decided(const StepView& view) {
  if (!has_ended()) recorder_.decided(view);
  return findings().empty();
}

bool RunAudit::finished(const StepView& view) {
  if (!has_ended()) recorder_.finished(view);
  return findings().empty();
}

// The scope `hits_only` has no finding worth reporting.
void RunAudit::take(const RecordedStep& step) {
  if (scope_ != AuditScope::hits_only) return audit(step);
  auditor_->step(step);
  auditor_->take_findings();
}

void RunAudit::end() {
  if (!has_ended() && scope_ != AuditScope::hits_only) audit(recorder_.end());
}

const HitTotals* RunAudit::hits() const {
  return auditor_ && scope_ == AuditScope::hits_only ? &auditor_->hits() : nullptr;
}

// Nothing in the pool means nothing was lost.
double hit_share(const HitTotals& hits) {
  if (hits.there == 0) return 100;
  return 100.0 * static_cast<double>(hits.hit) / static_cast<double>(hits.there);
}

std::string losses_text(const HitTotals& hits) {
  std::string losses;
  for (std::size_t i = 0; i < kHitLosses; ++i)
    if (hits.lost[i] > 0)
      losses += fmt::format("{}{} {}", losses.empty() ? "" : ", ", with_commas(hits.lost[i]),
                            name_of(static_cast<HitLoss>(i)));
  return losses;
}

nlohmann::ordered_json json_of(const HitTotals& hits) {
  nlohmann::ordered_json json = {{"lookups", hits.lookups},
                                 {"tokens", hits.tokens},
                                 {"in_pool", hits.there},
                                 {"hit", hits.hit},
                                 {"share_percent", hit_share(hits)}};
  for (std::size_t i = 0; i < kHitLosses; ++i)
    json["not_hit"][name_of(static_cast<HitLoss>(i))] = hits.lost[i];
  return json;
}

}  // namespace lockstep
