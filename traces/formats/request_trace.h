// A request trace: when requests arrive, what they ask for and how they end, in integer
// nanoseconds. docs/formats.md, "Request trace", documents the file; importers (open_trace.h) give
// the same records for foreign formats.
//
// 1. Records come in file order; times never decrease; a tie is resolved by file order.
// 2. Names are unique in a trace, and `after` names earlier requests only: no cycles.
// 3. Something ends every request: its output is max_tokens long, or its last token is the eos
//    token or a stop token.
// 4. Writing and reading a trace is the identity.
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

// How hash ids cover a prompt: with `ceil` the last id covers what is left (Mooncake), with `floor`
// the tokens behind the last whole block have no id and belong to this request alone (Weka).
enum class IdTail : std::uint8_t { ceil, floor };

struct HashIdConvention {
  std::int32_t block_tokens = 512;
  IdTail tail = IdTail::ceil;
  bool operator==(const HashIdConvention&) const = default;
};

struct TraceSource {
  std::string kind;                   // "generated", "mooncake", "azure", "benchmark", ...
  std::string name;                   // of the file or generator it came from
  std::optional<std::uint64_t> seed;  // of a generator
  bool operator==(const TraceSource&) const = default;
};

// What a replay may take for its defaults: options and pool that make the trace interesting.
struct EngineHints {
  EngineOptions options;
  std::optional<std::int64_t> num_blocks;
  bool operator==(const EngineHints&) const = default;
};

struct TraceHeader {
  TraceSource source;
  std::optional<HashIdConvention> ids;  // absent: no prompt is given by hash ids
  std::optional<EngineHints> engine;
  bool is_encoder_decoder = false;  // items are not part of prompts; an encoder reads them
  bool operator==(const TraceHeader&) const = default;
};

// What the model will answer. With tokens: exactly these. With `fill`: that token, `length` times.
// Otherwise the replay makes tokens of its own, the last of them the eos token when `length` is
// short of max_tokens.
struct OutputPlan {
  std::int32_t length = 1;           // tokens, at least 1
  std::vector<std::int32_t> tokens;  // empty, or `length` of them
  std::optional<std::int32_t> fill;
  bool operator==(const OutputPlan&) const = default;
};

// Exactly one of the two: the client disconnects at a time, or after a number of output tokens.
struct AbortPlan {
  std::optional<std::int64_t> t_ns;
  std::optional<std::int32_t> after_tokens;
  bool operator==(const AbortPlan&) const = default;
};

struct TraceRequest {
  RequestSpec spec;                // arrival_ns holds when `after` is empty
  std::vector<std::string> after;  // closed loop: arrives delay_ns after the last of these has left
  std::int64_t delay_ns = 0;
  OutputPlan output;
  std::optional<AbortPlan> abort;
  bool operator==(const TraceRequest&) const = default;
};

struct TraceControl {
  enum class Kind : std::uint8_t { reset_prefix_cache };
  Kind kind = Kind::reset_prefix_cache;
  std::int64_t t_ns = 0;
  bool preempts_running = false;  // all running requests free their blocks first
  bool operator==(const TraceControl&) const = default;
};

using TraceRecord = std::variant<TraceRequest, TraceControl>;

struct Trace {
  TraceHeader header;
  std::vector<TraceRecord> records;
  bool operator==(const Trace&) const = default;
};

// The seed of tokens that belong to one request alone: the request is the `ordinal`-th of its
// trace. Apart from every hash id below 2^63, and in its low 32 bits (which make the token ids)
// from every one below 2^31.
constexpr std::uint64_t private_seed(std::uint64_t ordinal) {
  return (std::uint64_t{1} << 63) + (std::uint64_t{1} << 31) + ordinal;
}

// A source of records. What it holds in memory is one record and the names it has seen.
class TraceReader {
 public:
  virtual ~TraceReader() = default;
  virtual const TraceHeader& header() const = 0;
  // The next record into `record`: true; false after the last one.
  virtual Result<bool> next(TraceRecord& record) = 0;
  // What the reader assumed about the file and left out of it, a phrase each: complete after the
  // last record.
  virtual std::vector<std::string> assumed() const { return {}; }
};

Result<std::unique_ptr<TraceReader>> open_request_trace(const std::string& path);
Result<Trace> read_all(TraceReader& reader);

// The file, each line with its newline, keys in the format's order. `ordinal` counts the requests
// before this one: it tells a prompt private to its request from one that merely looks so.
std::string trace_header_line(const TraceHeader& header);
std::string trace_record_line(const TraceHeader& header, const TraceRecord& record,
                              std::uint64_t ordinal);
std::string trace_end_line(std::uint64_t num_records);
std::string trace_to_text(const Trace& trace);
Result<void> write_request_trace(const std::string& path, const Trace& trace);

}  // namespace lockstep
