// The lines of a request trace as JSON values: for request traces and saved cases.
#pragma once

#include <string>
#include <unordered_set>

#include "base/json_reader.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

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
