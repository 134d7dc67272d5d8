// Readers of traces and workloads of other tools, and the request that every importer makes of a
// row. docs/formats.md, "Traces of other tools" and the sections after it, describes each format.
//
// Each open_...() checks the file's form and reports assumptions by assumed(). Errors name file,
// line and field.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/line_reader.h"
#include "base/result.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/open_trace.h"

namespace lockstep {

// Opens the requests of a file in one format.
using OpenTrace = Result<std::unique_ptr<TraceReader>>(const std::string& path,
                                                       const ImportOptions& options);

// Opens a trace of Mooncake's kind (JSON lines): times, lengths, and the ids of a prompt's blocks,
// the last of which covers the remainder. An id stands for the block's content and everything
// before it, so equal ids are equal prefixes; here it is the seed of a symbolic run. Keys that
// docs/formats.md, "Mooncake", does not have are refused if they could matter, and so is a row
// whose ids do not cover its prompt exactly. Arrivals count from the trace's own zero; rows at
// equal times keep the file's order. Dialects:
// - Mooncake: ms, ids of 512 tokens
// - vLLM's timed traces: s, ids of 16 tokens
// - AIPerf and Dynamo: sessions, whose turns wait for each other; rows that name others in wait_for
OpenTrace open_mooncake;

// Opens the manifest.json of AIPerf's synthesized sessions; its rows are in dataset.jsonl next to
// it.
inline constexpr std::string_view kAiperfRows = "dataset.jsonl";
OpenTrace open_aiperf_manifest;

// Opens conversations of coding agents, as kv-cache-tester and the cc-traces data sets have them:
// one per file, or one per line. Turns and sub-agents wait for each other.
OpenTrace open_weka;

// Opens Alibaba's Bailian traces (JSON lines): chats and their parents, ids of 16 tokens. The id of
// a last block that is not full may stand for padding and is not used. Arrivals are as recorded.
OpenTrace open_bailian;

// Opens BurstGPT (CSV): times and lengths, no prefixes.
OpenTrace open_burstgpt;
bool is_burstgpt_header(std::string_view line);

// Opens LLMServingSim's files (JSON lines): workloads with token ids, sessions of calls and tools,
// or the requests of a recorded run, which have lengths only.
OpenTrace open_llmservingsim;

// Opens Dynamo's request traces, dynamo.request.trace.v1 (JSON lines).
inline constexpr std::string_view kDynamoSchema = "dynamo.request.trace.v1";
OpenTrace open_dynamo;

// Opens Azure's LLM inference traces (CSV): TIMESTAMP, ContextTokens and GeneratedTokens, found by
// the names in the header line. The format does not state which prompts share a prefix, so every
// prompt is private to its request.
//
// Timestamps keep every digit: YYYY-MM-DD HH:MM:SS[.up to 9 digits], with T instead of the space
// and Z or an offset at the end (the 2024 and 2025 files), become integer ns since the first row.
// Lines may end in \r\n, and the last line may end without.
OpenTrace open_azure;

// True if a first line is the header of such a file.
bool is_azure_header(std::string_view line);

// Returns nanoseconds since 1970-01-01 00:00 UTC; nullopt: not such a time. Years 1970 to 2199.
std::optional<std::int64_t> utc_ns_of(std::string_view timestamp);

// A row of a format without links between requests.
struct ImportedRow {
  std::int64_t t_ns = 0;
  Prompt prompt;
  // Tokens; 0: the source recorded none.
  std::int32_t output_length = 0;
};

// Makes the request r<ordinal> of row number `ordinal`; it ends by its length. An output of no
// tokens becomes one token (ZeroOutput::one_token).
TraceRequest request_of(ImportedRow&& row, std::uint64_t ordinal);

// Returns the path's last component.
std::string file_name_of(std::string_view path);

// Reads a foreign trace of one request per line, in the order of the file.
//
// Invariants
// (1) ordinal_ counts rows, omitted ones included, so that names and private prompts do not depend
//     on ZeroOutput.
// (2) Memory does not grow with the file.
class ImportReader : public TraceReader {
 public:
  ImportReader(LineReader&& lines, const ImportOptions& options, std::string kind)
      : lines_(std::move(lines)), options_(options) {
    header_.source = {.kind = std::move(kind), .name = file_name_of(lines_.path()), .seed = {}};
  }
  const TraceHeader& header() const override { return header_; }
  Result<bool> next(TraceRecord& record) override;
  std::vector<std::string> assumed() const override { return notes_.phrases(options_); }

 protected:
  // Parses a row. The base class applies ZeroOutput, Arrivals and torn rows.
  virtual Result<ImportedRow> read_row(std::string_view line) = 0;

  LineReader lines_;
  ImportOptions options_;
  TraceHeader header_;
  ReadNotes notes_;
  std::uint64_t ordinal_ = 0;  // of the row
};

// Totals that an engine measured on the workload of a benchmark file. In such a file the first line
// has configuration, groups, pool and totals; the requests follow, and all are added before the
// first step in this order. Every sampled token is `sampled_token`, and only lengths end a request.
// docs/formats.md, "Benchmark file".
struct BenchmarkTotals {
  std::int64_t steps = 0;
  std::int64_t scheduled_tokens = 0;
  std::int64_t request_steps = 0;
  bool operator==(const BenchmarkTotals&) const = default;
};

// A whole benchmark file.
struct BenchmarkFile {
  std::string name;
  RecordedEngine engine;
  EngineOptions options;
  std::vector<KVCacheGroupSpec> groups{};
  std::int64_t num_blocks = 0;
  std::int32_t sampled_token = 0;
  BenchmarkTotals totals{};
  std::vector<RequestSpec> requests{};
};

Result<BenchmarkFile> read_benchmark_file(const std::string& path);
// Returns the requests as a trace with the file's options as hints; `path` names the source.
std::unique_ptr<TraceReader> requests_of(BenchmarkFile file, std::string_view path);

}  // namespace lockstep
