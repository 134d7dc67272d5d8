#include "base/parallel.h"

#include <algorithm>
#include <mutex>

#include "base/check.h"

namespace lockstep {

void for_each_in_parallel(std::int64_t count, int jobs,
                          const std::function<void(std::int64_t index)>& work,
                          const std::function<bool()>& go_on) {
  LS_CHECK(jobs >= 1 && count >= 0, "{} indices, {} jobs", count, jobs);
  std::mutex handing_out;
  std::int64_t next = 0;  // next index; `count`: the distribution has ended
  // The lock also orders the calls of go_on, which may therefore use state without a lock.
  const auto take = [&] {
    const std::scoped_lock held(handing_out);
    if (next == count || (go_on && !go_on())) return next = count;
    return next++;
  };
  const auto run = [&] {
    for (std::int64_t i = take(); i < count; i = take()) work(i);
  };
  // The caller is one of the threads; the destructor of `others` joins the rest.
  std::vector<std::jthread> others;
  for (std::int64_t j = 1; j < std::min<std::int64_t>(jobs, count); ++j) others.emplace_back(run);
  run();
}

ThreadTeam::ThreadTeam(int size) : turn_(size) {
  LS_CHECK(size >= 1, "{} threads", size);
  for (int member = 1; member < size; ++member)
    others_.emplace_back([this, member] {
      // The first barrier publishes work_, the second ends the run. A start without work is the
      // destructor's.
      for (turn_.arrive_and_wait(); work_ != nullptr; turn_.arrive_and_wait()) {
        (*work_)(member);
        turn_.arrive_and_wait();
      }
    });
}

ThreadTeam::~ThreadTeam() {
  LS_CHECK(work_ == nullptr, "a team ends during its work");
  turn_.arrive_and_wait();
}

void ThreadTeam::run(const std::function<void(int member)>& work) {
  // Not a lock: only programmer errors call run() from two threads.
  LS_CHECK(work_ == nullptr, "a team of {} threads is at work already", size());
  work_ = &work;
  turn_.arrive_and_wait();
  work(0);
  turn_.arrive_and_wait();
  work_ = nullptr;
}

}  // namespace lockstep
