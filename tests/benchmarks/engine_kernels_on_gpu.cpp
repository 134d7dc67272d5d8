// The kernels of a cache on a GPU: one row for each workload, timed by events with a cold L2, with
// the bandwidth of a plain copy of 1 GiB as the measure: large batches, batches of one and of
// sixteen requests, cache writes of 1 GiB, and a pool that takes four fifths of the memory that is
// left. FlashInfer's append is compared with our writes of bf16 where its package was found at
// build time. Without a GPU, `lockstep_gpu_benchmarks` reports that and exits with 2.
#include <benchmark/benchmark.h>
#include <fmt/core.h>

#include "base/check.h"
#include "cuda_backend/gpu/gpu_device.h"
#include "tests/benchmarks/engine_workloads.h"
#include "tests/benchmarks/flashinfer_append.h"
#include "tests/benchmarks/gpu_stopwatch.h"
#include "tests/benchmarks/pool_workloads.h"

namespace lockstep::cuda {

// The GPU's table, which simt.h declares for nvcc alone.
namespace simt_cuda {
extern const EngineKernels engine_kernels;
}

namespace {

constexpr const char* kPlainCopy = "plain_copy_of_1_GiB";
constexpr std::int64_t kColdBytes = 256 << 20;  // more than any L2 holds

// `copy_rate`: bytes a second of the plain copy, which is the first row and sets it; `of_copy` is a
// row's share of that.
void time_on_gpu(benchmark::State& state, Device& device, std::byte* scratch,
                 const Workload& workload, double& copy_rate) {
  double seconds = 0;
  for (auto _ : state) {
    int error = 0;
    const float milliseconds = gpu_milliseconds(device.place().stream, scratch, kColdBytes,
                                                [&] { error = workload.launch(device.place()); });
    if (error != 0 || milliseconds < 0) {
      state.SkipWithError(device.kernels().error_text(error));
      return;
    }
    state.SetIterationTime(double{milliseconds} / 1e3);
    seconds += double{milliseconds} / 1e3;
  }
  const std::int64_t bytes = state.iterations() * workload.bytes;
  state.SetBytesProcessed(bytes);
  state.SetItemsProcessed(state.iterations() * workload.items);
  const double rate = seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
  if (workload.name == kPlainCopy) copy_rate = rate;
  if (copy_rate > 0) state.counters["of_copy"] = rate / copy_rate;
}

Workload plain_copy(Device& device) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  auto* memory = device.allocate(2 * kBytes, "plain copy");
  return {kPlainCopy, 2 * kBytes, 1, [memory](const LaunchPlace& place) {
            return copy_on_device(place.stream, memory, memory + kBytes, kBytes);
          }};
}

// Of as many tokens as the writes of engine_workloads.h.
std::vector<Workload> other_appends([[maybe_unused]] Device& device,
                                    [[maybe_unused]] std::int32_t num_tokens) {
#ifdef LOCKSTEP_HAVE_FLASHINFER
  std::vector<Workload> appends = {flashinfer_append(device, num_tokens)};
  LS_CHECK(device.finish().has_value(), "an append of {} tokens does not fit", num_tokens);
  return appends;
#else
  return {};
#endif
}

int time_all(Device& device) {
  std::vector<Workload> workloads = {plain_copy(device)};
  const auto add = [&](std::vector<Workload> more, const std::string& suffix) {
    for (Workload& one : more) {
      one.name += suffix;
      workloads.push_back(std::move(one));
    }
  };
  add(engine_workloads(device, simt_cuda::engine_kernels, kGpuSizes), "");
  add(other_appends(device, kGpuSizes.prefill_tokens), "");
  constexpr std::int32_t kTokensOfGiB = 1 << 18;  // bf16 rows of K and V, 2 KiB each
  add(write_workloads(device, simt_cuda::engine_kernels, kTokensOfGiB), "_of_1_GiB");
  add(other_appends(device, kTokensOfGiB), "_of_1_GiB");
  for (const std::int32_t requests : {1, 16}) {
    add(other_appends(device, 64 * requests), fmt::format("_of_{}", requests));
    add(engine_workloads(device, simt_cuda::engine_kernels,
                         {.prefill_tokens = 64 * requests,
                          .decode_requests = requests,
                          .context_tokens = kGpuSizes.context_tokens,
                          .state_heads = kGpuSizes.state_heads}),
        fmt::format("_of_{}", requests));
  }
  constexpr std::int64_t kPageBytes = 2 << 20;
  const std::int64_t pages = free_memory_bytes() / 5 * 4 / kPageBytes;
  add(pool_workloads(device, device.kernels(), {static_cast<std::int32_t>(pages), kPageBytes}),
      fmt::format("_of_{}_GiB", pages * kPageBytes >> 30));
  std::byte* scratch = device.allocate(kColdBytes, "scratch");
  double copy_rate = 0;
  for (const Workload& workload : workloads)
    benchmark::RegisterBenchmark(workload.name.c_str(),
                                 [&device, scratch, &copy_rate, workload](benchmark::State& state) {
                                   time_on_gpu(state, device, scratch, workload, copy_rate);
                                 })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace
}  // namespace lockstep::cuda

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  auto device = lockstep::cuda::make_gpu_device(0);
  if (!device) {
    fmt::print(stderr, "lockstep_gpu_benchmarks: {}\n", device.error().message);
    return 2;
  }
  return lockstep::cuda::time_all(**device);
}
