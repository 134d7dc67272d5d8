// lockstep export FILE --as FORMAT: how can the requests of a failing case be sent to a live
// server?
//
// Writes arrivals, lengths and what prompts share, in the format of another tool, and prints the
// commands that serve the model and send the requests. If the format has no word for something, the
// export is refused; with --lossy it is left out and counted.
//
// Not exported: sampled tokens, which the live model chooses, and the faults of a saved case.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/output_file.h"
#include "cli/commands.h"
#include "cli/options/output_option.h"
#include "cli/options/replay_options.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "traces/exporters/export_trace.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"
#include "traces/formats/saved_case.h"
#include "traces/importers/open_trace.h"

namespace lockstep {
namespace {

// Duration of a recorded step, for recordings, which have no times: 10 ms, as in a replay.
constexpr std::int64_t kStepNs = 10'000'000;

struct ExportCommand {
  std::string file;
  std::string as;
  std::string out;  // path; empty: standard output
  std::string json_path;
  std::int32_t block_tokens = 0;  // tokens per id; 0: the most that loses nothing
  bool is_lossy = false;
  ImportOptions import;
};

// The requests, and what is known of the server that they were recorded on.
struct Exported {
  Trace trace;
  std::optional<EngineConfig> engine;  // of a saved case or recording; absent: a trace
  std::int64_t num_blocks = 0;
  std::string cut_off = {};              // where a recording ends early; empty: it is complete
  std::vector<std::string> chosen = {};  // the importer's assumptions
};

Result<Trace> requests_of(const Recording& recording, const std::string& file) {
  auto trace = trace_of(recording, kStepNs);
  if (!trace) return fail("{}: {}", file, trace.error().message);
  return trace;
}

// Reads the requests of a saved case, a recording or a trace. A saved case that follows a recording
// takes the recording's requests.
Result<Exported> read_requests(const ExportCommand& command) {
  LS_ASSIGN_OR_RETURN(const FileFormat format, detect_format(command.file));
  LS_RETURN_IF_ERROR(check_import(command.file, format, command.import));
  if (format == FileFormat::saved_case) {
    LS_ASSIGN_OR_RETURN(auto saved, read_saved_case(command.file));
    // Its requests are inside the recording; the trace of such a case is empty.
    if (saved.recording) {
      LS_ASSIGN_OR_RETURN(saved.trace, requests_of(*saved.recording, command.file));
    }
    return Exported{std::move(saved.trace), saved.engine, saved.cache.num_blocks,
                    cut_off_text(saved)};
  }
  if (format == FileFormat::recording) {
    LS_ASSIGN_OR_RETURN(const auto recording, read_recording(command.file));
    LS_ASSIGN_OR_RETURN(auto trace, requests_of(recording, command.file));
    return Exported{std::move(trace), recording.header.options.config, recording.header.num_blocks,
                    cut_off_text(recording.end)};
  }
  LS_ASSIGN_OR_RETURN(const auto reader, open_trace(command.file, format, command.import));
  LS_ASSIGN_OR_RETURN(auto trace, read_all(*reader));
  return Exported{std::move(trace), {}, 0, {}, reader->assumed()};
}

// REQUIRES: a name of export_formats(), which the option's check ensures.
const ExportFormat& format_named(std::string_view name) {
  return *std::ranges::find(export_formats(), name, &ExportFormat::name);
}

// Returns a command that serves a model with the case's configuration, as far as vLLM has options
// for it. The pool is given in blocks, since the case may need it to be full at the same moment.
std::string serve_text(const EngineConfig& engine, std::int64_t num_blocks) {
  std::string text = fmt::format(
      "  vllm serve MODEL --block-size {} --num-gpu-blocks-override {} --max-num-seqs {} "
      "--max-num-batched-tokens {} --max-model-len {}",
      engine.block_size, num_blocks, engine.max_num_seqs, engine.max_num_batched_tokens,
      engine.max_model_len);
  if (engine.policy == SchedulingPolicy::priority) text += " --scheduling-policy priority";
  text += engine.enable_prefix_caching ? " --enable-prefix-caching" : " --no-enable-prefix-caching";
  if (!engine.enable_chunked_prefill) text += " --no-enable-chunked-prefill";
  text += engine.async_scheduling ? " --async-scheduling" : " --no-async-scheduling";
  return text + "\n";
}

// Returns the command that sends the file, or an empty text if the format is read by no single
// tool.
std::string send_text(const ExportedTrace& exported, ExportAs as, const std::string& file) {
  switch (as) {
    case ExportAs::mooncake:
      return {};
    case ExportAs::aiperf:
      return fmt::format(
          "  aiperf profile --model MODEL --url URL --input-file {} --custom-dataset-type "
          "mooncake_trace --fixed-schedule --isl-block-size {}\n",
          file, exported.block_tokens);
    case ExportAs::timed_trace:
      return fmt::format(
          "  vllm bench serve --model MODEL --dataset-name timed_trace --dataset-path {} "
          "--timed-trace-chunk-hash-size {} --num-prompts {}\n",
          file, exported.block_tokens, exported.num_requests);
  }
  return {};
}

// Returns what was written, what was left out, and how to use it. Prompts of a live server differ
// in tokens, not in what they share.
std::string summary_text(const ExportCommand& command, const ExportedTrace& exported,
                         const Exported& read) {
  const std::string file = command.out.empty() ? "FILE" : command.out;
  const ExportFormat& format = format_named(command.as);
  std::string text = fmt::format("{} as {}, ids of {}\n", counted(exported.num_requests, "request"),
                                 command.as, counted(exported.block_tokens, "token"));
  for (const LeftOut& left_out : exported.left_out)
    text += fmt::format("  left out: {} ({} times)\n", left_out.what, with_commas(left_out.count));
  for (const std::string& chosen : read.chosen) text += fmt::format("  chosen: {}\n", chosen);
  if (!read.cut_off.empty())
    text += fmt::format("  {} is {}: unfinished requests get max_tokens of output\n", command.file,
                        read.cut_off);
  std::string live = read.engine ? serve_text(*read.engine, read.num_blocks) : "";
  live += send_text(exported, format.as, file);
  if (!live.empty()) text += "Against a live server:\n" + live;
  // Readers assume the format's usual block size unless another is given.
  if (exported.block_tokens != format.block_tokens_max)
    text += fmt::format(
        "Other readers need the ids' block size, {}; Lockstep: --import block={},time={}.\n",
        counted(exported.block_tokens, "token"), exported.block_tokens,
        format.as == ExportAs::timed_trace ? "s" : "ms");
  return text;
}

std::string totals_json(const ExportCommand& command, const ExportedTrace& exported,
                        const Exported& read) {
  nlohmann::ordered_json json{{"file", command.file},
                              {"as", command.as},
                              {"requests", exported.num_requests},
                              {"block_tokens", exported.block_tokens},
                              {"chosen", read.chosen},
                              {"left_out", nlohmann::ordered_json::array()}};
  for (const LeftOut& left_out : exported.left_out)
    json["left_out"].push_back({{"what", left_out.what}, {"count", left_out.count}});
  return json_text(json);
}

Result<int> export_requests(const ExportCommand& command) {
  LS_ASSIGN_OR_RETURN(const auto read, read_requests(command));
  ExportOptions options{
      .as = format_named(command.as).as, .block_tokens = {}, .is_lossy = command.is_lossy};
  if (command.block_tokens > 0) options.block_tokens = command.block_tokens;
  LS_ASSIGN_OR_RETURN(const auto exported, export_trace(command.file, read.trace, options));
  const std::string summary = summary_text(command, exported, read);
  if (command.out.empty()) {
    fmt::print("{}", exported.text);
    // Standard output carries the file, so the summary goes to standard error.
    fmt::print(stderr, "{}", summary);
  } else {
    LS_RETURN_IF_ERROR(write_output(command.out, exported.text));
    fmt::print("{}", summary);
  }
  if (!command.json_path.empty())
    LS_RETURN_IF_ERROR(write_output(command.json_path, totals_json(command, exported, read)));
  return kExitAgreed;
}

}  // namespace

void add_export_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ExportCommand>();
  CLI::App* command =
      app.add_subcommand("export", "Export requests for other tools and a live server");
  command
      ->add_option(
          "FILE", options->file,
          "a trace of any format, a saved case, a recording, or the name of a bundled sample")
      ->required()
      ->transform(sample_by_name());
  std::vector<std::string> names;
  for (const ExportFormat& format : export_formats()) names.emplace_back(format.name);
  command->add_option("--as", options->as, "mooncake, aiperf, timed_trace (of vllm bench serve)")
      ->required()
      ->check(CLI::IsMember(names));
  declare_output(*command, "--out", options->out, "output file (standard output)");
  declare_output(*command, "--json", options->json_path, "what was written and left out, as JSON");
  command
      ->add_option("--block", options->block_tokens,
                   "tokens per id (the most that keeps all shared prefixes exact)")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->type_name("N");
  command->add_flag("--lossy", options->is_lossy, "drop and count what the format cannot express");
  declare_import(*command, options->import);
  command->callback([options, &exit_code] { exit_code = exit_status(export_requests(*options)); });
}

}  // namespace lockstep
