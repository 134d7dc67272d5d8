// Kernels of the user's own in another process, which maps the memory of a device: a launch becomes
// a call. sim/worker/kernel_process.h starts such a process; the CUDA backend makes the calls.
//
// 1. Tensors are views of the shared memory. A call copies no byte of them.
// 2. The work of a call is complete when call() returns.
// Not here: what a function does with its arguments (python/lockstep_engines/user_kernels.py).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// Bytes from the start of the shared memory; strides in bytes, one per dimension.
struct KernelTensor {
  std::string name;
  std::int64_t offset = 0;
  std::string_view dtype;
  std::vector<std::int64_t> shape, strides;
};

struct KernelCall {
  std::string_view function;
  std::int32_t layer = 0;  // of the rank's plan; -1: a whole group is meant
  std::vector<KernelTensor> tensors = {};
  std::vector<std::pair<std::string_view, std::vector<std::int32_t>>> integers = {};
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
  // The file to map, of any size so far.
  virtual const std::string& memory() const = 0;
  virtual std::optional<KernelFailure> call(const KernelCall& call) = 0;
};

}  // namespace lockstep
