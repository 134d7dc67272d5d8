#include "cuda_backend/streams/step_graph.h"

#include <algorithm>
#include <map>
#include <ranges>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

// The last operations that touched each byte, in runs of bytes with the same answer.
//
// 1. Runs cover the whole address space: the first starts at 0, each ends where the next starts.
class LastTouches {
 public:
  // Calls before(i) for every operation that a reader (writer) of the range depends on.
  template <class Before>
  void read(MemoryRange range, int reader, Before before) {
    for_each_run(range, [&](Touch& touch) {
      if (touch.writer >= 0) before(touch.writer);
      if (touch.readers.empty() || touch.readers.back() != reader) touch.readers.push_back(reader);
    });
  }
  template <class Before>
  void write(MemoryRange range, int writer, Before before) {
    for_each_run(range, [&](Touch& touch) {
      if (touch.writer >= 0) before(touch.writer);
      for (const int reader : touch.readers) before(reader);
      touch = {writer, {}};
    });
  }
  // Records that this operation wrote every byte.
  void all_written(int writer) {
    runs_.clear();
    runs_[0] = {writer, {}};
  }

 private:
  struct Touch {
    int writer = -1;           // -1: none
    std::vector<int> readers;  // since
  };
  using Runs = std::map<std::uintptr_t, Touch>;  // by first byte, up to the next one

  Runs::iterator run_from(std::uintptr_t begin) {
    LS_CHECK(!runs_.empty() && runs_.begin()->first == 0, "runs do not start at 0");
    const auto after = runs_.upper_bound(begin);
    const auto run = std::prev(after);
    return run->first == begin ? run : runs_.emplace_hint(after, begin, run->second);
  }
  template <class Visit>
  void for_each_run(MemoryRange range, Visit visit) {
    LS_CHECK(range.begin <= range.end, "bytes {} to {}", range.begin, range.end);
    const auto first = run_from(range.begin);
    const auto end = run_from(range.end);
    for (auto run = first; run != end; ++run) visit(run->second);
  }

  Runs runs_{{0, {}}};
};

}  // namespace

StepGraph step_graph(std::span<const Operation> operations) {
  StepGraph graph(operations.size());
  LastTouches touches;
  int everything = -1;  // last operation that touches all memory; -1: none
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    const Operation& operation = operations[i];
    const auto after = [&](int before) {
      if (before != i) graph[i].push_back(before);
    };
    if (operation.touches_everything) {
      for (int before = std::max(everything, 0); before < i; ++before) after(before);
      touches.all_written(everything = i);
      continue;
    }
    for (const MemoryRange& range : operation.reads) touches.read(range, i, after);
    for (const MemoryRange& range : operation.writes) touches.write(range, i, after);
  }
  for (int i = 0; i < static_cast<int>(graph.size()); ++i) {
    std::vector<int>& before = graph[i];
    std::ranges::sort(before);
    before.erase(std::ranges::unique(before).begin(), before.end());
    LS_CHECK(before.empty() || (before.front() >= 0 && before.back() < i),
             "operation {} depends on operation {}", i, before.back());
  }
  return graph;
}

std::vector<Placement> place_on_streams(const StepGraph& graph, int num_streams) {
  LS_CHECK(num_streams >= 1, "{} streams", num_streams);
  const auto count = static_cast<int>(graph.size());
  std::vector<Placement> placements(count);
  std::vector<int> last(num_streams, -1), load(num_streams, 0);
  // seen[s][t]: the last operation of stream t that the last one of stream s comes after.
  std::vector<std::vector<int>> seen(num_streams, std::vector<int>(num_streams, -1));
  std::vector<std::vector<int>> seen_by(count);
  for (int i = 0; i < count; ++i) {
    Placement& placement = placements[i];
    int newest = -1;
    for (const int before : graph[i])
      if (last[placements[before].stream] == before) newest = std::max(newest, before);
    placement.stream = newest >= 0
                           ? placements[newest].stream
                           : static_cast<int>(std::ranges::min_element(load) - load.begin());
    std::vector<int>& known = seen[placement.stream];
    // The latest first: a wait for it may cover the others.
    for (const int before : std::views::reverse(graph[i])) {
      LS_CHECK(before >= 0 && before < i, "operation {} depends on operation {}", i, before);
      if (known[placements[before].stream] >= before) continue;
      placement.waits.push_back(before);
      placements[before].has_event = true;
      for (int stream = 0; stream < num_streams; ++stream)
        known[stream] = std::max(known[stream], seen_by[before][stream]);
    }
    known[placement.stream] = i;
    seen_by[i] = known;
    last[placement.stream] = i;
    ++load[placement.stream];
  }
  return placements;
}

}  // namespace lockstep::cuda
