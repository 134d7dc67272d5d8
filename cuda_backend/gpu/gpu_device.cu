#include "cuda_backend/gpu/gpu_device.h"

#include <cuda_runtime.h>

#include <cstring>
#include <utility>
#include <vector>

namespace lockstep::cuda {
namespace {

// Downloads wait here until finish(); a step of many rows fits without a wait in between.
constexpr std::int64_t kStagingBytes = std::int64_t{16} << 20;

class GpuDevice final : public Device {
 public:
  GpuDevice() {
    check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties_, 0));
    open_streams(1);
    check("cudaMallocHost", cudaMallocHost(&staging_, kStagingBytes));
    use_stream(0);
    place_.cta_threads = 256;
    place_.items_per_thread = 4;
    place_.items_per_reducer = 16;
    place_.whole_warps = true;
  }
  ~GpuDevice() override {
    // Whatever fails here has failed before, and finish() has told it.
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    if (staging_ != nullptr) cudaFreeHost(staging_);
  }

  std::string_view name() const override { return "cuda"; }
  std::string description() const override {
    return std::string(properties_.name) + ", sm_" + std::to_string(properties_.major) +
           std::to_string(properties_.minor);
  }
  const KernelTable& kernels() const override { return simt_cuda::kernel_table; }
  const EngineKernels& engine_kernels() const override { return simt_cuda::engine_kernels; }

  // Zeroed: what a kernel wrongly reads before it is written must at least be the same in every
  // run.
  std::byte* allocate(std::int64_t size_bytes, std::string name) override {
    if (failed() || size_bytes == 0) return nullptr;
    void* memory = nullptr;
    const auto size = static_cast<std::size_t>(size_bytes);
    check(name + ": cudaMalloc of " + std::to_string(size_bytes) + " bytes",
          cudaMalloc(&memory, size));
    if (!failed()) check("cudaMemsetAsync", cudaMemsetAsync(memory, 0, size, stream_));
    // Any stream may use it at once.
    if (!failed() && streams_.size() > 1)
      check("cudaStreamSynchronize", cudaStreamSynchronize(stream_));
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory) override {
    if (memory != nullptr) check("cudaFree", cudaFree(memory));
  }

  std::byte* allocate_host(std::int64_t size_bytes, std::string name) override {
    if (failed() || size_bytes == 0) return nullptr;
    void* memory = nullptr;
    check(name + ": cudaHostAlloc of " + std::to_string(size_bytes) + " bytes",
          cudaHostAlloc(&memory, static_cast<std::size_t>(size_bytes), cudaHostAllocMapped));
    return static_cast<std::byte*>(memory);
  }
  void release_host(std::byte* memory) override {
    if (memory != nullptr) check("cudaFreeHost", cudaFreeHost(memory));
  }

  // From pageable memory the call returns when the bytes have been taken over.
  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    check("upload", cudaMemcpyAsync(target, source, static_cast<std::size_t>(size_bytes),
                                    cudaMemcpyDefault, stream_));
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    auto* to = static_cast<std::byte*>(target);
    const auto* from = static_cast<const std::byte*>(source);
    while (size_bytes > 0 && !failed()) {
      if (staged_bytes_ == kStagingBytes) deliver();
      const std::int64_t piece =
          size_bytes < kStagingBytes - staged_bytes_ ? size_bytes : kStagingBytes - staged_bytes_;
      std::byte* place = static_cast<std::byte*>(staging_) + staged_bytes_;
      check("download", cudaMemcpyAsync(place, from, static_cast<std::size_t>(piece),
                                        cudaMemcpyDefault, stream_));
      pending_.push_back({to, place, static_cast<std::size_t>(piece)});
      staged_bytes_ += piece;
      to += piece;
      from += piece;
      size_bytes -= piece;
    }
  }
  void zero(void* target, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    check("cudaMemsetAsync",
          cudaMemsetAsync(target, 0, static_cast<std::size_t>(size_bytes), stream_));
  }
  Result<void> finish() override {
    if (!failed()) deliver();
    num_events_ = 0;
    if (failed()) return tl::unexpected(*failure());
    return {};
  }

  void open_streams(int count) override {
    while (streams_.size() < static_cast<std::size_t>(count) && !failed()) {
      cudaStream_t stream = nullptr;
      check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      if (stream != nullptr) streams_.push_back(stream);
    }
  }
  void use_stream(int stream) override {
    if (failed()) return;
    stream_ = streams_[static_cast<std::size_t>(stream)];
    place_.stream = stream_;
  }
  int record_event() override {
    if (failed()) return 0;
    if (num_events_ == events_.size()) {
      cudaEvent_t event = nullptr;
      check("cudaEventCreate", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      if (failed()) return 0;
      events_.push_back(event);
    }
    check("cudaEventRecord", cudaEventRecord(events_[num_events_], stream_));
    return static_cast<int>(num_events_++);
  }
  void wait_event(int event) override {
    if (failed()) return;
    check("cudaStreamWaitEvent",
          cudaStreamWaitEvent(stream_, events_[static_cast<std::size_t>(event)], 0));
  }

  // The second time that its launches run they are captured, and from then on the graph does.
  int launch_graph(CapturedGraph& graph, const LaunchPlace& place) override {
    if (graph.instance == nullptr)
      if (const cudaError_t error = capture(graph, place); error != cudaSuccess) return error;
    return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.instance.get()),
                           static_cast<cudaStream_t>(place.stream));
  }

  void begin_step(std::int64_t) override {}
  void take_reports(std::vector<DeviceReport>&) override {}  // compute-sanitizer's part
  std::optional<DeviceWriter> who_wrote(const std::byte*) override { return std::nullopt; }

 private:
  struct Pending {
    std::byte* target;
    const std::byte* staged;
    std::size_t size_bytes;
  };

  cudaError_t capture(CapturedGraph& graph, const LaunchPlace& place) {
    const auto stream = static_cast<cudaStream_t>(place.stream);
    cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (error != cudaSuccess) return error;
    const int launched = Device::launch_graph(graph, place);
    cudaGraph_t captured = nullptr;
    error = cudaStreamEndCapture(stream, &captured);  // also where a launch failed
    if (launched != 0) error = static_cast<cudaError_t>(launched);
    cudaGraphExec_t instance = nullptr;
    if (error == cudaSuccess) error = cudaGraphInstantiate(&instance, captured, 0);
    if (captured != nullptr) cudaGraphDestroy(captured);
    if (error == cudaSuccess)
      graph.instance = std::shared_ptr<void>(
          instance, [](void* made) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(made)); });
    return error;
  }

  void check(const std::string& what, cudaError_t error) {
    if (error != cudaSuccess) fail_with(what + ": " + cudaGetErrorString(error));
  }
  void deliver() {
    for (cudaStream_t stream : streams_)
      check("cudaStreamSynchronize", cudaStreamSynchronize(stream));
    if (failed()) return;
    for (const Pending& piece : pending_) std::memcpy(piece.target, piece.staged, piece.size_bytes);
    pending_.clear();
    staged_bytes_ = 0;
  }

  cudaDeviceProp properties_{};
  std::vector<cudaStream_t> streams_;
  cudaStream_t stream_ = nullptr;    // the one in use
  std::vector<cudaEvent_t> events_;  // kept for later steps
  std::size_t num_events_ = 0;       // of them in use since the last finish()
  void* staging_ = nullptr;
  std::int64_t staged_bytes_ = 0;
  std::vector<Pending> pending_;
};

}  // namespace

std::string why_no_gpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return std::string("no GPU: ") + cudaGetErrorString(error);
  if (count == 0) return "no GPU: the CUDA driver lists none";
  return {};
}

Result<std::unique_ptr<Device>> make_gpu_device() {
  if (std::string why = why_no_gpu(); !why.empty()) return fail(std::move(why));
  std::unique_ptr<Device> device = std::make_unique<GpuDevice>();
  if (auto done = device->finish(); !done) return tl::unexpected(done.error());
  return device;
}

}  // namespace lockstep::cuda
