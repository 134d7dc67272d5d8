// Distributes work over threads: indices over a pool that is created for one call, or short pieces
// of work over a team that persists.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace lockstep {

// Calls work(i) once for each i from 0 to count - 1, in `jobs` threads including the caller's, and
// returns when all have returned. Indices are distributed in order, but work may finish in any
// order. `go_on` is called before each index, by one thread at a time; its first false ends the
// distribution, and the calls in progress still finish. Absent: true. REQUIRES: jobs >= 1, count >=
// 0; work does not throw; work(i) touches nothing that work(j) writes.
void for_each_in_parallel(std::int64_t count, int jobs,
                          const std::function<void(std::int64_t index)>& work,
                          const std::function<bool()>& go_on = {});

// Threads that wait between calls and help with work of less than a millisecond.
//
// Invariants
// (1) Member 0 is the calling thread. Every other member is always the same thread, so thread-local
//     state persists.
// (2) No member works outside of run(), and none works twice in one call.
// (3) run() waits only for members that have begun. On a busy machine the caller works alone, at
//     the speed of one thread, instead of waiting for threads that have no processor.
// (4) What a member throws reaches the caller after all members have returned. A failed check in a
//     member does what it does in the caller's thread (ChecksThrow).
class ThreadTeam {
 public:
  // REQUIRES: size >= 1.
  explicit ThreadTeam(int size);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(others_.size()) + 1; }
  // Calls work(0) in this thread and, in parallel, work(member) in every other thread that wakes
  // before it returns. Returns when all of them have returned, or throws what the lowest member has
  // thrown. REQUIRES: members take pieces of the work until none is left, so that member 0 alone
  // completes it; no other run() is in progress.
  void run(const std::function<void(int member)>& work);

 private:
  void help(int member);
  void take_part(int member);

  // Lower half: members at work besides the caller; with kClosed, none may begin. Upper half: the
  // call.
  static constexpr std::uint64_t kClosed = std::uint64_t{1} << 31;
  static std::uint32_t call_of(std::uint64_t at_work) {
    return static_cast<std::uint32_t>(at_work >> 32);
  }
  static bool is_over(std::uint64_t at_work) { return (at_work << 32) == (kClosed << 32); }
  std::atomic<std::uint64_t> at_work_ = kClosed;
  std::atomic<std::uint32_t> num_calls_ = 0;        // threads wait for the next one
  const std::function<void(int)>* work_ = nullptr;  // null: between calls
  bool checks_throw_ = false;                       // in the caller's thread
  std::vector<std::exception_ptr> thrown_;          // by each member in this call
  std::atomic<bool> has_ended_ = false;
  std::vector<std::jthread> others_;
};

}  // namespace lockstep
