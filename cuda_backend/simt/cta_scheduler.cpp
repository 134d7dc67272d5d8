#include "cuda_backend/simt/cta_scheduler.h"

#include <fmt/format.h>
#include <utility>

#include "base/check.h"

__thread uint3 simt_current_thread_idx;

namespace simt {

using runtime::SourcePlace;

namespace {

// The scheduler whose worker is about to run for the first time.
thread_local CtaScheduler* starting = nullptr;

// Of the preemptions where CTAs take turns: how many make room for another CTA.
constexpr std::uint32_t kMakeRoomOneIn = 32;

}  // namespace

void CtaScheduler::begin_launch(const Launch& launch, Random* random,
                                LaunchStatistics* statistics) {
  // A parked worker may have kept addresses of thread-local variables.
  if (std::exchange(os_thread_, &simt_current_thread_idx) != &simt_current_thread_idx)
    forget_stacks();
  launch_ = launch;
  random_ = random;
  statistics_ = statistics;
  thread_count_ = launch.block_dim.x * launch.block_dim.y * launch.block_dim.z;
  order_.resize(thread_count_);
  for (unsigned i = 0; i < thread_count_; ++i) order_[i] = i;
  warps_.clear();
  warps_.resize((thread_count_ + 31) / 32);
}

void CtaScheduler::begin_cta(std::uint32_t linear) {
  LS_CHECK(paused_ == nullptr, "CTA {} begins while CTA {} is paused", linear, cta_linear_);
  cta_linear_ = tag_ = linear;
  further_tags_.clear();
  base_epoch_ = max_epoch_ = 0;
  started_ = finished_ = 0;
  given_up_ = false;
  ready_.clear();
  barrier_.waiting.clear();
  barrier_.arrived = 0;
  barrier_.acquired = 0;
  for (Warp& warp : warps_) {
    warp.exited = 0;
    for (const auto& one : warp.rendezvous) {
      one->arrived = 0;
      one->waiting.clear();
    }
  }
  if (launch_.shuffle) random_->shuffle(order_);
}

bool CtaScheduler::resume() {
  Worker* next = paused_ != nullptr ? std::exchange(paused_, nullptr) : next_worker();
  LS_CHECK(next != nullptr, "no memory for the stack of one simulated thread");
  continue_with(nullptr, next);
  current_ = nullptr;
  if (paused_ != nullptr) return false;
  if (given_up_) forget_stacks();  // of threads that still wait
  return true;
}

void CtaScheduler::forget_stacks() {
  idle_.clear();
  for (const auto& worker : workers_) {
    worker->restart = true;
    idle_.push_back(worker.get());
  }
}

// ---------------------------------------------------------------- workers

void CtaScheduler::worker_entry() { starting->work(); }

void CtaScheduler::work() {
  for (;;) {
    Worker* me = current_;
    while (started_ < thread_count_ && !given_up_) {
      begin_thread(*me, order_[started_++]);
      launch_.run_thread(launch_.args);
      finish_thread(me->thread);
      if (launch_.hunt && !ready_.empty()) break;
    }
    idle_.push_back(me);
    Worker* next = next_worker();
    if (next == me) continue;
    if (next == nullptr && finished_ < thread_count_) give_up();
    continue_with(me, next);
  }
}

void CtaScheduler::begin_thread(Worker& worker, unsigned thread) {
  const uint3& dim = launch_.block_dim;
  worker.thread = thread;
  const bool is_flat = dim.y == 1 && dim.z == 1;
  const unsigned x = is_flat ? thread : thread % dim.x;
  const unsigned y = is_flat ? 0 : thread / dim.x % dim.y;
  const unsigned z = is_flat ? 0 : thread / (dim.x * dim.y);
  worker.thread_index = {x, y, z};
  // Not a copy: a load of two words just stored waits for all stores of the previous thread.
  simt_current_thread_idx = {x, y, z};
  if (!launch_.stamps) return;
  worker.epoch = base_epoch_;
  worker.accesses = worker.acquired = worker.fence_stamp = 0;
  restamp(worker);
}

void CtaScheduler::finish_thread(unsigned thread) {
  ++finished_;
  Warp& warp = warps_[thread / 32];
  warp.exited |= 1u << (thread % 32);
  if (barrier_.arrived != 0 && barrier_.arrived == thread_count_ - finished_) release_barrier();
  for (const auto& one : warp.rendezvous)
    if (one->arrived != 0 && (one->lanes & ~warp.exited) == one->arrived) release_rendezvous(*one);
}

void CtaScheduler::restamp(Worker& worker) {
  worker.stamp = make_stamp(launch_.number, tag_, worker.thread, worker.epoch);
}

Worker* CtaScheduler::idle_worker() {
  if (idle_.empty()) {
    auto worker = std::make_unique<Worker>();
    if (!worker->fiber.map_stack(static_cast<unsigned>(workers_.size()))) return nullptr;
    workers_.push_back(std::move(worker));
    return workers_.back().get();
  }
  Worker* worker = idle_.back();
  idle_.pop_back();
  return worker;
}

// Returns a worker that can run: a released one, or one for a thread that has not started.
Worker* CtaScheduler::next_worker() {
  const std::uint32_t fresh = started_ < thread_count_ ? 1 : 0;
  const auto released = static_cast<std::uint32_t>(ready_.size());
  if (released + fresh == 0) return nullptr;
  std::uint32_t choice = released == 0 ? 0 : released - 1;
  if (launch_.shuffle) choice = random_->below(released + fresh);
  if (choice == released) {
    Worker* worker = idle_worker();
    if (worker != nullptr || released == 0) return worker;
    choice = 0;  // no memory for another stack: continue the started threads
  }
  Worker* worker = ready_[choice];
  ready_[choice] = ready_.back();
  ready_.pop_back();
  return worker;
}

// from is null, or to is null, for the stack that called resume.
void CtaScheduler::continue_with(Worker* from, Worker* to) {
  ++statistics_->switches;
  current_ = to;
  if (to != nullptr) {
    simt_current_thread_idx = to->thread_index;
    if (to->restart) {
      to->restart = false;
      starting = this;
      to->fiber.restart(&CtaScheduler::worker_entry);
    }
  }
  Fiber::switch_to(from == nullptr ? host_ : from->fiber, to == nullptr ? host_ : to->fiber);
}

void CtaScheduler::wait() {
  Worker* me = current_;
  Worker* next = next_worker();
  if (next == me) return;
  if (next == nullptr) give_up();
  continue_with(me, next);
}

void CtaScheduler::give_up() {
  listener_.on_divergence(ReportKind::barrier_divergence, nullptr, census());
  given_up_ = true;
}

std::string CtaScheduler::census() const {
  std::size_t in_warps = 0;
  for (const Warp& warp : warps_)
    for (const auto& one : warp.rendezvous) in_warps += one->waiting.size();
  std::string text = fmt::format(
      "deadlock: of {} threads {} wait at __syncthreads, {} at warp operations, {} have exited",
      thread_count_, barrier_.waiting.size(), in_warps, finished_);
  if (!barrier_.waiting.empty())
    text += fmt::format("; the barrier is {}:{}", barrier_.place.file, barrier_.place.line);
  return text;
}

void CtaScheduler::preempt() {
  if (launch_.takes_turns && random_->below(kMakeRoomOneIn) == 0) {
    ++statistics_->preemptions;
    paused_ = current_;
    return continue_with(current_, nullptr);
  }
  if (ready_.empty() && started_ >= thread_count_) return;
  ++statistics_->preemptions;
  ready_.push_back(current_);
  wait();
}

void CtaScheduler::abandon() {
  Worker* me = current_;
  ++statistics_->abandoned_threads;
  finish_thread(me->thread);
  Worker* next = next_worker();
  if (next == nullptr && finished_ < thread_count_) give_up();
  me->restart = true;
  idle_.push_back(me);
  continue_with(me, next);
  __builtin_unreachable();
}

// ---------------------------------------------------------------- epochs

// The epoch after everything so far.
std::uint32_t CtaScheduler::next_epoch() {
  if (max_epoch_ == kMaxEpoch) open_tag();
  return ++max_epoch_;
}

// Restarts the epochs under another tag. Stamps with an earlier tag of this CTA count as ordered.
// That is exact after a barrier; after a __syncwarp it may hide a race between two warps.
void CtaScheduler::open_tag() {
  tag_ = listener_.open_tag(cta_linear_);
  further_tags_.push_back(tag_);
  base_epoch_ = max_epoch_ = 0;
  for (const auto& worker : workers_) {
    worker->epoch = 0;
    restamp(*worker);
  }
  for (Warp& warp : warps_)
    for (const auto& one : warp.rendezvous) one->results[0].epoch = one->results[1].epoch = 0;
}

std::vector<std::uint32_t> CtaScheduler::tags_before(std::uint32_t tag) const {
  std::vector<std::uint32_t> tags;
  if (tag == cta_linear_) return tags;
  tags.push_back(cta_linear_);
  tags.insert(tags.end(), further_tags_.begin(), std::ranges::find(further_tags_, tag));
  return tags;
}

// ---------------------------------------------------------------- barriers

void CtaScheduler::sync_threads(SourcePlace place) {
  Worker* me = current_;
  if (barrier_.arrived == 0)
    barrier_.place = place;
  else if (barrier_.place.line != place.line)
    listener_.on_divergence(ReportKind::barrier_divergence, me,
                            fmt::format("at {}:{}, while others wait at {}:{}", place.file,
                                        place.line, barrier_.place.file, barrier_.place.line));
  ++barrier_.arrived;
  barrier_.acquired = std::max(barrier_.acquired, me->acquired);
  if (barrier_.arrived == thread_count_ - finished_) {
    release_barrier();
    if (launch_.shuffle) {
      ready_.push_back(me);
      wait();
    }
  } else {
    barrier_.waiting.push_back(me);
    wait();
  }
  if (launch_.stamps) {
    me->epoch = base_epoch_;
    me->acquired = std::max(me->acquired, barrier_.result_acquired);
    restamp(*me);
  }
}

void CtaScheduler::release_barrier() {
  ++statistics_->barriers;
  barrier_.result_acquired = barrier_.acquired;
  barrier_.arrived = 0;
  ready_.insert(ready_.end(), barrier_.waiting.begin(), barrier_.waiting.end());
  barrier_.waiting.clear();
  if (launch_.stamps) base_epoch_ = next_epoch();
}

// The warp operations of the scheduler. CUDA's rule: all lanes of the mask that have not exited
// make the same call with the same mask. A shuffle may read only lanes that take part.

using runtime::ShuffleKind;
using runtime::WarpOperation;

namespace {

constexpr unsigned kFullMask = 0xffffffffu;

const char* name_of(WarpOperation operation) {
  constexpr const char* kNames[] = {"__syncwarp", "a shuffle", "a ballot",
                                    "a whole-warp reduction"};
  return kNames[static_cast<std::size_t>(operation)];
}

// The lane that a shuffle reads: its own if the source is outside of its segment.
unsigned source_lane(unsigned own_lane, ShuffleKind kind, int operand, int width) {
  const int lane = static_cast<int>(own_lane);
  const int segment = lane & ~(width - 1);
  int source = lane;
  switch (kind) {
    case ShuffleKind::index:
      source = segment | (operand & (width - 1));
      break;
    case ShuffleKind::exclusive_or:
      source = lane ^ operand;
      break;
    case ShuffleKind::up:
      source = lane - operand;
      break;
    case ShuffleKind::down:
      source = lane + operand;
      break;
  }
  const bool inside = source >= segment && source < segment + width;
  return static_cast<unsigned>(inside ? source : lane);
}

}  // namespace

CtaScheduler::Rendezvous& CtaScheduler::rendezvous_of(Warp& warp, unsigned mask) {
  for (const auto& one : warp.rendezvous)
    if (one->mask == mask) return *one;
  const unsigned threads = thread_count_ - current_->thread / 32 * 32;
  const unsigned existing = threads >= 32 ? kFullMask : (1u << threads) - 1;
  warp.rendezvous.push_back(std::make_unique<Rendezvous>());
  warp.rendezvous.back()->mask = mask;
  warp.rendezvous.back()->lanes = mask & existing;
  return *warp.rendezvous.back();
}

void CtaScheduler::check_rendezvous(const Warp& warp, const Rendezvous& rendezvous,
                                    WarpOperation operation, runtime::Combine reduce) {
  const unsigned lane = current_->thread % 32;
  if (((rendezvous.mask >> lane) & 1) == 0)
    listener_.on_divergence(
        ReportKind::warp_divergence, current_,
        fmt::format("lane {} calls {} with mask {:08x}, which does not contain it", lane,
                    name_of(operation), rendezvous.mask));
  if (rendezvous.arrived != 0 && (rendezvous.operation != operation || rendezvous.reduce != reduce))
    listener_.on_divergence(
        ReportKind::warp_divergence, current_,
        fmt::format("at {}, while lanes of its mask wait at {}{}", name_of(operation),
                    name_of(rendezvous.operation),
                    rendezvous.operation == operation ? " of another kind" : ""));
  if (warp.rendezvous.size() == 1) return;
  for (const auto& other : warp.rendezvous)
    if (other.get() != &rendezvous && (other->mask & rendezvous.mask) != 0 && other->arrived != 0)
      listener_.on_divergence(ReportKind::warp_divergence, current_,
                              fmt::format("mask {:08x} overlaps mask {:08x} of waiting lanes",
                                          rendezvous.mask, other->mask));
}

const CtaScheduler::Result& CtaScheduler::meet(unsigned mask, std::uint64_t bits,
                                               WarpOperation operation, runtime::Combine reduce) {
  Worker* me = current_;
  Warp& warp = warps_[me->thread / 32];
  Rendezvous& rendezvous = rendezvous_of(warp, mask);
  check_rendezvous(warp, rendezvous, operation, reduce);
  Result& result = rendezvous.results[rendezvous.turn];
  rendezvous.operation = operation;
  rendezvous.reduce = reduce;
  result.slots[me->thread % 32] = bits;
  rendezvous.arrived |= 1u << (me->thread % 32);
  if ((rendezvous.lanes & ~warp.exited & ~rendezvous.arrived) != 0) {
    rendezvous.waiting.push_back(me);
    wait();
    return result;
  }
  release_rendezvous(rendezvous);
  if (launch_.shuffle) {
    ready_.push_back(me);
    wait();
  }
  return result;
}

void CtaScheduler::release_rendezvous(Rendezvous& rendezvous) {
  ++statistics_->warp_meetings;
  Result& result = rendezvous.results[rendezvous.turn];
  result.attended = rendezvous.arrived;
  if (rendezvous.operation == WarpOperation::combine) {
    for (unsigned i = 0; i < 32; ++i)
      if (((result.attended >> i) & 1) == 0) result.slots[i] = 0;
    rendezvous.reduce(result.slots);
  }
  if (launch_.stamps && rendezvous.operation == WarpOperation::sync) result.epoch = next_epoch();
  rendezvous.turn ^= 1;
  rendezvous.arrived = 0;
  ready_.insert(ready_.end(), rendezvous.waiting.begin(), rendezvous.waiting.end());
  rendezvous.waiting.clear();
}

void CtaScheduler::sync_warp(unsigned mask) {
  const Result& result = meet(mask, 0, WarpOperation::sync, nullptr);
  if (!launch_.stamps) return;
  current_->epoch = std::max(current_->epoch, result.epoch);
  restamp(*current_);
}

unsigned CtaScheduler::ballot(unsigned mask, bool predicate) {
  const Result& result = meet(mask, predicate ? 1 : 0, WarpOperation::ballot, nullptr);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) votes |= static_cast<unsigned>(result.slots[i] & 1) << i;
  return votes & result.attended;
}

std::uint64_t CtaScheduler::shuffle(unsigned mask, std::uint64_t bits, ShuffleKind kind,
                                    int operand, int width) {
  const Result& result = meet(mask, bits, WarpOperation::shuffle, nullptr);
  const unsigned lane = current_->thread % 32;
  const unsigned source = source_lane(lane, kind, operand, width);
  if (((result.attended >> source) & 1) != 0) return result.slots[source];
  listener_.on_divergence(
      ReportKind::warp_divergence, current_,
      fmt::format("a shuffle reads lane {}, but only {:08x} take part", source, result.attended));
  return result.slots[lane];
}

std::uint64_t CtaScheduler::combine(std::uint64_t bits, runtime::Combine reduce) {
  const Result& result = meet(kFullMask, bits, WarpOperation::combine, reduce);
  if (result.attended != kFullMask)
    listener_.on_divergence(
        ReportKind::warp_divergence, current_,
        fmt::format("a whole-warp reduction in which only lanes {:08x} take part",
                    result.attended));
  return result.slots[current_->thread % 32];
}

}  // namespace simt
