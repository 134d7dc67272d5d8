// The findings of docs/findings.md as cases for an engine: the files of tests/regressions that show
// each finding, the checks that report it, and an engine's outcome.
//
// Invariants
// (1) A case is the smallest known one: a check of the finding that fails in it is the finding.
// (2) The case requires of an engine what it required of the release that it was found in. An
//     engine without that support is skipped.
// (3) If the finding is a pool planned too small, the pool is the one that the tested release
//     plans.
//
// Not seen: what workers make of their tables.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "properties/judge/judge.h"
#include "traces/formats/recording.h"

namespace lockstep {

struct FindingCases {
  int number = 0;                            // in docs/findings.md
  std::string_view title;                    // its heading there
  std::span<const std::string_view> files;   // of tests/regressions, the smallest first
  std::span<const std::string_view> checks;  // of Outcome::check; "liveness" stands for all of it
  bool is_of_plan = false;                   // (3)
  std::string_view not_seen = {};            // what of it no decision shows
};

std::span<const FindingCases> finding_cases();

enum class FindingVerdict : std::uint8_t {
  absent,   // decided without harm
  shows,    // memory, answers or requests are harmed
  stops,    // shows, in that the engine raises or ends
  other,    // fails by a check that is not this finding's
  unbuilt,  // the engine cannot be asked for it
};

struct FindingTrial {
  FindingVerdict verdict = FindingVerdict::absent;
  std::string file;  // that shows it; else the first one that decides the verdict
  std::string check;
  std::int64_t step = -1;
  std::string what;
  Recording recording;  // what was decided of the file
};

struct FindingTrialOptions {
  std::string folder;          // of the cases
  std::string engine;          // the profile nearest to the tested release
  DecisionsFactory decisions;  // absent: the model decides
  AuditScope scope = AuditScope::other_engine;
};

// Errors: a case cannot be read.
Result<FindingTrial> try_finding(const FindingCases& finding, const FindingTrialOptions& options);

}  // namespace lockstep
