// A request trace: when requests arrive, their inputs and how they end, in integer nanoseconds.
// docs/formats.md, "Request trace", documents the file; importers (open_trace.h) produce the same
// records from foreign formats.
//
// 1. Records come in file order; times never decrease; file order resolves ties.
// 2. Names are unique in a trace, and `after` names earlier requests only, so that waits form no
//    cycles.
// 3. Every request ends: its output is max_tokens long, or its last token is the eos token or a
//    stop token.
// 4. Writing and reading a trace is the identity.
//
// Not checked here: whether a request fits an engine's limits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "reference/types/scheduler_types.h"
#include "traces/formats/recording.h"

namespace lockstep {

// How hash ids cover a prompt: with `ceil` the last id covers the remainder (Mooncake); with
// `floor` the tokens after the last whole block have no id and belong to this request only (Weka).
enum class IdTail : std::uint8_t { ceil, floor };

// Tokens per hash id, for all prompts of a trace.
struct HashIdConvention {
  std::int32_t block_tokens = 512;
  IdTail tail = IdTail::ceil;
  bool operator==(const HashIdConvention&) const = default;
};

// Origin of a trace, for messages and reports; nothing depends on it.
struct TraceSource {
  std::string kind;  // "generated", "mooncake", "azure", "benchmark", ...
  // Name of the file or generator.
  std::string name;
  std::optional<std::uint64_t> seed;  // of a generator
  bool operator==(const TraceSource&) const = default;
};

// Defaults for a replay: options and a pool that make the trace interesting, for example a pool
// small enough to preempt.
struct EngineHints {
  EngineOptions options;
  std::optional<std::int64_t> num_blocks;
  bool operator==(const EngineHints&) const = default;
};

struct TraceHeader {
  TraceSource source;
  // Absent: no prompt is given by hash ids.
  std::optional<HashIdConvention> ids;
  std::optional<EngineHints> engine;
  // True if items are not part of prompts: an encoder reads them.
  bool is_encoder_decoder = false;
  bool operator==(const TraceHeader&) const = default;
};

// The model's output. With tokens: exactly these. With `fill`: that token, `length` times.
// Otherwise the replay generates tokens from its seed, the last of them the eos token when `length`
// is below max_tokens.
struct OutputPlan {
  std::int32_t length = 1;           // tokens, at least 1
  std::vector<std::int32_t> tokens;  // empty, or `length` of them
  std::optional<std::int32_t> fill;
  bool operator==(const OutputPlan&) const = default;
};

// When the client disconnects: at a time, or after a number of output tokens. Exactly one is
// present.
struct AbortPlan {
  std::optional<std::int64_t> t_ns;
  std::optional<std::int32_t> after_tokens;
  bool operator==(const AbortPlan&) const = default;
};

// One request. Either spec.arrival_ns or `after` with `delay_ns` determines its arrival.
struct TraceRequest {
  RequestSpec spec;
  // Closed loop: the request arrives delay_ns after the last of these has ended.
  std::vector<std::string> after;
  std::int64_t delay_ns = 0;
  OutputPlan output;
  std::optional<AbortPlan> abort;
  bool operator==(const TraceRequest&) const = default;

  // Sets the output's length, and lowers min_tokens to it.
  void set_output_length(std::int32_t length);
  // The same, and makes max_tokens the only reason to end.
  void end_at_length(std::int32_t length);
};

// A client's command at a time that concerns no single request.
struct TraceControl {
  enum class Kind : std::uint8_t { reset_prefix_cache, pause_state };
  Kind kind = Kind::reset_prefix_cache;
  std::int64_t t_ns = 0;
  PauseState pause_state = PauseState::unpaused;
  // True if all running requests are preempted first; without that the reset fails while blocks are
  // in use.
  bool preempts_running = false;
  bool operator==(const TraceControl&) const = default;
};

using TraceRecord = std::variant<TraceRequest, TraceControl>;

// The record's own time; null: the record waits for other requests.
std::int64_t* time_of(TraceRecord& record);

// A whole trace in memory.
struct Trace {
  TraceHeader header;
  std::vector<TraceRecord> records;
  bool operator==(const Trace&) const = default;
};

// Returns the seed of tokens that belong to the `ordinal`-th request of its trace only. It differs
// from every hash id below 2^63, and in its low 32 bits, which determine the token ids, from every
// id below 2^31.
constexpr std::uint64_t private_seed(std::uint64_t ordinal) {
  return (std::uint64_t{1} << 63) + (std::uint64_t{1} << 31) + ordinal;
}

// A source of records. Its memory is one record and the names seen so far, not the whole file.
class TraceReader {
 public:
  virtual ~TraceReader() = default;
  virtual const TraceHeader& header() const = 0;
  // Reads the next record into `record` and returns true; false after the last one. An error ends
  // the source.
  virtual Result<bool> next(TraceRecord& record) = 0;
  // Assumptions of the reader about the file and parts that it skipped, one phrase each; complete
  // after the last record.
  virtual std::vector<std::string> assumed() const { return {}; }
};

// Opens a file of this format and reads its header.
Result<std::unique_ptr<TraceReader>> open_request_trace(const std::string& path);
// Reads the remaining records.
Result<Trace> read_all(TraceReader& reader);

// The lines of a trace, each with its newline, keys in the format's order. `ordinal` counts the
// requests before this one: it decides whether a symbolic prompt is private to its request, and can
// be written by its length only.
std::string trace_header_line(const TraceHeader& header);
std::string trace_record_line(const TraceHeader& header, const TraceRecord& record,
                              std::uint64_t ordinal);
std::string trace_end_line(std::uint64_t num_records);
std::string trace_to_text(const Trace& trace);

}  // namespace lockstep
