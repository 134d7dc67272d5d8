// The warp operations of the scheduler. CUDA's rule: all lanes of the mask that have not exited
// make the same call with the same mask. A value may be taken from a lane that attended, and from
// no other.
#include <fmt/format.h>

#include <algorithm>

#include "cuda_backend/simt/cta_scheduler.h"

namespace simt {

using runtime::ShuffleKind;
using runtime::WarpOperation;

namespace {

constexpr unsigned kFullMask = 0xffffffffu;

const char* name_of(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::sync:
      return "__syncwarp";
    case WarpOperation::shuffle:
      return "a shuffle";
    case WarpOperation::ballot:
      return "a ballot";
    case WarpOperation::combine:
      return "a whole-warp reduction";
  }
  return "?";
}

// The lane that a shuffle reads: its own when the source lies outside of its segment.
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

CtaScheduler::Meeting& CtaScheduler::meeting_of(Warp& warp, unsigned mask) {
  for (const auto& meeting : warp.meetings)
    if (meeting->mask == mask) return *meeting;
  const unsigned threads = thread_count_ - current_->thread / 32 * 32;
  const unsigned existing = threads >= 32 ? kFullMask : (1u << threads) - 1;
  warp.meetings.push_back(std::make_unique<Meeting>());
  warp.meetings.back()->mask = mask;
  warp.meetings.back()->lanes = mask & existing;
  return *warp.meetings.back();
}

void CtaScheduler::check_meeting(const Warp& warp, const Meeting& meeting, WarpOperation operation,
                                 runtime::Combine reduce) {
  const unsigned lane = current_->thread % 32;
  if (((meeting.mask >> lane) & 1) == 0)
    listener_.on_divergence(ReportKind::warp_divergence, current_,
                            fmt::format("lane {} calls {} with mask {:08x}, which is without it",
                                        lane, name_of(operation), meeting.mask));
  if (meeting.arrived != 0 && (meeting.operation != operation || meeting.reduce != reduce))
    listener_.on_divergence(ReportKind::warp_divergence, current_,
                            fmt::format("at {}, while lanes of its mask wait at {}{}",
                                        name_of(operation), name_of(meeting.operation),
                                        meeting.operation == operation ? " of another kind" : ""));
  if (warp.meetings.size() == 1) return;
  for (const auto& other : warp.meetings)
    if (other.get() != &meeting && (other->mask & meeting.mask) != 0 && other->arrived != 0)
      listener_.on_divergence(ReportKind::warp_divergence, current_,
                              fmt::format("mask {:08x} overlaps mask {:08x} that others wait with",
                                          meeting.mask, other->mask));
}

const CtaScheduler::Result& CtaScheduler::meet(unsigned mask, std::uint64_t bits,
                                               WarpOperation operation, runtime::Combine reduce) {
  Worker* me = current_;
  Warp& warp = warps_[me->thread / 32];
  Meeting& meeting = meeting_of(warp, mask);
  check_meeting(warp, meeting, operation, reduce);
  Result& result = meeting.results[meeting.turn];
  meeting.operation = operation;
  meeting.reduce = reduce;
  result.slots[me->thread % 32] = bits;
  meeting.arrived |= 1u << (me->thread % 32);
  if ((meeting.lanes & ~warp.exited & ~meeting.arrived) != 0) {
    meeting.waiting.push_back(me);
    wait();
    return result;
  }
  release_meeting(meeting);
  if (launch_.shuffle) {
    ready_.push_back(me);
    wait();
  }
  return result;
}

void CtaScheduler::release_meeting(Meeting& meeting) {
  ++statistics_->warp_meetings;
  Result& result = meeting.results[meeting.turn];
  result.attended = meeting.arrived;
  if (meeting.operation == WarpOperation::combine) {
    for (unsigned i = 0; i < 32; ++i)
      if (((result.attended >> i) & 1) == 0) result.slots[i] = 0;
    meeting.reduce(result.slots);
  }
  if (launch_.stamps && meeting.operation == WarpOperation::sync) result.epoch = next_epoch();
  meeting.turn ^= 1;
  meeting.arrived = 0;
  ready_.insert(ready_.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
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
  listener_.on_divergence(ReportKind::warp_divergence, current_,
                          fmt::format("a shuffle takes a value from lane {}; only {:08x} take part",
                                      source, result.attended));
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
