// The failure of a case that is judged in a child process: its verdict, a crash, or a hang. A crash
// of the model or of a backend thus ends the child and not the search.
//
// Invariants
// (1) Two failures are equal if kind, check and finding are equal, and of an engine's own failures
//     also the bucket: an exception is not another one. Step, request and text may differ.
// (2) A crash is identified by the failed check of the program, or else by its signal.
// (3) Judging in a child and in this process give the same failure, unless the case crashes or
//     hangs.
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
  std::string kind;   // kind of the outcome ("divergence"), or "crash" or "hang"
  std::string check;  // "page_written"; a crash: "reference/cache/block_pool.cpp:42" or "SIGSEGV"
  std::int64_t step = -1;  // -1: unknown
  std::int64_t steps = 0;  // steps that ran; 0 after a crash or a hang
  std::string request;
  std::string what;
  int finding = 0;  // Outcome::finding

  bool failed() const { return kind != "agreed" && kind != "refused"; }
  // Compares what a shrink must preserve. A smaller case usually fails in another step and request.
  bool same_as(const Failure& other) const;
};

using Judging = std::function<Outcome(const SavedCase&)>;

// Returns the failure of a case, or one that did not fail. Errors: the case cannot be judged here.
using JudgeCase = std::function<Result<Failure>(const SavedCase&)>;

// Judges the case in a child of its own. `time_limit` is for this case; beyond it the failure is a
// "hang". Errors: no process can be started.
Result<Failure> judge_in_child(const SavedCase& saved, const Judging& judging,
                               std::chrono::milliseconds time_limit);
// Judges the case in a child that judges many. The call returns the same result in both processes,
// as FollowingChild requires.
Result<Failure> judge_in_child(const SavedCase& saved, const Judging& judging,
                               FollowingChild& child);

Failure failure_of(const Outcome& outcome);
nlohmann::ordered_json json_of(const Failure& failure);
// Returns what a saved case expects. `kind` uses the words of a run's verdict, so that `lockstep
// replay` can check it.
ExpectedVerdict expected_of(const Failure& failure);

// Returns the bucket of a failure: its check and the first clause of its message, with N for words
// that contain a digit and R for the request. Failures with one cause mostly share a bucket; a
// second cause under the same check mostly has another one. "audit.token_write: token N of R is
// written to block N" collects all tokens, requests and blocks.
std::string bucket_of(std::string_view check, std::string_view request, std::string_view what);

// Judges the case in this process. Required for an engine whose decisions come from its own
// process: a forked child could not share its pipe.
Failure judge_here(const SavedCase& saved, const Judging& judging);

// Returns the predicate of a shrink that preserves `first`. A case that cannot be judged counts as
// not failing.
StillFails fails_like(const Failure& first, JudgeCase judge_case);

}  // namespace lockstep
