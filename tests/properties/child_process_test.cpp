// A child process answers, crashes or hangs, and the parent can tell.
#include "base/child_process.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

TEST(ChildProcess, AnAnswerComesBackWholeHoweverLongItIs) {
  const std::string text(3'000'000, 'x');
  const auto answer = run_in_child([&] { return text; }, 60s);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->end, ChildAnswer::End::answered);
  EXPECT_EQ(answer->text, text);
}

TEST(ChildProcess, AFailedCheckIsACrashWithItsWords) {
  const auto answer = run_in_child(
      []() -> std::string {
        LS_CHECK(1 + 1 == 3, "two and {}", 7);
        return "";
      },
      60s);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->end, ChildAnswer::End::crashed);
  EXPECT_EQ(answer->signal, "SIGABRT");
  EXPECT_NE(answer->last_words.find("check failed: 1 + 1 == 3: two and 7"), std::string::npos)
      << answer->last_words;
}

// Needs 300 ms of a processor that four other processes use as well.
TEST(ChildProcess, TimeWithoutAProcessorDoesNotCountAsAHang) {
  cpu_set_t all, first;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  CPU_ZERO(&first);
  for (int cpu = 0; CPU_COUNT(&first) == 0; ++cpu)
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &first);
  const auto busy_until = [&](auto ends) {
    ::sched_setaffinity(0, sizeof first, &first);
    while (!ends()) continue;
  };
  std::vector<pid_t> others(4);
  for (pid_t& other : others) {
    other = ::fork();
    if (other == 0) busy_until([] { return ::getppid() == 1; });
  }
  const auto answer = run_in_child(
      [&]() -> std::string {
        const pid_t behind_a_shell = ::fork();
        if (behind_a_shell == 0) {
          busy_until([] { return std::clock() > 3 * CLOCKS_PER_SEC / 10; });
          ::_exit(0);
        }
        ::waitpid(behind_a_shell, nullptr, 0);
        return "done";
      },
      700ms);
  for (const pid_t other : others) {
    ::kill(other, SIGKILL);
    ::waitpid(other, nullptr, 0);
  }
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->text, "done");
}

TEST(ChildProcess, AHangEndsAtTheLimit) {
  const auto answer = run_in_child(
      []() -> std::string {
        for (;;) ::pause();
      },
      100ms);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->end, ChildAnswer::End::timed_out);
}

TEST(ChildProcess, WorkOfManyPartsHasTheLimitForEachPart) {
  FollowingChild child(400ms);
  const auto answer = child.run([&]() -> std::string {
    for (int part = 0; part < 5; ++part) {
      std::this_thread::sleep_for(100ms);
      child.beat();
    }
    return "done";
  });
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->end, ChildAnswer::End::answered);
  EXPECT_EQ(answer->text, "done");
}

// Both processes go through this loop; only the child works.
TEST(ChildProcess, AFollowingChildKeepsItsMemoryUntilItCrashesOrIsEnded) {
  int pieces = 0;  // of work, in this process
  const auto work = [&] {
    if (++pieces == 3) ::raise(SIGKILL);
    return std::to_string(pieces);
  };
  std::vector<std::string> seen;
  FollowingChild child(60s);
  for (int i = 0; i < 6; ++i) {
    const auto answer = child.run(work);
    ASSERT_TRUE(answer);
    seen.push_back(answer->text + answer->signal);
    if (i == 4) child.end();
  }
  EXPECT_EQ(seen, (std::vector<std::string>{"1", "2", "SIGKILL", "1", "2", "1"}));
  EXPECT_EQ(pieces, 0);
}

TEST(ChildProcess, NothingThatTheChildDoesIsSeenHereAndNoChildIsLeft) {
  int here = 1;
  const auto answer = run_in_child([&] { return std::to_string(here = 2); }, 60s);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->text, "2");
  EXPECT_EQ(here, 1);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

}  // namespace
}  // namespace lockstep
