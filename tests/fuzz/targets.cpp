#include "tests/fuzz/targets.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/check.h"
#include "properties/audit/audit.h"
#include "properties/fuzz/fuzz.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "sim/engine/faults.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/recording_damage.h"
#include "traces/formats/plan_recording.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"
#include "traces/formats/safetensors.h"
#include "traces/formats/saved_case.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using Bytes = std::span<const std::uint8_t>;

// An error names the file in which it is.
template <class T>
bool is_read(const Result<T>& result, const std::string& path) {
  if (result) return true;
  LS_CHECK(result.error().message.find(path) != std::string::npos, "an error without a place: {}",
           result.error().message);
  return false;
}

// Reads; when that goes well, what is written of it reads as the same text again.
template <class Read, class Write>
void read_and_write(Bytes bytes, Read read, Write write) {
  const MemoryFile file(bytes);
  const auto first = read(file.path());
  if (!is_read(first, file.path())) return;
  const std::string text = write(*first);
  const MemoryFile written(text);
  const auto second = read(written.path());
  LS_CHECK(second.has_value(), "what was written is refused: {}", second.error().message);
  LS_CHECK(write(*second) == text, "written, read and written it is another text");
}

Result<Trace> read_whole(Result<std::unique_ptr<TraceReader>> reader) {
  if (!reader) return tl::unexpected(reader.error());
  return read_all(**reader);
}

void run_request_trace(Bytes bytes) {
  read_and_write(
      bytes, [](const std::string& path) { return read_whole(open_request_trace(path)); },
      trace_to_text);
}

void run_recording(Bytes bytes) {
  read_and_write(bytes, read_recording, [](const Recording& recording) {
    std::string text = recording_header_line(recording.header);
    for (const RecordedStep& step : recording.steps) text += recording_step_line(step);
    return text + recording_end_line(recording.end);
  });
}

void run_saved_case(Bytes bytes) { read_and_write(bytes, read_saved_case, saved_case_to_text); }

void run_layout_recording(Bytes bytes) {
  const MemoryFile file(bytes);
  is_read(read_plan_recordings(file.path()), file.path());
}

void run_model_file(Bytes bytes) { read_and_write(bytes, read_model_file, model_to_json); }

void run_benchmark(Bytes bytes) {
  const MemoryFile file(bytes);
  is_read(read_benchmark_file(file.path()), file.path());
}

// Whatever it is: the first line says, and one of the readers takes or refuses the rest.
void run_any_trace(Bytes bytes) {
  const MemoryFile file(bytes);
  is_read(read_whole(open_trace(file.path())), file.path());
}

// Decisions that no engine made: whatever a file contains, the audit reports what is wrong.
void run_audit(Bytes bytes) {
  const MemoryFile file(bytes);
  is_read(audit_recording(file.path()), file.path());
}

// What a reader takes can be written as a request trace, which its own reader takes.
template <class Open>
void import_and_write(Bytes bytes, Open open) {
  const MemoryFile file(bytes);
  const auto trace = read_whole(open(file.path(), ImportOptions()));
  if (!is_read(trace, file.path())) return;
  const MemoryFile written(trace_to_text(*trace));
  const auto again = read_whole(open_request_trace(written.path()));
  LS_CHECK(again.has_value(), "what was imported is refused: {}", again.error().message);
  LS_CHECK(*again == *trace, "an imported trace, written and read, is another");
}

void run_mooncake(Bytes bytes) { import_and_write(bytes, open_mooncake); }
void run_weka(Bytes bytes) { import_and_write(bytes, open_weka); }
void run_bailian(Bytes bytes) { import_and_write(bytes, open_bailian); }
void run_burstgpt(Bytes bytes) { import_and_write(bytes, open_burstgpt); }
void run_llmservingsim(Bytes bytes) { import_and_write(bytes, open_llmservingsim); }
void run_dynamo(Bytes bytes) { import_and_write(bytes, open_dynamo); }

// The rows that it names are not there.
void run_aiperf_manifest(Bytes bytes) {
  const MemoryFile file(bytes);
  const auto trace = read_whole(open_aiperf_manifest(file.path(), {}));
  LS_CHECK(!trace, "a manifest without rows was read");
}

void run_azure(Bytes bytes) {
  const MemoryFile file(bytes);
  is_read(read_whole(open_azure(file.path(), {})), file.path());
}

void run_fault_plan(Bytes bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto plan = fault_plan_from_text(text);
  if (!plan) return;
  std::string written;
  for (const PlannedFault& fault : plan->faults())
    written += (written.empty() ? "" : ",") + to_text(fault);
  const auto again = fault_plan_from_text(written);
  LS_CHECK(again && *again == *plan, "{} reads as another plan", written);
  const auto filed = fault_plan_of(faults_of(*plan));
  LS_CHECK(filed && *filed == *plan, "{} is another plan in a file", written);
}

void run_fuzz_report(Bytes bytes) { read_and_write(bytes, read_fuzz_report, fuzz_report_to_json); }

void run_safetensors(Bytes bytes) {
  const auto tensors = read_safetensors(bytes);
  if (!tensors) return;
  const std::vector<std::uint8_t> file = safetensors_file(*tensors);
  const auto again = read_safetensors(file);
  LS_CHECK(again && safetensors_file(*again) == file, "written and read it is another file");
}

void run_scenario(Bytes bytes) {
  ByteChoices choices(bytes);
  GeneratorOptions options;
  options.backend = "none";
  const SavedCase saved = generate_case(choices, options);
  const Outcome outcome = judge(saved);
  LS_CHECK(outcome.kind != OutcomeKind::refused, "refused: {}", outcome.what);
  LS_CHECK(!outcome.failed() || known_finding(saved, outcome) != nullptr, "{} in step {}: {}\n{}",
           outcome.check, outcome.step, outcome.what, saved_case_to_text(saved));
}

// Damage chosen by the bytes, judged by every command that takes recordings.
void run_damage(Bytes bytes) {
  ByteChoices choices(bytes);
  judge_damaged(damaged_recording(choices));
}

SavedCase small_case(std::uint64_t seed) {
  GeneratorOptions options;
  options.backend = "none";
  options.requests_max = 3;
  return generate_case(seed, options);
}

std::vector<std::string> request_traces() {
  return {trace_to_text(small_case(1).trace), trace_to_text(small_case(3).trace)};
}

std::vector<std::string> saved_cases() {
  return {saved_case_to_text(small_case(1)), saved_case_to_text(small_case(3))};
}

// Files of the project, by their first `lines` lines.
std::vector<std::string> beginnings(std::initializer_list<std::string_view> paths, int lines_max) {
  std::vector<std::string> texts;
  for (const std::string_view path : paths) {
    std::ifstream file(std::filesystem::path(LOCKSTEP_SOURCE_DIR) / path);
    LS_CHECK(file.good(), "{} is not there", path);
    std::string& text = texts.emplace_back();
    std::string line;
    for (int i = 0; i < lines_max && std::getline(file, line); ++i) text += line + "\n";
  }
  return texts;
}

std::vector<std::string> recordings() {
  return beginnings({"tests/regressions/vllm_0_22_1_window_freed_by_drafts.jsonl",
                     "tests/regressions/vllm_0_22_1_state_hit_longer.jsonl",
                     "tests/regressions/vllm_0_22_1_two_half_loaded.jsonl"},
                    1'000);
}

std::vector<std::string> layout_recordings() {
  return beginnings({"traces/samples/recordings/vllm-0.22.1/layouts.jsonl",
                     "traces/samples/recordings/vllm-0.33.0/layouts.jsonl"},
                    1);
}

std::vector<std::string> model_files() {
  auto files =
      beginnings({"traces/models/jamba-mini.json", "traces/models/qwen3.5-0.8b.json"}, 1'000);
  files.push_back(R"({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
      "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
      "hidden_size": 1024, "sliding_window": 512,
      "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}})");
  return files;
}

std::vector<std::string> benchmarks() {
  return beginnings({"traces/samples/recordings/vllm-0.22.1/benchmarks/mamba_align.jsonl"}, 4);
}

std::vector<std::string> fault_plans() {
  return {"refuse_allocation@12+3,pinch_pool@20+8:4,abort_decode@5:1", "late_output@1+2"};
}

std::vector<std::string> fuzz_reports() {
  FuzzOptions options;
  options.generator.backend = "none";
  options.mutant = "hash-stale";
  options.runs = 30;
  return {fuzz_report_to_json(fuzz(options)), fuzz_report_to_json({})};
}

std::vector<std::string> safetensors_files() {
  const std::vector<std::uint8_t> rows(12, 7);
  const SafeTensor tensor{.name = "h", .dtype = "BF16", .shape = {3, 2}, .bytes = rows};
  const auto file = safetensors_file({&tensor, 1});
  return {std::string(file.begin(), file.end())};
}

std::vector<std::string> mooncake_files() {
  return {
      "{\"timestamp\": 0, \"input_length\": 1030, \"output_length\": 5, \"hash_ids\": [0, 1, 2]}\n"
      "{\"timestamp\": 7, \"input_length\": 1, \"output_length\": 2, \"hash_ids\": [9]}\n",
      beginnings({"traces/samples/foreign/timed_trace.jsonl"}, 9).front(),
      beginnings({"traces/samples/foreign/agentic_mooncake.jsonl"}, 9).front(),
      beginnings({"traces/samples/foreign/aiperf/dataset.jsonl"}, 9).front()};
}

std::vector<std::string> weka_files() {
  return beginnings({"traces/samples/foreign/weka.json", "traces/samples/foreign/cc_traces.jsonl"},
                    9);
}

std::vector<std::string> bailian_files() {
  return beginnings({"traces/samples/foreign/bailian.jsonl"}, 9);
}

std::vector<std::string> burstgpt_files() {
  return beginnings({"traces/samples/foreign/burstgpt.csv"}, 9);
}

std::vector<std::string> llmservingsim_files() {
  return beginnings({"traces/samples/foreign/llmservingsim.jsonl",
                     "traces/samples/foreign/llmservingsim_agentic.jsonl",
                     "traces/samples/foreign/llmservingsim_recorded.jsonl"},
                    9);
}

std::vector<std::string> dynamo_files() {
  return beginnings(
      {"traces/samples/foreign/dynamo.jsonl", "traces/samples/foreign/dynamo_agents.jsonl"}, 9);
}

std::vector<std::string> aiperf_manifests() {
  return beginnings({"traces/samples/foreign/aiperf/manifest.json"}, 99);
}

std::vector<std::string> azure_files() {
  return {
      "TIMESTAMP,ContextTokens,GeneratedTokens\n"
      "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"};
}

std::vector<std::string> any_traces() {
  std::vector<std::string> files;
  for (const auto seeds : {request_traces, recordings, saved_cases, benchmarks, mooncake_files,
                           azure_files, weka_files, bailian_files, burstgpt_files,
                           llmservingsim_files, dynamo_files, aiperf_manifests})
    files.push_back(seeds().front());
  return files;
}

// Draws of a seed, byte by byte: with ByteChoices they make a case.
std::vector<std::string> scenarios() {
  std::vector<std::string> texts;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SeededChoices choices(seed);
    std::string& text = texts.emplace_back();
    for (int i = 0; i < 400; ++i) text += static_cast<char>(choices.below(256));
  }
  return texts;
}

constexpr FuzzTarget kTargets[] = {
    {"request_trace", run_request_trace, request_traces},
    {"recording", run_recording, recordings},
    {"saved_case", run_saved_case, saved_cases},
    {"layout_recording", run_layout_recording, layout_recordings},
    {"model_file", run_model_file, model_files},
    {"benchmark", run_benchmark, benchmarks},
    {"mooncake", run_mooncake, mooncake_files},
    {"azure", run_azure, azure_files},
    {"weka", run_weka, weka_files},
    {"bailian", run_bailian, bailian_files},
    {"burstgpt", run_burstgpt, burstgpt_files},
    {"llmservingsim", run_llmservingsim, llmservingsim_files},
    {"dynamo", run_dynamo, dynamo_files},
    {"aiperf_manifest", run_aiperf_manifest, aiperf_manifests},
    {"fault_plan", run_fault_plan, fault_plans},
    {"fuzz_report", run_fuzz_report, fuzz_reports},
    {"any_trace", run_any_trace, any_traces},
    {"audit", run_audit, recordings},
    {"damage", run_damage, scenarios},
    {"safetensors", run_safetensors, safetensors_files},
    {"scenario", run_scenario, scenarios},
};

}  // namespace

std::span<const FuzzTarget> fuzz_targets() { return kTargets; }

const FuzzTarget& fuzz_target(std::string_view name) {
  const auto target = std::ranges::find(kTargets, name, &FuzzTarget::name);
  LS_CHECK(target != std::end(kTargets), "no fuzz target {}", name);
  return *target;
}

}  // namespace lockstep
