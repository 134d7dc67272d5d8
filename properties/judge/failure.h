// The outcome of a case judged in a child process: its verdict, a crash, or a hang.
//
// Invariants
// (1) Two failures are equal if their kind, the check's name and the named finding are equal;
//     position, step and request may differ.
// (2) A crash is named by the failed check of the program, or by its signal.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/child_process.h"
#include "base/result.h"
#include "properties/judge/judge.h"
#include "properties/shrink/shrinker.h"

namespace lockstep {

struct Failure {
  std::string kind;   // of the outcome ("divergence", ...), or "crash" or "hang"
  std::string check;  // "page_written"; of a crash "reference/cache/block_pool.cpp:42" or "SIGSEGV"
  std::int64_t step = -1;  // -1: not known
  std::int64_t steps = 0;  // that were run
  std::string request;
  std::string what;
  int finding = 0;  // Outcome::finding

  bool failed() const { return kind != "agreed" && kind != "refused"; }
  bool same_as(const Failure& other) const {
    return kind == other.kind && check == other.check && finding == other.finding;
  }
};

using Judging = std::function<Outcome(const SavedCase&)>;

// The outcome of a case, however it is judged. Errors: it cannot be judged.
using JudgeCase = std::function<Result<Failure>(const SavedCase&)>;

Result<Failure> judge_in_child(const SavedCase& saved, const Judging& judging,
                               std::chrono::milliseconds time_limit);
// In a child that judges many; the result is the same in both processes.
Result<Failure> judge_in_child(const SavedCase& saved, const Judging& judging,
                               FollowingChild& child);

Failure failure_of(const Outcome& outcome);
nlohmann::ordered_json json_of(const Failure& failure);
// What a saved case says of it.
ExpectedVerdict expected_of(const Failure& failure);

// The bucket of a failure: its check and the first clause of its sentence, with N for words that
// hold a number and R for the request. Failures of one cause share it, most of the time; a second
// cause under the same check has another one.
std::string bucket_of(std::string_view check, std::string_view request, std::string_view what);

// Judged in this process: for an engine whose decisions come from a process of their own.
Failure judge_here(const SavedCase& saved, const Judging& judging);

// The predicate of a shrink that keeps `first`. A case that cannot be judged does not fail.
StillFails fails_like(const Failure& first, JudgeCase judge_case);

}  // namespace lockstep
