// Finds the policies of an undocumented engine: searches the table of policies for the combination
// under which its recordings agree, in every field of every step.
//
// Method: start from the release that carries the recordings furthest, then change one policy at a
// time, or two, as long as more steps agree. Afterwards every policy is changed alone, which shows
// how firmly the recordings determine it.
//
// Not found: a combination that needs three policies at once before any recording improves.
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
  std::vector<const Release*> left_out;  // releases that the search must not return
  int jobs = 1;
  // Progress: what the search does. Called from one thread at a time; may be empty.
  std::function<void(const std::string& what)> at{};
};

// A policy with another value than the profile's.
struct PolicyFlip {
  const Policy* policy = nullptr;
  std::int64_t value = 0;
};

// What the recordings show about one policy.
struct PolicyEvidence {
  const Policy* policy = nullptr;
  std::int64_t value = 0;          // of the profile found
  std::vector<std::int64_t> also;  // other values under which all agree equally far
  // Changes of other policies that explain the recordings equally well. Only filled for a policy
  // that differs from the nearest release.
  std::vector<PolicyFlip> instead;
  std::int64_t parting = 0;              // most recordings that differ under another value
  std::optional<ConformMismatch> first;  // difference in the first of these recordings
  bool is_determined() const { return also.empty() && instead.empty(); }
};

struct Fit {
  const Release* nearest = nullptr;        // the one from which fewest policies differ
  const EngineProfile* profile = nullptr;  // the nearest, and what differs from it
  std::vector<PolicyEvidence> evidence;    // of every policy, in the table's order
  ConformSummary summary;                  // of the recordings under `profile`
  std::int64_t tried = 0;                  // combinations that were run
  // True if a stop signal ended the search: `profile` is the best combination so far, and
  // `evidence` is empty.
  bool is_stopped = false;

  bool agrees() const { return summary.agreed == static_cast<std::int64_t>(summary.files.size()); }
  // The difference to report if no combination agrees: that of the recording with the earliest one.
  // Null: all agree, or the search was stopped.
  const ConformMismatch* new_behaviour() const;
};

// Searches. Errors: a recording that cannot be read, recordings of different engines, none, or a
// stop signal before every release has run.
Result<Fit> fit_policies(const std::vector<std::string>& paths, const FitOptions& options);

}  // namespace lockstep
