#include <algorithm>
#include <memory>
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
  // How many are proposed for what follows output token `index`: all, or in `short_percent` of all
  // cases fewer.
  std::int32_t num_drafts(std::int64_t index, std::int32_t all, std::int32_t short_percent) const;

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

std::int32_t PlannedOutput::num_drafts(std::int64_t index, std::int32_t all,
                                       std::int32_t short_percent) const {
  const std::uint64_t coin = mix(mix(key_) + static_cast<std::uint64_t>(index));
  if (static_cast<std::int32_t>(coin % 100) >= short_percent) return all;
  return static_cast<std::int32_t>(coin / 100 % static_cast<std::uint64_t>(all));
}

// An event at a time. Ties follow the order of the trace, then the order of their causes.
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
  TraceWorkload(std::shared_ptr<const Trace> trace, const TraceWorkloadOptions& options);

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
  // A record that has not been an event.
  struct Pending {
    std::uint64_t ordinal = 0;  // among requests
    std::size_t waits_for = 0;  // requests that have not left
    std::int64_t left_ns = 0;   // when the last of the others left
  };
  struct Plan {
    PlannedOutput output;
    std::string name;
    std::optional<std::int32_t> abort_after;
  };

  void await(const TraceRequest& request, std::size_t index);
  std::optional<std::int64_t> next_due() const;
  void emit(std::size_t index, std::vector<WorkloadEvent>& events);

  const std::shared_ptr<const Trace> trace_;
  const TraceWorkloadOptions options_;
  std::int64_t now_ = 0;
  std::int64_t consumed_ = 0;  // up to the last record that has been an event
  std::uint64_t order_ = 0;

  std::vector<Pending> pending_;         // by record
  DueQueue arrivals_;                    // of records
  Slab<std::string> timed_aborts_;       // names
  DueQueue aborts_;                      // into timed_aborts_
  std::vector<std::string> aborts_now_;  // by output length, in order
  Slab<Plan> plans_;                     // by ticket
  // Of every request that has not left: records that wait for it.
  std::unordered_map<std::string, std::vector<std::size_t>> waiters_;
};

TraceWorkload::TraceWorkload(std::shared_ptr<const Trace> trace,
                             const TraceWorkloadOptions& options)
    : trace_(std::move(trace)), options_(options), pending_(trace_->records.size()) {
  std::uint64_t ordinal = 0;
  for (std::size_t index = 0; index < pending_.size(); ++index) {
    const TraceRecord& record = trace_->records[index];
    if (const auto* request = std::get_if<TraceRequest>(&record)) {
      pending_[index].ordinal = ordinal++;
      await(*request, index);
    } else {
      arrivals_.push({std::get<TraceControl>(record).t_ns, order_++, index});
    }
  }
}

// It arrives at its time, or when the earlier requests that it names have left.
void TraceWorkload::await(const TraceRequest& request, std::size_t index) {
  for (const std::string& name : request.after) {
    const auto earlier = waiters_.find(name);
    if (earlier == waiters_.end()) continue;
    earlier->second.push_back(index);
    ++pending_[index].waits_for;
  }
  waiters_.try_emplace(request.spec.name);
  if (pending_[index].waits_for > 0) return;
  arrivals_.push(
      {request.after.empty() ? request.spec.arrival_ns : request.delay_ns, order_++, index});
}

std::optional<std::int64_t> TraceWorkload::next_due() const {
  std::optional<std::int64_t> next;
  if (!arrivals_.empty()) next = arrivals_.top().t_ns;
  if (!aborts_.empty() && (!next || aborts_.top().t_ns < *next)) next = aborts_.top().t_ns;
  if (!aborts_now_.empty()) next = now_;
  return next;
}

Result<Turn> TraceWorkload::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
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
    emit(index, events);
  }
  while (!aborts_.empty() && aborts_.top().t_ns <= now_) {
    const std::size_t index = aborts_.top().index;
    aborts_.pop();
    events.push_back(abort_of(timed_aborts_.take(index)));
  }
  return Turn::step;
}

void TraceWorkload::emit(std::size_t index, std::vector<WorkloadEvent>& events) {
  consumed_ = std::max(consumed_, static_cast<std::int64_t>(index) + 1);
  WorkloadEvent& event = events.emplace_back();
  const auto* request = std::get_if<TraceRequest>(&trace_->records[index]);
  if (request == nullptr) {
    event.kind = WorkloadEvent::Kind::reset_prefix_cache;
    event.resets_running = std::get<TraceControl>(trace_->records[index]).preempts_running;
    return;
  }
  const Pending& pending = pending_[index];
  Plan plan{.output = PlannedOutput(*request, options_.seed, pending.ordinal),
            .name = request->spec.name,
            .abort_after = {}};
  if (request->abort && request->abort->t_ns)
    aborts_.push({*request->abort->t_ns, order_++, timed_aborts_.add(request->spec.name)});
  else if (request->abort)
    plan.abort_after = request->abort->after_tokens;
  event.kind = WorkloadEvent::Kind::add;
  event.request = request->spec;
  if (!request->after.empty()) event.request.arrival_ns = pending.left_ns + request->delay_ns;
  event.ticket = plans_.add(std::move(plan));
}

Result<void> TraceWorkload::sample(std::int64_t, std::span<const SampledRow> rows,
                                   ModelOutput& output) {
  for (const SampledRow& row : rows) {
    Plan& plan = plans_[row.ticket];
    std::int64_t index = row.num_output_tokens;
    if (row.samples) {
      // Drafts are right as long as the model samples them; after them the model samples one more
      // token. With steps in flight the worker's drafts replace the engine's placeholders.
      const bool knows_more = options_.async_scheduling && !row.is_new;
      for (const std::int32_t given : row.drafts) {
        const std::int32_t draft = given < 0 && knows_more
                                       ? plan.output.draft(index, options_.draft_acceptance_percent)
                                       : given;
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
    if (options_.num_spec_tokens == 0 || options_.async_scheduling) continue;
    const std::int32_t num_drafts =
        plan.output.num_drafts(index, options_.num_spec_tokens, options_.short_drafts_percent);
    for (std::int32_t i = 0; row.samples && i < num_drafts; ++i)
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
    const auto& request = std::get<TraceRequest>(trace_->records[index]);
    arrivals_.push({pending.left_ns + request.delay_ns, order_++, index});
  }
  waiters_.erase(waiting);
}

}  // namespace

std::unique_ptr<Workload> make_trace_workload(std::shared_ptr<const Trace> trace,
                                              const TraceWorkloadOptions& options) {
  return std::make_unique<TraceWorkload>(std::move(trace), options);
}

std::unique_ptr<Workload> make_trace_workload(Trace trace, const TraceWorkloadOptions& options) {
  return make_trace_workload(std::make_shared<const Trace>(std::move(trace)), options);
}

}  // namespace lockstep
