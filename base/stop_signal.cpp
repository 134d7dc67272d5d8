#include "base/stop_signal.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace lockstep {
namespace {

constexpr std::int64_t kSameSignalNs = 200'000'000;

// Lock-free atomics only: the handler may interrupt any code, a holder of a mutex included.
std::atomic<std::int64_t> first_ns = 0;  // 0: no signal yet
std::atomic<int> first_signal = 0;
std::atomic<bool> is_watching = false;
std::array<std::atomic<pid_t>, 64> groups;
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// Handles SIGINT and SIGTERM. Calls only functions that POSIX allows in a signal handler.
void on_signal(int signal) {
  std::int64_t first = 0;
  const std::int64_t now = now_ns();
  if (first_ns.compare_exchange_strong(first, now)) {
    first_signal = signal;
    return;
  }
  // A second delivery of the same request to stop, not the user's second Ctrl-C.
  if (now - first < kSameSignalNs) return;
  // A negative id addresses the whole group: an engine and what its shell started.
  for (const auto& group : groups)
    if (const pid_t id = group.load(); id > 0) ::kill(-id, SIGKILL);
  ::_exit(128 + signal);
}

// Replaces one slot that holds `from`; 0 is a free slot. No effect if no slot holds it.
void replace_group(pid_t from, pid_t to) {
  for (auto& group : groups) {
    pid_t id = from;
    if (group.compare_exchange_strong(id, to)) return;
  }
}

}  // namespace

void watch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  is_watching = true;
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction before {};
    // A shell starts background jobs with SIGINT ignored, and they must survive a Ctrl-C that is
    // meant for the foreground.
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)
      ::sigaction(signal, &action, nullptr);
  }
}

bool stop_requested() { return first_signal.load(std::memory_order_relaxed) != 0; }
int stop_signal() { return first_signal; }

void leave_stop_signals_to_parent() {
  if (!is_watching) return;
  // A parent that is killed cannot end its children, and an ignored SIGINT would keep them running.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_IGN);
  first_signal = 0;
}

void add_group_to_kill(pid_t group) { replace_group(0, group); }
void remove_group_to_kill(pid_t group) { replace_group(group, 0); }

}  // namespace lockstep
