// A device for tests of single kernels: arrays go in, bytes come out, reports fail the test. It is
// the SIMT executor, or a GPU where the environment says LOCKSTEP_TEST_DEVICE=cuda; without a GPU
// every test of such a run is skipped.
//
// 1. On a GPU there are no modes: bodies of in_every_mode() run once, and nothing is reported.
#pragma once

#include <cctype>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/result.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/launch/kernel_table.h"
#include "tests/cuda_backend/kernel_log.h"

namespace lockstep::cuda {

// Of the framework that the tests are written in: the test that runs has failed, and goes on.
void fail_test(const std::string& message);

bool runs_on_gpu();
// Why there is no device: "no GPU: ...", or a variable that says nothing; empty: there is one.
std::string why_no_kernel_device();
// What devices live in: a simulated runtime, or nothing at all. Kept for as long as any of them.
std::shared_ptr<void> surroundings_of_devices();
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
  const EngineKernels& engine() { return device_->engine_kernels(); }

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

  // The launch shapes that results must not depend on: the device's own, a GPU's, and one thread;
  // on a GPU its own, and CTAs of one warp with little and with much to do.
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
  std::vector<std::byte*> memory_;  // to be given back: a GPU outlives its device
};

// Every way to run a kernel that its result must not depend on: the plain build, the checked one,
// and the checked one with threads preempted between accesses, from `hunts` seeds.
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

// Numbers for tests: any place, any order, the same every time.
inline std::uint64_t number(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t x = seed * 0x2545F4914F6CDD1Du + i * 0x9E3779B97F4A7C15u + 1;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  return x ^ (x >> 32);
}

}  // namespace lockstep::cuda
