// What a KV connector loads and sends: whose blocks a transfer writes, and who keeps them
// meanwhile. A recording says when a load is over and which blocks it did not fill; what it filled
// holds the request's own prefix from then on.
#include <fmt/core.h>

#include <algorithm>

#include "properties/audit/audit_impl.h"
#include "sim/engine/wait_graph.h"

namespace lockstep {
namespace {

const RecordedConnectorAnswer* answer_of(const RecordedStep& step, const std::string& name) {
  if (!step.connector) return nullptr;
  const auto found = std::ranges::find(*step.connector, name, &RecordedConnectorAnswer::id);
  return found == step.connector->end() ? nullptr : &*found;
}

}  // namespace

// Tokens at the head of a request's table that were there before the step: a connector that loads
// within the step fills those behind the local hit.
std::int32_t Auditor::Impl::num_hit(const RecordedStep& step, const RecordedScheduled& scheduled,
                                    const AuditedRequest& request) const {
  const RecordedConnectorAnswer* const answer = answer_of(step, scheduled.id);
  if (request.transfer == Transfer::loaded || answer == nullptr) return scheduled.computed;
  return std::min(answer->local, scheduled.computed);
}

// A transfer fills positions [first, last) of the request, as far as it has tokens, but not the
// blocks that are reported invalid.
void Auditor::Impl::write_loaded(const AuditedRequest& request, std::int32_t first,
                                 std::int32_t last, std::span<const BlockId> invalid) {
  const std::int32_t end = std::min(last, static_cast<std::int32_t>(request.contents.size()));
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (is_state(groups_[g].spec)) {
      load_states(request, g, first, end, invalid);
      continue;
    }
    const std::int32_t size = block_size(g);
    for (std::int32_t p = first; p < end; ++p) {
      const auto index = static_cast<std::size_t>(p / size);
      const BlockId block =
          index < request.tables[g].size() ? request.tables[g][index] : kNullBlock;
      if (block == kNullBlock) continue;
      if (std::ranges::find(invalid, block) != invalid.end()) {
        ledger_.set_not_loaded(block, step_);
        continue;
      }
      if (!ledger_.belongs_to(block, static_cast<std::int32_t>(g))) {
        report(AuditRule::token_write, request, g, p, block,
               fmt::format("a load writes to block {}, which was not handed out to this group",
                           index_of(block)));
        break;
      }
      ledger_.write(block, p % size,
                    {request.contents[static_cast<std::size_t>(p)], request.index, p},
                    p == 0 ? request.root : request.contents[static_cast<std::size_t>(p) - 1]);
    }
  }
}

// The states at the ends of blocks, and at the end of the load; without a table by position, this
// one alone.
void Auditor::Impl::load_states(const AuditedRequest& request, std::size_t group,
                                std::int32_t first, std::int32_t end,
                                std::span<const BlockId> invalid) {
  const std::vector<BlockId>& table = request.tables[group];
  const bool by_position = groups_[group].spec.mamba_cache_mode != MambaCacheMode::none;
  const std::int32_t size = block_size(group);
  for (std::int32_t count = by_position ? first / size * size + size : end; first < end;
       count += size) {
    count = std::min(count, end);
    const auto entry = by_position ? static_cast<std::size_t>((count - 1) / size) : 0;
    const BlockId block = entry < table.size() ? table[entry] : kNullBlock;
    if (block != kNullBlock && std::ranges::find(invalid, block) == invalid.end()) {
      LedgerState& state = ledger_.state(block);
      state.content = request.contents[static_cast<std::size_t>(count) - 1];
      state.num_tokens = count;
      state.writer = request.index;
      state.inputs = {state.content};
      state.inputs_before = count;
    }
    if (count == end) break;
  }
}

// A load that takes longer than its step: the blocks are the request's from now on.
void Auditor::Impl::begin_load(const RecordedStep& step, const RecordedTable& loading) {
  const auto found = requests_.find(loading.id);
  const RecordedConnectorAnswer* const answer = answer_of(step, loading.id);
  if (found != requests_.end() && found->second.transfer == Transfer::loading) return;
  if (found == requests_.end() || answer == nullptr || !answer->external) {
    report(AuditRule::transfer, loading.id,
           "a load is under way that nobody asked the connector for");
    return;
  }
  AuditedRequest& request = found->second;
  request.transfer = Transfer::loading;
  request.held_since = step.step;
  request.invalid.clear();
  request.tables = loading.blocks;
  request.first_loaded = answer->local;
  request.computed = answer->local + *answer->external;
  request.reserved_to = request.computed + draft_slots_;
  if (request.computed > std::ssize(request.tokens) && !request.is_adrift() &&
      !request.is_past_telling)
    report(AuditRule::transfer, loading.id,
           fmt::format("{} tokens are said to be here and {} elsewhere, of {}", answer->local,
                       *answer->external, request.tokens.size()));
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (std::size_t i = 0; i < request.tables[g].size(); ++i)
      if (request.tables[g][i] != kNullBlock &&
          static_cast<std::int32_t>(i) * block_size(g) >= request.first_loaded)
        hand_out(request, g, i, request.tables[g][i]);
}

// A request that is asked about again holds nothing: nothing of its load arrived.
void Auditor::Impl::release_failed_loads(const RecordedStep& step) {
  if (!step.connector) return;
  for (const RecordedConnectorAnswer& answer : *step.connector) {
    const auto found = requests_.find(answer.id);
    if (found == requests_.end() || found->second.transfer != Transfer::loaded) continue;
    found->second.transfer = Transfer::none;
    for (auto& table : found->second.tables) table.clear();
  }
}

// After those that run have their tables: what begins to load may have hit their blocks.
void Auditor::Impl::begin_loads(const RecordedStep& step) {
  if (!step.loading) return;
  for (const RecordedTable& loading : *step.loading) begin_load(step, loading);
}

// A request has left; its blocks stay where a transfer needs them.
void Auditor::Impl::leave(const RecordedStep& step, const std::string& name) {
  const auto found = requests_.find(name);
  if (found == requests_.end()) return;
  AuditedRequest& request = found->second;
  request.running = false;
  request.has_left = true;
  if (std::ranges::find(step.held, name) != step.held.end()) request.is_sent = true;
  if (request.transfer == Transfer::loaded) request.transfer = Transfer::none;
  if (request.is_sent || request.transfer == Transfer::loading) return;
  requests_.erase(found);
}

// Rows whose attention read a block that was not filled: what they computed is void, and the engine
// drops it.
void Auditor::Impl::void_rows(const RecordedStep& step, std::vector<AuditRow>& rows) {
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

// The first of `computed` tokens that lies in one of the blocks; `computed` if none does.
std::int32_t Auditor::Impl::first_invalid(const AuditedRequest& request, std::int32_t computed,
                                          std::span<const BlockId> invalid) const {
  std::int32_t first = computed;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto num_blocks = std::min(request.tables[g].size(),
                                     static_cast<std::size_t>(ceil_div32(computed, block_size(g))));
    // What the window has left behind is others' by now.
    const std::size_t begin = first_needed(request, g, computed);
    for (std::size_t i = begin; i < num_blocks; ++i)
      if (std::ranges::find(invalid, request.tables[g][i]) != invalid.end())
        first = std::min(first, static_cast<std::int32_t>(i) * block_size(g));
  }
  return first;
}

// A row that was decided before it was known that the step before it had read a lost block. It is
// computed again; what it samples has to be dropped, or the request is adrift.
bool Auditor::Impl::is_dropped(const RecordedStep& step, const RecordedScheduled& scheduled,
                               AuditedRequest& request) {
  if (!config_.async_scheduling) return false;
  // Who comes in may have hit such a block.
  if (scheduled.is_new)
    for (const auto& [of_step, report] : reports_in_flight_)
      if (first_invalid(request, scheduled.computed, report.invalid_blocks) < scheduled.computed)
        request.void_step = of_step;
  const std::int32_t last = scheduled.computed + scheduled.tokens;
  const bool had_come_in = last_.output_of_step && *last_.output_of_step >= request.void_step;
  const bool is_behind =
      request.void_step >= 0 && request.void_step + 1 == step.step && !had_come_in;
  if (is_behind && !request.is_adrift() && !sampled_of(step, request.name).empty()) {
    request.adrift_since = step.step;
    request.adrift = fmt::format(
        "tokens [{}, {}) were scheduled before it was known that the step before them read a block "
        "that a load did not fill, and what they sample is kept",
        scheduled.computed, last);
  }
  if (request.is_adrift()) request.computed = request.scheduled_to = last;
  return is_behind || request.is_adrift();
}

// Nobody is given what it samples: it fails, or its client leaves.
void Auditor::Impl::give_up(const RecordedStep& step) {
  const auto gives_up = [&](const std::string& name) {
    if (const auto found = requests_.find(name); found != requests_.end())
      found->second.adrift.clear();
  };
  for (const auto* events : {&step.before, &step.during})
    for (const RecordedEvent& event : *events)
      if (event.kind == RecordedEvent::Kind::abort) gives_up(event.name);
  for (const RecordedStopped& stopped : step.stopped)
    if (stopped.reason == "error") gives_up(stopped.id);
}

// After the step: what came in with outputs, once the engine hears of it.
void Auditor::Impl::take_outputs(const RecordedStep& step) {
  for (const std::string& name : step.held)
    if (const auto found = requests_.find(name); found != requests_.end())
      found->second.is_sent = true;
  if (step.worker) reports_in_flight_.insert_or_assign(step.step, *step.worker);
  const std::int64_t last = config_.async_scheduling ? step.output_of_step.value_or(-1) : step.step;
  while (!reports_in_flight_.empty() && reports_in_flight_.begin()->first <= last) {
    take_report(reports_in_flight_.begin()->second);
    reports_in_flight_.erase(reports_in_flight_.begin());
  }
  for (const RecordedStopped& stopped : step.stopped)
    if (const auto found = requests_.find(stopped.id); found != requests_.end()) {
      check_stopped(stopped, found->second);
      const bool goes_on = stopped.reason == "stop" || stopped.reason == "length";
      if (found->second.is_session && goes_on)
        stop_session(last, found->second);
      else
        found->second.has_ended = true;
    }
  // What came in after an output that was missed shows that it is not on its way.
  for (UnheardFinding& unheard : unheard_)
    if (unheard.step <= last)
      tell(unheard.finding, cause_of(unheard.finding.rule, unheard.finding.request, {}));
  std::erase_if(unheard_, [&](const UnheardFinding& unheard) { return unheard.step <= last; });
  give_up(step);
  for (auto& [name, request] : requests_)
    if (!request.adrift.empty() && request.adrift_since <= last)
      report(AuditRule::attention_read, name, std::exchange(request.adrift, {}));
}

void Auditor::Impl::take_report(const RecordedWorker& worker) {
  for (auto& [name, request] : requests_)
    if (request.transfer == Transfer::loading)
      request.invalid.insert(request.invalid.end(), worker.invalid_blocks.begin(),
                             worker.invalid_blocks.end());
  for (const std::string& name : worker.received) {
    const auto found = requests_.find(name);
    if (found == requests_.end() || found->second.transfer != Transfer::loading) {
      report(AuditRule::transfer, name, "a load is reported complete that is not under way");
      continue;
    }
    AuditedRequest& request = found->second;
    if (std::ranges::find(worker.failed, name) != worker.failed.end()) {
      request.computed = request.first_loaded;
      request.transfer = Transfer::loaded;
      if (request.has_left) requests_.erase(found);
      continue;
    }
    write_loaded(request, request.first_loaded, request.computed, request.invalid);
    request.computed = first_invalid(request, request.computed, request.invalid);
    request.transfer = Transfer::loaded;
    if (request.has_left) requests_.erase(found);
  }
  for (const std::string& name : worker.sent) {
    const auto found = requests_.find(name);
    if (found == requests_.end() || !found->second.is_sent)
      report(AuditRule::transfer, name, "blocks are reported sent that nobody keeps");
    else
      requests_.erase(found);
  }
}

// A recording that ends while nothing runs and somebody waits in a circle: the engine never moves
// again.
void Auditor::Impl::check_standstill(const RecordedStep& last) {
  if (!last.running.empty() || !last.skipped) return;
  Standstill standstill;
  standstill.free_blocks = last.free_blocks;
  standstill.total_blocks = ledger_.num_blocks() - 1;
  const auto num_blocks = [](const AuditedRequest& request) {
    std::int64_t count = 0;
    for (const auto& table : request.tables)
      count += std::ranges::count_if(table, [](BlockId block) { return block != kNullBlock; });
    return count;
  };
  const auto add = [&](const std::string& name) {
    const auto found = requests_.find(name);
    if (found == requests_.end()) return;
    const AuditedRequest& request = found->second;
    const bool keeps = request.transfer != Transfer::none;
    const std::int64_t held = keeps ? num_blocks(request) : 0;
    standstill.queue.push_back(
        {.name = name,
         .blocks_held = held,
         .blocks_missing = num_blocks_missing(config_, groups_, std::ssize(request.tokens),
                                              keeps ? request.computed : 0, held),
         .held_since = keeps ? request.held_since : -1,
         .is_loading = request.transfer == Transfer::loading});
  };
  for (const RecordedSkipped& skipped : *last.skipped) add(skipped.id);
  for (const std::string& name : last.waiting) add(name);
  for (const auto& [name, request] : requests_)
    if (request.has_left) standstill.blocks_held_by_finished += num_blocks(request);
  const auto cycle = find_wait_cycle(standstill);
  if (!cycle) return;
  step_ = last.step;
  report(AuditRule::standstill, cycle->requests.front(), "nothing runs any more: " + cycle->text);
}

}  // namespace lockstep
