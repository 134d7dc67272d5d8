#include "properties/audit/kv_transfer_ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>
#include <utility>

#include "reference/plan/capacity.h"
#include "sim/engine/wait_graph.h"

namespace lockstep {
namespace {

const RecordedConnectorAnswer* answer_of(const RecordedStep& step, const std::string& name) {
  if (!step.connector) return nullptr;
  const auto found = std::ranges::find(*step.connector, name, &RecordedConnectorAnswer::id);
  return found == step.connector->end() ? nullptr : &*found;
}

bool contains(std::span<const BlockId> blocks, BlockId block) {
  return std::ranges::find(blocks, block) != blocks.end();
}

}  // namespace

// A connector that loads within the step fills the blocks after the local hit. It is queried with
// whole blocks of the hit; a hit that ends inside one is used if the load is not longer.
std::int32_t KvTransferLedger::num_hit(const RecordedStep& step, const RecordedScheduled& row,
                                       const AuditRequest& request) const {
  const RecordedConnectorAnswer* const answer = answer_of(step, row.id);
  if (request.transfer == Transfer::loaded || answer == nullptr) return row.computed;
  const std::int32_t num_after = row.computed - answer->local;
  const bool is_part =
      num_after > answer->external.value_or(0) && num_after < setup_.scheduler_block_size;
  return is_part ? row.computed : std::min(answer->local, row.computed);
}

std::int32_t KvTransferLedger::loaded_to(const RecordedStep& step, const RecordedScheduled& row) {
  const RecordedConnectorAnswer* const answer = answer_of(step, row.id);
  return answer == nullptr ? 0
                           : std::min(answer->local + answer->external.value_or(0), row.computed);
}

void KvTransferLedger::load(const AuditRequest& request, std::int32_t first, std::int32_t last,
                            std::span<const BlockId> invalid) {
  const std::int32_t end = std::min(last, static_cast<std::int32_t>(request.contents.size()));
  for (std::size_t g = 0; g < num_groups(); ++g) {
    if (is_state(spec_of(g))) {
      load_states(request, g, first, end, invalid);
      continue;
    }
    for (std::int32_t p = first; p < end; ++p) {
      const auto index = static_cast<std::size_t>(p / block_size(g));
      const BlockId block =
          index < request.tables[g].size() ? request.tables[g][index] : kNullBlock;
      if (block == kNullBlock) continue;
      if (contains(invalid, block))
        pool_.set_not_loaded(block, step_number());
      else if (!tokens_.load(request, g, p, block))
        break;
    }
  }
}

// The states at the ends of blocks and at the end of the load; without a table by position, only
// the last one.
void KvTransferLedger::load_states(const AuditRequest& request, std::size_t group,
                                   std::int32_t first, std::int32_t end,
                                   std::span<const BlockId> invalid) {
  const std::vector<BlockId>& table = request.tables[group];
  const bool by_position = spec_of(group).mamba_cache_mode != MambaCacheMode::none;
  const std::int32_t size = block_size(group);
  for (std::int32_t count = by_position ? first / size * size + size : end; first < end;
       count += size) {
    count = std::min(count, end);
    const auto entry = by_position ? static_cast<std::size_t>((count - 1) / size) : 0;
    const BlockId block = entry < table.size() ? table[entry] : kNullBlock;
    if (block != kNullBlock && !contains(invalid, block)) {
      PoolState& state = pool_.state(block);
      state.content = request.contents[static_cast<std::size_t>(count) - 1];
      state.num_tokens = count;
      state.writer = request.index;
      state.inputs = {state.content};
      state.inputs_before = count;
    }
    if (count == end) break;
  }
}

// A load that takes longer than its step: the blocks belong to the request from now on.
void KvTransferLedger::begin_load(const RecordedStep& step, const RecordedTable& loading) {
  AuditRequest* const request = requests_.find(loading.id);
  const RecordedConnectorAnswer* const answer = answer_of(step, loading.id);
  if (request != nullptr && request->transfer == Transfer::loading) {
    if (request->tables != loading.blocks)
      report(AuditRule::transfer, loading.id,
             "the blocks of its load in flight are not those that the load started with", "blocks");
    return;
  }
  if (request == nullptr || answer == nullptr || !answer->external) {
    report(AuditRule::transfer, loading.id,
           "a load is in flight that no query of the connector started");
    return;
  }
  Load& load = loads_[*request];
  load.held_since = step.step;
  load.invalid.clear();
  load.first = answer->local;
  request->transfer = Transfer::loading;
  request->tables = loading.blocks;
  request->computed = answer->local + *answer->external;
  blocks_.reserve_load(*request);
  if (request->computed > std::ssize(request->tokens) && !request->is_adrift &&
      !request->is_unpredictable)
    report(AuditRule::transfer, loading.id,
           fmt::format("{} tokens are reported here and {} elsewhere, of {}", answer->local,
                       *answer->external, request->tokens.size()));
  for (std::size_t g = 0; g < num_groups(); ++g)
    for (std::size_t i = 0; i < request->tables[g].size(); ++i)
      if (request->tables[g][i] != kNullBlock &&
          static_cast<std::int32_t>(i) * block_size(g) >= load.first)
        blocks_.allocate(*request, g, i, request->tables[g][i]);
}

// The scheduler queries the connector again for a request that has loaded nothing.
void KvTransferLedger::begin(const RecordedStep& step) {
  if (!step.connector) return;
  for (const RecordedConnectorAnswer& answer : *step.connector) {
    AuditRequest* const request = requests_.find(answer.id);
    if (request == nullptr || request->transfer != Transfer::loaded) continue;
    request->transfer = Transfer::none;
    for (auto& table : request->tables) table.clear();
  }
}

void KvTransferLedger::step(const RecordedStep& step) {
  if (!step.loading) return;
  for (const RecordedTable& loading : *step.loading) begin_load(step, loading);
}

void KvTransferLedger::release(const RecordedStep& step, const std::string& name) {
  AuditRequest* const request = requests_.find(name);
  if (request == nullptr) return;
  request->running = false;
  request->has_left = true;
  if (std::ranges::find(step.held, name) != step.held.end()) request->is_sent = true;
  if (request->transfer == Transfer::loaded) request->transfer = Transfer::none;
  if (request->is_sent || request->transfer == Transfer::loading) return;
  requests_.erase(name);
}

// The engine drops what these rows computed.
void KvTransferLedger::void_rows(const RecordedStep& step, std::vector<AuditRow>& rows) {
  if (!step.worker || step.worker->invalid_blocks.empty()) return;
  for (auto& [name, request] : requests_) {
    if (!request.running) continue;
    const auto row = std::ranges::find(rows, &request, &AuditRow::request);
    const std::int32_t computed = row == rows.end() ? request.computed : row->first;
    const std::int32_t valid = first_invalid(request, computed, step.worker->invalid_blocks);
    if (valid == computed) continue;
    request.computed = valid;
    if (row == rows.end()) continue;
    row->is_void = true;
    request.void_step = step.step;
    std::ranges::fill(row->contents, 0);
  }
}

// First of `computed` tokens whose block is invalid; `computed` if none is.
std::int32_t KvTransferLedger::first_invalid(const AuditRequest& request, std::int32_t computed,
                                             std::span<const BlockId> invalid) const {
  if (invalid.empty()) return computed;
  std::int32_t first = computed;
  for (std::size_t g = 0; g < num_groups(); ++g) {
    const auto num_blocks = std::min(request.tables[g].size(),
                                     static_cast<std::size_t>(ceil_div32(computed, block_size(g))));
    // Blocks before the window belong to other requests now.
    for (std::size_t i = blocks_.first_needed(request, g, computed); i < num_blocks; ++i)
      if (contains(invalid, request.tables[g][i]))
        first = std::min(first, static_cast<std::int32_t>(i) * block_size(g));
  }
  LS_CHECK(first <= computed, "token {} of {}", first, computed);
  return first;
}

// The row's samples have to be dropped, or the request is adrift.
bool KvTransferLedger::is_dropped(const RecordedStep& step, const RecordedScheduled& row,
                                  AuditRequest& request) {
  if (!setup_.config.async_scheduling) return false;
  // A new request may have hit a lost block.
  if (row.is_new)
    for (const auto& [of_step, report] : in_flight_)
      if (first_invalid(request, row.computed, report.invalid_blocks) < row.computed)
        request.void_step = of_step;
  const std::int32_t last = row.computed + row.tokens;
  const bool was_known = last_output_of_step_ && *last_output_of_step_ >= request.void_step;
  const bool is_after = request.void_step >= 0 && request.void_step + 1 == step.step && !was_known;
  if (is_after && !request.is_adrift && !sampled_of(step, request.name).empty()) {
    request.is_adrift = has_adrift_ = true;
    loads_[request].adrift_since = step.step;
    loads_[request].adrift = fmt::format(
        "tokens [{}, {}) were scheduled before it was known that the previous step read a block "
        "that a load did not fill, and what they sample is kept",
        row.computed, last);
  }
  if (request.is_adrift) request.computed = request.scheduled_to = last;
  return is_after || request.is_adrift;
}

void KvTransferLedger::end(const RecordedStep& step, std::int64_t last) {
  for (const std::string& name : step.held)
    if (AuditRequest* const request = requests_.find(name); request != nullptr)
      request->is_sent = true;
  if (step.worker) in_flight_.insert_or_assign(step.step, *step.worker);
  while (!in_flight_.empty() && in_flight_.begin()->first <= last) {
    receive(in_flight_.begin()->second);
    in_flight_.erase(in_flight_.begin());
  }
  last_output_of_step_ = step.output_of_step;
}

void KvTransferLedger::receive(const RecordedWorker& worker) {
  // A late report also sends back the request that holds the block now.
  for (auto& [name, request] : requests_)
    if (first_invalid(request, request.computed, worker.invalid_blocks) < request.computed)
      blocks_.note_withdrawn(request);
  for (auto& [name, request] : requests_)
    if (request.transfer == Transfer::loading)
      loads_[request].invalid.insert(loads_[request].invalid.end(), worker.invalid_blocks.begin(),
                                     worker.invalid_blocks.end());
  for (const std::string& name : worker.received) {
    AuditRequest* const request = requests_.find(name);
    if (request == nullptr || request->transfer != Transfer::loading) {
      report(AuditRule::transfer, name, "a load is reported complete that is not in flight");
      continue;
    }
    const Load& done = loads_[*request];
    if (std::ranges::find(worker.failed, name) != worker.failed.end()) {
      request->computed = done.first;
    } else {
      load(*request, done.first, request->computed, done.invalid);
      request->computed = first_invalid(*request, request->computed, done.invalid);
    }
    request->transfer = Transfer::loaded;
    if (request->has_left) requests_.erase(name);
  }
  for (const std::string& name : worker.sent) {
    const AuditRequest* const request = requests_.find(name);
    if (request == nullptr || !request->is_sent)
      report(AuditRule::transfer, name, "blocks are reported sent that no request keeps");
    else
      requests_.erase(name);
  }
}

// No client receives the samples of a request that fails or is aborted.
void KvTransferLedger::forgive_undelivered(const RecordedStep& step) {
  const auto forgive = [&](const std::string& name) {
    if (const AuditRequest* const request = requests_.find(name); request != nullptr)
      loads_[*request].adrift.clear();
  };
  for (const auto* events : {&step.before, &step.during})
    for (const RecordedEvent& event : *events)
      if (event.kind == RecordedEvent::Kind::abort) forgive(event.name);
  for (const RecordedStopped& stopped : step.stopped)
    if (stopped.reason == "error") forgive(stopped.id);
}

void KvTransferLedger::report_adrift(const RecordedStep& step, std::int64_t last) {
  if (!has_adrift_) return;
  forgive_undelivered(step);
  for (auto& [name, request] : requests_)
    if (Load& load = loads_[request]; !load.adrift.empty() && load.adrift_since <= last)
      report(AuditRule::attention_read, name, std::exchange(load.adrift, {}));
}

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
      // The cache of an encoder-decoder model limits nothing (finding 39).
      encoder_cache_max_(has_cross_attention(header.groups) ? std::nullopt
                                                            : header.encoder_cache_size),
      // SGLang's chunk size does not limit the tokens of decodes in a mixed step.
      knows_max_tokens_(header.engine.name != "sglang" &&
                        is_given(header, "max_num_batched_tokens")),
      knows_max_requests_(is_given(header, "max_num_seqs")),
      knows_max_drafts_(is_given(header, "num_spec_tokens")),
      planned_blocks_(planned_blocks_of_request(header.options.config, header.groups)),
      checks_progress_(setup_.scope == AuditScope::whole_recording && !header.connector &&
                       planned_blocks_ < header.num_blocks) {}

void PolicyLedger::begin(const RecordedEvent& event) {
  if (event.kind == RecordedEvent::Kind::pause_state) pause_state_ = event.pause_state;
}

// With a connector, a request may have to start over for another reason. SGLang also replaces the
// table of a request that ends in the step.
void PolicyLedger::check_victims(const RecordedStep& step) const {
  if (setup_.config.policy != SchedulingPolicy::priority || setup_.has_connector) return;
  for (const std::string& name : step.preempted) {
    const AuditRequest* victim = requests_.find(name);
    if (victim == nullptr || step.runs(name)) continue;
    if (setup_.profile == nullptr &&
        std::ranges::count(step.stopped, name, &RecordedStopped::id) > 0)
      continue;
    for (const std::string& other : step.running) {
      const AuditRequest* running = requests_.find(other);
      if (running == nullptr || !running->running || priorities_[*running] <= priorities_[*victim])
        continue;
      report(AuditRule::victim, name,
             fmt::format("is preempted with priority {}, and {} with priority {} keeps running",
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
           fmt::format("{} adapters are in the step, and a worker has space for {}: max_loras",
                       adapters.size(), *adapters_max_),
           "adapters");
}

void PolicyLedger::check_encoder(std::int64_t num_rows, std::int64_t num_held) const {
  if (encoder_cache_max_ && num_held > *encoder_cache_max_)
    report(AuditRule::limits, {},
           fmt::format("{} rows of the encoder are held, and its cache has space for {}: "
                       "encoder_cache_size",
                       num_held, *encoder_cache_max_),
           "encoder cache");
  if (encoder_rows_max_ && num_rows > *encoder_rows_max_)
    report(AuditRule::limits, {},
           fmt::format("{} rows are encoded in the step, and the encoder has space for {}: "
                       "encoder_compute_budget",
                       num_rows, *encoder_rows_max_),
           "budget");
}

// With PAUSED_NEW, vLLM still admits requests that hold blocks: loads and sessions.
void PolicyLedger::check_pause(const RecordedStep& step) const {
  if (pause_state_ == PauseState::unpaused) return;
  const bool all = pause_state_ == PauseState::paused_all;
  for (const RecordedScheduled& row : step.scheduled)
    if (all || (row.is_new && !setup_.has_connector))
      report(AuditRule::limits, row.id,
             fmt::format("is scheduled while {} is set", all ? "PAUSED_ALL" : "PAUSED_NEW"),
             "paused");
}

void PolicyLedger::check_batch(const RecordedStep& step) const {
  check_pause(step);
  std::int64_t num_tokens = 0;
  for (const RecordedScheduled& row : step.scheduled) num_tokens += row.tokens;
  if (knows_max_tokens_ && num_tokens > setup_.config.max_num_batched_tokens)
    report(AuditRule::limits, {},
           fmt::format(
               "{} tokens are scheduled, and a worker has space for {}: max_num_batched_tokens",
               num_tokens, setup_.config.max_num_batched_tokens),
           "too many tokens");
  for (const RecordedScheduled& row : step.scheduled)
    if (knows_max_drafts_ && std::ssize(row.spec) > setup_.config.num_spec_tokens)
      report(AuditRule::limits, row.id,
             fmt::format("{} drafts are scheduled, and the engine makes {}: num_spec_tokens",
                         row.spec.size(), setup_.config.num_spec_tokens),
             "too many drafts");
  const auto num_rows = std::max(std::ssize(step.scheduled), std::ssize(step.running));
  if (knows_max_requests_ && num_rows > setup_.config.max_num_seqs)
    report(AuditRule::limits, {},
           fmt::format("{} requests run, and a worker has space for {}: max_num_seqs", num_rows,
                       setup_.config.max_num_seqs),
           "too many requests");
}

// True if the step has space for a running request that it does not schedule. Next to rows of other
// requests, only a decode is certain to fit: engines run prefills first, or hold them back.
bool PolicyLedger::could_run(const RecordedStep& step, const AuditRequest& request,
                             bool is_decoding) const {
  const std::int64_t num_left = std::ssize(request.tokens) - request.computed;
  const bool awaits_encoder =
      !request.keyed.keys.mm.empty() && request.computed < request.num_prompt;
  if (!request.running || request.has_ended || request.is_unpredictable || request.is_adrift ||
      awaits_encoder || num_left <= 0 || waits_[request].since > core_.last_output)
    return false;
  if (step.free_blocks < num_blocks_missing(setup_.config, setup_.groups,
                                            std::ssize(request.tokens), request.computed, 0))
    return false;
  if (step.scheduled.empty()) return true;
  std::int64_t num_tokens = num_left + setup_.config.num_spec_tokens;
  for (const RecordedScheduled& row : step.scheduled) num_tokens += row.tokens;
  return is_decoding && num_left == 1 && request.keyed.keys.lora.name.empty() &&
         knows_max_requests_ && std::ssize(step.scheduled) < setup_.config.max_num_seqs &&
         knows_max_tokens_ && num_tokens <= setup_.config.max_num_batched_tokens;
}

void PolicyLedger::check_running(const RecordedStep& step) {
  bool is_decoding = false;
  for (const RecordedScheduled& row : step.scheduled) {
    const AuditRequest* request = requests_.find(row.id);
    if (request == nullptr) continue;
    waits_[*request] = {.since = step.step};
    is_decoding |= row.computed >= request->num_prompt;
  }
  if (!checks_progress_ || step.scheduled.size() >= step.running.size() ||
      !step.inputs.blocked.empty() || pause_state_ != PauseState::unpaused)
    return;
  // An engine that alternates between batches of its running requests schedules each in turn.
  const std::int64_t steps_max = std::max<std::int64_t>(16, 2 * std::ssize(step.running));
  for (const std::string& name : step.running) {
    const AuditRequest* request = requests_.find(name);
    if (request == nullptr || waits_[*request].since == step.step ||
        !could_run(step, *request, is_decoding) || ++waits_[*request].num_steps != steps_max)
      continue;
    report(AuditRule::standstill, name,
           fmt::format("runs with {} of its {} tokens computed, and no step has scheduled it since "
                       "step {}: no output of it is in flight, and {} of {} blocks are free",
                       request->computed, request->tokens.size(), waits_[*request].since,
                       step.free_blocks, pool_.num_blocks() - 1),
           "unscheduled");
  }
}

// The engine accepts no request that is longer than the plan, so no request alone in the pool is
// preempted, and none waits.
void PolicyLedger::step(const RecordedStep& step) {
  check_running(step);
  const bool is_ordered = has_order(step.before) || had_orders_;
  had_orders_ = has_order(step.during);
  last_.skipped.reset();
  if (step.running.empty() && step.skipped) last_ = step;
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
  if (!last_.skipped) return;
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
