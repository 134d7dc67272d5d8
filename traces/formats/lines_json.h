// The lines of recordings and request traces as JSON values: for both, benchmark files and saved
// cases.
//
// Invariants
// (1) A TraceRecordReader accepts each request name once.
#pragma once

#include <string>
#include <unordered_set>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

RecordingHeader read_recording_header(JsonValue value);
// The step that must have the number `expected_step`.
RecordedStep read_recorded_step(JsonValue value, const RecordingHeader& header,
                                std::int64_t expected_step);
// Its parts, appended to `step`: the decision, from `scheduled` to `copies`, with tables; the
// queues, the pool and the prefix cache; what the output ended.
void read_decision_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step);
void read_state_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step);
void read_stopped_key(JsonObject& object, RecordedStep& step);
// The same, written; the state with tables.
void write_decision_keys(JsonWriter& out, const RecordedStep& step);
void write_state_keys(JsonWriter& out, const RecordedStep& step);
void write_stopped_key(JsonWriter& out, const RecordedStep& step);
void write_recorded_event(JsonWriter& out, const RecordedEvent& event);
void write_worker(JsonWriter& out, const RecordedWorker& worker);
void write_tokens_by_request(JsonWriter& out, const std::vector<RecordedTokens>& rows);
// `config` to `connector` of a header.
void write_engine_keys(JsonWriter& out, const RecordingHeader& header);

// The end of a recording that has `steps` steps.
RecordingEnd read_recording_end(JsonValue value, const RecordingHeader& header, std::int64_t steps);

// {"add":name,"prompt":..,"max_tokens":..} and what may follow; `arrival` is the caller's.
struct AddedForm {
  bool has_max_tokens = true;
  KeysForm keys = {};
};
RequestSpec read_added_request(JsonObject& object, bool& priority_given, AddedForm form = {});

// The lines of a request trace as JSON values: for request traces and saved cases.
inline constexpr std::int64_t kTraceVersion = 1;

TraceHeader read_trace_header(JsonValue value);
// {"end":true,"records":num_records}
void read_trace_end(JsonValue value, std::uint64_t num_records);

// Reads the records of one trace in order and checks what holds between them: unique names, `after`
// pointing back, times that never decrease.
class TraceRecordReader {
 public:
  explicit TraceRecordReader(TraceHeader header) : header_(std::move(header)) {}
  TraceRecord read(JsonValue value);

 private:
  void check_time(JsonObject& object, std::int64_t t_ns);

  TraceHeader header_;
  std::unordered_set<std::string> names_;  // asked for membership, never walked
  std::uint64_t ordinal_ = 0;
  std::int64_t last_t_ns_ = 0;
};

}  // namespace lockstep
