// The workload of a request trace: arrivals on a virtual clock in nanoseconds, and sampled tokens
// that depend only on the trace and the seed.
//
// Invariants
// (1) Token n of a request is the same whenever it is sampled: after a preemption, in another
//     schedule, with or without drafts.
// (2) A turn gives aborts by output length first, then arrivals and controls, then timed aborts.
//     Each of these is in the order of time; ties follow the trace.
// (3) The clock never runs backward.
//
// Not here: the trace's format (traces/formats/request_trace.h) and recordings.

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
#include "traces/formats/scheduler_protocol.h"

namespace lockstep {
namespace {

// Sampled token ids are below this; the ids of a trace's prompts may be larger.
constexpr std::int32_t kVocabulary = 50'000;

// The output tokens of a request: as the trace gives them, or generated from (seed, request, index)
// if the trace gives only their number.
class PlannedOutput {
 public:
  PlannedOutput() = default;
  // `ordinal`: index among the requests of the trace, so equal requests get different tokens.
  PlannedOutput(const TraceRequest& request, std::uint64_t seed, std::uint64_t ordinal)
      : plan_(request.output), ends_(request.spec.stop_token_ids), key_(mix(seed ^ mix(ordinal))) {
    if (request.spec.eos_token) ends_.push_back(*request.spec.eos_token);
    is_ended_by_token_ = !ends_.empty() && request.output.length < request.spec.max_tokens;
  }

  // Returns output token `index`, also beyond the planned end: a step in flight and a draft may
  // reach past it.
  std::int32_t token(std::int64_t index) const {
    // Explicit tokens first, then the fill token. If the trace plans fewer tokens than max_tokens
    // allows, a token must end the request: eos, or else the last of stop_token_ids.
    if (index < static_cast<std::int64_t>(plan_.tokens.size())) return plan_.tokens[index];
    if (plan_.fill && index < plan_.length) return *plan_.fill;
    if (is_ended_by_token_ && index == plan_.length - 1) return ends_.back();
    return made(index);
  }

  // Returns the draft for output token `index`: the right token in `acceptance_percent` of all
  // cases.
  std::int32_t draft(std::int64_t index, std::int32_t acceptance_percent) const {
    const std::int32_t right = token(index);
    // Another key than that of tokens: acceptance is independent of the token's value.
    const std::uint64_t coin = mix(~key_ + static_cast<std::uint64_t>(index));
    if (static_cast<std::int32_t>(coin % 100) < acceptance_percent) return right;
    // A wrong draft must not end the request either: a request whose drafts are accepted by mistake
    // would end and hide the mistake.
    return without_end((right + 1) % kVocabulary);
  }

  // Returns the number of drafts proposed after output token `index`: all, or in `short_percent` of
  // all cases fewer, possibly none.
  std::int32_t num_drafts(std::int64_t index, std::int32_t all, std::int32_t short_percent) const {
    const std::uint64_t coin = mix(mix(key_) + static_cast<std::uint64_t>(index));
    if (static_cast<std::int32_t>(coin % 100) >= short_percent) return all;
    return static_cast<std::int32_t>(coin / 100 % static_cast<std::uint64_t>(all));
  }

 private:
  // Returns a generated token.
  std::int32_t made(std::int64_t index) const {
    const std::uint64_t random = mix(key_ + static_cast<std::uint64_t>(index));
    return without_end(static_cast<std::int32_t>(random % kVocabulary));
  }
  // Returns the first token from `token` on that does not end the request. The loop ends even if
  // every token ends the request.
  std::int32_t without_end(std::int32_t token) const {
    for (std::size_t i = 0; i < ends_.size() && std::ranges::count(ends_, token) > 0; ++i)
      token = (token + 1) % kVocabulary;
    return token;
  }

  OutputPlan plan_;
  std::vector<std::int32_t> ends_;  // tokens that end the request: stop_token_ids, then eos
  bool is_ended_by_token_ = false;
  std::uint64_t key_ = 0;
};

// An event at a time. Ties follow the order of the trace, then the order in which events were
// added.
struct Due {
  std::int64_t t_ns = 0;
  std::uint64_t order = 0;
  std::size_t index = 0;  // index of the event's data
  bool operator>(const Due& other) const {
    return std::pair(t_ns, order) > std::pair(other.t_ns, other.order);
  }
};
using DueQueue = std::priority_queue<Due, std::vector<Due>, std::greater<>>;

// A table with stable indices that reuses freed entries: a long trace needs as many entries as
// requests are live.
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
  // Removes and returns an entry. REQUIRES: the entry was added and not taken since.
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
  TraceWorkload(std::shared_ptr<const Trace> trace, const TraceWorkloadOptions& options)
      : trace_(std::move(trace)), options_(options), pending_(trace_->records.size()) {
    std::uint64_t ordinal = 0;
    for (std::size_t index = 0; index < pending_.size(); ++index) {
      const TraceRecord& record = trace_->records[index];
      // The whole trace is registered at the start: a closed loop may name any earlier request.
      if (const auto* request = std::get_if<TraceRequest>(&record)) {
        pending_[index].ordinal = ordinal++;
        await(*request, index);
      } else {
        arrivals_.push({std::get<TraceControl>(record).t_ns, order_++, index});
      }
    }
  }

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override {
    const auto next = next_due();
    // Live requests keep the run going without arrivals: they may still finish.
    if (!next && !state.unfinished) return Turn::end;
    // Only an idle engine jumps to the next event. A busy one advances by the duration of its
    // steps.
    if (state.idle) {
      if (!next) return Turn::stuck;
      now_ = std::max(now_, *next);
    }
    // Aborts by output length come first: they belong to the previous step.
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

  Result<void> sample(std::int64_t, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    for (const SampledRow& row : rows) {
      Plan& plan = plans_[row.ticket];
      // Position of the next output token: drafts verify from here.
      std::int64_t index = row.num_output_tokens;
      if (row.samples) {
        // Accepts drafts up to the first wrong one, then samples one more token. With steps in
        // flight, drafts are placeholders (-1) in the decision and only the worker has their
        // values. A new request has no drafts yet, so its placeholders verify nothing.
        const bool knows_more = options_.async_scheduling && !row.is_new;
        for (const std::int32_t given : row.drafts) {
          const std::int32_t draft =
              given < 0 && knows_more ? plan.output.draft(index, options_.draft_acceptance_percent)
                                      : given;
          if (draft != plan.output.token(index)) break;
          output.tokens.push_back(draft);
          ++index;
        }
        output.tokens.push_back(plan.output.token(index++));
        // The abort reaches the engine before its next step, as a client's does that has seen the
        // token.
        if (plan.abort_after && index >= *plan.abort_after) {
          aborts_now_.push_back(plan.name);
          plan.abort_after.reset();
        }
      }
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
      // With asynchronous scheduling the worker keeps the drafts; the output has none.
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

  void step_done(std::int64_t scheduled_tokens) override {
    if (scheduled_tokens > 0) now_ += options_.step_time.step_ns(scheduled_tokens);
  }
  void request_left(std::string_view name, std::uint64_t ticket) override {
    plans_.take(ticket);
    // Every request that arrived is in waiters_, whether a record waits for it or not.
    const auto waiting = waiters_.find(std::string(name));
    LS_CHECK(waiting != waiters_.end(), "{} left and was not here", name);
    for (const std::size_t index : waiting->second) {
      Pending& pending = pending_[index];
      // The delay counts from the last of the named requests.
      pending.left_ns = std::max(pending.left_ns, now_);
      if (--pending.waits_for > 0) continue;
      const auto& request = std::get<TraceRequest>(trace_->records[index]);
      arrivals_.push({pending.left_ns + request.delay_ns, order_++, index});
    }
    waiters_.erase(waiting);
  }

  std::int64_t now_ns() const override { return now_; }
  std::optional<std::int64_t> next_due_ns() const override { return next_due(); }
  void advance_to(std::int64_t now_ns) override { now_ = std::max(now_, now_ns); }
  std::int64_t records_consumed() const override { return consumed_; }
  std::vector<std::string_view> features() const override {
    std::vector<std::string_view> features;
    for (const TraceRecord& record : trace_->records)
      if (const auto* control = std::get_if<TraceControl>(&record))
        features.push_back(control->kind == TraceControl::Kind::pause_state
                               ? "pause_state"
                               : reset_feature(control->preempts_running));
    return features;
  }

 private:
  // A record that has not become an event yet.
  struct Pending {
    std::uint64_t ordinal = 0;  // among requests
    std::size_t waits_for = 0;  // named requests that have not finished
    std::int64_t left_ns = 0;   // time at which the last named request finished
  };
  // A request that has arrived and not finished.
  struct Plan {
    PlannedOutput output;
    std::string name;
    std::optional<std::int32_t> abort_after;
  };

  // Registers a request for its time, or with the requests that it waits for. A name that no
  // earlier record has is not waited for. If none is left, the request arrives at delay_ns.
  void await(const TraceRequest& request, std::size_t index) {
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

  // Returns the time of the next event; absent: none is known. An arrival that waits for a running
  // request has no time yet.
  std::optional<std::int64_t> next_due() const {
    std::optional<std::int64_t> next;
    if (!arrivals_.empty()) next = arrivals_.top().t_ns;
    if (!aborts_.empty() && (!next || aborts_.top().t_ns < *next)) next = aborts_.top().t_ns;
    if (!aborts_now_.empty()) next = now_;
    return next;
  }

  // Turns a record into an event.
  void emit(std::size_t index, std::vector<WorkloadEvent>& events) {
    consumed_ = std::max(consumed_, static_cast<std::int64_t>(index) + 1);
    WorkloadEvent& event = events.emplace_back();
    const auto* request = std::get_if<TraceRequest>(&trace_->records[index]);
    if (request == nullptr) {
      const auto& control = std::get<TraceControl>(trace_->records[index]);
      event.kind = control.kind == TraceControl::Kind::pause_state
                       ? WorkloadEvent::Kind::pause_state
                       : WorkloadEvent::Kind::reset_prefix_cache;
      event.resets_running = control.preempts_running;
      event.pause_state = control.pause_state;
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
    // The arrival time that the scheduler sees: policies order requests by it.
    if (!request->after.empty()) event.request.arrival_ns = pending.left_ns + request->delay_ns;
    event.ticket = plans_.add(std::move(plan));
  }

  const std::shared_ptr<const Trace> trace_;
  const TraceWorkloadOptions options_;
  std::int64_t now_ = 0;
  std::int64_t consumed_ = 0;  // number of records up to the last one that became an event
  std::uint64_t order_ = 0;

  std::vector<Pending> pending_;         // by record
  DueQueue arrivals_;                    // of records
  Slab<std::string> timed_aborts_;       // names
  DueQueue aborts_;                      // into timed_aborts_
  std::vector<std::string> aborts_now_;  // aborts by output length, in order
  Slab<Plan> plans_;                     // by ticket
  // Per request that has not finished: the records that wait for it.
  std::unordered_map<std::string, std::vector<std::size_t>> waiters_;
};

}  // namespace

std::unique_ptr<Workload> make_trace_workload(std::shared_ptr<const Trace> trace,
                                              const TraceWorkloadOptions& options) {
  return std::make_unique<TraceWorkload>(std::move(trace), options);
}

std::unique_ptr<Workload> make_trace_workload(Trace trace, const TraceWorkloadOptions& options) {
  return make_trace_workload(std::make_shared<const Trace>(std::move(trace)), options);
}

}  // namespace lockstep
