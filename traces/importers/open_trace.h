// Any file that states when requests arrive, as a stream of trace records; and the detection, by
// content, of a file's format.
//
// Not checked here: whether the requests fit an engine; recordings and saved cases have their own
// readers (traces/formats).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "traces/formats/request_trace.h"

namespace lockstep {

// Formats that `lockstep` detects. Those from `mooncake` to `dynamo` belong to other tools and may
// consist of several files.
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

// Detects the format by the file's first line, never by its name: the first entry of a table whose
// test succeeds. An unknown file is refused with that table. Documents over many lines are parsed
// whole.
Result<FileFormat> detect_format(const std::string& path);

// Treatment of a request without output tokens. Public traces have some (failed or cancelled
// requests), but an engine requires max_tokens of at least 1.
enum class ZeroOutput : std::uint8_t {
  // Keep it with one token: its prefill counts, and it ends with its first token.
  one_token,
  // Omit it; requests that wait for it wait for its predecessors instead.
  skip,
  // An error that names the line.
  refuse,
};

enum class TimeUnit : std::uint8_t { ms, s };
enum class Arrivals : std::uint8_t {
  recorded,
  // All requests arrive at once, except for turns, which still wait for each other.
  closed,
};
// The prompt of a later turn in a session: the whole conversation (`whole`), or only what follows
// the previous turns and answers (`added`).
enum class Turns : std::uint8_t { whole, added };

// Facts that a file of another tool does not state. An absent option takes the default of
// docs/formats.md for the file's format, which the reader reports in assumed().
struct ImportOptions {
  ZeroOutput zero_output = ZeroOutput::one_token;
  // Tokens per hash id.
  std::optional<std::int32_t> block_tokens = {};
  std::optional<TimeUnit> time_unit = {};
  std::optional<Turns> turns = {};
  Arrivals arrivals = Arrivals::recorded;
  // True if a last row that breaks off is omitted instead of refused.
  bool skips_torn = false;
  // Names of the options of import_options_from_text() that were given.
  std::vector<std::string> given = {};
  // Further files of the same trace, read after the first.
  std::vector<std::string> shards = {};
};

// Parses "block=16,time=s,turns=added,zero=skip,arrival=closed,torn=skip", each option at most
// once. Errors name the option and its values.
Result<ImportOptions> import_options_from_text(std::string_view text);

// Refuses options that a file of this format does not read.
Result<void> check_import(const std::string& path, FileFormat format, const ImportOptions& options);

// Opens a request trace, a benchmark file (all requests arrive at 0), or a trace of another tool.
// Recordings and saved cases are refused. `format` is the result of detect_format(); shards must
// have the same format.
Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path, FileFormat format,
                                                const ImportOptions& options = {});
Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path,
                                                const ImportOptions& options = {});

}  // namespace lockstep
