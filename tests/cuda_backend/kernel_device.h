// A device for tests of single kernels: the SIMT executor, or a GPU if LOCKSTEP_TEST_DEVICE is
// cuda. Without a GPU every test of such a run is skipped.
//
// 1. A report fails the test. 2. On a GPU there are no modes and no reports: bodies of
//    in_every_mode() run once.
#pragma once

#include <cctype>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/result.h"
#include "cuda_backend/defects/kernels/defect_table.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/launch/kernel_table.h"
#include "tests/cuda_backend/kernel_log.h"

namespace lockstep::cuda {

// Fails the running test, which continues. Each test framework has its own.
void fail_test(const std::string& message);

bool runs_on_gpu();
// Why the device is missing: "no GPU: ...", or an unknown variable; empty: it is there.
std::string why_no_kernel_device();
// The simulated runtime of the devices, or null. It lives as long as any of them.
std::shared_ptr<void> surroundings_of_devices();
// Part `index` of rows that are whole, as kernels of numbers address it.
inline PartLayout part_of(const RowCache& rows, std::int32_t index) {
  return {.base = rows.base + index * rows.part_stride,
          .block_stride = rows.block_stride,
          .token_stride = rows.token_stride,
          .head_stride = rows.head_stride,
          .block_size = rows.block_size,
          .num_heads = rows.num_kv_heads,
          .head_size = rows.head_size,
          .piece_elements = rows.head_size,
          .dtype = rows.dtype};
}

inline constexpr const char* kNoChecker = "reports are the CPU executor's, and this is a GPU";
Result<std::unique_ptr<Device>> make_kernel_device(CheckMode mode, std::uint64_t seed,
                                                   std::int64_t pool_size_bytes);

class KernelDevice {
 public:
  explicit KernelDevice(CheckMode mode = CheckMode::check, std::uint64_t seed = 1,
                        std::int64_t pool_size_bytes = 0) {
    surroundings_ = surroundings_of_devices();
    auto made = make_kernel_device(mode, seed, pool_size_bytes);
    LS_CHECK(made.has_value(), "{}", made.error().message);
    device_ = std::move(*made);
  }
  KernelDevice(const KernelDevice&) = delete;
  KernelDevice& operator=(const KernelDevice&) = delete;
  ~KernelDevice() {
    finish();
    log_kernels(device_->kernel_statistics());
    for (std::byte* memory : memory_) device_->release(memory);
  }

  Device& operator*() { return *device_; }
  Device* operator->() { return device_.get(); }
  const KernelTable& kernels() { return device_->kernels(); }
  const EngineKernels& engine() { return planted_ ? *planted_ : device_->engine_kernels(); }
  // engine() from now on has the defect in the place of its own launcher.
  template <class Params>
  void plant(Launcher<Params> EngineKernels::*own, Launcher<Params> DefectKernels::*defect) {
    if (!planted_) planted_ = device_->engine_kernels();
    *planted_.*own = defect_kernels_of(device_->kernels()).*defect;
  }

  template <class T>
  T* put(const std::vector<T>& values, const std::string& name) {
    const auto size = static_cast<std::int64_t>(values.size() * sizeof(T));
    T* memory = room<T>(static_cast<std::int64_t>(values.size()), name);
    device_->upload(memory, values.data(), size);
    return memory;
  }
  // Undefined memory.
  template <class T>
  T* room(std::int64_t count, const std::string& name) {
    memory_.push_back(device_->allocate(count * static_cast<std::int64_t>(sizeof(T)), name));
    return reinterpret_cast<T*>(memory_.back());
  }
  template <class T>
  std::vector<T> get(const T* memory, std::int64_t count) {
    std::vector<T> values(static_cast<std::size_t>(count));
    device_->download(values.data(), memory, count * static_cast<std::int64_t>(sizeof(T)));
    finish();
    return values;
  }

  // Launch shapes with equal results: the device's own, a GPU's, and one thread; on a GPU its own,
  // and CTAs of one warp with few and with many items.
  std::vector<LaunchPlace> places() {
    if (runs_on_gpu()) {
      LaunchPlace little = device_->place(), much = device_->place();
      little.cta_threads = much.cta_threads = 32;
      little.items_per_thread = little.items_per_reducer = 1;
      much.items_per_thread = much.items_per_reducer = 1 << 10;
      return {device_->place(), little, much};
    }
    LaunchPlace gpu = device_->place(), single = device_->place();
    gpu.cta_threads = 256;
    gpu.items_per_thread = 4;
    gpu.items_per_reducer = 16;
    gpu.whole_warps = true;
    single.cta_threads = 1;
    single.items_per_thread = single.items_per_reducer = 1 << 20;
    return {device_->place(), gpu, single};
  }

  std::vector<DeviceReport> reports() {
    std::vector<DeviceReport> found;
    device_->take_reports(found);
    return found;
  }
  void expect_no_reports() {
    for (const DeviceReport& report : reports()) fail_test(report.message);
  }

 private:
  void finish() {
    if (!device_->finish()) fail_test("the device has failed");
  }

  std::shared_ptr<void> surroundings_;
  std::unique_ptr<Device> device_;
  std::vector<std::byte*> memory_;  // released at the end: a GPU outlives its device
  std::optional<EngineKernels> planted_;
};

// Runs the body in every mode, whose results must be equal: the plain build, the checked one, and
// the checked one with threads preempted between accesses, for `hunts` seeds.
template <class Body>
void in_every_mode(const Body& body, int hunts = 2) {
  body(CheckMode::fast, std::uint64_t{1});
  if (runs_on_gpu()) return;
  body(CheckMode::check, std::uint64_t{1});
  for (int seed = 1; seed <= hunts; ++seed) body(CheckMode::hunt, std::uint64_t(seed));
}
inline constexpr int kHuntsOfSlowTests = 100;

// The name of a shape as a test's name.
inline std::string test_name(std::string name) {
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name;
}

// Deterministic numbers for tests.
inline std::uint64_t number(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t x = seed * 0x2545F4914F6CDD1Du + i * 0x9E3779B97F4A7C15u + 1;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 32);
}

}  // namespace lockstep::cuda
