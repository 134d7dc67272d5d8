#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

TEST(ForEachInParallel, VisitsEachIndexOnceWithAnyNumberOfThreads) {
  for (const int jobs : {1, 2, 7, 64}) {
    std::vector<std::atomic<int>> visits(50);
    for_each_in_parallel(50, jobs, [&](std::int64_t i) { ++visits[static_cast<std::size_t>(i)]; });
    for (const auto& times : visits) EXPECT_EQ(times, 1) << jobs;
  }
}

TEST(ForEachInParallel, OneJobIsTheCallersThreadAndGoesInOrder) {
  const auto caller = std::this_thread::get_id();
  std::vector<std::int64_t> seen;
  for_each_in_parallel(5, 1, [&](std::int64_t i) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    seen.push_back(i);
  });
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(ForEachInParallel, WorkThatWaitsForOtherWorkRunsBesideIt) {
  std::atomic<int> arrived = 0;
  for_each_in_parallel(3, 3, [&](std::int64_t) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 3);
}

TEST(ForEachInParallel, OfNothingDoesNothing) {
  for_each_in_parallel(
      0, 4, [](std::int64_t) { ADD_FAILURE(); },
      [] {
        ADD_FAILURE();
        return true;
      });
}

// All before the first false, without a gap; nothing after it is called.
TEST(ForEachInParallel, EndsWithTheFirstNoAndLeavesNoGap) {
  for (const int jobs : {1, 4}) {
    int questions = 0;  // asked by one thread at a time
    std::mutex held;
    std::set<std::int64_t> done;
    for_each_in_parallel(
        100, jobs,
        [&](std::int64_t i) {
          const std::scoped_lock lock(held);
          done.insert(i);
        },
        [&] { return ++questions != 11; });
    EXPECT_EQ(questions, 11) << jobs;
    EXPECT_EQ(done.size(), 10u) << jobs;
    EXPECT_EQ(*done.rbegin(), 9) << jobs;
  }
}

TEST(ThreadTeam, EveryMemberWorksInEveryRunAndMember0IsTheCaller) {
  for (const int size : {1, 2, 5}) {
    ThreadTeam team(size);
    EXPECT_EQ(team.size(), size);
    std::vector<std::thread::id> first(static_cast<std::size_t>(size));
    team.run(
        [&](int member) { first[static_cast<std::size_t>(member)] = std::this_thread::get_id(); });
    EXPECT_EQ(first[0], std::this_thread::get_id());
    EXPECT_EQ(std::set(first.begin(), first.end()).size(), first.size());
    for (int i = 0; i < 100; ++i) {
      std::vector<std::thread::id> again(first.size());
      team.run([&](int member) {
        again[static_cast<std::size_t>(member)] = std::this_thread::get_id();
      });
      EXPECT_EQ(again, first);
    }
  }
}

}  // namespace
}  // namespace lockstep
