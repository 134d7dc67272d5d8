#include <algorithm>
#include <deque>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "reference/memory/content.h"
#include "sim/engine/workload.h"

namespace lockstep {
namespace {

constexpr std::int32_t kVocabulary = 50'000;

// The tokens that a request of a trace will be answered with: as the trace says, or made from
// (seed, request, index) when it only says how many.
class PlannedOutput {
 public:
  PlannedOutput() = default;
  // `ordinal` counts the requests of the trace.
  PlannedOutput(const TraceRequest& request, std::uint64_t seed, std::uint64_t ordinal);

  // Output token `index`, also beyond the planned end (a step in flight, a draft).
  std::int32_t token(std::int64_t index) const;
  // The draft for output token `index`: the right token in `acceptance_percent` of all cases.
  std::int32_t draft(std::int64_t index, std::int32_t acceptance_percent) const;

 private:
  std::int32_t made(std::int64_t index) const;

  OutputPlan plan_;
  std::optional<std::int32_t> eos_;
  bool ends_with_eos_ = false;
  std::uint64_t key_ = 0;
};

PlannedOutput::PlannedOutput(const TraceRequest& request, std::uint64_t seed, std::uint64_t ordinal)
    : plan_(request.output),
      eos_(request.spec.eos_token),
      ends_with_eos_(eos_ && request.output.length < request.spec.max_tokens),
      key_(mix(seed ^ mix(ordinal))) {}

// Never the eos token by accident.
std::int32_t PlannedOutput::made(std::int64_t index) const {
  const std::uint64_t random = mix(key_ + static_cast<std::uint64_t>(index));
  const auto token = static_cast<std::int32_t>(random % kVocabulary);
  return token == eos_ ? (token + 1) % kVocabulary : token;
}

std::int32_t PlannedOutput::token(std::int64_t index) const {
  if (index < static_cast<std::int64_t>(plan_.tokens.size())) return plan_.tokens[index];
  if (plan_.fill && index < plan_.length) return *plan_.fill;
  if (ends_with_eos_ && index == plan_.length - 1) return *eos_;
  return made(index);
}

std::int32_t PlannedOutput::draft(std::int64_t index, std::int32_t acceptance_percent) const {
  const std::int32_t right = token(index);
  const std::uint64_t coin = mix(~key_ + static_cast<std::uint64_t>(index));
  if (static_cast<std::int32_t>(coin % 100) < acceptance_percent) return right;
  const std::int32_t wrong = (right + 1) % kVocabulary;
  return wrong == eos_ ? (wrong + 1) % kVocabulary : wrong;
}

// Records read ahead of the clock: one that waits for an earlier request is seen when it is read.
constexpr std::size_t kLookahead = 1024;
// Of requests that left, for records that are read after that: the time when they did.
constexpr std::size_t kLeftRemembered = 65'536;

// Something due at a time; ties go by the order in which things were read or caused.
struct Due {
  std::int64_t t_ns = 0;
  std::uint64_t order = 0;
  std::size_t index = 0;  // into a table of what is due
  bool operator>(const Due& other) const {
    return std::pair(t_ns, order) > std::pair(other.t_ns, other.order);
  }
};
using DueQueue = std::priority_queue<Due, std::vector<Due>, std::greater<>>;

// A table that reuses free places.
template <class T>
class Slab {
 public:
  std::size_t add(T value) {
    if (free_.empty()) {
      values_.push_back(std::move(value));
      return values_.size() - 1;
    }
    const std::size_t index = free_.back();
    free_.pop_back();
    values_[index] = std::move(value);
    return index;
  }
  T& operator[](std::size_t index) { return values_[index]; }
  T take(std::size_t index) {
    free_.push_back(index);
    return std::exchange(values_[index], T{});
  }

 private:
  std::vector<T> values_;
  std::vector<std::size_t> free_;
};

WorkloadEvent abort_of(std::string name) {
  WorkloadEvent event;
  event.kind = WorkloadEvent::Kind::abort;
  event.name = std::move(name);
  return event;
}

class TraceWorkload final : public Workload {
 public:
  TraceWorkload(std::unique_ptr<TraceReader> reader, const TraceWorkloadOptions& options)
      : reader_(std::move(reader)), options_(options) {}

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override;
  void step_done(std::int64_t scheduled_tokens) override {
    if (scheduled_tokens > 0) now_ += options_.step_time.step_ns(scheduled_tokens);
  }
  void request_left(std::string_view name, std::uint64_t ticket) override;
  std::int64_t now_ns() const override { return now_; }
  std::optional<std::int64_t> next_due_ns() const override { return next_due(); }
  void advance_to(std::int64_t now_ns) override { now_ = std::max(now_, now_ns); }
  std::int64_t records_consumed() const override { return consumed_; }

 private:
  struct Pending {
    TraceRecord record;
    std::uint64_t ordinal = 0;  // among requests
    std::int64_t index = 0;     // among records
    std::size_t waits_for = 0;  // requests that have not left
    std::int64_t left_ns = 0;   // when the last of the others left
  };
  struct Plan {
    PlannedOutput output;
    std::string name;
    std::optional<std::int32_t> abort_after;
  };

  Result<void> read_ahead();
  void take_in(TraceRecord record);
  std::optional<std::int64_t> next_due() const;
  void emit(Pending pending, std::vector<WorkloadEvent>& events);

  std::unique_ptr<TraceReader> reader_;
  const TraceWorkloadOptions options_;
  std::int64_t now_ = 0;
  std::int64_t consumed_ = 0;  // up to the last record that has been an event
  std::int64_t num_read_ = 0;
  std::uint64_t ordinal_ = 0;
  std::uint64_t order_ = 0;
  bool read_all_ = false;
  std::size_t timed_read_ = 0;  // records in arrivals_ that came with a time of their own

  Slab<Pending> pending_;
  DueQueue arrivals_;                                                  // into pending_
  Slab<std::string> timed_aborts_;                                     // names
  DueQueue aborts_;                                                    // into timed_aborts_
  std::vector<std::string> aborts_now_;                                // by output length, in order
  Slab<Plan> plans_;                                                   // by ticket
  std::unordered_map<std::string, std::vector<std::size_t>> waiters_;  // of every request not left
  std::unordered_map<std::string, std::int64_t> left_ns_;
  std::deque<std::string> left_order_;
};

Result<void> TraceWorkload::read_ahead() {
  while (!read_all_ && timed_read_ < kLookahead) {
    TraceRecord record;
    LS_ASSIGN_OR_RETURN(const auto more, reader_->next(record));
    if (!more)
      read_all_ = true;
    else
      take_in(std::move(record));
  }
  return {};
}

void TraceWorkload::take_in(TraceRecord record) {
  Pending pending{.record = std::move(record), .index = num_read_++};
  const auto* request = std::get_if<TraceRequest>(&pending.record);
  if (request == nullptr) {
    const std::int64_t t_ns = std::get<TraceControl>(pending.record).t_ns;
    arrivals_.push({t_ns, order_++, pending_.add(std::move(pending))});
    ++timed_read_;
    return;
  }
  pending.ordinal = ordinal_++;
  waiters_.try_emplace(request->spec.name);
  if (request->after.empty()) {
    const std::int64_t t_ns = request->spec.arrival_ns;
    arrivals_.push({t_ns, order_++, pending_.add(std::move(pending))});
    ++timed_read_;
    return;
  }
  const std::vector<std::string> after = request->after;
  const std::int64_t delay_ns = request->delay_ns;
  const std::size_t index = pending_.add(std::move(pending));
  for (const std::string& name : after) {
    if (const auto waiting = waiters_.find(name); waiting != waiters_.end()) {
      waiting->second.push_back(index);
      ++pending_[index].waits_for;
    } else if (const auto left = left_ns_.find(name); left != left_ns_.end()) {
      pending_[index].left_ns = std::max(pending_[index].left_ns, left->second);
    }
  }
  if (pending_[index].waits_for == 0)
    arrivals_.push({pending_[index].left_ns + delay_ns, order_++, index});
}

std::optional<std::int64_t> TraceWorkload::next_due() const {
  std::optional<std::int64_t> next;
  if (!arrivals_.empty()) next = arrivals_.top().t_ns;
  if (!aborts_.empty() && (!next || aborts_.top().t_ns < *next)) next = aborts_.top().t_ns;
  if (!aborts_now_.empty()) next = now_;
  return next;
}

Result<Turn> TraceWorkload::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
  LS_RETURN_IF_ERROR(read_ahead());
  const auto next = next_due();
  if (!next && !state.unfinished) return Turn::end;
  if (state.idle) {
    if (!next) return Turn::stuck;
    now_ = std::max(now_, *next);
  }
  for (std::string& name : aborts_now_) events.push_back(abort_of(std::move(name)));
  aborts_now_.clear();
  while (!arrivals_.empty() && arrivals_.top().t_ns <= now_) {
    const std::size_t index = arrivals_.top().index;
    arrivals_.pop();
    emit(pending_.take(index), events);
    LS_RETURN_IF_ERROR(read_ahead());
  }
  while (!aborts_.empty() && aborts_.top().t_ns <= now_) {
    const std::size_t index = aborts_.top().index;
    aborts_.pop();
    events.push_back(abort_of(timed_aborts_.take(index)));
  }
  return Turn::step;
}

void TraceWorkload::emit(Pending pending, std::vector<WorkloadEvent>& events) {
  consumed_ = std::max(consumed_, pending.index + 1);
  auto* request = std::get_if<TraceRequest>(&pending.record);
  if (request == nullptr) {
    --timed_read_;
    events.emplace_back().kind = WorkloadEvent::Kind::reset_prefix_cache;
    return;
  }
  if (request->after.empty())
    --timed_read_;
  else
    request->spec.arrival_ns = pending.left_ns + request->delay_ns;
  Plan plan{.output = PlannedOutput(*request, options_.seed, pending.ordinal),
            .name = request->spec.name,
            .abort_after = {}};
  if (request->abort && request->abort->t_ns)
    aborts_.push({*request->abort->t_ns, order_++, timed_aborts_.add(request->spec.name)});
  else if (request->abort)
    plan.abort_after = request->abort->after_tokens;
  const std::size_t ticket = plans_.add(std::move(plan));
  WorkloadEvent& event = events.emplace_back();
  event.kind = WorkloadEvent::Kind::add;
  event.request = std::move(request->spec);
  event.ticket = ticket;
}

Result<void> TraceWorkload::sample(std::int64_t, std::span<const SampledRow> rows,
                                   ModelOutput& output) {
  for (const SampledRow& row : rows) {
    Plan& plan = plans_[row.ticket];
    std::int64_t index = row.num_output_tokens;
    if (row.samples) {
      // Drafts are right as far as the model says the same; behind them it says one token more.
      for (const std::int32_t draft : row.drafts) {
        if (draft != plan.output.token(index)) break;
        output.tokens.push_back(draft);
        ++index;
      }
      output.tokens.push_back(plan.output.token(index++));
      if (plan.abort_after && index >= *plan.abort_after) {
        aborts_now_.push_back(plan.name);
        plan.abort_after.reset();
      }
    }
    output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
    if (options_.num_spec_tokens == 0) continue;
    for (std::int32_t i = 0; row.samples && i < options_.num_spec_tokens; ++i)
      output.draft_tokens.push_back(
          plan.output.draft(index + i, options_.draft_acceptance_percent));
    output.draft_ends.push_back(static_cast<std::uint32_t>(output.draft_tokens.size()));
  }
  return {};
}

void TraceWorkload::request_left(std::string_view name, std::uint64_t ticket) {
  plans_.take(ticket);
  const auto waiting = waiters_.find(std::string(name));
  LS_CHECK(waiting != waiters_.end(), "{} left and was not here", name);
  for (const std::size_t index : waiting->second) {
    Pending& pending = pending_[index];
    pending.left_ns = std::max(pending.left_ns, now_);
    if (--pending.waits_for > 0) continue;
    const auto& request = std::get<TraceRequest>(pending.record);
    arrivals_.push({pending.left_ns + request.delay_ns, order_++, index});
  }
  waiters_.erase(waiting);
  if (read_all_) return;
  left_ns_[std::string(name)] = now_;
  left_order_.emplace_back(name);
  if (left_order_.size() <= kLeftRemembered) return;
  left_ns_.erase(left_order_.front());
  left_order_.pop_front();
}

}  // namespace

std::unique_ptr<Workload> make_trace_workload(std::unique_ptr<TraceReader> reader,
                                              const TraceWorkloadOptions& options) {
  return std::make_unique<TraceWorkload>(std::move(reader), options);
}

}  // namespace lockstep
