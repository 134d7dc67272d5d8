// A user's kernels: launches of a device become calls, in another process that maps the device's
// memory (sim/worker/kernel_process.h), or in a plugin (cuda_backend/plugin/plugin_kernels.h).
//
// 1. Tensors are views of the device's memory. A call copies no byte of them.
// 2. A call's work is complete when call() returns, or is ordered in KernelCall::stream.
// Not here: what a function does with its arguments (docs/check_your_kernels.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// Strides in bytes, one per dimension.
struct KernelTensor {
  std::string name;
  const std::byte* address = nullptr;
  std::string_view dtype;
  std::vector<std::int64_t> shape, strides;
};

struct KernelIntegers {
  std::string_view name;
  std::vector<std::int32_t> values;
  const std::int32_t* on_device = nullptr;  // of kernels in this process
};

struct KernelCall {
  std::string_view function;
  std::int32_t layer = 0;  // of the rank's plan; -1: a whole group is meant
  std::int32_t group = -1;
  std::vector<KernelTensor> tensors = {};
  std::vector<KernelIntegers> integers = {};
  double scale = 0;                   // of scores, of the delta rule's outputs
  const std::byte* memory = nullptr;  // start of the shared memory
  void* stream = nullptr;             // cudaStream_t; null on a CPU
};

// `kind`: "exception", "fault" (a result that no caller can use), "crash", "hang"; "harness": the
// failure is Lockstep's.
struct KernelFailure {
  std::string kind, what;
};

class UserKernels {
 public:
  virtual ~UserKernels() = default;
  virtual std::string_view name() const = 0;  // "kernels:module:Class"
  virtual bool has(std::string_view function) const = 0;
  // The file to map, of any size so far; empty: the functions take pointers of this process.
  virtual const std::string& memory() const = 0;
  virtual bool on_gpu() const { return false; }  // pointers are those of the first GPU
  virtual std::optional<KernelFailure> call(const KernelCall& call) = 0;
};

}  // namespace lockstep
