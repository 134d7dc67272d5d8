#include "properties/judge/known_findings.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "properties/shrink/case_parts.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

// Returns true if the repaired case agrees, or fails only in a later step. A stuck case has no step
// to compare: it must agree.
bool gets_past(const Outcome& failure, const Outcome& without) {
  if (without.kind == OutcomeKind::agreed) return true;
  return without.failed() && failure.kind != OutcomeKind::stuck && without.step > failure.step;
}

// Repairs every finding that a rule repairs, and returns true if the failure is then gone.
bool is_past_all_rules(const SavedCase& saved, const Outcome& failure,
                       const BackendFactory& backend) {
  return !profile_without(saved.engine.engine, 0).empty() &&
         gets_past(failure, judge(with_all_rules_repaired(saved), backend));
}

// Returns true if the finding may be the cause: its check failed and its condition holds. Cheap, so
// it comes before any judging.
bool could_be(const KnownFinding& finding, const SavedCase& saved, const Outcome& outcome) {
  return std::ranges::find(finding.checks, outcome.check) != finding.checks.end() &&
         finding.can_happen(saved);
}

// As known_finding(). `repairs`: repaired cases that may be searched for further findings. Without
// this limit, a search between two alternating failures never ends.
const KnownFinding* search(const SavedCase& saved, const Outcome& outcome,
                           const BackendFactory& backend, int& repairs) {
  if (!outcome.failed()) return nullptr;
  // The planted defect must not matter: the same failure in the same step without it.
  if (!saved.mutants.empty()) {
    SavedCase unplanted = saved;
    unplanted.mutants.clear();
    const Outcome without = judge(unplanted, backend);
    const bool is_same = without.same_failure(outcome) && without.step == outcome.step;
    return is_same ? search(unplanted, without, backend, repairs) : nullptr;
  }
  std::optional<Outcome> decided;
  // The backend's divergence may follow from the decision. judge(saved) runs without a backend and
  // gives the audit's view of the decisions; a later failure is not the cause.
  if (outcome.kind == OutcomeKind::divergence) {
    decided = judge(saved);
    if (!decided->failed() || decided->step > outcome.step) decided.reset();
  }
  // With its repair the case passes the failing step. A case that still fails, by another check, is
  // explained if the remaining failure is known: it is gone with all rules repaired, or it is
  // recognised itself.
  auto passes_without_rules = [&, passes = std::optional<bool>()]() mutable {
    if (!passes) passes = is_past_all_rules(saved, outcome, backend);
    return *passes;
  };
  const auto is_explained_by = [&](const KnownFinding& finding) {
    const SavedCase repaired = finding.repaired(saved);
    const Outcome without = judge(repaired, backend);
    if (gets_past(outcome, without)) return true;
    if (!without.failed() || without.same_failure(outcome)) return false;
    const bool is_rule = repaired.engine.engine != saved.engine.engine;
    return (is_rule && passes_without_rules()) ||
           (--repairs >= 0 && search(repaired, without, backend, repairs) != nullptr);
  };
  const KnownFinding* first = nullptr;
  for (const KnownFinding& finding : known_findings()) {
    if (!could_be(finding, saved, outcome) && !(decided && could_be(finding, saved, *decided)))
      continue;
    if (is_explained_by(finding)) return &finding;
    if (first == nullptr) first = &finding;
  }
  // Repairing one of two causes does not help; repairing all does. The first possible one is named.
  return first != nullptr && passes_without_rules() ? first : nullptr;
}

}  // namespace

const KnownFinding* finding_of_number(int number) {
  for (const KnownFinding& finding : known_findings())
    if (finding.number == number) return &finding;
  for (const EngineFinding& own : engine_findings())
    if (own.finding.number == number) return &own.finding;
  for (const KnownFinding& finding : worker_findings())
    if (finding.number == number) return &finding;
  return nullptr;
}

const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const BackendFactory& backend) {
  int repairs = static_cast<int>(std::ssize(known_findings()));
  return search(saved, outcome, backend, repairs);
}

// Returns the case under the release that is modelled with connectors, if its own release is not.
// Policies on which findings about connectors depend keep the values of the case's release.
static SavedCase as_modelled(const SavedCase& saved) {
  if (!has_connector(saved) || engine_profile(saved.engine.engine).release->models_connectors)
    return saved;
  std::string engine = connector_profile().name;
  for (const FindingPolicies& finding : finding_policies())
    if (finding.needs_connector)
      for (const PolicyIs& is : finding.needs) {
        const Policy& policy = *find_policy(is.policy);
        engine = with_policy(engine_profile(engine), policy,
                             policy.get(engine_profile(saved.engine.engine)))
                     .name;
      }
  SavedCase modelled = saved;
  modelled.engine.engine = engine;
  // Options that the modelled release does not have get its own behaviour.
  modelled.engine.num_hash_lookahead_tokens = kEngineHashLookahead;
  modelled.engine.prefix_cache_retention_interval = kDenseRetention;
  return modelled;
}

// Returns true if the release can have the finding, by its policies. A finding without policies is
// possible in all.
static bool is_of_release(const KnownFinding& finding, const EngineProfile& profile) {
  return std::ranges::none_of(finding_policies(), [&](const FindingPolicies& policies) {
    return policies.finding == finding.number && !is_possible(profile, policies);
  });
}

const KnownFinding* known_finding_of_engine(const SavedCase& saved, const Outcome& outcome) {
  if (!outcome.failed()) return nullptr;
  // Another engine has no invariants, so the model's failure is compared without them.
  JudgeOptions options;
  options.invariants = false;
  const SavedCase modelled = as_modelled(saved);
  const Outcome model = judge(modelled, options);
  // First the defects that the model does not follow: it passes, or fails by a known one instead.
  for (const EngineFinding& own : engine_findings())
    if (could_be(own.finding, saved, outcome) && model.tally[own.reached] > 0 &&
        outcome.what.find(own.text) != std::string::npos &&
        (gets_past(outcome, model) ||
         (model.step == outcome.step && known_finding(modelled, model) != nullptr)))
      return &own.finding;
  // Another release may fail a step sooner or later: requests are compared. A deadlock has no step.
  const bool is_own = modelled.engine.engine == saved.engine.engine;
  const bool is_stuck = outcome.kind == OutcomeKind::stuck;
  const bool is_there = is_own ? model.step == outcome.step : model.request == outcome.request;
  const bool is_same =
      model.kind == outcome.kind && (is_stuck || (is_there && model.check == outcome.check));
  const KnownFinding* finding = is_same ? known_finding(modelled, model) : nullptr;
  return finding != nullptr && is_of_release(*finding, engine_profile(saved.engine.engine))
             ? finding
             : nullptr;
}

namespace {

// A worker's host names the finding at the start of its message: after "input" or "exception:
// EngineFault", within 24 characters. Later occurrences belong to quoted text.
const KnownFinding* named_by_worker(const Outcome& outcome) {
  const bool may_name = outcome.failed() && (outcome.what.starts_with("input: finding ") ||
                                             outcome.what.starts_with("exception: EngineFault: "));
  for (const KnownFinding& finding : worker_findings())
    if (may_name && outcome.what.find(fmt::format(": finding {}: ", finding.number)) < 24)
      return &finding;
  return nullptr;
}

// Looks for the cause of a divergence in the decisions: what the audit finds in that step or
// before. A worker's page shows the defect when it is written, the audit when it is read.
const KnownFinding* known_finding_of_decisions(const SavedCase& saved, const Outcome& outcome,
                                               const JudgeOptions& judged_by) {
  if (outcome.kind != OutcomeKind::divergence || !judged_by.backend) return nullptr;
  const Outcome own = judge(saved, {.decisions = judged_by.decisions, .rules = judged_by.rules});
  const bool is_cause = own.failed() && own.step <= outcome.step;
  return is_cause ? known_finding_of_engine(saved, own) : nullptr;
}

// Looks for the cause of a divergence in the case itself. The engine cannot be repaired here, so
// only repairs that change the case and not the profile can identify the finding.
const KnownFinding* known_finding_of_page(const SavedCase& saved, const Outcome& outcome,
                                          const JudgeOptions& judged_by) {
  if (outcome.kind != OutcomeKind::divergence || !judged_by.backend) return nullptr;
  const Outcome decided = judge(saved);
  for (const KnownFinding& finding : known_findings()) {
    if (!could_be(finding, saved, decided)) continue;
    const SavedCase repaired = finding.repaired(saved);
    if (repaired.engine.engine == saved.engine.engine &&
        gets_past(outcome, judge(repaired, judged_by)))
      return &finding;
  }
  return nullptr;
}

}  // namespace

const KnownFinding* known_finding(const SavedCase& saved, const Outcome& outcome,
                                  const JudgeOptions& judged_by) {
  if (const KnownFinding* finding = named_by_worker(outcome)) return finding;
  const KnownFinding* finding = judged_by.decisions
                                    ? known_finding_of_engine(saved, outcome)
                                    : known_finding(saved, outcome, judged_by.backend);
  if (finding == nullptr && judged_by.decisions)
    finding = known_finding_of_decisions(saved, outcome, judged_by);
  return finding != nullptr ? finding : known_finding_of_page(saved, outcome, judged_by);
}

const KnownFinding* known_finding_of_run(const SavedCase& saved, const JudgeOptions& options) {
  return known_finding(saved, judge(saved, options), options);
}

}  // namespace lockstep
