#include "cuda_backend/streams/stream_device.h"

#include <fmt/format.h>

#include <map>

#include "base/check.h"
#include "cuda_backend/device/forwarding_device.h"
#include "cuda_backend/streams/step_graph.h"
#include "cuda_backend/streams/stream_order.h"

namespace lockstep::cuda {
namespace {

class StreamDevice final : public ForwardingDevice {
 public:
  StreamDevice(std::unique_ptr<Device> device, const StreamOptions& options)
      : ForwardingDevice(std::move(device)), options_(options) {
    LS_CHECK(options.num_streams >= 2, "{} streams", options.num_streams);
    inner().open_streams(options.num_streams);
  }
  // Pending operations are dropped; their releases are not.
  ~StreamDevice() override { release_all(); }

  std::string description() const override {
    return fmt::format("{}, {} streams", ForwardingDevice::description(), options_.num_streams);
  }
  int num_streams() const override { return options_.num_streams; }
  bool wants_operations() const override { return true; }

  std::byte* allocate(std::int64_t size_bytes, std::string name) override {
    return noted(ForwardingDevice::allocate(size_bytes, name), size_bytes, name);
  }
  std::byte* allocate_host(std::int64_t size_bytes, std::string name) override {
    return noted(ForwardingDevice::allocate_host(size_bytes, name), size_bytes, name);
  }
  void release(std::byte* memory) override {
    if (memory != nullptr) releases_.push_back({memory, &Device::release});
    if (pending_.empty()) release_all();
  }
  void release_host(std::byte* memory) override {
    if (memory != nullptr) releases_.push_back({memory, &Device::release_host});
    if (pending_.empty()) release_all();
  }

  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    const auto* bytes = static_cast<const std::byte*>(source);
    keep(Operation{}.named("upload").write(range_of(target, size_bytes)),
         [this, target, kept = std::vector<std::byte>(bytes, bytes + size_bytes)] {
           inner().upload(target, kept.data(), static_cast<std::int64_t>(kept.size()));
         });
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    keep(Operation{}.named("download").read(range_of(source, size_bytes)),
         [=, this] { inner().download(target, source, size_bytes); });
  }
  void zero(void* target, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    keep(Operation{}.named("memset").write(range_of(target, size_bytes)),
         [=, this] { inner().zero(target, size_bytes); });
  }
  void run(const Operation& operation, const Launch& launch) override {
    if (failed()) return;
    keep(operation, [this, operation, launch] { inner().run(operation, launch); });
  }

  Result<void> finish() override {
    if (!failed()) issue();
    operations_.clear();
    pending_.clear();
    auto done = finish_inner();
    release_all();
    return done;
  }
  void take_reports(std::vector<DeviceReport>& reports) override {
    for (DeviceReport& report : reports_) reports.push_back(std::move(report));
    reports_.clear();
    ForwardingDevice::take_reports(reports);
  }

 private:
  struct Allocation {
    MemoryRange range;
    std::string name;
  };

  struct Release {
    std::byte* memory;
    void (Device::*release)(std::byte*);
  };

  std::byte* noted(std::byte* memory, std::int64_t size_bytes, const std::string& name) {
    if (memory != nullptr)
      allocations_[range_of(memory, 0).begin] = {range_of(memory, size_bytes), name};
    return memory;
  }
  void keep(Operation operation, std::function<void()> start) {
    operations_.push_back(std::move(operation));
    pending_.push_back(std::move(start));
  }

  void issue() {
    LS_CHECK(pending_.size() == operations_.size(), "{} calls of {} operations", pending_.size(),
             operations_.size());
    StepGraph graph = step_graph(operations_);
    if (options_.edit_graph) options_.edit_graph(operations_, graph);
    LS_CHECK(graph.size() == operations_.size(), "a graph of {} for {} operations", graph.size(),
             operations_.size());
    const std::vector<Placement> placements = place_on_streams(graph, options_.num_streams);
    StreamOrder order(options_.num_streams);
    std::vector<int> events(operations_.size(), -1);  // of the device
    std::vector<int> order_events(operations_.size(), -1);
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      const Placement& placement = placements[i];
      inner().use_stream(placement.stream);
      order.use_stream(placement.stream);
      for (const int before : placement.waits) {
        LS_CHECK(events[before] >= 0, "operation {} waits for {}, which has no event", i, before);
        inner().wait_event(events[before]);
        order.wait_event(order_events[before]);
      }
      pending_[i]();
      order.run(operations_[i]);
      if (!placement.has_event) continue;
      events[i] = inner().record_event();
      order_events[i] = order.record_event();
    }
    inner().use_stream(0);
    for (const StreamOrder::Unordered& pair : order.unordered_pairs()) report(pair);
  }

  void report(const StreamOrder::Unordered& pair) {
    const auto does = [](bool writes) { return writes ? "writes" : "reads"; };
    DeviceReport report{.kind = "unordered",
                        .kernel = pair.later,
                        .message = {},
                        .allocation = {},
                        .byte_offset = 0,
                        .sanitizer_words = {}};
    std::string where = "memory";
    if (const auto after = allocations_.upper_bound(pair.range.begin);
        after != allocations_.begin()) {
      const Allocation& allocation = std::prev(after)->second;
      if (pair.range.begin < allocation.range.end) {
        report.allocation = allocation.name;
        report.byte_offset = static_cast<std::int64_t>(pair.range.begin - allocation.range.begin);
        where = fmt::format("bytes of {}", allocation.name);
      }
    }
    report.message = fmt::format(
        "unordered: {} on stream {} {} {}, {} on stream {} {} them, and no event orders them",
        pair.earlier, pair.earlier_stream, does(pair.earlier_writes), where, pair.later,
        pair.later_stream, does(pair.later_writes));
    reports_.push_back(std::move(report));
  }

  void release_all() {
    for (const Release& release : releases_) {
      allocations_.erase(range_of(release.memory, 0).begin);
      (inner().*release.release)(release.memory);
    }
    releases_.clear();
  }

  StreamOptions options_;
  std::map<std::uintptr_t, Allocation> allocations_;  // by first byte
  std::vector<Operation> operations_;
  std::vector<std::function<void()>> pending_;  // one entry per operation
  std::vector<Release> releases_;
  std::vector<DeviceReport> reports_;
};

}  // namespace

std::unique_ptr<Device> make_stream_device(std::unique_ptr<Device> device,
                                           const StreamOptions& options) {
  return std::make_unique<StreamDevice>(std::move(device), options);
}

}  // namespace lockstep::cuda
