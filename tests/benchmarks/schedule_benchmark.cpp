// How fast the model decides: schedule and update_from_output alone, no backend.
//
// The recorded workloads are those on which vLLM's own scheduler is timed too (docs/measured.md).
#include <benchmark/benchmark.h>

#include <filesystem>
#include <memory>
#include <string>

#include "reference/schedule/scheduler.h"
#include "sim/engine/workload.h"
#include "sim/session/session.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

// One run of `path`; false when it cannot be run, and `state` says why.
bool run_once(benchmark::State& state, const std::string& path, const EngineConfig& engine,
              const std::vector<KVCacheGroupSpec>& groups, std::int64_t num_blocks,
              RunSummary& summary) {
  auto reader = open_trace(path);
  Result<Trace> trace = reader ? read_all(**reader) : Result<Trace>(tl::unexpected(reader.error()));
  auto plan = plan_for_groups(groups, num_blocks);
  auto decisions = Scheduler::create(engine, groups, num_blocks);
  if (!trace || !plan || !decisions) {
    state.SkipWithError("the benchmark cannot be set up");
    return false;
  }
  auto workload = make_trace_workload(std::move(*trace), {});
  LockstepConfig config;
  config.engine = engine;
  config.backend = make_backend_config(engine, std::move(*plan));
  const auto report = run_lockstep(config, {*decisions, *workload});
  if (!report) {
    state.SkipWithError(report.error().message.c_str());
    return false;
  }
  summary = report->summary;
  return true;
}

void measure(benchmark::State& state, const std::string& path, const EngineConfig& engine,
             const std::vector<KVCacheGroupSpec>& groups, std::int64_t num_blocks) {
  double request_steps = 0;
  double seconds = 0;
  for (auto _ : state) {
    RunSummary summary;
    if (!run_once(state, path, engine, groups, num_blocks, summary)) return;
    state.SetIterationTime(summary.seconds.schedule);
    request_steps += static_cast<double>(summary.request_steps);
    seconds += summary.seconds.schedule;
  }
  state.counters["request_steps/s"] = request_steps / seconds;
}

void recorded(benchmark::State& state, const char* name) {
  const auto samples = find_samples_dir();
  const auto path = samples.value_or("") / "recordings/vllm-0.22.1/benchmarks" / name;
  const auto file = read_benchmark_file(path.string());
  if (!file) {
    state.SkipWithError(file.error().message.c_str());
    return;
  }
  measure(state, path.string(), file->options.config, file->groups, file->num_blocks);
}
BENCHMARK_CAPTURE(recorded, full, "full.jsonl")->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recorded, full_sw, "full_sw.jsonl")
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recorded, mamba_align, "mamba_align.jsonl")
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

// 12,031 requests, 145 million prompt tokens, blocks of 512 tokens as the trace's own hashes.
void mooncake_conversation(benchmark::State& state) {
  const auto data = find_data_dir();
  const auto path = data.value_or("") / "traces/full/mooncake/conversation_trace.jsonl";
  if (!data || !std::filesystem::exists(path)) {
    state.SkipWithError("the trace is not on this machine");
    return;
  }
  EngineConfig engine;
  engine.block_size = 512;
  engine.max_model_len = 131'072;
  KVCacheGroupSpec group;
  group.layer_names = {"layers.0"};
  group.spec.block_size = engine.block_size;
  measure(state, path.string(), engine, {group}, 4'096);
}
BENCHMARK(mooncake_conversation)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace lockstep
