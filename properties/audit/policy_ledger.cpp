#include "properties/audit/policy_ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "reference/plan/request_need.h"
#include "sim/engine/wait_graph.h"

namespace lockstep {
namespace {

bool has_order(const std::vector<RecordedEvent>& events) {
  return std::ranges::any_of(
      events, [](const RecordedEvent& event) { return event.kind != RecordedEvent::Kind::add; });
}

std::int64_t num_blocks_of(const AuditRequest& request) {
  std::int64_t count = 0;
  for (const auto& table : request.tables)
    count += std::ranges::count_if(table, [](BlockId block) { return block != kNullBlock; });
  return count;
}

}  // namespace

PolicyLedger::PolicyLedger(AuditCore& core, const KvTransferLedger& transfers,
                           const RecordingHeader& header)
    : Ledger(core),
      transfers_(transfers),
      adapters_max_(header.options.inputs.max_loras),
      encoder_rows_max_(header.encoder_compute_budget),
      knows_max_tokens_(is_given(header, "max_num_batched_tokens")),
      knows_max_requests_(is_given(header, "max_num_seqs")),
      planned_blocks_(planned_blocks_of_request(header.options.config, header.groups)),
      checks_progress_(setup_.scope == AuditScope::whole_recording && !header.connector &&
                       planned_blocks_ < header.num_blocks) {}

void PolicyLedger::begin(const RecordedEvent& event) {
  if (event.kind == RecordedEvent::Kind::pause_state) pause_state_ = event.pause_state;
}

// With a connector, a request may have to start over for another reason. A request that the step
// schedules again keeps its place: SGLang has replaced its table.
void PolicyLedger::check_victims(const RecordedStep& step) const {
  if (setup_.config.policy != SchedulingPolicy::priority || setup_.has_connector) return;
  for (const std::string& name : step.preempted) {
    const AuditRequest* victim = requests_.find(name);
    if (victim == nullptr || std::ranges::count(step.scheduled, name, &RecordedScheduled::id) > 0)
      continue;
    for (const std::string& other : step.running) {
      const AuditRequest* running = requests_.find(other);
      if (running == nullptr || !running->running || priorities_[*running] <= priorities_[*victim])
        continue;
      report(AuditRule::victim, name,
             fmt::format("is preempted with priority {}, and {} with priority {} runs on",
                         priorities_[*victim], other, priorities_[*running]));
      break;
    }
  }
}

void PolicyLedger::check_adapters(const RecordedStep& step) const {
  if (!adapters_max_) return;
  std::set<std::int64_t> adapters;
  for (const RecordedScheduled& row : step.scheduled) {
    const AuditRequest* request = requests_.find(row.id);
    if (request != nullptr && !request->keyed.keys.lora.name.empty())
      adapters.insert(request->keyed.keys.lora.id);
  }
  if (std::ssize(adapters) > *adapters_max_)
    report(AuditRule::limits, {},
           fmt::format("{} adapters are in the step, and a worker has room for {}: max_loras",
                       adapters.size(), *adapters_max_),
           "adapters");
}

void PolicyLedger::check_encoder(std::int64_t num_rows) const {
  if (encoder_rows_max_ && num_rows > *encoder_rows_max_)
    report(AuditRule::limits, {},
           fmt::format("{} rows are encoded in the step, and the encoder has room for {}: "
                       "encoder_compute_budget",
                       num_rows, *encoder_rows_max_),
           "budget");
}

void PolicyLedger::check_batch(const RecordedStep& step) const {
  std::int64_t num_tokens = 0;
  for (const RecordedScheduled& row : step.scheduled) num_tokens += row.tokens;
  if (knows_max_tokens_ && num_tokens > setup_.config.max_num_batched_tokens)
    report(AuditRule::limits, {},
           fmt::format("{} tokens are scheduled, and a worker has room for {}: "
                       "max_num_batched_tokens",
                       num_tokens, setup_.config.max_num_batched_tokens),
           "too many tokens");
  const auto num_rows = std::max(std::ssize(step.scheduled), std::ssize(step.running));
  if (knows_max_requests_ && num_rows > setup_.config.max_num_seqs)
    report(AuditRule::limits, {},
           fmt::format("{} requests run, and a worker has room for {}: max_num_seqs", num_rows,
                       setup_.config.max_num_seqs),
           "too many requests");
}

// The engine accepts no request that is longer than the plan, so no request alone in the pool is
// preempted, and none waits.
void PolicyLedger::step(const RecordedStep& step) {
  const bool is_ordered = has_order(step.before) || had_orders_;
  had_orders_ = has_order(step.during);
  last_.step = step.step;
  last_.running = step.running;
  last_.waiting = step.waiting;
  last_.skipped = step.skipped;
  last_.free_blocks = step.free_blocks;
  const std::int64_t all = pool_.num_blocks() - 1 - num_sink_blocks(setup_.groups);
  const bool is_empty = step.running.empty() && step.scheduled.empty() && step.free_blocks == all;
  if (!checks_progress_ || !is_empty || is_ordered || !step.inputs.blocked.empty() ||
      pause_state_ != PauseState::unpaused) {
    num_idle_steps_ = 0;
    return;
  }
  const std::string planned = fmt::format("one request of {} tokens is planned with {} of the {}",
                                          setup_.config.max_model_len, planned_blocks_, all);
  if (step.preempted.size() == 1) {
    num_idle_steps_ = 0;
    const AuditRequest* request = requests_.find(step.preempted.front());
    if (request == nullptr) return;
    // The pool is too small for every request of that length: one cause.
    findings_.add(
        {.rule = AuditRule::standstill,
         .step = step_number(),
         .request = request->name,
         .token = request->computed,
         .what = fmt::format("is preempted after {} tokens though no other request holds a "
                             "block: it needs more than there are, and {}",
                             request->computed, planned)},
        "preempted alone");
  } else if (!step.waiting.empty() && !step.skipped && ++num_idle_steps_ == 2) {
    report(AuditRule::standstill, step.waiting.front(),
           fmt::format(
               "no request runs, all blocks are free, and this request is not admitted: nothing "
               "will run before it, and {}",
               planned));
  }
}

void PolicyLedger::end() {
  if (!last_.running.empty() || !last_.skipped) return;
  Standstill standstill;
  standstill.free_blocks = last_.free_blocks;
  standstill.total_blocks = pool_.num_blocks() - 1;
  const auto add = [&](const std::string& name) {
    const AuditRequest* request = requests_.find(name);
    if (request == nullptr) return;
    const bool keeps = request->transfer != Transfer::none;
    const std::int64_t held = keeps ? num_blocks_of(*request) : 0;
    standstill.queue.push_back({.name = name,
                                .blocks_held = held,
                                .blocks_missing = num_blocks_missing(
                                    setup_.config, setup_.groups, std::ssize(request->tokens),
                                    keeps ? request->computed : 0, held),
                                .held_since = keeps ? transfers_.held_since(*request) : -1,
                                .is_loading = request->transfer == Transfer::loading});
  };
  for (const RecordedSkipped& skipped : *last_.skipped) add(skipped.id);
  for (const std::string& name : last_.waiting) add(name);
  for (const auto& [name, request] : requests_)
    if (request.has_left) standstill.blocks_held_by_finished += num_blocks_of(request);
  const auto cycle = find_wait_cycle(standstill);
  if (!cycle) return;
  findings_.begin_step(last_.step);
  report(AuditRule::standstill, cycle->requests.front(), "nothing runs again: " + cycle->text);
}

}  // namespace lockstep
