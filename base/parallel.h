// Distributes work over threads: indices over a pool that is created for one call, or short pieces
// of work over a team that persists.
#pragma once

#include <barrier>
#include <cstdint>
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

// Threads that wait between calls, for work of less than a millisecond: two barriers cost less than
// starting threads.
//
// Invariants
// (1) Member 0 is the calling thread. Every other member is always the same thread, so thread-local
//     state persists.
// (2) No member works outside of run().
class ThreadTeam {
 public:
  // REQUIRES: size >= 1.
  explicit ThreadTeam(int size);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(others_.size()) + 1; }
  // Calls work(member) once for each member from 0 to size() - 1, in parallel, and returns when all
  // have returned. REQUIRES: no other run() is in progress; work does not throw.
  void run(const std::function<void(int member)>& work);

 private:
  std::barrier<> turn_;  // all members, at the start and at the end of a run
  const std::function<void(int)>* work_ = nullptr;  // null at a start: threads exit
  std::vector<std::jthread> others_;
};

}  // namespace lockstep
