// A saved case: everything that a replay needs, in one file, so that a divergence can be reproduced
// on another machine. docs/formats.md, "Saved case". The file is a line of configuration, a whole
// request trace and, optionally, a whole recording.
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

// The result that a replay of the case must reproduce.
struct ExpectedVerdict {
  // Phase of a divergence, or another verdict; "agreed": the case does not fail.
  std::string kind;
  // Step of the divergence; absent: any.
  std::optional<std::int64_t> step;
  // The judge's check that failed (properties/judge/judge.h), and its request. Empty: the run
  // itself failed, or nothing did.
  std::string check{};
  std::string request{};
  // Of an engine's own failure: bucket_of() (properties/judge/failure.h). Empty: any.
  std::string cause{};
  bool fails() const { return kind != "agreed"; }
  bool operator==(const ExpectedVerdict&) const = default;
};

// A run with its inputs: requests, and decisions to follow.
struct SavedCase : RunSpec {
  std::string name;
  std::optional<ExpectedVerdict> expected;
  // The engine that decided when the case failed; absent: the model.
  std::optional<RecordedEngine> decided_by;
  // The real worker that held the cache then; absent: a backend.
  std::optional<WorkedBy> worked_by;
  Trace trace;
  // Decisions to follow, or inputs for the model's own decisions (RunSpec::decide).
  std::optional<Recording> recording;
  bool operator==(const SavedCase&) const = default;
};

// As cut_off_text() of the recording; empty: no recording, or a complete one.
inline std::string cut_off_text(const SavedCase& saved) {
  return saved.recording ? cut_off_text(saved.recording->end) : std::string();
}

// Reads a case (plain or gzip). Errors name file, line and field.
Result<SavedCase> read_saved_case(const std::string& path);
// The same from memory, with the same refusals. `name` replaces the path in messages.
Result<SavedCase> saved_case_from_text(std::string name, std::string text);
// The bytes of the file; equal cases give equal bytes.
std::string saved_case_to_text(const SavedCase& saved);
// Writes a temporary file and renames it. Errors: the file system's.
Result<void> write_saved_case(const std::string& path, const SavedCase& saved);

// Known failures, with ids of the user's choice:
// {"lockstep_known":1,"known":[{"id":..,"check":..,"text":..,"until":"2027-01-31","test":..}]}.
// `text`, part of the message, `until`, the last day on which the failure is ignored, and `test`, a
// pattern that only the pytest plugin reads, are optional.

struct KnownFailure {
  std::string id;
  // The fuzzer's name of the check: "audit.handed_out".
  std::string check;
  // Part of the failure's message; empty: any message.
  std::string text;
  // Last day, "2027-01-31"; empty: no limit. Dates compare as text.
  std::string until;
};

// Reads such a file of at most 1 MiB. Errors: another file, a text that is not a date, an id that
// occurs twice.
Result<std::vector<KnownFailure>> read_known_file(const std::string& path);

}  // namespace lockstep
