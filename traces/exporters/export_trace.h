// A request trace in the terms of other tools, so that its requests can be sent to a live server.
//
// 1. Exported are arrivals, lengths, and what prompts share (prefix_ids.h). Requests of different
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
