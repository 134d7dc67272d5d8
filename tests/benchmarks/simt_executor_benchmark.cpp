// Threads per second of the executor, per mode, compared with a plain loop that does the same.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <vector>

#include "base/check.h"
#include "cuda_backend/simt/executor/executor.h"
#include "cuda_backend/simt/random.h"
#include "tests/benchmarks/simt_benchmark_kernels.h"

namespace lockstep {
namespace {

constexpr std::int64_t kTokens = 4096, kRow = 1024, kBlockSize = 16, kBlocks = 512;
constexpr std::int64_t kBlockStride = kBlockSize * kRow + 64;   // padded pages
constexpr std::int64_t kPayloadBytes = 4 * kTokens * kRow * 2;  // K and V, read and written
constexpr int kSumRows = 1024, kSumColumns = 1024;

enum class Run { fast, check, hunt_16, hunt_1 };

// Everything that both workloads need, in the arena of one executor.
struct Workload {
  std::unique_ptr<simt::Executor> device;
  const BenchmarkKernels* kernels;
  WriteRowsParams rows{};
  float* sum_in = nullptr;
  float* sum_out = nullptr;

  explicit Workload(Run run)
      : kernels(run == Run::fast ? &simt_fast::benchmark_kernels
                                 : &simt_checked::benchmark_kernels) {
    simt::ExecutorOptions options;
    options.arena_bytes = std::size_t{1} << 30;
    options.mode = run == Run::fast    ? simt::Mode::fast
                   : run == Run::check ? simt::Mode::check
                                       : simt::Mode::hunt;
    options.preempt_one_in = run == Run::hunt_1 ? 1 : 16;
    device = *simt::Executor::create(options);
    simt::Random random(1);
    rows.key = random_array<std::uint16_t>(random, kTokens * kRow, "key");
    rows.value = random_array<std::uint16_t>(random, kTokens * kRow, "value");
    rows.key_cache = *device->allocate_array<std::uint16_t>(kBlocks * kBlockStride, "key_cache");
    rows.value_cache =
        *device->allocate_array<std::uint16_t>(kBlocks * kBlockStride, "value_cache");
    std::vector<std::int64_t> slots(kBlocks * kBlockSize);
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
    random.shuffle(slots);
    rows.slot_mapping = uploaded(slots, "slot_mapping");
    rows.num_tokens = kTokens;
    rows.block_stride = kBlockStride;
    rows.row = kRow;
    rows.block_size = kBlockSize;
    std::vector<float> numbers(std::size_t{kSumRows} * kSumColumns);
    for (float& x : numbers) x = static_cast<float>(random.below(2001)) / 1000.0f - 1.0f;
    sum_in = uploaded(numbers, "in");
    sum_out = *device->allocate_array<float>(kSumRows, "out");
  }

  template <class T>
  T* uploaded(const std::vector<T>& host, const char* name) {
    T* data = *device->allocate_array<T>(host.size(), name);
    LS_CHECK(device->memcpy_h2d(data, host.data(), host.size() * sizeof(T)) == simt::success);
    return data;
  }
  template <class T>
  T* random_array(simt::Random& random, std::size_t count, const char* name) {
    std::vector<T> host(count);
    for (T& x : host) x = static_cast<T>(random.next());
    return uploaded(host, name);
  }
};

void finish(benchmark::State& state, const Workload& work, std::int64_t bytes) {
  for (const simt::Report& report : work.device->reports())
    state.SkipWithError(to_string(report).c_str());
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["threads/s"] =
      benchmark::Counter(static_cast<double>(work.device->last_launch().threads) * iterations,
                         benchmark::Counter::kIsRate);
  state.SetBytesProcessed(static_cast<std::int64_t>(iterations) * bytes);
}

template <class Kernel>
void write_rows(benchmark::State& state, Run run, Kernel BenchmarkKernels::*kernel) {
  Workload work(run);
  for (auto _ : state) (work.kernels->*kernel)(work.device->stream(), work.rows);
  finish(state, work, kPayloadBytes);
}

template <class Kernel>
void sum_rows(benchmark::State& state, Run run, Kernel BenchmarkKernels::*kernel) {
  Workload work(run);
  for (auto _ : state)
    (work.kernels->*kernel)(work.device->stream(), work.sum_in, work.sum_out, kSumRows,
                            kSumColumns);
  finish(state, work, std::int64_t{4} * kSumRows * kSumColumns);
}

void launch_nothing(benchmark::State& state, Run run) {
  Workload work(run);
  for (auto _ : state) work.kernels->nothing(work.device->stream());
  finish(state, work, 0);
}

void write_rows_plain_loop(benchmark::State& state) {
  const Workload work(Run::fast);
  const WriteRowsParams& p = work.rows;
  for (auto _ : state) {
    for (std::int64_t token = 0; token < p.num_tokens; ++token) {
      const std::int64_t slot = p.slot_mapping[token];
      const std::int64_t to = slot / p.block_size * p.block_stride + slot % p.block_size * p.row;
      std::memcpy(p.key_cache + to, p.key + token * p.row, static_cast<std::size_t>(p.row) * 2);
      std::memcpy(p.value_cache + to, p.value + token * p.row, static_cast<std::size_t>(p.row) * 2);
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * kPayloadBytes);
}
BENCHMARK(write_rows_plain_loop)->Unit(benchmark::kMillisecond);

void register_all() {
  const std::pair<const char*, Run> runs[] = {{"fast", Run::fast},
                                              {"check", Run::check},
                                              {"hunt_1_in_16", Run::hunt_16},
                                              {"hunt_every_access", Run::hunt_1}};
  for (const Run run : {Run::fast, Run::check})
    benchmark::RegisterBenchmark(run == Run::fast ? "launch_nothing/fast" : "launch_nothing/check",
                                 launch_nothing, run);
  const auto add = [](const std::string& name, auto body) {
    benchmark::RegisterBenchmark(name.c_str(), body)->Unit(benchmark::kMillisecond);
  };
  for (const auto& [name, run] : runs) {
    const Run mode = run;
    const std::string suffix = std::string("/") + name;
    add("write_rows_vec16" + suffix,
        [mode](benchmark::State& s) { write_rows(s, mode, &BenchmarkKernels::write_rows_vec16); });
    add("write_rows_scalar" + suffix,
        [mode](benchmark::State& s) { write_rows(s, mode, &BenchmarkKernels::write_rows_scalar); });
    add("sum_rows_shuffles" + suffix,
        [mode](benchmark::State& s) { sum_rows(s, mode, &BenchmarkKernels::sum_rows_shuffles); });
    add("sum_rows_warp_sum" + suffix,
        [mode](benchmark::State& s) { sum_rows(s, mode, &BenchmarkKernels::sum_rows_warp_sum); });
    add("sum_rows_tree" + suffix,
        [mode](benchmark::State& s) { sum_rows(s, mode, &BenchmarkKernels::sum_rows_tree); });
  }
}
const bool registered = (register_all(), true);

}  // namespace
}  // namespace lockstep
