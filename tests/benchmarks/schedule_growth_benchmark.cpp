// How the cost of a decision grows: with the requests that run, the groups, the size of the pool.
// Time of schedule() and update_from_output() alone, on caches of this file's own making.
//
//   decode/RUNNING/GROUPS  ns per request in a step in which all of them decode one token
//   turnover/BLOCKS/GROUPS ns per block that is allocated from a full pool (its old content is
//                          evicted), computed, published and freed
//   step/WAITING           ns of a step with one request, while others wait for a place
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "base/stopwatch.h"
#include "reference/schedule/scheduler.h"

namespace lockstep {
namespace {

constexpr std::int32_t kBlockSize = 16;

// One group of full attention, the others with a window of 1,024 tokens, as in full_sw.
std::vector<KVCacheGroupSpec> groups_of(std::int64_t count) {
  std::vector<KVCacheGroupSpec> groups(static_cast<std::size_t>(count));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    groups[g].layer_names = {"layers." + std::to_string(g)};
    groups[g].spec.block_size = kBlockSize;
    if (g == 0) continue;
    groups[g].spec.kind = CacheKind::sliding_window;
    groups[g].spec.sliding_window = 1024;
  }
  return groups;
}

class Bench {
 public:
  Bench(std::int64_t num_groups, std::int64_t num_blocks, std::int32_t max_num_seqs)
      : scheduler_(make(num_groups, num_blocks, max_num_seqs)) {}

  // A prompt that no other request has.
  void add(std::uint32_t num_tokens, std::int32_t max_tokens) {
    RequestSpec spec;
    spec.name = "r" + std::to_string(++num_requests_);
    spec.prompt.runs.push_back({TokenRun::Kind::seeded, num_requests_, 0, num_tokens});
    spec.max_tokens = max_tokens;
    const auto id = scheduler_.add_request(std::move(spec));
    LS_CHECK(id.has_value(), "{}", id.error().message);
  }

  // Returns its requests. Each of them samples one token: no prompt here is cut into chunks.
  std::size_t step() {
    const SchedulerOutput& decision = scheduler_.schedule();
    const std::size_t size = decision.scheduled.size();
    sampled_.tokens.assign(size, 7);
    sampled_.token_ends.resize(size);
    for (std::size_t i = 0; i < size; ++i)
      sampled_.token_ends[i] = static_cast<std::uint32_t>(i + 1);
    if (size > 0) scheduler_.update_from_output(sampled_);
    return size;
  }

  bool busy() const { return scheduler_.has_unfinished_requests(); }
  std::size_t num_running() const { return scheduler_.running().size(); }

 private:
  static Scheduler make(std::int64_t num_groups, std::int64_t num_blocks,
                        std::int32_t max_num_seqs) {
    EngineConfig engine;
    engine.block_size = kBlockSize;
    engine.max_num_seqs = max_num_seqs;
    engine.max_num_batched_tokens = 8'192;
    engine.max_model_len = 32'768;
    auto scheduler = Scheduler::create(engine, groups_of(num_groups), num_blocks);
    LS_CHECK(scheduler.has_value(), "{}", scheduler.error().message);
    return std::move(*scheduler);
  }

  Scheduler scheduler_;
  ModelOutput sampled_;
  std::uint64_t num_requests_ = 0;
};

void decode(benchmark::State& state) {
  constexpr std::uint32_t kPrompt = 512;
  constexpr std::int32_t kSteps = 1'024;
  const std::int64_t running = state.range(0), groups = state.range(1);
  const std::int64_t num_blocks = running * groups * (kPrompt + 2 * kSteps) / kBlockSize + 1;
  double seconds = 0;
  for (auto _ : state) {
    Bench bench(groups, num_blocks, static_cast<std::int32_t>(running));
    for (std::int64_t i = 0; i < running; ++i) bench.add(kPrompt, 2 * kSteps);
    while (bench.num_running() < static_cast<std::size_t>(running)) bench.step();
    Stopwatch watch;
    for (std::int32_t step = 0; step < kSteps; ++step) bench.step();
    const double lap = watch.lap();
    state.SetIterationTime(lap);
    seconds += lap;
  }
  state.counters["ns"] =
      1e9 * seconds / (static_cast<double>(state.iterations() * running) * kSteps);
}
BENCHMARK(decode)
    ->ArgsProduct({{1, 16, 256, 1'024}, {1, 2, 4, 8}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

void turnover(benchmark::State& state) {
  constexpr std::uint32_t kPrompt = 2'048;
  const std::int64_t num_blocks = state.range(0), groups = state.range(1);
  const std::int64_t blocks_a_request = groups * (kPrompt / kBlockSize);
  Bench bench(groups, num_blocks, 1);
  const auto serve = [&] {
    bench.add(kPrompt, 1);
    Stopwatch watch;
    while (bench.busy()) bench.step();
    return watch.lap();
  };
  for (std::int64_t used = 0; used < num_blocks; used += blocks_a_request) serve();
  double seconds = 0;
  for (auto _ : state) {
    const double lap = serve();
    state.SetIterationTime(lap);
    seconds += lap;
  }
  state.counters["ns"] = 1e9 * seconds / static_cast<double>(state.iterations() * blocks_a_request);
}
BENCHMARK(turnover)
    ->ArgsProduct({{1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20}, {1, 4}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

void step(benchmark::State& state) {
  constexpr std::uint32_t kPrompt = 16;
  constexpr std::int32_t kOutput = 16'384;
  std::int64_t steps = 0;
  double seconds = 0;
  for (auto _ : state) {
    Bench bench(1, 2'048, 1);
    bench.add(kPrompt, kOutput);
    for (std::int64_t i = 0; i < state.range(0); ++i) bench.add(kPrompt, 1);
    bench.step();
    Stopwatch watch;
    for (std::int32_t i = 2; i < kOutput; ++i) bench.step();
    const double lap = watch.lap();
    state.SetIterationTime(lap);
    seconds += lap;
    steps += kOutput - 2;
  }
  state.counters["ns"] = 1e9 * seconds / static_cast<double>(steps);
}
BENCHMARK(step)->Arg(0)->Arg(1'000)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace lockstep
