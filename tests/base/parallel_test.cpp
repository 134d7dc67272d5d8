#include "base/parallel.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/failed_check.h"

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

// Members take pieces until none is left, as the executor's do.
TEST(ThreadTeam, DoesEveryPieceOnceAndAMemberIsAlwaysTheSameThread) {
  for (const int size : {1, 2, 5}) {
    ThreadTeam team(size);
    EXPECT_EQ(team.size(), size);
    std::vector<std::thread::id> threads(static_cast<std::size_t>(size));
    threads[0] = std::this_thread::get_id();
    for (int call = 0; call < 1000; ++call) {
      std::vector<std::thread::id> at_work(threads.size());
      std::vector<int> done(64);
      std::atomic<std::size_t> next = 0;
      team.run([&](int member) {
        const auto i = static_cast<std::size_t>(member);
        EXPECT_EQ(at_work[i], std::thread::id()) << "a second time in call " << call;
        at_work[i] = std::this_thread::get_id();
        for (std::size_t piece = next++; piece < done.size(); piece = next++) ++done[piece];
      });
      EXPECT_EQ(done, std::vector<int>(done.size(), 1));
      EXPECT_EQ(at_work[0], threads[0]);
      for (std::size_t i = 1; i < threads.size(); ++i) {
        if (threads[i] == std::thread::id()) threads[i] = at_work[i];
        EXPECT_TRUE(at_work[i] == threads[i] || at_work[i] == std::thread::id());
      }
    }
    std::erase(threads, std::thread::id());
    EXPECT_EQ(std::set(threads.begin(), threads.end()).size(), threads.size());
  }
}

// Both members throw; a failed check in member 1 throws because it would in the caller.
TEST(ThreadTeam, ThrowsWhatAMemberHasThrownWhenAllHaveReturned) {
  ThreadTeam team(2);
  const ChecksThrow throwing;
  for (const int thrower : {0, 1}) {
    std::atomic<bool> has_helped = false, has_returned = false;
    try {
      team.run([&](int member) {
        if (member == 1) has_helped = true;
        while (!has_helped) std::this_thread::yield();
        LS_CHECK(member != thrower, "member {}", member);
        has_returned = true;
      });
      FAIL() << "member " << thrower << " has thrown nothing";
    } catch (const FailedCheck& failed) {
      EXPECT_TRUE(std::string_view(failed.what()).starts_with(fmt::format("member {}", thrower)));
    }
    EXPECT_TRUE(has_returned);
  }
}

// The caller works until another member has begun: on any machine it begins in the end.
TEST(ThreadTeam, HasOthersHelpWhileTheCallerWorks) {
  ThreadTeam team(2);
  std::atomic<bool> has_helped = false;
  team.run([&](int member) {
    if (member == 1) has_helped = true;
    while (!has_helped) std::this_thread::yield();
  });
  EXPECT_TRUE(has_helped);
}

}  // namespace
}  // namespace lockstep
