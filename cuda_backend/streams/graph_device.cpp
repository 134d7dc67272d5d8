#include "cuda_backend/streams/stream_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "cuda_backend/device/forwarding_device.h"

namespace lockstep::cuda {
namespace {

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

}  // namespace

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

}  // namespace lockstep::cuda
