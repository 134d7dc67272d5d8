// What holds over all requests of a step: whose the blocks are, and that somebody gets on.
#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "properties/audit/audit_impl.h"

namespace lockstep {

// Parts of blocks can be hit where hashes are finer than the states' blocks and nothing but full
// attention is beside them (v1/core/kv_cache_utils.py, partial_hash_hits_enabled).
std::int32_t hit_alignment_of(const RecordingHeader& header) {
  bool has_parts = false;
  for (const KVCacheGroupSpec& group : header.groups) {
    const KVCacheSpec& spec = group.spec;
    if (spec.bounded_replay || is_ring(spec)) continue;
    if (spec.kind == CacheKind::mamba)
      has_parts |= spec.mamba_cache_mode == MambaCacheMode::align &&
                   spec.block_size > header.hash_block_size;
    else if ((spec.kind == CacheKind::sliding_window || spec.kind == CacheKind::chunked_local) &&
             spec.block_size != header.hash_block_size)
      return static_cast<std::int32_t>(std::max<std::int64_t>(1, header.scheduler_block_size));
  }
  const std::int64_t alignment = has_parts ? header.hash_block_size : header.scheduler_block_size;
  return static_cast<std::int32_t>(std::max<std::int64_t>(1, alignment));
}

// What every release zeroes beside states: full attention. The newer ones zero all attention.
std::vector<bool> zeroed_groups(const RecordingHeader& header) {
  std::vector<bool> zeroed(header.groups.size());
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  const bool has_states = std::ranges::any_of(
      header.groups, [](const KVCacheGroupSpec& group) { return is_state(group.spec); });
  if (profile == nullptr || !has_states || header.connector) return zeroed;
  for (std::size_t g = 0; g < zeroed.size(); ++g) {
    const KVCacheSpec& spec = header.groups[g].spec;
    zeroed[g] = spec.kind == CacheKind::full_attention ||
                (profile->zeroed_blocks == ZeroedBlocks::attention && keeps_tokens(spec));
  }
  return zeroed;
}

std::int32_t draft_slots_of(const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  switch (config.spec_method) {
    case SpecMethod::none:
    case SpecMethod::ngram:
      return 0;
    case SpecMethod::draft_model:
    case SpecMethod::eagle:
      return config.num_spec_tokens;
  }
  return 0;
}

bool has_draft_slots_at_once(const RecordingHeader& header) {
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  return profile != nullptr && profile->lookahead_in_first_step;
}

bool retires_by_scheduled_tokens(const RecordingHeader& header) {
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  return profile == nullptr || profile->retire_basis == RetireBasis::scheduled;
}

void Auditor::Impl::check_common_prefix(const RecordedStep& step) {
  if (!step.common_prefix_blocks) return;
  for (std::size_t g = 0; g < std::min(groups_.size(), step.common_prefix_blocks->size()); ++g) {
    const auto num_common = static_cast<std::size_t>(std::max((*step.common_prefix_blocks)[g], 0));
    const std::vector<BlockId>* first = nullptr;
    for (const std::string& name : step.running) {
      const auto it = requests_.find(name);
      if (it == requests_.end() || num_common == 0) continue;
      const std::vector<BlockId>& table = it->second.tables[g];
      if (first == nullptr) first = &table;
      if (table.size() >= num_common && first->size() >= num_common &&
          std::equal(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(num_common),
                     first->begin()))
        continue;
      report(
          AuditRule::common_prefix, it->second, g, -1, kNullBlock,
          fmt::format(
              "{} blocks are said to be common to all running requests; this one's table differs",
              num_common));
      break;
    }
  }
}

// Blocks of those that do not run: loading, loaded, or to be sent. Who has left has let go of what
// its window no longer reaches; whether drafts count there is said below.
std::set<BlockId> Auditor::Impl::kept_by_transfers(bool counts_drafts) const {
  std::set<BlockId> kept;
  for (const auto& [name, request] : requests_) {
    if (request.running || !request.keeps_blocks()) continue;
    const std::int32_t end =
        counts_drafts ? std::max(request.scheduled_to, request.computed) : request.computed;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const std::size_t first = request.has_left ? first_needed(request, g, end) : 0;
      for (std::size_t i = first; i < request.tables[g].size(); ++i)
        if (request.tables[g][i] != kNullBlock) kept.insert(request.tables[g][i]);
    }
  }
  return kept;
}

// Names those of the blocks that can be the lost ones.
void Auditor::Impl::report_leak(std::string what, std::int64_t num_missing,
                                const std::set<BlockId>& held) {
  constexpr std::size_t kTold = 8;
  if (leaks_.size() >= kTold)
    return report(AuditRule::conservation, {}, std::move(what), "more and more");
  Leak leak{num_taken_ + findings_.size(), step_, std::move(what), num_missing, {}};
  if (num_missing > 0)
    std::ranges::set_difference(in_use_, held, std::back_inserter(leak.candidates));
  // A request that starts over drops the blocks that it had: one cause.
  if (num_missing > 0 && num_missing <= std::ranges::count_if(leak.candidates, [&](BlockId block) {
                           return starts_over_.contains(ledger_.holders(block)[0].request);
                         }))
    return;
  report(AuditRule::conservation, {}, leak.what + lost_text(leak), fmt::format("{}", step_));
  leaks_.push_back(std::move(leak));
}

std::string Auditor::Impl::lost_text(const Leak& leak) const {
  constexpr std::int64_t kNamed = 8;
  std::string names;
  std::int64_t num = 0;
  for (const BlockId block : leak.candidates) {
    const LedgerHolder& last = ledger_.holders(block)[0];
    if (last.since > leak.step || last.request < 0 || ++num > kNamed) continue;
    names += fmt::format("{}block {}, last of request {} since step {}", num == 1 ? "" : "; ",
                         index_of(block), name_at(last.request), last.since);
  }
  if (num == 0) return {};
  if (num > kNamed) names += fmt::format("; {} more", num - kNamed);
  return num <= leak.num_missing ? fmt::format(". Lost: {}", names)
                                 : fmt::format(". Lost: {} of these: {}", leak.num_missing, names);
}

// Both ends of a copy stay until it has run. Who leaves while a step is in flight leaves before it
// is known which of its drafts stand, and a recording does not show when: the engine's count lies
// between the two.
void Auditor::Impl::check_conservation(const RecordedStep& step) {
  // What a session that waits has let go of behind its window is not shown.
  const bool waits =
      std::ranges::any_of(requests_, [](const auto& of) { return of.second.is_between_chunks; });
  if (!shows_all_holders_ || step.transfers.kv_holding) return;
  if (waits && !std::ranges::all_of(groups_, [](const KVCacheGroupSpec& group) {
        return keeps_all_tokens(group.spec);
      }))
    return;
  const std::set<BlockId> kept = kept_by_transfers(false);
  const std::int64_t num_sinks = num_sink_blocks(groups_);
  const auto adds_up = [&](std::int64_t held) {
    const std::int64_t excess = held + step.free_blocks + 1 + num_sinks - ledger_.num_blocks();
    if (excess > 0) return excess <= std::ssize(kept) - std::ssize(kept_by_transfers(true));
    return -excess <= num_copied_;
  };
  const std::int64_t kept_total = std::ssize(kept) + step.free_blocks + 1 + num_sinks;
  if (step.running.empty()) {
    if (adds_up(std::ssize(kept)))
      in_use_ = kept;
    else if (std::exchange(odd_total_, kept_total) != kept_total)
      report_leak(
          fmt::format("nobody runs, and {} of {} blocks are free besides the null block{}",
                      step.free_blocks, ledger_.num_blocks() - 1,
                      kept.empty() ? "" : fmt::format(", with {} kept for transfers", kept.size())),
          ledger_.num_blocks() - kept_total, kept);
  }
  if (!step.tables) return;
  std::map<std::int32_t, std::int32_t> group_of;
  for (const RecordedTable& table : *step.tables) {
    for (std::size_t g = 0; g < table.blocks.size(); ++g) {
      for (const BlockId block : table.blocks[g]) {
        if (block == kNullBlock) continue;
        const auto [at, is_new] = group_of.emplace(index_of(block), static_cast<std::int32_t>(g));
        if (!is_new && at->second != static_cast<std::int32_t>(g))
          report(AuditRule::conservation, table.id,
                 fmt::format("block {} is in the tables of group {} and of group {}",
                             index_of(block), at->second, g),
                 fmt::format("two groups, block {}", index_of(block)));
      }
    }
  }
  std::set<BlockId> held = kept;
  for (const auto& [block, group] : group_of) held.insert(BlockId{block});
  // A block that is lost stays lost: told once.
  const std::int64_t total = std::ssize(held) + step.free_blocks + 1 + num_sinks;
  if (adds_up(std::ssize(held)))
    in_use_ = std::move(held);
  else if (std::exchange(odd_total_, total) != total)
    report_leak(fmt::format("{} blocks are held and {} free, with the null block {} of {}",
                            held.size(), step.free_blocks, total, ledger_.num_blocks()),
                ledger_.num_blocks() - total, held);
}

// The worker knows of a table what was handed over; the scheduler goes by its own, in which it lets
// go of what a window has passed.
void Auditor::Impl::check_tables(const RecordedStep& step) {
  if (!step.tables) return;
  for (const RecordedTable& table : *step.tables) {
    const auto found = requests_.find(table.id);
    if (found == requests_.end() || !found->second.running || found->second.starts_over) continue;
    for (std::size_t g = 0; g < std::min(groups_.size(), table.blocks.size()); ++g) {
      if (!keeps_tokens(groups_[g].spec)) continue;
      const std::vector<BlockId>& handed = found->second.tables[g];
      const std::vector<BlockId>& shown = table.blocks[g];
      std::size_t i = 0;
      while (i < shown.size() &&
             (shown[i] == kNullBlock || (i < handed.size() && handed[i] == shown[i])))
        ++i;
      if (i == shown.size()) continue;
      report(AuditRule::handed_out, found->second, g, static_cast<std::int64_t>(i) * block_size(g),
             shown[i],
             i < handed.size()
                 ? fmt::format("the scheduler's table has block {} as entry {}, and the worker was "
                               "handed block {}",
                               index_of(shown[i]), i, index_of(handed[i]))
                 : fmt::format("the scheduler's table has block {} as entry {}, and the worker was "
                               "handed {} blocks",
                               index_of(shown[i]), i, handed.size()));
    }
  }
}

// The drafter writes behind the tokens of the step: without a slot there it writes to the null
// block, or to whoever has the next row of the table.
void Auditor::Impl::check_draft_slots(const RecordedScheduled& scheduled, const AuditRow& row,
                                      bool was_loaded) {
  if (draft_slots_ == 0 || (scheduled.is_new && !draft_slots_at_once_ && !was_loaded)) return;
  const std::int32_t end = std::min(row.counted_to + draft_slots_, config_.max_model_len);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!keeps_tokens(groups_[g].spec)) continue;
    const std::int64_t room = std::ssize(row.request->tables[g]) * block_size(g);
    if (room >= end) continue;
    report(
        AuditRule::draft_slots, *row.request, g, row.counted_to, kNullBlock,
        fmt::format("tokens up to {} are scheduled, and the drafter writes {} slots behind them; "
                    "the table of {} blocks ends at token {}",
                    row.counted_to, draft_slots_, row.request->tables[g].size(), room));
  }
}

// With the pool to itself a request gets all that it needs, since the engine takes no longer one
// than it has planned for; so nobody is sent back from there, and nobody waits.
void Auditor::Impl::check_progress(const RecordedStep& step) {
  const std::int64_t all = ledger_.num_blocks() - 1 - num_sink_blocks(groups_);
  const bool is_empty = step.running.empty() && step.scheduled.empty() && step.free_blocks == all;
  const auto is_order = [](const RecordedEvent& event) {
    return event.kind != RecordedEvent::Kind::add;
  };
  const bool is_told =
      std::ranges::any_of(step.before, is_order) || std::ranges::any_of(last_.during, is_order);
  if (!checks_progress_ || !is_empty || is_told || !step.inputs.blocked.empty() ||
      pause_state_ != PauseState::unpaused) {
    num_idle_steps_ = 0;
    return;
  }
  const std::string planned = fmt::format("one request of {} tokens is planned with {} of the {}",
                                          config_.max_model_len, planned_blocks_, all);
  if (step.preempted.size() == 1) {
    num_idle_steps_ = 0;
    const auto found = requests_.find(step.preempted.front());
    if (found == requests_.end()) return;
    // The pool is too small for whoever is as long: one cause.
    tell({.rule = AuditRule::standstill,
          .step = step_,
          .request = found->first,
          .token = found->second.computed,
          .what = fmt::format("is preempted after {} tokens though nobody else holds a block: it "
                              "needs more than there are, and {}",
                              found->second.computed, planned)},
         "preempted alone");
  } else if (!step.waiting.empty() && !step.skipped && ++num_idle_steps_ == 2) {
    report(AuditRule::standstill, step.waiting.front(),
           fmt::format("nobody runs, all blocks are free, and this request is not let in: nothing "
                       "will run before it, and {}",
                       planned));
  }
}

// A plan counts the running state and the one before, and one for each draft. What a step in flight
// keeps beside them (docs/findings.md, 5) is let pass: a pool that lacks it is seen to stand still.
void Auditor::Impl::check_planned(const RecordedStep& step) {
  in_flight_max_ = std::max(in_flight_max_, step.step - 1 - last_output_);
  if (!step.tables || scope_ == AuditScope::running_engine) return;
  for (const RecordedTable& table : *step.tables) {
    const auto found = requests_.find(table.id);
    if (found == requests_.end()) continue;
    for (std::size_t g = 0; g < std::min(groups_.size(), table.blocks.size()); ++g) {
      const KVCacheSpec& spec = groups_[g].spec;
      if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
      const std::int64_t planned = max_blocks_per_request(spec, plan_options_of(config_));
      const std::int64_t spare =
          in_flight_max_ + (keeps_states_of_drafts_ ? spec.num_speculative_blocks : 0);
      const auto held =
          std::ssize(table.blocks[g]) - std::ranges::count(table.blocks[g], kNullBlock);
      if (held <= planned + spare) continue;
      report(
          AuditRule::planned_blocks, table.id,
          fmt::format("{} states of group {} are held; the pool is planned for {} a request, and "
                      "{} more may be kept for what is not known yet",
                      held, g, planned, spare));
      break;
    }
  }
}

}  // namespace lockstep
