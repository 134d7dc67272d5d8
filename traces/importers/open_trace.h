// Any file that says when requests arrive, as a stream of trace records; and the test, by content,
// which format a file has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "traces/formats/request_trace.h"

namespace lockstep {

enum class FileFormat : std::uint8_t {
  request_trace,
  recording,
  benchmark,
  saved_case,
  mooncake,
  azure,
  layouts,
};
std::string_view name_of(FileFormat format);

// By the first line, never by the name. An unknown file is refused with the list of known formats.
Result<FileFormat> detect_format(const std::string& path);

// A request with an output of no tokens: real traces hold some (a failed or cancelled request), an
// engine takes none (max_tokens is at least 1).
enum class ZeroOutput : std::uint8_t {
  one_token,  // keep it: its prefill counts, and it leaves with its first token
  skip,       // leave it out
  refuse,     // an error that names the line
};

struct ImportOptions {
  ZeroOutput zero_output = ZeroOutput::one_token;
  std::int32_t mooncake_block_tokens = 512;
};

// A request trace, a benchmark file (everything arrives at 0), Mooncake JSONL or an Azure CSV. A
// recording or a saved case is refused with the command that takes it. `format`: the file's, which
// detect_format() has told.
Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path, FileFormat format,
                                                const ImportOptions& options = {});
Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path,
                                                const ImportOptions& options = {});

}  // namespace lockstep
