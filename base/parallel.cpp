#include "base/parallel.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/failed_check.h"

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

ThreadTeam::ThreadTeam(int size) : thrown_(static_cast<std::size_t>(std::max(size, 1))) {
  LS_CHECK(size >= 1, "{} threads", size);
  for (int member = 1; member < size; ++member)
    others_.emplace_back([this, member] { help(member); });
}

ThreadTeam::~ThreadTeam() {
  LS_CHECK(work_ == nullptr, "a team ends during its work");
  has_ended_ = true;
  ++num_calls_;
  num_calls_.notify_all();
}

// A member may join a call before num_calls_ counts it, so it compares the call itself.
void ThreadTeam::help(int member) {
  for (std::uint32_t seen = 0, joined = 0;;) {
    num_calls_.wait(seen);
    seen = num_calls_;
    if (has_ended_) return;
    std::uint64_t at_work = at_work_;
    const auto may_join = [&] { return (at_work & kClosed) == 0 && call_of(at_work) != joined; };
    while (may_join() && !at_work_.compare_exchange_weak(at_work, at_work + 1)) {
    }
    if (!may_join()) continue;
    joined = call_of(at_work);
    take_part(member);
    if (is_over(--at_work_)) at_work_.notify_one();
  }
}

void ThreadTeam::take_part(int member) {
  try {
    std::optional<ChecksThrow> throwing;
    if (checks_throw_) throwing.emplace();
    (*work_)(member);
  } catch (...) {
    thrown_[static_cast<std::size_t>(member)] = std::current_exception();
  }
}

void ThreadTeam::run(const std::function<void(int member)>& work) {
  // Not a lock: only programmer errors call run() from two threads.
  LS_CHECK(work_ == nullptr, "a team of {} threads is at work already", size());
  checks_throw_ = ChecksThrow::is_on();
  work_ = &work;
  at_work_ = std::uint64_t{num_calls_ + 1} << 32;
  ++num_calls_;
  num_calls_.notify_all();
  take_part(0);
  for (std::uint64_t at_work = at_work_ |= kClosed; !is_over(at_work); at_work = at_work_)
    at_work_.wait(at_work);
  work_ = nullptr;
  std::exception_ptr first;
  for (std::exception_ptr& thrown : thrown_)
    if (auto one = std::exchange(thrown, nullptr); one && !first) first = std::move(one);
  if (first) std::rethrow_exception(first);
}

}  // namespace lockstep
