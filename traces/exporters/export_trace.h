// A request trace in the terms of other tools, so that its requests can be sent to a live server.
//
// 1. Exported are arrivals, lengths, and what prompts share (SharedPrefixes). Requests of different
//    salts share no id. What a model answers is its own.
// 2. Everything that a format has no word for is refused at once, by name, or left out and counted.
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

// Hash ids for prompts of any kind: which blocks of which prompts have the same content after the
// same prefix.
//
// Invariants
// (1) Two prompts have as many leading ids in common as whole blocks, and a partial last block only
//     if the prompts are equal. So ids state exactly what is shared when the block divides every
//     length that two different prompts share. Prompts of different salts share nothing.
// (2) Ids count from 0 in order of appearance.

// What prompts have in common.
struct SharedPrefixes {
  // Tokens that every length that two unequal prompts share is a multiple of; 0: nothing is shared.
  std::int64_t unit = 0;
  // Two requests that share a length that is not a multiple of the requested block.
  struct Between {
    std::string first, second;
    std::int64_t tokens = 0;
  };
  std::vector<Between> pairs;  // each length of neighbours in the order of content
};
SharedPrefixes shared_prefixes(const std::vector<const TraceRequest*>& requests);

// The largest power of two, up to `block_max`, in which ids lose nothing.
std::int32_t block_that_tells_all(const SharedPrefixes& shared, std::int32_t block_max);

// Per request its ids, one per `block_tokens`; the last covers what is left.
std::vector<std::vector<std::uint64_t>> prefix_ids(const std::vector<const TraceRequest*>& requests,
                                                   std::int32_t block_tokens);

enum class ExportAs : std::uint8_t {
  mooncake,     // ms; ids of up to 512 tokens
  aiperf,       // the same rows with names, min_tokens and priorities
  timed_trace,  // vLLM's bench dataset: s; ids of up to 16 tokens
};
struct ExportFormat {
  ExportAs as;
  std::string_view name;
  std::int32_t block_tokens_max;  // the readers' default
};
std::span<const ExportFormat> export_formats();

struct ExportOptions {
  ExportAs as = ExportAs::mooncake;
  std::optional<std::int32_t> block_tokens;  // of an id; left out: the most that loses nothing
  bool is_lossy = false;
};

struct LeftOut {
  std::string what;
  std::int64_t count = 0;
};

struct ExportedTrace {
  std::string text;  // JSON lines
  std::int32_t block_tokens = 0;
  std::int64_t num_requests = 0;
  std::vector<LeftOut> left_out;
};

// `file`: for messages. Errors: what the format cannot carry; a trace without requests.
Result<ExportedTrace> export_trace(const std::string& file, const Trace& trace,
                                   const ExportOptions& options);

}  // namespace lockstep
