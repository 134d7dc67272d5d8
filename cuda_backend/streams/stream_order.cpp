#include "cuda_backend/streams/stream_order.h"

#include <algorithm>
#include <boost/graph/transitive_closure.hpp>
#include <tuple>

namespace lockstep::cuda {
namespace {

using Ranges = std::vector<MemoryRange>;

Ranges sorted(Ranges ranges, bool everything) {
  if (everything) return {{0, UINTPTR_MAX}};
  std::ranges::sort(ranges, {}, &MemoryRange::begin);
  return ranges;
}

// The first bytes that are in both lists. Ranges of one list may overlap each other.
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

}  // namespace

int StreamOrder::add_call() {
  const auto call = static_cast<int>(boost::add_vertex(calls_));
  int& last = last_of_stream_[stream_];
  LS_CHECK(last < call, "call {} after call {}", call, last);
  if (last >= 0) boost::add_edge(last, call, calls_);
  last = call;
  return call;
}

int StreamOrder::record_event() {
  events_.push_back(add_call());
  return static_cast<int>(events_.size()) - 1;
}

void StreamOrder::wait_event(int event) {
  LS_CHECK(event >= 0 && std::cmp_less(event, events_.size()), "event {} of {}", event,
           events_.size());
  boost::add_edge(events_[event], add_call(), calls_);
}

void StreamOrder::run(const Operation& operation) {
  const bool everything = operation.touches_everything;
  issued_.push_back({&operation, stream_, add_call(), sorted(operation.reads, everything),
                     sorted(operation.writes, everything)});
}

std::vector<StreamOrder::Unordered> StreamOrder::unordered_pairs() const {
  Calls closure;
  boost::transitive_closure(calls_, closure);
  std::vector<Unordered> found;
  std::vector<bool> is_later(boost::num_vertices(calls_));  // than `before`
  std::vector<std::optional<Unordered>> of_later(issued_.size());
  for (std::size_t i = 0; i < issued_.size(); ++i) {
    const Issued& before = issued_[i];
    is_later.assign(is_later.size(), false);
    for (const auto call :
         boost::make_iterator_range(boost::adjacent_vertices(before.call, closure)))
      is_later[call] = true;
    for (std::size_t j = i + 1; j < issued_.size(); ++j)
      if (!of_later[j] && !is_later[issued_[j].call]) of_later[j] = conflict(before, issued_[j]);
  }
  for (auto& pair : of_later)
    if (pair) found.push_back(std::move(*pair));
  return found;
}

std::optional<StreamOrder::Unordered> StreamOrder::conflict(const Issued& before,
                                                            const Issued& now) {
  const std::tuple<const Ranges&, const Ranges&, bool, bool> conflicts[] = {
      {before.writes, now.writes, true, true},
      {before.writes, now.reads, true, false},
      {before.reads, now.writes, false, true}};
  for (const auto& [a, b, a_writes, b_writes] : conflicts)
    if (const auto range = overlap(a, b))
      return Unordered{before.operation->name,
                       now.operation->name,
                       before.stream,
                       now.stream,
                       *range,
                       a_writes,
                       b_writes};
  return std::nullopt;
}

}  // namespace lockstep::cuda
