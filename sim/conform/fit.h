// Finds the policies of an undocumented engine: searches the table of policies for the combination
// under which its recordings agree, in every field of every step.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "sim/conform/conform.h"

namespace lockstep {

struct FitOptions {
  std::vector<const Release*> left_out;  // releases that must not be found
  int jobs = 1;
  // Called now and then, from one thread at a time, with what the search does.
  std::function<void(const std::string& what)> at{};
};

// A policy with another value than the profile's.
struct PolicyFlip {
  const Policy* policy = nullptr;
  std::int64_t value = 0;
};

// What recordings say of one policy.
struct PolicyEvidence {
  const Policy* policy = nullptr;
  std::int64_t value = 0;          // of the profile found
  std::vector<std::int64_t> also;  // other values under which all agree as well
  // What in its place makes all agree as well, where this policy differs from the nearest release.
  std::vector<PolicyFlip> instead;
  std::int64_t parting = 0;              // recordings that part with another value, at most
  std::optional<ConformMismatch> first;  // where the first of these parts
  bool is_determined() const { return also.empty() && instead.empty(); }
};

struct Fit {
  const Release* nearest = nullptr;        // the one from which fewest policies differ
  const EngineProfile* profile = nullptr;  // the nearest, and what differs from it
  std::vector<PolicyEvidence> evidence;    // of every policy, in the table's order
  ConformSummary summary;                  // of the recordings under `profile`
  std::int64_t tried = 0;                  // combinations

  bool agrees() const { return summary.agreed == static_cast<std::int64_t>(summary.files.size()); }
  // No combination agrees: of the recordings that part the one with the shortest agreed beginning.
  const ConformMismatch* new_behaviour() const;
};

// An Error: a recording cannot be read, they are of several engines, or there is none.
Result<Fit> fit_policies(const std::vector<std::string>& paths, const FitOptions& options);

}  // namespace lockstep
