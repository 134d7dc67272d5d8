// The findings of docs/findings.md as cases for an engine. Each row names the files of
// tests/regressions that show a finding and the checks that report it. try_finding() runs them with
// an engine's decisions and reports whether that engine has the finding.
//
// Invariants
// (1) A case is the smallest known one: if a check of the finding fails in it, the failure is the
//     finding.
// (2) A case requires of an engine what it required of the release in which it was found. An engine
//     without that support is `unbuilt`, never `absent`.
// (3) If the finding is a pool that is planned too small, the pool has the size that the tested
//     release plans.
//
// Not checked: what a worker makes of its tables.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "properties/judge/judge.h"
#include "traces/formats/recording.h"

namespace lockstep {

// One finding and how to recognise it. The strings refer to static storage.
struct FindingCases {
  int number = 0;                            // in docs/findings.md
  std::string_view title;                    // its heading there
  std::span<const std::string_view> files;   // of tests/regressions, the smallest first
  std::span<const std::string_view> checks;  // Outcome::check; "liveness": all of its sub-checks
  bool is_of_plan = false;                   // the pool is the defect: see invariant (3)
  std::string_view not_seen = {};            // the part of it that no decision shows; empty: none
};

// Returns all rows, ascending by number.
std::span<const FindingCases> finding_cases();

enum class FindingVerdict : std::uint8_t {
  absent,   // the engine decides every file without harm
  shows,    // memory, outputs or requests are harmed
  stops,    // as `shows`, but the engine raises or ends instead
  other,    // fails by a check that does not belong to the finding
  unbuilt,  // the engine does not support the case
};

// The verdict on one finding, from the file that gives the strongest evidence.
struct FindingTrial {
  FindingVerdict verdict = FindingVerdict::absent;
  std::string file;  // the file behind the verdict
  std::string check;
  std::int64_t step = -1;
  std::string what;
  Recording recording;  // decisions up to the failure, or to the end
};

struct FindingTrialOptions {
  std::string folder;          // the folder of the cases: tests/regressions
  std::string engine;          // profile closest to the tested release
  DecisionsFactory decisions;  // absent: the model decides
  AuditScope scope = AuditScope::other_engine;
};

// Runs the files of the finding in order, until one shows it. Every file is judged from its first
// step, without a backend. Errors: a case cannot be read, or its pool cannot be resized.
Result<FindingTrial> try_finding(const FindingCases& finding, const FindingTrialOptions& options);

}  // namespace lockstep
