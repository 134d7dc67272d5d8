// A saved case: everything that a replay needs, in one file, so that a divergence can be
// reproduced. docs/formats.md, "Saved case".
//
// Invariants
// (1) Self-contained: configuration, plan, requests, recorded decisions and faults are inside.
// (2) Reading a written case gives an equal case; a file is a complete case or does not exist.
//
// Not checked here: whether a backend, mutant or fault of that name exists; the code that runs the
// case checks it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

struct ExpectedVerdict {
  std::string kind;  // of the divergence, or a verdict; "agreed": the case does not fail
  std::optional<std::int64_t> step;
  // What failed it: the judge's check (properties/judge/judge.h) and its request. Empty: the run
  // itself did, or nothing.
  std::string check{};
  std::string request{};
  bool fails() const { return kind != "agreed"; }
  bool operator==(const ExpectedVerdict&) const = default;
};

// A run and what it is given: its requests, and decisions to follow.
struct SavedCase : RunSpec {
  std::string name;
  std::optional<ExpectedVerdict> expected;
  std::optional<RecordedEngine> decided_by;  // another engine, when it failed; absent: the model
  std::optional<WorkedBy> worked_by;         // a real worker, when it failed; absent: a backend
  Trace trace;
  std::optional<Recording> recording;  // decisions to follow instead of the reference's own
  bool operator==(const SavedCase&) const = default;
};

// As cut_off_text(); empty: it has no recording, or a whole one.
inline std::string cut_off_text(const SavedCase& saved) {
  return saved.recording ? cut_off_text(saved.recording->end) : std::string();
}

Result<SavedCase> read_saved_case(const std::string& path);
// The same from memory: what the reader refuses in a file it refuses here. `name` stands for the
// path in the message.
Result<SavedCase> saved_case_from_text(std::string name, std::string text);
std::string saved_case_to_text(const SavedCase& saved);
Result<void> write_saved_case(const std::string& path, const SavedCase& saved);

// Known failures, by ids of the user: {"lockstep_known":1,"known":[{"id":..,
// "check":..,"text":..,"until":"2027-01-31"}]}. `text`, part of the message, and `until`, the last
// day on which the failure is ignored, are optional.

struct KnownFailure {
  std::string id;
  std::string check;  // as the fuzzer names it: "audit.handed_out"
  std::string text;   // in the failure's sentence; empty: any
  std::string until;  // "2027-01-31"; empty: forever
};

// Errors: not such a file, a date that is none, an id twice.
Result<std::vector<KnownFailure>> read_known_file(const std::string& path);

}  // namespace lockstep
