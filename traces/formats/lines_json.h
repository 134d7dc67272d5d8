// The lines of recordings and request traces as JSON values, for the readers of both and for
// benchmark files, saved cases and the scheduler protocol, which embed them.
//
// Invariants
// (1) A TraceRecordReader accepts each request name once.
// (2) Errors are kept by the JSON reader of the value; a function that met one returns a default
//     object, so callers check ok() once per line.
#pragma once

#include <string>
#include <unordered_set>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

// vLLM's names of PauseState (v1/core/sched/interface.py).
inline constexpr JsonWord<PauseState> kPauseStates[] = {{"UNPAUSED", PauseState::unpaused},
                                                        {"PAUSED_NEW", PauseState::paused_new},
                                                        {"PAUSED_ALL", PauseState::paused_all}};

// Reads the first line.
RecordingHeader read_recording_header(JsonValue value);
// Reads the step line that must have the number `expected_step`.
RecordedStep read_recorded_step(JsonValue value, const RecordingHeader& header,
                                std::int64_t expected_step);
// Reads parts of a step and appends them to `step`: the decision, from `scheduled` to `copies`,
// with tables; the queues, the pool and the prefix cache; the requests that the output ended.
void read_decision_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step);
void read_state_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step);
void read_stopped_key(JsonObject& object, RecordedStep& step);
// Writes the same parts; the state includes the tables. Keys only: the caller opens and closes the
// object.
void write_decision_keys(JsonWriter& out, const RecordedStep& step);
void write_state_keys(JsonWriter& out, const RecordedStep& step);
void write_stopped_key(JsonWriter& out, const RecordedStep& step);
void write_recorded_event(JsonWriter& out, const RecordedEvent& event);
void write_worker(JsonWriter& out, const RecordedWorker& worker);
void write_tokens_by_request(JsonWriter& out, const std::vector<RecordedTokens>& rows);
// Writes `config` to `connector` of a header, as the scheduler protocol's `open` has them.
void write_engine_keys(JsonWriter& out, const RecordingHeader& header);

// Refuses a `scheduler_block_size` that the header's groups cannot have.
void check_scheduler_block_size(JsonObject& object, const RecordingHeader& header);

// Reads the end line of a recording with `steps` steps; another number is refused.
RecordingEnd read_recording_end(JsonValue value, const RecordingHeader& header, std::int64_t steps);

// How an `add` looks: {"add":name,"prompt":..,"max_tokens":..} and optional keys. `arrival` is the
// caller's, since only recordings have it.
struct AddedForm {
  // False for pooling requests, which sample nothing.
  bool has_max_tokens = true;
  KeysForm keys = {};
};
// `priority_given`: the key was present. REQUIRES: the caller calls finish() on the object.
RequestSpec read_added_request(JsonObject& object, bool& priority_given, AddedForm form = {});

// The lines of a request trace as JSON values: for request traces and saved cases.
inline constexpr std::int64_t kTraceVersion = 1;

// Reads the first line of a request trace.
TraceHeader read_trace_header(JsonValue value);
// Reads {"end":true,"records":N}; another number than num_records is refused.
void read_trace_end(JsonValue value, std::uint64_t num_records);

// Reads the records of one trace in order and checks the conditions between them: unique names,
// `after` naming earlier requests only, times that never decrease.
//
// Memory grows with the number of requests, by their names only.
class TraceRecordReader {
 public:
  explicit TraceRecordReader(TraceHeader header) : header_(std::move(header)) {}
  // Reads a request or a control record. Requests with `after` have no time of their own and are
  // exempt from the order of times.
  TraceRecord read(JsonValue value);

 private:
  void check_time(JsonObject& object, std::int64_t t_ns);

  TraceHeader header_;
  // Only queried for membership: iteration order would not be deterministic.
  std::unordered_set<std::string> names_;
  // Requests read so far: the number that makes a private prompt unique.
  std::uint64_t ordinal_ = 0;
  std::int64_t last_t_ns_ = 0;
};

}  // namespace lockstep
