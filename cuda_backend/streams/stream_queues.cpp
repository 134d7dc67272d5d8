#include "cuda_backend/streams/stream_device.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "cuda_backend/device/forwarding_device.h"
#include "cuda_backend/simt/random.h"

namespace lockstep::cuda {
namespace {

constexpr std::uint32_t kRanksLast = 8;  // operations, on average, between two changes of ranks

class StreamQueues final : public ForwardingDevice {
 public:
  StreamQueues(std::unique_ptr<Device> device, std::uint64_t seed)
      : ForwardingDevice(std::move(device)), random_(seed), queues_(1) {}

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
    enqueue([this, event] { event_passed_[event] = true; });
    return event;
  }
  void wait_event(int event) override {
    LS_CHECK(event >= 0 && std::cmp_less(event, event_passed_.size()), "event {} of {}", event,
             event_passed_.size());
    queues_[stream_].push_back({.waits_for = event, .start = [] {}});
  }

  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    const auto* bytes = static_cast<const std::byte*>(source);
    enqueue([this, target, kept = std::vector<std::byte>(bytes, bytes + size_bytes)] {
      inner().upload(target, kept.data(), static_cast<std::int64_t>(kept.size()));
    });
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    enqueue([=, this] { inner().download(target, source, size_bytes); });
  }
  void zero(void* target, std::int64_t size_bytes) override {
    enqueue([=, this] { inner().zero(target, size_bytes); });
  }
  void run(const Operation& operation, const Launch& launch) override {
    enqueue([this, operation, launch] { inner().run(operation, launch); });
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

  void enqueue(std::function<void()> start) {
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

std::unique_ptr<Device> make_stream_queues(std::unique_ptr<Device> device, std::uint64_t seed) {
  return std::make_unique<StreamQueues>(std::move(device), seed);
}

}  // namespace lockstep::cuda
