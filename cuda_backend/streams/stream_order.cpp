#include "cuda_backend/streams/stream_order.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

using Ranges = std::vector<MemoryRange>;

Ranges sorted(Ranges ranges, bool everything) {
  if (everything) return {{0, UINTPTR_MAX}};
  std::ranges::sort(ranges, {}, &MemoryRange::begin);
  return ranges;
}

// The first bytes that lie in both. Ranges of one list may overlap each other.
std::optional<MemoryRange> overlap(const Ranges& a, const Ranges& b) {
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    const MemoryRange both{std::max(x->begin, y->begin), std::min(x->end, y->end)};
    if (both.begin < both.end) return both;
    if (x->end <= y->end)
      ++x;
    else
      ++y;
  }
  return std::nullopt;
}

void join(boost::dynamic_bitset<>& into, const boost::dynamic_bitset<>& more) {
  if (into.size() < more.size()) into.resize(more.size());
  for (auto i = more.find_first(); i != more.npos; i = more.find_next(i)) into.set(i);
}

}  // namespace

int StreamOrder::record_event() {
  events_.push_back(streams_[stream_]);
  return static_cast<int>(events_.size()) - 1;
}

void StreamOrder::wait_event(int event) {
  LS_CHECK(event >= 0 && static_cast<std::size_t>(event) < events_.size(), "event {} of {}", event,
           events_.size());
  join(streams_[stream_], events_[event]);
}

std::optional<StreamOrder::Unordered> StreamOrder::run(const Operation& operation) {
  const bool everything = operation.touches_everything;
  Issued now{&operation, stream_, sorted(operation.reads, everything),
             sorted(operation.writes, everything)};
  Set& done = streams_[stream_];
  done.resize(issued_.size() + 1);
  std::optional<Unordered> found;
  for (std::size_t i = 0; i < issued_.size() && !found; ++i) {
    if (done.test(i)) continue;
    ++pairs_compared_;
    const Issued& before = issued_[i];
    const auto conflict = [&](const Ranges& a, const Ranges& b, bool a_writes, bool b_writes) {
      if (found) return;
      if (const auto range = overlap(a, b))
        found = Unordered{before.operation->name,
                          operation.name,
                          before.stream,
                          stream_,
                          *range,
                          a_writes,
                          b_writes};
    };
    conflict(before.writes, now.writes, true, true);
    conflict(before.writes, now.reads, true, false);
    conflict(before.reads, now.writes, false, true);
  }
  done.set(issued_.size());
  issued_.push_back(std::move(now));
  return found;
}

}  // namespace lockstep::cuda
