// The table of policies: each with its words, the release and the pull request of vLLM that changed
// it, what it does to a user, and the findings that follow from it. Profiles, `lockstep engines`,
// `--engine RELEASE,POLICY=VALUE`, `lockstep fit` and docs/reference/releases.md come from it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/profiles/engine_profile.h"

namespace lockstep {

struct PolicyValue {
  std::string_view word;
  std::int64_t value = 0;
};

struct PolicyChange {
  std::string_view release;  // from which on
  std::int64_t value = 0;
  std::int32_t pull_request = 0;  // of vLLM; 0: not known
};

struct Policy {
  std::string_view name;  // of the field of EngineProfile
  std::string_view chapter;
  std::span<const PolicyValue> values;
  std::vector<PolicyChange> history;  // oldest first; the first release's value leads
  std::string_view effect;            // of a change, on a user: one line
  std::string_view shown_by;          // the kind of workload that tells the values apart
  std::int64_t (*get)(const EngineProfile&) = nullptr;
  void (*set)(EngineProfile&, std::int64_t) = nullptr;

  // REQUIRES: `value` is one of `values`.
  std::string_view word(std::int64_t value) const;
  // Whether a release has ever changed it. Otherwise it is a repair that no release makes.
  bool has_history() const { return history.size() > 1; }
};

// In the order of the fields of EngineProfile.
std::span<const Policy> policies();
const Policy* find_policy(std::string_view name);

// The profile with this policy so, under the description that names it.
const EngineProfile& with_policy(const EngineProfile& profile, const Policy& policy,
                                 std::int64_t value);
// The policies in which two profiles differ.
std::vector<const Policy*> differences(const EngineProfile& one, const EngineProfile& other);

// A finding of docs/findings.md, and what it hangs on.
struct PolicyIs {
  std::string_view policy, word;
  bool is_other = false;  // any value but this
};
struct FindingPolicies {
  int finding = 0;
  std::vector<PolicyIs> needs;    // all of them; none: it lives in every release
  std::vector<PolicyIs> repairs;  // any engine without it has these; none: no policy repairs it
  bool needs_connector = false;
};
std::span<const FindingPolicies> finding_policies();
// Whether its policies make it possible; and whether this model of the engine can show it.
bool is_possible(const EngineProfile& profile, const FindingPolicies& finding);
bool can_show(const EngineProfile& profile, const FindingPolicies& finding);

// The description of the profile in which this finding is repaired; 0: all that it can show. Empty:
// there is none, or no policy repairs it.
std::string profile_without(std::string_view description, int finding);

}  // namespace lockstep
