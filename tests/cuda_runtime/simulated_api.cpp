// The functions of toolkit/cuda_runtime.h: what each checks and returns. What they do is in
// simulated_cuda.cpp.
#include <cuda_runtime.h>

#include <cstring>
#include <utility>

#include "base/check.h"
#include "tests/cuda_runtime/simulated_cuda.h"

using lockstep::cuda::LateStreams;
using lockstep::cuda::MemoryKind;
using lockstep::cuda::SimulatedCuda;

namespace {

SimulatedCuda& cuda() { return SimulatedCuda::current(); }

cudaError_t allocate(const std::string& function, MemoryKind kind, void** memory,
                     std::size_t size) {
  if (const auto error = cuda().begin_unsafe_call(function)) return error;
  void* made = cuda().memory.allocate(kind, size);
  if (made == nullptr) return cudaErrorMemoryAllocation;
  *memory = made;
  return cudaSuccess;
}

// A release happens even if the call returns an earlier error.
cudaError_t after(cudaError_t earlier, cudaError_t own) {
  return earlier != cudaSuccess ? earlier : own;
}

template <class Map, class Handle>
cudaError_t destroy(const std::string& function, Map& live, Handle handle) {
  const cudaError_t earlier = cuda().begin_call(function);
  return after(earlier, live.erase(handle) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

}  // namespace

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorUnknown:
      return "unknown error";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
  if (const auto error = cuda().begin_call("cudaGetDeviceCount")) return error;
  *count = cuda().options.device_count;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const auto error = cuda().begin_call("cudaGetDeviceProperties")) return error;
  if (device < 0 || device >= cuda().options.device_count) return cudaErrorInvalidDevice;
  *properties = {
      .name = "Simulated GPU", .major = cuda().options.major, .minor = cuda().options.minor};
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t size) {
  return allocate("cudaMalloc", MemoryKind::device, memory, size);
}
cudaError_t cudaMallocHost(void** memory, std::size_t size) {
  return allocate("cudaMallocHost", MemoryKind::pinned, memory, size);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t size, unsigned) {
  return allocate("cudaHostAlloc", MemoryKind::pinned, memory, size);
}

cudaError_t cudaFree(void* memory) {
  cudaError_t earlier = cuda().begin_unsafe_call("cudaFree");
  if (cuda().draw()) earlier = after(earlier, cuda().run_all());
  return after(earlier, cuda().memory.release(MemoryKind::device, memory) ? cudaSuccess
                                                                          : cudaErrorInvalidValue);
}
cudaError_t cudaFreeHost(void* memory) {
  const cudaError_t earlier = cuda().begin_unsafe_call("cudaFreeHost");
  return after(earlier, cuda().memory.release(MemoryKind::pinned, memory) ? cudaSuccess
                                                                          : cudaErrorInvalidValue);
}

// The address, in this process. On a GPU: of the allocation that holds it.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  if (const auto error = cuda().begin_call("cudaIpcGetMemHandle")) return error;
  if (cuda().memory.kind_of(memory, 1) != MemoryKind::device) return cudaErrorInvalidValue;
  *handle = {};
  std::memcpy(handle->reserved, &memory, sizeof memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (const auto error = cuda().begin_call("cudaMemcpyAsync")) return error;
  return cuda().copy(target, source, size, stream);
}

cudaError_t cudaMemsetAsync(void* target, int value, std::size_t size, cudaStream_t stream) {
  if (const auto error = cuda().begin_call("cudaMemsetAsync")) return error;
  const auto kind = cuda().memory.kind_of(target, size);
  if (!kind || kind == MemoryKind::pageable) return cudaErrorInvalidValue;
  return cuda().put(stream, [=, &here = cuda()] {
    if (!here.memory.kind_of(target, size)) return here.fault(cudaErrorIllegalAddress);
    std::memset(target, value, size);
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (const auto error = cuda().begin_call("cudaStreamCreateWithFlags")) return error;
  if (flags != cudaStreamNonBlocking)
    return cudaErrorInvalidValue;  // others wait for the legacy one
  *stream = cuda().next_handle<cudaStream_t>();
  auto made = std::make_unique<SimulatedCuda::Stream>();
  made->queue = cuda().streams.add();
  cuda().live_streams.emplace(*stream, std::move(made));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return destroy("cudaStreamDestroy", cuda().live_streams, stream);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (const auto error = cuda().begin_call("cudaStreamSynchronize")) return error;
  SimulatedCuda::Stream* stream = cuda().find(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->is_capturing) {
    stream->is_invalidated = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  if (cuda().options.drops_synchronisations) return cudaSuccess;
  return cuda().wait_for(cuda().streams.mark(stream->queue));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  if (const auto error = cuda().begin_call("cudaStreamWaitEvent")) return error;
  const SimulatedCuda::Stream* stream = cuda().find(handle);
  const auto found = cuda().live_events.find(event);
  if (stream == nullptr || found == cuda().live_events.end()) return cudaErrorInvalidResourceHandle;
  LS_CHECK(!stream->is_capturing, "an event within a capture");
  const LateStreams::Mark recorded = found->second->recorded;
  if (recorded != nullptr && !cuda().options.drops_waits)
    cuda().streams.wait(stream->queue, recorded);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const auto error = cuda().begin_call("cudaEventCreateWithFlags")) return error;
  *event = cuda().next_handle<cudaEvent_t>();
  cuda().live_events.emplace(*event, std::make_unique<SimulatedCuda::Event>());
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return destroy("cudaEventDestroy", cuda().live_events, event);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  if (const auto error = cuda().begin_call("cudaEventRecord")) return error;
  const SimulatedCuda::Stream* stream = cuda().find(handle);
  const auto found = cuda().live_events.find(event);
  if (stream == nullptr || found == cuda().live_events.end()) return cudaErrorInvalidResourceHandle;
  LS_CHECK(!stream->is_capturing, "an event within a capture");
  found->second->recorded = cuda().streams.mark(stream->queue);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  if (const auto error = cuda().begin_call("cudaStreamBeginCapture")) return error;
  SimulatedCuda::Stream* stream = cuda().find(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->is_capturing) return cudaErrorInvalidValue;
  stream->is_capturing = true;
  return cudaSuccess;
}

// Whatever it returns, the stream captures no more.
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const cudaError_t earlier = cuda().begin_call("cudaStreamEndCapture");
  *graph = nullptr;
  SimulatedCuda::Stream* stream = cuda().find(handle);
  if (stream == nullptr) return after(earlier, cudaErrorInvalidResourceHandle);
  if (!stream->is_capturing) return after(earlier, cudaErrorInvalidValue);
  auto nodes =
      std::make_shared<const std::vector<LateStreams::Work>>(std::exchange(stream->captured, {}));
  stream->is_capturing = false;
  if (std::exchange(stream->is_invalidated, false)) return cudaErrorStreamCaptureInvalidated;
  if (earlier != cudaSuccess) return earlier;
  *graph = cuda().next_handle<cudaGraph_t>();
  cuda().live_graphs.emplace(*graph, std::move(nodes));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  if (const auto error = cuda().begin_call("cudaGraphInstantiate")) return error;
  const auto found = cuda().live_graphs.find(graph);
  if (found == cuda().live_graphs.end()) return cudaErrorInvalidValue;
  *instance = cuda().next_handle<cudaGraphExec_t>();
  // Its own: the graph may go.
  cuda().live_instances.emplace(
      *instance, std::make_shared<const std::vector<LateStreams::Work>>(*found->second));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return destroy("cudaGraphDestroy", cuda().live_graphs, graph);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  return destroy("cudaGraphExecDestroy", cuda().live_instances, instance);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  if (const auto error = cuda().begin_call("cudaGraphLaunch")) return error;
  const auto found = cuda().live_instances.find(instance);
  if (found == cuda().live_instances.end()) return cudaErrorInvalidValue;
  using Nodes = std::weak_ptr<const std::vector<LateStreams::Work>>;
  return cuda().put(stream, [&here = cuda(), nodes = Nodes(found->second)] {
    const auto kept = nodes.lock();
    if (kept == nullptr) return here.fault(cudaErrorLaunchFailure);
    for (const auto& node : *kept) node();
  });
}
