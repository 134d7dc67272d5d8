// Work over a range of indices, shared out among threads.
#pragma once

#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace lockstep {

// Calls work(i) once for each i from 0 to count - 1, in `jobs` threads including the caller's, and
// returns when all have returned. Indices are distributed in order. `go_on` is called before each
// index, by one thread at a time; its first false ends the distribution. Absent: true.
// REQUIRES: jobs >= 1; work does not throw.
void for_each_in_parallel(std::int64_t count, int jobs,
                          const std::function<void(std::int64_t index)>& work,
                          const std::function<bool()>& go_on = {});

// Threads that wait between calls, for work of less than a millisecond.
//
// Invariants
// (1) Member 0 is the thread that calls; every other member is always the same thread.
// (2) Outside of run(), no member works.
class ThreadTeam {
 public:
  // REQUIRES: size >= 1.
  explicit ThreadTeam(int size);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(others_.size()) + 1; }
  // Calls work(member) in each member, and returns when all have returned.
  void run(const std::function<void(int member)>& work);

 private:
  std::barrier<> turn_;                             // at the start and end of a run
  const std::function<void(int)>* work_ = nullptr;  // null at a start: the members end
  std::vector<std::jthread> others_;
};

}  // namespace lockstep
