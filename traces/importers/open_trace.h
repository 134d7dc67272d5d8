// Any file that says when requests arrive, as a stream of trace records; and the test, by content,
// which format a file has.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "traces/formats/request_trace.h"

namespace lockstep {

enum class FileFormat : std::uint8_t {
  request_trace,
  recording,
  benchmark,
  saved_case,
  mooncake,
  azure,
  burstgpt,
  weka,
  bailian,
  llmservingsim,
  dynamo,
  aiperf_manifest,
  layouts,
};
std::string_view name_of(FileFormat format);

// By its content, never by its name: a table of what the first line of each format shows. An
// unknown file is refused with that table.
Result<FileFormat> detect_format(const std::string& path);

// A request with an output of no tokens: real traces hold some (a failed or cancelled request), an
// engine takes none (max_tokens is at least 1).
enum class ZeroOutput : std::uint8_t {
  one_token,  // keep it: its prefill counts, and it leaves with its first token
  skip,       // leave it out
  refuse,     // an error that names the line
};

enum class TimeUnit : std::uint8_t { ms, s };
enum class Arrivals : std::uint8_t {
  recorded,
  closed,  // all at once; turns still follow each other
};
// What the prompt of a later turn in a session is: all of it, or what comes behind the turns and
// answers before.
enum class Turns : std::uint8_t { whole, added };

// What a file of another tool does not say itself; left out: what docs/formats.md says of its
// format.
struct ImportOptions {
  ZeroOutput zero_output = ZeroOutput::one_token;
  std::optional<std::int32_t> block_tokens = {};  // of a hash id
  std::optional<TimeUnit> time_unit = {};
  std::optional<Turns> turns = {};
  Arrivals arrivals = Arrivals::recorded;
  bool skips_torn = false;               // a last row that breaks off is left out
  std::vector<std::string> shards = {};  // files that follow the first
};

// "block=16,time=s,turns=added,zero=skip,arrival=closed,torn=skip", each at most once.
Result<ImportOptions> import_options_from_text(std::string_view text);

// A request trace, a benchmark file (everything arrives at 0), or a trace of another tool. A
// recording or a saved case is refused with the command that takes it. `format`: the result of
// detect_format().
Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path, FileFormat format,
                                                const ImportOptions& options = {});
Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path,
                                                const ImportOptions& options = {});

}  // namespace lockstep
