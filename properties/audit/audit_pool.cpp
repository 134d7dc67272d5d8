// What holds over all requests of a step: whose the blocks are, and that somebody gets on.
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <utility>

#include "properties/audit/audit_impl.h"
#include "reference/profiles/engine_profile.h"

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

// Both ends of a copy stay until it has run. Who leaves while a step is in flight leaves before it
// is known which of its drafts stand, and a recording does not show when: the engine's count lies
// between the two.
void Auditor::Impl::check_conservation(const RecordedStep& step) {
  const std::set<BlockId> kept = kept_by_transfers(false);
  const auto adds_up = [&](std::int64_t held) {
    const std::int64_t excess = held + step.free_blocks + 1 - ledger_.num_blocks();
    if (excess > 0) return excess <= std::ssize(kept) - std::ssize(kept_by_transfers(true));
    return -excess <= num_copied_;
  };
  const std::int64_t kept_total = std::ssize(kept) + step.free_blocks + 1;
  if (step.running.empty() && !adds_up(std::ssize(kept)) &&
      std::exchange(odd_total_, kept_total) != kept_total)
    report(
        AuditRule::conservation, {},
        fmt::format("nobody runs, and {} of {} blocks are free besides the null block{}",
                    step.free_blocks, ledger_.num_blocks() - 1,
                    kept.empty() ? "" : fmt::format(", with {} kept for transfers", kept.size())));
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
                             index_of(block), at->second, g));
      }
    }
  }
  const auto held = std::ssize(group_of) + std::ranges::count_if(kept, [&](BlockId block) {
                      return !group_of.contains(index_of(block));
                    });
  // A block that is lost stays lost: told once.
  const std::int64_t total = held + step.free_blocks + 1;
  if (adds_up(held) || std::exchange(odd_total_, total) == total) return;
  report(AuditRule::conservation, {},
         fmt::format("{} blocks are held and {} free, with the null block {} of {}", held,
                     step.free_blocks, total, ledger_.num_blocks()));
}

// With the pool to itself a request gets all that it needs, since the engine takes no longer one
// than it has planned for; so nobody is sent back from there, and nobody waits.
void Auditor::Impl::check_progress(const RecordedStep& step) {
  const auto all = static_cast<std::int64_t>(ledger_.num_blocks()) - 1;
  const bool is_empty = step.running.empty() && step.scheduled.empty() && step.free_blocks == all;
  const auto is_order = [](const RecordedEvent& event) {
    return event.kind != RecordedEvent::Kind::add;
  };
  const bool is_told =
      std::ranges::any_of(step.before, is_order) || std::ranges::any_of(last_.during, is_order);
  if (!checks_progress_ || !is_empty || is_told || pause_state_ != PauseState::unpaused) {
    num_idle_steps_ = 0;
    return;
  }
  const std::string planned = fmt::format("one request of {} tokens is planned with {} of the {}",
                                          config_.max_model_len, planned_blocks_, all);
  if (step.preempted.size() == 1) {
    num_idle_steps_ = 0;
    const auto found = requests_.find(step.preempted.front());
    if (found == requests_.end() || std::exchange(found->second.was_sent_back, true)) return;
    report(AuditRule::standstill, found->first,
           fmt::format("is preempted after {} tokens though nobody else holds a block: it needs "
                       "more than there are, and {}",
                       found->second.computed, planned));
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
  if (!step.tables || !checks_planned_) return;
  for (const RecordedTable& table : *step.tables) {
    const auto found = requests_.find(table.id);
    if (found == requests_.end() || found->second.holds_too_many) continue;
    for (std::size_t g = 0; g < std::min(groups_.size(), table.blocks.size()); ++g) {
      const KVCacheSpec& spec = groups_[g].spec;
      if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
      const std::int64_t planned = max_blocks_per_request(spec, plan_options_of(config_));
      const std::int64_t spare =
          in_flight_max_ + (keeps_states_of_drafts_ ? spec.num_speculative_blocks : 0);
      const auto held =
          std::ssize(table.blocks[g]) - std::ranges::count(table.blocks[g], kNullBlock);
      if (held <= planned + spare) continue;
      found->second.holds_too_many = true;
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
