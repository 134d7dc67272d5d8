// The graph of a step's operations, their placement, and the check of the issued calls. The check
// is independent of the first two and finds every missing edge.
#include "cuda_backend/streams/step_graph.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda_backend/streams/stream_order.h"
#include "tests/cuda_backend/kernel_device.h"

namespace lockstep::cuda {
namespace {

Operation operation(std::string name, std::vector<MemoryRange> reads,
                    std::vector<MemoryRange> writes) {
  Operation made;
  made.named(std::move(name));
  made.reads = std::move(reads);
  made.writes = std::move(writes);
  return made;
}

bool has_edge(const StepGraph& graph, int from, int to) {
  return std::ranges::count(graph[to], from) > 0;
}

bool conflict(const Operation& a, const Operation& b) {
  if (a.touches_everything || b.touches_everything) return true;
  const auto meet = [](const std::vector<MemoryRange>& x, const std::vector<MemoryRange>& y) {
    for (const MemoryRange& p : x)
      for (const MemoryRange& q : y)
        if (p.begin < q.end && q.begin < p.end) return true;
    return false;
  };
  return meet(a.writes, b.writes) || meet(a.writes, b.reads) || meet(a.reads, b.writes);
}

// Operations over a few bytes, so that most of them meet.
std::vector<Operation> random_operations(std::uint64_t seed, int count) {
  std::vector<Operation> operations;
  std::uint64_t at = 0;
  const auto below = [&](std::uint64_t bound) { return number(seed, at++) % bound; };
  for (int i = 0; i < count; ++i) {
    Operation one = operation(fmt::format("operation {}", i), {}, {});
    const auto range = [&] {
      const std::uintptr_t begin = 100 + below(60);
      return MemoryRange{begin, begin + 1 + below(8)};
    };
    for (std::uint64_t n = below(3); n > 0; --n) one.read(range());
    for (std::uint64_t n = 1 + below(2); n > 0; --n) one.write(range());
    one.touches_everything = below(20) == 0;
    operations.push_back(std::move(one));
  }
  return operations;
}

// Issues operations as placed, except one wait. Returns the found pairs.
std::vector<StreamOrder::Unordered> issue(const std::vector<Operation>& operations,
                                          const std::vector<Placement>& placements, int num_streams,
                                          int left_out = -1) {
  StreamOrder order(num_streams);
  std::vector<int> events(operations.size(), -1);
  int wait = 0;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    order.use_stream(placements[i].stream);
    for (const int before : placements[i].waits)
      if (wait++ != left_out) order.wait_event(events[before]);
    order.run(operations[i]);
    if (placements[i].has_event) events[i] = order.record_event();
  }
  return order.unordered_pairs();
}

TEST(StepGraph, ReadersOfOneWriteAreNotOrderedAmongThemselves) {
  const std::vector<Operation> operations = {
      operation("write", {}, {{100, 200}}), operation("read", {{100, 150}}, {}),
      operation("read", {{140, 200}}, {}), operation("overwrite", {}, {{190, 192}})};
  const StepGraph graph = step_graph(operations);
  EXPECT_TRUE(has_edge(graph, 0, 1));
  EXPECT_TRUE(has_edge(graph, 0, 2));
  EXPECT_FALSE(has_edge(graph, 1, 2));
  EXPECT_FALSE(has_edge(graph, 1, 3));
  EXPECT_TRUE(has_edge(graph, 2, 3));
}

TEST(StepGraph, AnOperationThatWasNotDescribedIsOrderedWithEverything) {
  const std::vector<Operation> operations = {operation("a", {}, {{1, 2}}), Operation{},
                                             operation("b", {{7, 8}}, {})};
  const StepGraph graph = step_graph(operations);
  EXPECT_TRUE(has_edge(graph, 0, 1));
  EXPECT_TRUE(has_edge(graph, 1, 2));
  EXPECT_FALSE(has_edge(graph, 0, 2));
}

TEST(StepGraph, JoinsExactlyThePairsThatConflictInRandomSteps) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const std::vector<Operation> operations = random_operations(seed, 24);
    const StepGraph graph = step_graph(operations);
    std::vector<std::vector<bool>> path(24, std::vector<bool>(24));
    for (int j = 0; j < 24; ++j)
      for (int i = j - 1; i >= 0; --i)
        for (int k = i + 1; k <= j; ++k)
          if (has_edge(graph, i, k) && (k == j || path[k][j])) path[i][j] = true;
    for (int i = 0; i < 24; ++i)
      for (int j = i + 1; j < 24; ++j) {
        const bool conflicts = conflict(operations[i], operations[j]);
        EXPECT_TRUE(!conflicts || path[i][j]) << seed << ": no path from " << i << " to " << j;
        EXPECT_TRUE(conflicts || !has_edge(graph, i, j)) << seed << ": " << i << " and " << j;
      }
  }
}

TEST(StepGraph, PlacedOnStreamsIsOrderedWhereverItMustBe) {
  for (std::uint64_t seed = 0; seed < 50; ++seed)
    for (const int num_streams : {1, 2, 3, 8}) {
      const std::vector<Operation> operations = random_operations(seed, 40);
      const auto placements = place_on_streams(step_graph(operations), num_streams);
      EXPECT_TRUE(issue(operations, placements, num_streams).empty()) << seed;
    }
}

TEST(StepGraph, SpreadsIndependentOperationsOverAllStreams) {
  std::vector<Operation> operations;
  for (std::uintptr_t i = 1; i < 9; ++i)
    operations.push_back(operation("alone", {}, {{10 * i, 10 * i + 5}}));
  std::vector<int> load(4, 0);
  for (const Placement& placement : place_on_streams(step_graph(operations), 4)) {
    EXPECT_TRUE(placement.waits.empty());
    ++load[placement.stream];
  }
  EXPECT_EQ(load, std::vector<int>(4, 2));
}

// No wait is there for nothing: whichever is left out, some pair is unordered.
TEST(StreamOrder, NamesAPairForEveryMissingWait) {
  int waits_tried = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<Operation> operations = random_operations(seed, 24);
    const auto placements = place_on_streams(step_graph(operations), 3);
    int num_waits = 0;
    for (const Placement& placement : placements)
      num_waits += static_cast<int>(placement.waits.size());
    for (int wait = 0; wait < num_waits; ++wait) {
      const auto found = issue(operations, placements, 3, wait);
      EXPECT_FALSE(found.empty()) << seed << " without wait " << wait;
      for (const auto& pair : found) EXPECT_NE(pair.earlier_stream, pair.later_stream);
    }
    waits_tried += num_waits;
  }
  EXPECT_GT(waits_tried, 200);
}

TEST(StreamOrder, AnEventOrdersOnlyEarlierOperations) {
  const Operation copy = operation("copy", {{1, 2}}, {{5, 9}});
  const Operation late = operation("late", {}, {{20, 30}});
  const Operation use = operation("use", {{8, 25}}, {});
  StreamOrder order(2);
  order.use_stream(1);
  order.run(copy);
  const int event = order.record_event();
  order.run(late);
  order.use_stream(0);
  order.wait_event(event);
  order.run(use);
  const auto found = order.unordered_pairs();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found.front().earlier, "late");
  EXPECT_EQ(found.front().later, "use");
  EXPECT_EQ(found.front().range, (MemoryRange{20, 25}));
  EXPECT_TRUE(found.front().earlier_writes);
  EXPECT_FALSE(found.front().later_writes);
}

}  // namespace
}  // namespace lockstep::cuda
