// A CUDA device: memory, copies and launches. There are two: the SIMT executor (simt_device.h) and
// a GPU (gpu/gpu_device.h). All code above them is the same.
//
// Invariants:
// 1. Operations take effect in call order. A call may return before its operation is done.
// 2. The device keeps its first failure. Later operations do nothing, and every later finish()
//    returns the failure.
// 3. Downloaded bytes are valid after the next finish(). upload() does not read the host's memory
//    after it returns.
// 4. Rule 1 holds within a stream. Only events order two streams, and finish() waits for all
//    streams. A device that runs everything in call order may ignore streams.
// 5. release() takes what allocate() returned, once; release_host() what allocate_host() returned.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"
#include "cuda_backend/launch/kernel_table.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// What one operation of a step does to device memory: the ranges that it may read and those that it
// may write. Neither the graph that orders operations on streams (step_graph.h) nor the check of
// that order (stream_order.h) knows more about them.
//
// 1. Ranges may be wider than what is touched, never narrower: a range too many costs concurrency,
//    a range too few is a missing edge. The SIMT executor reports accesses outside of them.
// 2. An operation that was not described touches everything.

// Bytes [begin, end) of device memory.
struct MemoryRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool operator==(const MemoryRange&) const = default;
};

inline MemoryRange range_of(const void* memory, std::int64_t size_bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  return {begin, begin + static_cast<std::uintptr_t>(size_bytes)};
}

struct Operation {
  std::string name = "a launch";
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  bool touches_everything = true;

  // Starts the description: only memory that is added afterwards is touched.
  Operation& named(std::string what) {
    name = std::move(what);
    touches_everything = false;
    return *this;
  }
  Operation& read(MemoryRange range) {
    if (range.begin != range.end) reads.push_back(range);
    return *this;
  }
  Operation& write(MemoryRange range) {
    if (range.begin != range.end) writes.push_back(range);
    return *this;
  }
  // Arrays with range() (device.h).
  template <class... Arrays>
  Operation& read_all(const Arrays&... arrays) {
    (read(arrays.range()), ...);
    return *this;
  }
  template <class... Arrays>
  Operation& write_all(const Arrays&... arrays) {
    (write(arrays.range()), ...);
    return *this;
  }
};

// A finding of the device's memory checker, without its page. `allocation` is the name from
// allocate(); empty: the address is in no allocation.
struct DeviceReport : MemoryReport {
  std::string allocation;
  std::int64_t byte_offset = 0;
};

struct DeviceWriter {
  std::string kernel;
  std::string thread;  // "cta 3 thread 17"
  std::int64_t step = -1;
};

struct CapturedGraph;

// The parameters of any launch.
using LaunchParams =
    std::variant<TableClearParams*, TableAppendParams*, TableEditParams*, SlotMappingParams*,
                 FillRowsParams*, GatherRowsParams*, ZeroBlocksParams*, CopyBlocksParams*,
                 PoisonBlocksParams*, FingerprintParams*, DigestParams*, StateUpdateParams*,
                 WritePartsParams*, SplitAttentionParams*, ConvParams*, SelectiveStateParams*,
                 GatedDeltaParams*, MoveBytesParams*, DraftSlotsParams*, MirrorRowsParams*,
                 ClearRegionsParams*, HotReadParams*, SwapRowsParams*>;

class Device {
 public:
  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual std::string_view name() const = 0;
  virtual std::string description() const = 0;
  virtual const KernelTable& kernels() const = 0;
  virtual const EngineKernels& engine_kernels() const = 0;

  // Returns undefined bytes, aligned to 256; null for size 0, or with a failure if memory runs out.
  virtual std::byte* allocate(std::int64_t size_bytes, std::string name) = 0;
  virtual void release(std::byte* memory) = 0;
  // Returns pinned host memory, at an address that kernels and copies can use.
  virtual std::byte* allocate_host(std::int64_t size_bytes, std::string name) {
    return allocate(size_bytes, std::move(name));
  }
  virtual void release_host(std::byte* memory) { release(memory); }
  virtual void upload(void* target, const void* source, std::int64_t size_bytes) = 0;
  virtual void download(void* target, const void* source, std::int64_t size_bytes) = 0;
  virtual void zero(void* target, std::int64_t size_bytes) = 0;
  virtual Result<void> finish() = 0;

  // Later writes belong to this step. See who_wrote().
  virtual void begin_step(std::int64_t step) = 0;
  virtual void take_reports(std::vector<DeviceReport>& reports) = 0;
  virtual std::optional<DeviceWriter> who_wrote(const std::byte* address) = 0;

  virtual std::vector<KernelStatistics> kernel_statistics() const { return {}; }
  // The memory that offsets of shared tensors count from; null: the device shares none.
  virtual const std::byte* memory_begin() const { return nullptr; }
  // By which another process opens the memory of a GPU; empty: it does not.
  virtual std::string_view memory_handle() const { return {}; }
  // As Backend::attends_to_ranges().
  virtual bool attends_to_ranges() const { return true; }
  virtual DType query_dtype() const { return DType::fp32; }  // as Backend::query_dtype()
  // As Backend::not_checked().
  virtual std::vector<std::string> not_checked() const { return {}; }
  // True if the device reports accesses outside of allocations and does not make them.
  virtual bool watches_accesses() const { return false; }

  // A launch without its place. Returns 0 or the platform's error, like a launcher.
  using Launch = std::function<int(const LaunchPlace&)>;
  virtual void run(const Operation&, const Launch& launch) {
    if (!failed()) check_launch(launch(place_));
  }
  // describe(Operation&) adds the memory that the launch touches; called if wants_operations().
  template <class Params, class Describe>
  void launch(Launcher<Params> launcher, const Params& params, Describe describe) {
    if (failed()) return;
    if (edit_ == nullptr) return issue(launcher, params, describe);
    Params edited = params;
    Operation also;
    edit_(&edited, also);
    issue(launcher, edited, [&](Operation& operation) {
      describe(operation);
      for (const MemoryRange& range : also.reads) operation.read(range);
    });
  }
  template <class Params>
  void launch(Launcher<Params> launcher, const Params& params) {
    launch(launcher, params, [](Operation&) {});
  }
  virtual bool wants_operations() const { return false; }

  // Captured graphs (streams/stream_device.h). Other devices run everything as issued.
  // Returns the size of the smallest graph for `count` items, or `count`.
  virtual std::int32_t padded_batch(std::int32_t count) const { return count; }
  virtual bool captures(std::int32_t /*size*/) const { return false; }
  // Runs or replays the launches that issue() makes for a batch padded to `size`. REQUIRES: issue()
  // only launches; if captures(size), parameters differ only in device memory.
  virtual void run_captured(std::string_view /*part*/, std::int32_t /*size*/,
                            const std::function<void()>& issue) {
    issue();
  }
  // True: later launches are neither captured nor replayed.
  virtual void run_eagerly(bool /*eagerly*/) {}
  // Drops all graphs: addresses in captured launches have changed.
  virtual void forget_captured() {}
  // Launches a graph, as one piece of work if the platform can.
  virtual int launch_graph(CapturedGraph& graph, const LaunchPlace& place);
  virtual GraphStatistics graph_statistics() const { return {}; }

  // Streams 0 to count - 1. REQUIRES: called once, before any operation but allocate().
  virtual void open_streams(int /*count*/) {}
  virtual void use_stream(int /*stream*/) {}  // for later operations
  // Marks the end of the stream's operations so far. wait_event() delays later operations of the
  // current stream until a mark is reached. Events are valid until the next finish().
  virtual int record_event() { return 0; }
  virtual void wait_event(int /*event*/) {}
  // Streams that a step's operations are spread over.
  virtual int num_streams() const { return 1; }

  bool failed() const { return failure_.has_value(); }
  const LaunchPlace& place() const { return place_; }

 protected:
  // Called with the parameters of every launch. It may change them and add memory that is read.
  using EditLaunch = std::function<void(LaunchParams, Operation&)>;
  void edit_launches(EditLaunch edit) { edit_ = std::move(edit); }
  void fail_with(std::string message) {
    if (!failed()) failure_ = Error{std::move(message)};
  }
  const std::optional<Error>& failure() const { return failure_; }
  void check_launch(int error) {
    if (error != 0) fail_with(std::string("kernel launch: ") + kernels().error_text(error));
  }

  LaunchPlace place_;

 private:
  template <class Params, class Describe>
  void issue(Launcher<Params> launcher, const Params& params, const Describe& describe) {
    if (!wants_operations()) return check_launch(launcher(place_, params));
    Operation operation;
    describe(operation);
    run(operation,
        [launcher, params](const LaunchPlace& place) { return launcher(place, params); });
  }

  std::optional<Error> failure_;
  EditLaunch edit_;
};

// Launches with frozen parameters, in order, and the device's own form of them.
struct CapturedGraph {
  std::vector<Device::Launch> launches;
  std::shared_ptr<void> instance;  // the device's, released before it; null: not made yet
};

inline int Device::launch_graph(CapturedGraph& graph, const LaunchPlace& place) {
  for (const Launch& launch : graph.launches)
    if (const int error = launch(place); error != 0) return error;
  return 0;
}

// Stops the program when an array's `count` is negative. Not inline: nvcc reads this header, and
// does not compile fmt.
void check_count(std::string_view array, std::int64_t count);

// An array in device memory that grows: one kind of input or result of a step.
//
// 1. It is its own allocation, so that a read or write past it is found, and its name is in
//    reports.
// 2. capacity_ only grows. Growing drops the contents and changes the address.
template <class T>
class DeviceArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  DeviceArray(Device& device, std::string name) : device_(&device), name_(std::move(name)) {}
  ~DeviceArray() { device_->release(reinterpret_cast<std::byte*>(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  // Makes room for `count` elements. Drops the contents if the array grows.
  T* reserve(std::int64_t count) {
    check_count(name_, count);
    if (count <= capacity_) return data_;
    device_->release(reinterpret_cast<std::byte*>(data_));
    capacity_ = std::max(count, 2 * capacity_);
    data_ = reinterpret_cast<T*>(
        device_->allocate(capacity_ * static_cast<std::int64_t>(sizeof(T)), name_));
    return data_;
  }
  T* upload(std::span<const T> values) {
    if (values.empty()) return data_;
    reserve(static_cast<std::int64_t>(values.size()));
    device_->upload(data_, values.data(), static_cast<std::int64_t>(values.size_bytes()));
    return data_;
  }
  T* data() const { return data_; }
  MemoryRange range() const {
    return range_of(data_, capacity_ * static_cast<std::int64_t>(sizeof(T)));
  }

 private:
  Device* device_;
  std::string name_;
  T* data_ = nullptr;
  std::int64_t capacity_ = 0;
};

// The items of a launch: filled on the host, whose storage stays from step to step, and uploaded.
template <class T>
class StagedItems : public DeviceArray<T> {
 public:
  using DeviceArray<T>::DeviceArray;
  T* upload() { return DeviceArray<T>::upload(host); }
  std::span<const T> items(std::size_t first, std::size_t count) const {
    return std::span(host).subspan(first, count);
  }

  std::vector<T> host;
};

}  // namespace lockstep::cuda
