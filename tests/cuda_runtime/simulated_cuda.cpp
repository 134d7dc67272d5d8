#include "tests/cuda_runtime/simulated_cuda.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

SimulatedCuda* the_current = nullptr;

}  // namespace

SimulatedCuda::SimulatedCuda(const SimulatedCudaOptions& asked)
    : memory(asked.device_bytes, asked.pinned_bytes, asked.fresh),
      streams(asked.seed),
      options(asked),
      random_(asked.seed + 1) {
  LS_CHECK(the_current == nullptr, "two simulated CUDA runtimes at once");
  simt::ExecutorOptions executor;
  executor.mode = simt::Mode::fast;
  executor.seed = asked.seed;
  executor.arena_bytes =
      executor.least_arena_bytes;  // it runs kernels and holds none of the memory
  auto made = simt::Executor::create(executor);
  LS_CHECK(made.has_value(), "{}", made.error().message);
  executor_ = std::move(*made);
  the_current = this;
}

SimulatedCuda::~SimulatedCuda() { the_current = nullptr; }

SimulatedCuda& SimulatedCuda::current() {
  LS_CHECK(the_current != nullptr, "a call of CUDA without a simulated runtime");
  return *the_current;
}

LiveObjects SimulatedCuda::live() const {
  return {.device_memory = memory.num_live(MemoryKind::device),
          .pinned_memory = memory.num_live(MemoryKind::pinned),
          .streams = std::ssize(live_streams),
          .events = std::ssize(live_events),
          .graphs = std::ssize(live_graphs),
          .instances = std::ssize(live_instances)};
}

std::int64_t SimulatedCuda::num_calls(const std::string& function) const {
  const auto found = calls_.find(function);
  return found == calls_.end() ? 0 : found->second;
}

void SimulatedCuda::fault(cudaError_t error) {
  if (sticky_ == cudaSuccess) sticky_ = error;
}

cudaError_t SimulatedCuda::begin_call(const std::string& function) {
  ++calls_[function];
  if (random_.below(4) == 0) streams.run_one();
  if (num_calls_++ == options.failing_call) {
    failed_function_ = function;
    if (options.sticks) fault(options.error);
    return options.error;
  }
  return sticky_;
}

cudaError_t SimulatedCuda::begin_unsafe_call(const std::string& function) {
  bool is_capturing = false;
  for (auto& [handle, stream] : live_streams) {
    is_capturing |= stream->is_capturing;
    stream->is_invalidated |= stream->is_capturing;
  }
  const cudaError_t error = begin_call(function);
  return error == cudaSuccess && is_capturing ? cudaErrorStreamCaptureUnsupported : error;
}

SimulatedCuda::Stream* SimulatedCuda::find(cudaStream_t stream) {
  const auto found = live_streams.find(stream);
  return found == live_streams.end() ? nullptr : found->second.get();
}

// After an error that sticks the device does no more work.
cudaError_t SimulatedCuda::put(cudaStream_t handle, Work work) {
  Stream* stream = find(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  auto unless_faulted = [this, work = std::move(work)] {
    if (sticky_ == cudaSuccess) work();
  };
  if (stream->is_capturing) {
    stream->captured.push_back(std::move(unless_faulted));
  } else {
    streams.put(stream->queue, std::move(unless_faulted));
  }
  return cudaSuccess;
}

cudaError_t SimulatedCuda::launch(cudaStream_t stream,
                                  std::function<void(simt::Executor*)> launch) {
  if (const auto error = begin_call("a kernel launch")) return error;
  return put(stream, [this, launch = std::move(launch)] { launch(executor_.get()); });
}

void SimulatedCuda::move(void* target, const void* source, std::size_t size_bytes) {
  if (!memory.kind_of(target, size_bytes) || !memory.kind_of(source, size_bytes))
    return fault(cudaErrorIllegalAddress);
  std::memmove(target, source, size_bytes);
}

cudaError_t SimulatedCuda::copy(void* target, const void* source, std::size_t size_bytes,
                                cudaStream_t handle) {
  const auto to = memory.kind_of(target, size_bytes), from = memory.kind_of(source, size_bytes);
  if (!to || !from) return cudaErrorInvalidValue;
  const Stream* stream = find(handle);
  const bool pageable = to == MemoryKind::pageable || from == MemoryKind::pageable;
  LS_CHECK(stream == nullptr || !stream->is_capturing || !pageable,
           "a copy of pageable memory within a capture");
  const auto* bytes = static_cast<const std::byte*>(source);
  cudaError_t error = cudaSuccess;
  if (from == MemoryKind::pageable && to == MemoryKind::device && draw()) {
    error = put(handle, [this, target, taken = std::vector(bytes, bytes + size_bytes)] {
      move(target, taken.data(), taken.size());
    });
  } else {
    error = put(handle, [=, this] { move(target, source, size_bytes); });
  }
  const bool within_host = to != MemoryKind::device && from != MemoryKind::device;
  const bool waits = within_host || (to == MemoryKind::pageable && draw());
  if (error != cudaSuccess || !waits || stream->is_capturing) return error;
  return wait_for(streams.mark(stream->queue));
}

cudaError_t SimulatedCuda::wait_for(const LateStreams::Mark& mark) {
  streams.run_to(mark);
  return sticky_;
}

cudaError_t SimulatedCuda::run_all() {
  streams.run_all();
  return sticky_;
}

}  // namespace lockstep::cuda
