#include "cuda_backend/gpu/gpu_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace lockstep::cuda {
namespace {

// Uploads and downloads lie here until finish(); a step of many rows fits without a wait in
// between.
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
    // What was started may still use what goes now. If anything fails here nobody is left to be
    // told.
    wait_for_streams();
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
  // What was started may still use the memory: cudaFree "may perform implicit synchronization", and
  // cudaFreeHost promises nothing.
  void release(std::byte* memory) override {
    if (memory == nullptr) return;
    wait_for_streams();
    check("cudaFree", cudaFree(memory));
  }

  std::byte* allocate_host(std::int64_t size_bytes, std::string name) override {
    if (failed() || size_bytes == 0) return nullptr;
    void* memory = nullptr;
    check(name + ": cudaHostAlloc of " + std::to_string(size_bytes) + " bytes",
          cudaHostAlloc(&memory, static_cast<std::size_t>(size_bytes), cudaHostAllocMapped));
    return static_cast<std::byte*>(memory);
  }
  void release_host(std::byte* memory) override {
    if (memory == nullptr) return;
    wait_for_streams();
    check("cudaFreeHost", cudaFreeHost(memory));
  }

  // A copy from pageable memory "might be synchronous with respect to the host", or still read it
  // when the call has returned: only what is staged has been taken over.
  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    in_pieces(size_bytes, [&](std::int64_t begin, std::byte* place, std::size_t size) {
      std::memcpy(place, static_cast<const std::byte*>(source) + begin, size);
      check("upload", cudaMemcpyAsync(static_cast<std::byte*>(target) + begin, place, size,
                                      cudaMemcpyDefault, stream_));
    });
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    in_pieces(size_bytes, [&](std::int64_t begin, std::byte* place, std::size_t size) {
      check("download", cudaMemcpyAsync(place, static_cast<const std::byte*>(source) + begin, size,
                                        cudaMemcpyDefault, stream_));
      pending_.push_back({static_cast<std::byte*>(target) + begin, place, size});
    });
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
    wait_for_streams();  // what allocate() zeroes there is zero for the others too
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
    if (graph.instance == nullptr) capture(graph, place);
    if (failed()) return cudaSuccess;  // it has been told
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

  // A capture that has begun is ended whatever happens, and what it made is owned or gone.
  void capture(CapturedGraph& graph, const LaunchPlace& place) {
    const auto stream = static_cast<cudaStream_t>(place.stream);
    check("cudaStreamBeginCapture",
          cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    if (failed()) return;
    check("captured launch", static_cast<cudaError_t>(Device::launch_graph(graph, place)));
    cudaGraph_t captured = nullptr;
    check("cudaStreamEndCapture", cudaStreamEndCapture(stream, &captured));
    cudaGraphExec_t instance = nullptr;
    if (!failed()) check("cudaGraphInstantiate", cudaGraphInstantiate(&instance, captured, 0));
    if (captured != nullptr) check("cudaGraphDestroy", cudaGraphDestroy(captured));
    if (instance != nullptr)
      graph.instance = std::shared_ptr<void>(instance, [this](void* made) { drop(made); });
  }
  // Nothing is said about an instance that goes before its last launch is done.
  void drop(void* instance) {
    wait_for_streams();
    check("cudaGraphExecDestroy", cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(instance)));
  }

  void check(const std::string& what, cudaError_t error) {
    if (error != cudaSuccess) fail_with(what + ": " + cudaGetErrorString(error));
  }
  void wait_for_streams() {
    for (cudaStream_t stream : streams_)
      check("cudaStreamSynchronize", cudaStreamSynchronize(stream));
  }
  // move(begin, place, size): bytes [begin, begin + size) go through `place` in the staging buffer.
  template <class Move>
  void in_pieces(std::int64_t size_bytes, Move move) {
    for (std::int64_t begin = 0; begin < size_bytes;) {
      if (!failed() && staged_bytes_ == kStagingBytes) deliver();
      if (failed()) return;
      const std::int64_t size = std::min(size_bytes - begin, kStagingBytes - staged_bytes_);
      std::byte* place = static_cast<std::byte*>(staging_) + staged_bytes_;
      staged_bytes_ += size;
      move(begin, place, static_cast<std::size_t>(size));
      begin += size;
    }
  }
  void deliver() {
    wait_for_streams();
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
