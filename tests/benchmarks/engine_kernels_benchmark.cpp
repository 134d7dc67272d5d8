// The kernels of launch/kernel_table.h on the SIMT executor, in each mode: simulated threads,
// items (tokens, keys times heads, pages) and bytes a second.
#include <benchmark/benchmark.h>

#include <memory>

#include "base/check.h"
#include "cuda_backend/device/simt_device.h"
#include "tests/benchmarks/pool_workloads.h"

namespace lockstep::cuda {
namespace {

struct Bench {
  explicit Bench(CheckMode mode) {
    auto made = make_simt_device(mode, 1, 0);
    LS_CHECK(made.has_value(), "{}", made.error().message);
    device = std::move(*made);
    workloads = engine_workloads(
        *device, mode == CheckMode::fast ? simt_fast::engine_kernels : simt_checked::engine_kernels,
        kCpuSizes);
    for (Workload& pool : pool_workloads(*device, device->kernels(), kCpuPool))
      workloads.push_back(std::move(pool));
  }
  std::unique_ptr<Device> device;
  std::vector<Workload> workloads;
};

void run(benchmark::State& state, CheckMode mode, std::size_t index) {
  Bench bench(mode);
  const Workload& workload = bench.workloads[index];
  std::vector<DeviceReport> reports;
  for (auto _ : state) {
    LS_CHECK(workload.launch(bench.device->place()) == 0, "{}", workload.name);
  }
  bench.device->take_reports(reports);
  LS_CHECK(reports.empty(), "{}: {}", workload.name, reports.front().message);
  state.SetBytesProcessed(state.iterations() * workload.bytes);
  state.SetItemsProcessed(state.iterations() * workload.items);
}

const bool registered = [] {
  const std::pair<const char*, CheckMode> modes[] = {
      {"fast", CheckMode::fast}, {"check", CheckMode::check}, {"hunt", CheckMode::hunt}};
  const std::vector<Workload> workloads = Bench(CheckMode::fast).workloads;
  for (std::size_t i = 0; i < workloads.size(); ++i)
    for (const auto& [name, mode] : modes)
      benchmark::RegisterBenchmark(
          ("engine/" + workloads[i].name + "/" + name).c_str(),
          [i, mode = mode](benchmark::State& state) { run(state, mode, i); })
          ->Unit(benchmark::kMillisecond);
  return true;
}();

}  // namespace
}  // namespace lockstep::cuda
