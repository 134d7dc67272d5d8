// What the backend asks of a CUDA device: memory, copies, launches. Two exist: the SIMT executor
// (simt_device.h) and a GPU (gpu/gpu_device.h); everything above them is the same code.
//
// 1. Operations take effect in the order of the calls. They may return before they are done.
// 2. The first failure is kept: later operations do nothing, and every finish() from then on
//    returns it.
// 3. What download() fetches is there after the next finish(), not before. upload() is done with
//    the host's memory when it returns.
// 4. Streams: rule 1 holds for the operations of one stream. Between two streams there is no order
//    but that of events, and finish() waits for all of them. A device that keeps every operation in
//    the order of the calls, as the SIMT executor does, need not know about streams.
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
#include "cuda_backend/device/operation.h"
#include "cuda_backend/launch/kernel_table.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// A finding of the device's memory checker. `allocation` is the name given to allocate(); empty
// when the address lies in none.
struct DeviceReport {
  std::string kind;
  std::string kernel;
  std::string message;
  std::string allocation;
  std::int64_t byte_offset = 0;
  std::string sanitizer_words;  // as in MemoryReport
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
                 FillRowsParams*, WriteRowsParams*, GatherRowsParams*, ZeroBlocksParams*,
                 CopyBlocksParams*, CopyPagesParams*, PoisonBlocksParams*, FingerprintParams*,
                 DigestParams*, AttentionParams*, StateUpdateParams*, WritePartsParams*,
                 SplitAttentionParams*, ConvParams*, SelectiveStateParams*, GatedDeltaParams*,
                 MoveBytesParams*, RequestSlotsParams*, BatchTablesParams*, DraftSlotsParams*,
                 MirrorRowsParams*, ClearRegionsParams*, HotReadParams*, SwapRowsParams*>;

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

  // Undefined bytes, aligned to 256. Null and a kept failure when there is no room; size 0 is null.
  virtual std::byte* allocate(std::int64_t size_bytes, std::string name) = 0;
  virtual void release(std::byte* memory) = 0;
  // Pinned memory of the host, at an address that kernels and copies use like any other. A device
  // that computes on the host has no other kind.
  virtual std::byte* allocate_host(std::int64_t size_bytes, std::string name) {
    return allocate(size_bytes, std::move(name));
  }
  virtual void release_host(std::byte* memory) { release(memory); }
  virtual void upload(void* target, const void* source, std::int64_t size_bytes) = 0;
  virtual void download(void* target, const void* source, std::int64_t size_bytes) = 0;
  virtual void zero(void* target, std::int64_t size_bytes) = 0;
  virtual Result<void> finish() = 0;

  // Later writes belong to this step, for who_wrote().
  virtual void begin_step(std::int64_t step) = 0;
  virtual void take_reports(std::vector<DeviceReport>& reports) = 0;
  virtual std::optional<DeviceWriter> who_wrote(const std::byte* address) = 0;

  virtual std::vector<KernelStatistics> kernel_statistics() const { return {}; }
  // True: an access outside of an allocation is a report and does no harm.
  virtual bool watches_accesses() const { return false; }

  // A launch that waits for its place: 0 or the platform's error, as a launcher returns it.
  using Launch = std::function<int(const LaunchPlace&)>;
  virtual void run(const Operation&, const Launch& launch) {
    if (!failed()) check_launch(launch(place_));
  }
  // describe(Operation&) says what the launch touches; called only where wants_operations().
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

  // Captured graphs (streams/stream_device.h). A device without any runs everything as issued.
  // What `count` items are padded to: the size of the graph that takes them, or `count` itself.
  virtual std::int32_t padded_batch(std::int32_t count) const { return count; }
  virtual bool captures(std::int32_t /*size*/) const { return false; }
  // The launches that issue() makes for a batch padded to `size`. REQUIRES: it launches, and does
  // nothing else on the device; where captures(size), parameters differ in device memory only.
  virtual void run_captured(std::string_view /*part*/, std::int32_t /*size*/,
                            const std::function<void()>& issue) {
    issue();
  }
  // What comes next is launched anew, and neither captured nor replayed; or not any more.
  virtual void run_eagerly(bool /*eagerly*/) {}
  // Addresses that captured launches may hold have changed.
  virtual void forget_captured() {}
  // Launches all of a graph, as one piece of work where the platform can.
  virtual int launch_graph(CapturedGraph& graph, const LaunchPlace& place);
  virtual GraphStatistics graph_statistics() const { return {}; }

  // Streams 0 to count - 1. REQUIRES: called once, before any operation but allocate().
  virtual void open_streams(int /*count*/) {}
  virtual void use_stream(int /*stream*/) {}  // later operations go there
  // Everything so far in the stream in use; wait_event() holds back what comes after it in the
  // stream in use then. Events are good until the next finish().
  virtual int record_event() { return 0; }
  virtual void wait_event(int /*event*/) {}
  // Over how many streams a step's operations are spread.
  virtual int num_streams() const { return 1; }

  bool failed() const { return failure_.has_value(); }
  const LaunchPlace& place() const { return place_; }
  virtual void plant(KernelDefect defect) { place_.defect = defect; }

 protected:
  // Called with the parameters of every launch, which it may change; what it adds to the operation
  // is read as well.
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

// Launches with their parameters frozen, in order, and what the device has made of them.
struct CapturedGraph {
  std::vector<Device::Launch> launches;
  std::shared_ptr<void> instance;  // a device's own, gone before it; null: not made yet
};

inline int Device::launch_graph(CapturedGraph& graph, const LaunchPlace& place) {
  for (const Launch& launch : graph.launches)
    if (const int error = launch(place); error != 0) return error;
  return 0;
}

// Stops the program when an array's `count` is negative. Not inline: nvcc reads this header, and
// does not compile fmt.
void check_count(std::string_view array, std::int64_t count);

// An array in device memory that grows: the place of one kind of input or result of a step. Named,
// so that a memory report says which one; its own allocation, so that running past it is found.
template <class T>
class DeviceArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  DeviceArray(Device& device, std::string name) : device_(&device), name_(std::move(name)) {}
  ~DeviceArray() { device_->release(reinterpret_cast<std::byte*>(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  // Room for `count` elements; what was there is gone when it had to grow.
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

}  // namespace lockstep::cuda
