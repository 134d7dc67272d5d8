// How long a kernel takes on the CPU executor, in each of its modes: means with their confidence,
// `kernel_matrices "[!benchmark]"`. The title of a row has the bytes that one run reads and writes.
#include <fmt/core.h>

#include "base/check.h"
#include "cuda_backend/device/simt_device.h"
#include "tests/benchmarks/pool_workloads.h"
#include "tests/cuda_backend/matrices/catch2.h"

namespace lockstep::cuda {
namespace {

TEST_CASE("kernels: time of one run", "[!benchmark]") {
  const auto [name, mode] = GENERATE(table<std::string, CheckMode>(
      {{"fast", CheckMode::fast}, {"check", CheckMode::check}, {"hunt", CheckMode::hunt}}));
  DYNAMIC_SECTION(name) {
    auto made = make_simt_device(mode, 1, 0);
    LS_CHECK(made.has_value(), "{}", made.error().message);
    Device& device = **made;
    std::vector<Workload> workloads = engine_workloads(
        device, mode == CheckMode::fast ? simt_fast::engine_kernels : simt_checked::engine_kernels,
        kCpuSizes);
    for (Workload& pool : pool_workloads(device, device.kernels(), kCpuPool))
      workloads.push_back(std::move(pool));
    for (const Workload& workload : workloads)
      BENCHMARK(fmt::format("{}, {}, {:.1f} KB", workload.name, name,
                            static_cast<double>(workload.bytes) / 1e3)) {
        return workload.launch(device.place());
      };
    std::vector<DeviceReport> reports;
    device.take_reports(reports);
    CHECK(reports.empty());
  }
}

}  // namespace
}  // namespace lockstep::cuda
