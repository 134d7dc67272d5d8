// A CUDA runtime on the CPU for gpu_device.cu. It does the least that NVIDIA's documentation of the
// runtime API promises. While an object lives, the functions of toolkit/cuda_runtime.h act on it.
//
// Promised, and kept:
//  1. Operations of one stream take effect in order; between streams, events order them
//     (late_streams.h), as an event was last recorded when cudaStreamWaitEvent was called.
//     cudaStreamSynchronize returns when all that its stream was given is done.
//  2. Copies between two places in host memory are done when the call returns.
//  3. While a stream captures, what it is given is kept and not run. Calls that may not be made
//     then (allocating, freeing, waiting for that stream) return cudaErrorStreamCaptureUnsupported,
//     and the capture ends with cudaErrorStreamCaptureInvalidated and no graph. A launch of a graph
//     runs its nodes in order, as one operation.
//  4. A destroyed stream still does its work, and so does a destroyed event.
//  5. A copy from or to what is no memory is cudaErrorIllegalAddress, in every call from then on:
//     errors that stick come late.
// Not promised, and chosen by the seed or not done:
//  6. When work runs that the host does not wait for.
//  7. Whether a copy from pageable memory reads it during the call or later, and whether one to it
//     is done when the call returns ("might be synchronous").
//  8. Whether cudaFree waits for the device ("may perform implicit synchronization").
//     cudaFreeHost does not; nothing says that it would. cudaMalloc does not wait, nor zero.
//  9. A launch of a graph whose instance is destroyed before it runs does not run, and is
//     cudaErrorLaunchFailure: CUDA does not specify its outcome.
//
// Not simulated: time, several devices, the legacy stream, other threads, events and copies of
// pageable memory within a capture. A kernel's accesses are not watched: it runs on the CPU
// executor in mode fast, each launch as a whole (launches of two streams are never interleaved).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_backend/simt/executor/executor.h"
#include "cuda_backend/simt/random.h"
#include "tests/cuda_runtime/late_streams.h"
#include "tests/cuda_runtime/simulated_memory.h"

namespace lockstep::cuda {

struct SimulatedCudaOptions {
  std::uint64_t seed = 1;
  int device_count = 1;
  int major = 9, minor = 0;  // compute capability
  std::int64_t device_bytes = std::int64_t{1} << 30;
  std::int64_t pinned_bytes = std::int64_t{1} << 30;
  // The call of this number, from 0, returns `error`. A release still happens, because it may
  // return an error of earlier work.
  std::int64_t failing_call = -1;
  cudaError_t error = cudaErrorUnknown;
  bool sticks = false;  // ... and so does every later call
  // Wrong on purpose: cudaStreamWaitEvent orders nothing, cudaStreamSynchronize does not wait.
  bool drops_waits = false;
  // Bytes of new memory. 0 keeps kernels inside their memory that read an upload too early.
  int fresh = 0xC5;
  bool drops_synchronisations = false;
};

// Objects that a program has not released.
struct LiveObjects {
  std::int64_t device_memory = 0, pinned_memory = 0;
  std::int64_t streams = 0, events = 0, graphs = 0, instances = 0;
  bool operator==(const LiveObjects&) const = default;
};

class SimulatedCuda {
 public:
  using Work = LateStreams::Work;

  explicit SimulatedCuda(const SimulatedCudaOptions& options = {});
  ~SimulatedCuda();
  SimulatedCuda(const SimulatedCuda&) = delete;
  SimulatedCuda& operator=(const SimulatedCuda&) = delete;
  static SimulatedCuda& current();

  LiveObjects live() const;
  std::int64_t num_calls() const { return num_calls_; }
  std::int64_t num_calls(const std::string& function) const;
  // The function of the failing call; empty: not called yet.
  const std::string& failed_function() const { return failed_function_; }
  // Everything that was started runs. An error of work that ran sticks, and is returned.
  cudaError_t run_all();

  // A kernel, as a launcher would start it; `launch` is given the executor as its stream.
  cudaError_t launch(cudaStream_t stream, std::function<void(simt::Executor*)> launch);

  // For the functions of the API (simulated_api.cpp).
  struct Stream {
    std::size_t queue = 0;
    bool is_capturing = false, is_invalidated = false;
    std::vector<Work> captured;
  };
  struct Event {
    LateStreams::Mark recorded;  // null: never
  };
  using Nodes = std::shared_ptr<const std::vector<Work>>;

  cudaError_t begin_call(const std::string& function);
  // ... that may not be made while a stream captures.
  cudaError_t begin_unsafe_call(const std::string& function);
  cudaError_t put(cudaStream_t stream, Work work);
  cudaError_t copy(void* target, const void* source, std::size_t size_bytes, cudaStream_t stream);
  cudaError_t wait_for(const LateStreams::Mark& mark);
  bool draw() { return random_.below(2) == 0; }
  Stream* find(cudaStream_t stream);
  // An error of work that ran.
  void fault(cudaError_t error);

  SimulatedMemory memory;
  LateStreams streams;
  std::map<cudaStream_t, std::unique_ptr<Stream>> live_streams;
  std::map<cudaEvent_t, std::unique_ptr<Event>> live_events;
  std::map<cudaGraph_t, Nodes> live_graphs;
  std::map<cudaGraphExec_t, Nodes> live_instances;
  const SimulatedCudaOptions options;

  // A handle that was never returned before.
  template <class Handle>
  Handle next_handle() {
    return reinterpret_cast<Handle>(next_handle_ += 16);
  }

 private:
  void move(void* target, const void* source, std::size_t size_bytes);

  simt::Random random_;
  std::unique_ptr<simt::Executor> executor_;
  std::uintptr_t next_handle_ = 0x1000;
  std::int64_t num_calls_ = 0;
  std::map<std::string, std::int64_t> calls_;
  std::string failed_function_;
  cudaError_t sticky_ = cudaSuccess;
};

}  // namespace lockstep::cuda
