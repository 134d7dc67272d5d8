// A request trace in the formats of other tools, so that its requests can be sent to a live server.
//
// 1. Exported are arrivals, lengths, and the prefixes that prompts share (SharedPrefixes). Requests
//    of different salts share no id. Outputs keep their length only: a server samples its own
//    tokens.
// 2. Everything that a format cannot express is refused at once, by name, or omitted and counted.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

// Hash ids for prompts of any kind: they state which blocks of which prompts have the same content
// after the same prefix.
//
// Invariants
// (1) Two prompts have as many leading ids in common as whole blocks, and a partial last block only
//     if the prompts are equal. So ids state exactly what is shared when the block divides every
//     length that two different prompts share. Prompts of different salts share nothing; those of
//     different images share what precedes the first difference.
// (2) Ids count from 0 in order of appearance.
//
// The prefixes that prompts have in common. Prompts that share 1,000 and 1,536 tokens with others
// have the unit 8, the greatest common divisor.
struct SharedPrefixes {
  // Greatest common divisor of all lengths that two unequal prompts share, in tokens; 0: none.
  std::int64_t unit = 0;
  // Two requests, and the tokens that they share.
  struct Between {
    std::string first, second;
    std::int64_t tokens = 0;
  };
  // One entry per pair of neighbours in the order of content: the lengths of all other pairs are
  // minima of these.
  std::vector<Between> pairs;
};
SharedPrefixes shared_prefixes(const std::vector<const TraceRequest*>& requests);

// Returns the largest power of two, up to `block_max`, that divides every shared length: ids of
// that many tokens lose nothing. 1 at least.
std::int32_t block_that_tells_all(const SharedPrefixes& shared, std::int32_t block_max);

// Returns the ids of each request, in the order of `requests`: one id per `block_tokens` tokens,
// the last one for the remainder. Linear in the tokens of all prompts.
std::vector<std::vector<std::uint64_t>> prefix_ids(const std::vector<const TraceRequest*>& requests,
                                                   std::int32_t block_tokens);

enum class ExportAs : std::uint8_t {
  mooncake,     // ms; ids of up to 512 tokens
  aiperf,       // the same rows with names, min_tokens and priorities
  timed_trace,  // vLLM's bench dataset: s; ids of up to 16 tokens
};
// A format with its name on the command line.
struct ExportFormat {
  ExportAs as;
  std::string_view name;
  // Tokens per id that the format's readers assume by default.
  std::int32_t block_tokens_max;
};
std::span<const ExportFormat> export_formats();

struct ExportOptions {
  ExportAs as = ExportAs::mooncake;
  // Tokens per id; absent: the most that lose nothing.
  std::optional<std::int32_t> block_tokens;
  // True if properties that the format cannot carry are omitted instead of refused.
  bool is_lossy = false;
};

// A property that a lossy export omitted, and the number of requests that have it.
struct LeftOut {
  std::string what;
  std::int64_t count = 0;
};

// The exported text, and what a reader must know about it.
struct ExportedTrace {
  std::string text;  // JSON lines
  // Tokens per id, which the reader must be configured with.
  std::int32_t block_tokens = 0;
  std::int64_t num_requests = 0;
  std::vector<LeftOut> left_out;
};

// Exports `trace`; `file` names it in messages. Errors: properties that the format cannot carry,
// unless the export is lossy; a trace without requests.
Result<ExportedTrace> export_trace(const std::string& file, const Trace& trace,
                                   const ExportOptions& options);

}  // namespace lockstep
