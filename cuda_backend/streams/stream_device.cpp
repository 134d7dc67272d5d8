#include "cuda_backend/streams/stream_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"
#include "cuda_backend/device/forwarding_device.h"
#include "cuda_backend/simt/random.h"
#include "cuda_backend/streams/stream_order.h"

namespace lockstep::cuda {

namespace {

class StreamDevice final : public DeferringDevice {
 public:
  StreamDevice(std::unique_ptr<Device> device, const StreamOptions& options)
      : DeferringDevice(std::move(device)), options_(options) {
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
  void keep(Operation operation, std::function<void()> start) override {
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
    DeviceReport report;
    report.kind = "unordered";
    report.kernel = pair.later;
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

class GraphDevice final : public ForwardingDevice {
 public:
  GraphDevice(std::unique_ptr<Device> device, std::vector<std::int32_t> sizes)
      : ForwardingDevice(std::move(device)), sizes_(std::move(sizes)) {
    LS_CHECK(!sizes_.empty() && std::ranges::is_sorted(sizes_) && sizes_.front() > 0, "{} sizes",
             sizes_.size());
  }

  std::string description() const override {
    return fmt::format("{}, graphs of up to {} tokens", ForwardingDevice::description(),
                       sizes_.back());
  }
  // run() records the launches.
  bool wants_operations() const override { return true; }

  void release(std::byte* memory) override {
    LS_CHECK(recording_ == nullptr, "memory is released during a capture");
    if (memory != nullptr) forget_captured();
    ForwardingDevice::release(memory);
  }
  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    LS_CHECK(recording_ == nullptr, "an upload during a capture: the graph would freeze its bytes");
    inner().upload(target, source, size_bytes);
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    LS_CHECK(recording_ == nullptr, "a download during a capture");
    inner().download(target, source, size_bytes);
  }
  void zero(void* target, std::int64_t size_bytes) override {
    LS_CHECK(recording_ == nullptr, "a memset during a capture");
    inner().zero(target, size_bytes);
  }
  void run(const Operation& operation, const Launch& launch) override {
    if (failed()) return;
    if (whole_ != nullptr) return add_to(*whole_, operation);
    if (recording_ != nullptr) recording_->launches.push_back(launch);
    inner().run(operation, launch);
  }

  std::int32_t padded_batch(std::int32_t count) const override {
    if (is_eager_ || count <= 0 || count > sizes_.back()) return count;
    return *std::ranges::lower_bound(sizes_, count);
  }
  bool captures(std::int32_t size) const override {
    return !is_eager_ && std::ranges::binary_search(sizes_, size);
  }
  void run_eagerly(bool eagerly) override {
    LS_CHECK(recording_ == nullptr, "the mode changes during a capture");
    is_eager_ = eagerly;
  }
  void run_captured(std::string_view part, std::int32_t size,
                    const std::function<void()>& issue) override {
    if (failed()) return;
    LS_CHECK(recording_ == nullptr && whole_ == nullptr, "part {} within another part", part);
    if (!captures(size)) return issue();
    std::shared_ptr<CapturedGraph>& graph = graphs_[{std::string(part), size}];
    if (graph == nullptr) {
      graph = std::make_shared<CapturedGraph>();
      recording_ = graph.get();
      issue();
      recording_ = nullptr;
      ++statistics_.captured;
      return;
    }
    LS_CHECK(graph->instance == nullptr || statistics_.replayed > 0,
             "part {}: a device's graph exists before the first replay", part);
    Operation whole;
    whole.named(fmt::format("graph of {} {}", size, part));
    whole_ = &whole;
    issue();
    whole_ = nullptr;
    inner().run(whole, [this, graph](const LaunchPlace& place) {
      return inner().launch_graph(*graph, place);
    });
    ++statistics_.replayed;
  }
  void forget_captured() override {
    LS_CHECK(whole_ == nullptr, "graphs are dropped while one is replayed");
    statistics_.dropped += std::ssize(graphs_);
    graphs_.clear();
  }
  GraphStatistics graph_statistics() const override { return statistics_; }

 private:
  using Key = std::pair<std::string, std::int32_t>;  // part, size

  static void add_to(Operation& whole, const Operation& one) {
    whole.touches_everything |= one.touches_everything;
    whole.reads.insert(whole.reads.end(), one.reads.begin(), one.reads.end());
    whole.writes.insert(whole.writes.end(), one.writes.begin(), one.writes.end());
  }

  const std::vector<std::int32_t> sizes_;
  std::map<Key, std::shared_ptr<CapturedGraph>> graphs_;
  CapturedGraph* recording_ = nullptr;  // launches run and are recorded here
  bool is_eager_ = false;
  Operation* whole_ = nullptr;  // launches are dropped; what they touch is added here
  GraphStatistics statistics_;
};

constexpr std::uint32_t kRanksLast = 8;  // operations, on average, between two changes of ranks

class StreamQueues final : public DeferringDevice {
 public:
  StreamQueues(std::unique_ptr<Device> device, std::uint64_t seed)
      : DeferringDevice(std::move(device)), random_(seed), queues_(1) {}

  void open_streams(int count) override {
    LS_CHECK(count >= 1 && queues_.size() == 1 && queues_.front().empty(), "{} streams after {}",
             count, queues_.size());
    queues_.resize(count);
  }
  void use_stream(int stream) override {
    LS_CHECK(stream >= 0 && std::cmp_less(stream, queues_.size()), "stream {} of {}", stream,
             queues_.size());
    stream_ = stream;
  }
  int record_event() override {
    const auto event = static_cast<int>(event_passed_.size());
    event_passed_.push_back(false);
    keep({}, [this, event] { event_passed_[event] = true; });
    return event;
  }
  void wait_event(int event) override {
    LS_CHECK(event >= 0 && std::cmp_less(event, event_passed_.size()), "event {} of {}", event,
             event_passed_.size());
    queues_[stream_].push_back({.waits_for = event, .start = [] {}});
  }

  Result<void> finish() override {
    drain();
    LS_CHECK(std::find(event_passed_.begin(), event_passed_.end(), false) == event_passed_.end(),
             "an event was recorded and not reached");
    event_passed_.clear();
    return finish_inner();
  }

 private:
  struct Entry {
    int waits_for = -1;  // an event
    std::function<void()> start;
  };

  void keep(Operation, std::function<void()> start) override {
    queues_[stream_].push_back({.start = std::move(start)});
  }
  bool can_continue(const std::deque<Entry>& queue) const {
    return !queue.empty() &&
           (queue.front().waits_for < 0 || event_passed_[queue.front().waits_for]);
  }
  void drain() {
    std::vector<std::size_t> ranks(queues_.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    random_.shuffle(ranks);
    const auto next = [&] {
      return std::ranges::find_if(ranks, [&](std::size_t s) { return can_continue(queues_[s]); });
    };
    for (auto stream = next(); stream != ranks.end(); stream = next()) {
      std::deque<Entry>& queue = queues_[*stream];
      const Entry entry = std::move(queue.front());
      queue.pop_front();
      entry.start();
      if (random_.below(kRanksLast) == 0) random_.shuffle(ranks);
    }
    for (const std::deque<Entry>& queue : queues_)
      LS_CHECK(queue.empty(), "a stream waits for an event that is never recorded");
  }

  simt::Random random_;
  std::vector<std::deque<Entry>> queues_;
  std::vector<bool> event_passed_;
  int stream_ = 0;
};

}  // namespace

std::unique_ptr<Device> make_stream_device(std::unique_ptr<Device> device,
                                           const StreamOptions& options) {
  return std::make_unique<StreamDevice>(std::move(device), options);
}

std::vector<std::int32_t> cudagraph_capture_sizes(std::int32_t largest, std::int32_t max_tokens) {
  largest = std::min(largest, max_tokens);
  std::vector<std::int32_t> sizes;
  for (std::int32_t size = 1; size <= largest; size += size < 4     ? size
                                                       : size < 8   ? 4
                                                       : size < 256 ? 8
                                                                    : 16)
    sizes.push_back(size);
  if (max_tokens == largest && !std::ranges::binary_search(sizes, largest))
    sizes.push_back(largest);
  return sizes;
}

std::unique_ptr<Device> make_graph_device(std::unique_ptr<Device> device,
                                          std::vector<std::int32_t> sizes) {
  return std::make_unique<GraphDevice>(std::move(device), std::move(sizes));
}

std::unique_ptr<Device> make_stream_queues(std::unique_ptr<Device> device, std::uint64_t seed) {
  return std::make_unique<StreamQueues>(std::move(device), seed);
}

}  // namespace lockstep::cuda
