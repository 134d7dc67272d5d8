#include "cuda_backend/gpu/gpu_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace lockstep::cuda {
namespace {

// Bytes of pinned memory for uploads and downloads until finish(): at first, since pinning takes
// milliseconds and a search opens a device per case, and at most, where a step of many rows fits.
constexpr std::int64_t kFirstStagingBytes = std::int64_t{256} << 10;
constexpr std::int64_t kStagingBytes = std::int64_t{16} << 20;

// The oldest compute capability that this build has code for, times ten; at least 8.0 (bf16).
#ifdef __CUDA_ARCH_LIST__
constexpr int kOldestCapability = std::max(80, std::min({__CUDA_ARCH_LIST__}) / 10);
#else
constexpr int kOldestCapability = 80;
#endif

// The first GPU.
//
// 1. streams_ has at least one stream; stream_ and place_.stream are the current one.
// 2. Bytes [0, staged_bytes_) of the staging buffer are in use until deliver(). pending_ lists the
//    downloads among them.
// 3. Events [0, num_events_) were recorded since the last finish().
// 4. After a failure no call starts work. The destructor still releases everything.
// 5. With shared memory, allocations are its bytes [0, shared_used_), and none is used again.
class GpuDevice final : public Device {
 public:
  explicit GpuDevice(std::int64_t shared_bytes) : shared_bytes_(shared_bytes) {
    open_streams(1);
    pin_staging(kFirstStagingBytes);
    use_stream(0);
    place_.cta_threads = 256;
    place_.items_per_thread = 4;
    place_.items_per_reducer = 16;
    place_.whole_warps = true;
    if (shared_bytes_ > 0 && !failed()) share_memory();
  }
  ~GpuDevice() override {
    // Started work may still use these objects. A failure here has no receiver.
    wait_for_streams();
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    if (staging_ != nullptr) cudaFreeHost(staging_);
    if (shared_ != nullptr) cudaFree(shared_);
  }

  std::string_view name() const override { return "cuda"; }
  std::string description() const override {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return "a GPU";
    return std::string(properties.name) + ", sm_" + std::to_string(properties.major) +
           std::to_string(properties.minor);
  }
  const KernelTable& kernels() const override { return simt_cuda::kernel_table; }
  const EngineKernels& engine_kernels() const override { return simt_cuda::engine_kernels; }

  // The bytes stay undefined, so that compute-sanitizer's initcheck finds reads of them.
  std::byte* allocate(std::int64_t size_bytes, std::string name) override {
    if (failed() || size_bytes == 0) return nullptr;
    if (shared_bytes_ > 0) return from_shared(size_bytes, name);
    void* memory = nullptr;
    check(name + ": cudaMalloc of " + std::to_string(size_bytes) + " bytes",
          cudaMalloc(&memory, static_cast<std::size_t>(size_bytes)));
    return static_cast<std::byte*>(memory);
  }
  // Started work may still use the memory: cudaFree only "may perform implicit synchronization",
  // and cudaFreeHost promises nothing.
  void release(std::byte* memory) override {
    if (memory == nullptr || shared_bytes_ > 0) return;
    wait_for_streams();
    check("cudaFree", cudaFree(memory));
  }
  const std::byte* memory_begin() const override { return shared_; }
  std::string_view memory_handle() const override { return handle_; }

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

  // A copy from pageable memory "might be synchronous with respect to the host", or may still read
  // it after the call. Staged bytes are safe.
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

  // The second run of a part captures its launches. Later runs launch the graph.
  int launch_graph(CapturedGraph& graph, const LaunchPlace& place) override {
    if (graph.instance == nullptr) capture(graph, place);
    if (failed()) return cudaSuccess;  // the failure is recorded
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

  // The handle names whole allocations of cudaMalloc, hence one for everything.
  void share_memory() {
    check("cudaMalloc of " + std::to_string(shared_bytes_) + " shared bytes",
          cudaMalloc(reinterpret_cast<void**>(&shared_), static_cast<std::size_t>(shared_bytes_)));
    cudaIpcMemHandle_t handle{};
    if (!failed()) check("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, shared_));
    for (const char byte : handle.reserved)
      for (const int shift : {4, 0}) handle_ += "0123456789abcdef"[byte >> shift & 15];
  }
  std::byte* from_shared(std::int64_t size_bytes, const std::string& name) {
    std::byte* memory = shared_ + shared_used_;
    shared_used_ += (size_bytes + 255) / 256 * 256;
    if (shared_used_ <= shared_bytes_) return memory;
    fail_with(name + ": " + std::to_string(shared_bytes_) + " bytes of shared memory are too few");
    return nullptr;
  }
  // Ends a started capture in every case. Its objects are owned or destroyed.
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
  // CUDA does not specify the destruction of an instance whose launch is still running.
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
  // Calls move(begin, place, size) for bytes [begin, begin + size), staged at `place`.
  template <class Move>
  void in_pieces(std::int64_t size_bytes, Move move) {
    for (std::int64_t begin = 0; begin < size_bytes;) {
      if (!failed() && staged_bytes_ == staging_size_) {
        deliver();
        if (staging_size_ < kStagingBytes) pin_staging(4 * staging_size_);
      }
      if (failed()) return;
      const std::int64_t size = std::min(size_bytes - begin, staging_size_ - staged_bytes_);
      std::byte* place = static_cast<std::byte*>(staging_) + staged_bytes_;
      staged_bytes_ += size;
      move(begin, place, static_cast<std::size_t>(size));
      begin += size;
    }
  }
  // REQUIRES: no byte of the buffer is in use.
  void pin_staging(std::int64_t size) {
    if (failed()) return;
    if (staging_ != nullptr) cudaFreeHost(std::exchange(staging_, nullptr));
    check("cudaMallocHost", cudaMallocHost(&staging_, static_cast<std::size_t>(size)));
    staging_size_ = size;
  }
  void deliver() {
    wait_for_streams();
    if (failed()) return;
    for (const Pending& piece : pending_) std::memcpy(piece.target, piece.staged, piece.size_bytes);
    pending_.clear();
    staged_bytes_ = 0;
  }

  const std::int64_t shared_bytes_;
  std::int64_t shared_used_ = 0;
  std::byte* shared_ = nullptr;
  std::string handle_;  // of shared_: 64 bytes as hexadecimal digits
  std::vector<cudaStream_t> streams_;
  cudaStream_t stream_ = nullptr;    // the one in use
  std::vector<cudaEvent_t> events_;  // kept for later steps
  std::size_t num_events_ = 0;       // of them in use since the last finish()
  void* staging_ = nullptr;
  std::int64_t staging_size_ = 0;
  std::int64_t staged_bytes_ = 0;
  std::vector<Pending> pending_;
};

}  // namespace

std::string why_no_gpu() {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return std::string("no GPU: ") + cudaGetErrorString(error);
  if (count == 0) return "no GPU: the CUDA driver lists none";
  cudaDeviceProp properties{};
  error = cudaGetDeviceProperties(&properties, 0);
  if (error != cudaSuccess) return std::string("no GPU: ") + cudaGetErrorString(error);
  const int capability = 10 * properties.major + properties.minor;
  if (capability >= kOldestCapability) return {};
  return std::string("no GPU: ") + properties.name + " has compute capability " +
         std::to_string(properties.major) + "." + std::to_string(properties.minor) +
         ", this build needs " + std::to_string(kOldestCapability / 10) + "." +
         std::to_string(kOldestCapability % 10) + "; set LOCKSTEP_CUDA_ARCHITECTURES";
}

Result<std::unique_ptr<Device>> make_gpu_device(std::int64_t shared_bytes) {
  if (std::string why = why_no_gpu(); !why.empty()) return fail(std::move(why));
  std::unique_ptr<Device> device = std::make_unique<GpuDevice>(shared_bytes);
  if (auto done = device->finish(); !done) return tl::unexpected(done.error());
  return device;
}

}  // namespace lockstep::cuda
