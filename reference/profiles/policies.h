// The table of policies: each with its words, the release and the pull request of vLLM that changed
// it, its effect on a user, and the findings that depend on it. Profiles, `lockstep engines`,
// `--engine RELEASE,POLICY=VALUE`, `lockstep fit` and docs/reference/releases.md come from it.
//
// Invariants
// (1) Every field of EngineProfile except name and release has exactly one row.
// (2) A history starts with the oldest release and lists only changes, oldest first.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/profiles/engine_profile.h"

namespace lockstep {

// A value of a policy, and its word in descriptions of engines.
struct PolicyValue {
  std::string_view word;
  std::int64_t value = 0;
};

// The release that changed a policy.
struct PolicyChange {
  std::string_view release;  // the first one with this value
  std::int64_t value = 0;
  std::int32_t pull_request = 0;  // of vLLM; 0: unknown
};

struct Policy {
  std::string_view name;     // of the field of EngineProfile
  std::string_view chapter;  // heading in the page of releases
  std::span<const PolicyValue> values;
  std::vector<PolicyChange> history;  // oldest first; the first release's value leads
  std::string_view effect;            // of a change on a user: one line
  std::string_view shown_by;          // the kind of workload that distinguishes the values
  std::int64_t (*get)(const EngineProfile&) = nullptr;
  void (*set)(EngineProfile&, std::int64_t) = nullptr;

  // REQUIRES: `value` is one of `values`.
  std::string_view word(std::int64_t value) const;
  // True if a release has changed it. Otherwise no release does: it is a repair.
  bool has_history() const { return history.size() > 1; }
};

// All policies, in the order of the table. Built once.
std::span<const Policy> policies();
// Null: no policy has the name. O(policies).
const Policy* find_policy(std::string_view name);

// The profile with this value, under the description that names it. REQUIRES: `value` is one of the
// policy's values.
const EngineProfile& with_policy(const EngineProfile& profile, const Policy& policy,
                                 std::int64_t value);
// The policies in which two profiles differ, in the order of the table.
std::vector<const Policy*> differences(const EngineProfile& one, const EngineProfile& other);

// A condition of a finding on one policy: it has this value, or (is_other) any other.
struct PolicyIs {
  std::string_view policy, word;
  bool is_other = false;  // any value but this
};
// A finding of docs/findings.md, and the policies that it depends on.
struct FindingPolicies {
  int finding = 0;
  std::vector<PolicyIs> needs;    // all must hold; empty: every release has the finding
  std::vector<PolicyIs> repairs;  // an engine with all of these lacks it; empty: no policy does
  bool needs_connector = false;
};
// Findings that depend on decisions. Findings of workers and planners have no row.
std::span<const FindingPolicies> finding_policies();
// True if the profile's policies make the finding possible; true if this model of the engine can
// also show it, which may need a modelled connector.
bool is_possible(const EngineProfile& profile, const FindingPolicies& finding);
bool can_show(const EngineProfile& profile, const FindingPolicies& finding);

// The description of the profile in which the finding is repaired; 0: every finding that it can
// show. Empty: no policy repairs it, or the profile does not have it.
std::string profile_without(std::string_view description, int finding);

}  // namespace lockstep
