#include "tests/cuda_runtime/late_streams.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

constexpr std::uint32_t kRanksLast = 8;  // pieces of work, on average, between two draws of ranks

}  // namespace

std::size_t LateStreams::add() {
  ranks_.push_back(queues_.size());
  queues_.emplace_back();
  random_.shuffle(ranks_);
  return queues_.size() - 1;
}

void LateStreams::put(std::size_t stream, Work work) {
  queues_[stream].push_back({std::move(work), nullptr});
}

LateStreams::Mark LateStreams::mark(std::size_t stream) {
  auto passed = std::make_shared<bool>(false);
  put(stream, [passed] { *passed = true; });
  return passed;
}

void LateStreams::wait(std::size_t stream, Mark mark) {
  queues_[stream].push_back({[] {}, std::move(mark)});
}

bool LateStreams::run_one() {
  const auto next =
      std::ranges::find_if(ranks_, [&](std::size_t i) { return can_continue(queues_[i]); });
  if (next == ranks_.end()) return false;
  const Entry entry = std::move(queues_[*next].front());
  queues_[*next].pop_front();
  entry.work();
  if (random_.below(kRanksLast) == 0) random_.shuffle(ranks_);
  return true;
}

void LateStreams::run_to(const Mark& mark) {
  while (!*mark) LS_CHECK(run_one(), "the host waits for a mark that nothing can reach");
}

void LateStreams::run_all() {
  while (run_one()) {
  }
  for (const auto& queue : queues_)
    LS_CHECK(queue.empty(), "a stream waits for a mark that never passes");
}

}  // namespace lockstep::cuda
