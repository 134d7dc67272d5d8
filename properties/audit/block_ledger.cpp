#include "properties/audit/block_ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "reference/plan/capacity.h"

namespace lockstep {
namespace {

// Every release zeroes full attention next to states. The newer ones zero all attention.
std::vector<bool> zeroed_groups(const RecordingHeader& header, const EngineProfile* profile) {
  std::vector<bool> zeroed(header.groups.size());
  if (profile == nullptr || !has_states(header.groups) || header.connector) return zeroed;
  for (std::size_t g = 0; g < zeroed.size(); ++g) {
    const KVCacheSpec& spec = header.groups[g].spec;
    zeroed[g] = is_full_of_pairs(spec.kind) ||
                (profile->zeroed_blocks == ZeroedBlocks::attention && keeps_tokens(spec));
  }
  return zeroed;
}

// With some connectors, blocks have holders whose tables are not shown: a store into a host tier of
// vLLM's own, states that are being sent, and (0.33.0) requests that wait for the output of a step
// in flight.
bool shows_all_holders(const RecordingHeader& header, const EngineProfile* profile) {
  const bool defers_frees =
      profile != nullptr && profile->defers_frees && header.options.config.async_scheduling;
  return !header.connector ||
         (!defers_frees && header.connector->name.empty() &&
          !header.connector->requires_kv_delivery && !has_states(header.groups));
}

// Sorts the blocks; each remains once.
void make_set(std::vector<BlockId>& blocks) {
  std::ranges::sort(blocks);
  const auto repeated = std::ranges::unique(blocks);
  blocks.erase(repeated.begin(), repeated.end());
}

std::string_view what_needs_it(const AuditRequest& reader) {
  if (reader.transfer == Transfer::loading) return "still loads it";
  return reader.is_sent ? "still sends it" : "still reads it";
}

}  // namespace

BlockLedger::BlockLedger(AuditCore& core, const RecordingHeader& header)
    : Ledger(core),
      draft_slots_at_once_(setup_.profile != nullptr && setup_.profile->lookahead_in_first_step),
      keeps_states_of_drafts_(setup_.profile == nullptr ||
                              setup_.profile->retire_basis == RetireBasis::scheduled),
      shows_all_holders_(shows_all_holders(header, setup_.profile)),
      tells_copies_(!header.options.inputs.max_loras && !header.encoder_compute_budget),
      is_zeroed_(zeroed_groups(header, setup_.profile)) {}

void BlockLedger::begin(const RecordedStep& step) {
  check_copies(step);
  zeroed_now_ = step.zero;
  make_set(zeroed_now_);
  fresh_ = zeroed_now_;
  for (const BlockId block : step.zero)
    if (index_of(block) > 0 && index_of(block) < pool_.num_blocks())
      pool_.zero(block, step_number());
}

void BlockLedger::step(const RecordedStep& step) {
  // With a step in flight, the copies of two steps may not have run.
  num_copied_ = 2 * std::ssize(step.copies);
  if (setup_.config.async_scheduling) num_copied_ += num_copied_before_;
  num_copied_before_ = 2 * std::ssize(step.copies);
  check_conservation(step);
  check_common_prefix(step);
}

void BlockLedger::end() {
  for (const Leak& leak : leaks_) findings_.replace_text(leak.finding, leak.what + lost_text(leak));
}

void BlockLedger::restart(AuditRequest& request, std::int32_t computed, bool keeps_table) {
  Held& held = held_[request];
  if (!keeps_table && request.transfer != Transfer::loaded) held.reserved_to = 0;
  held.kept.assign(num_groups(), {});
  if (keeps_table) held.kept = std::move(request.tables);
  request.tables.resize(num_groups());
  for (auto& table : request.tables) table.clear();
  // A hit that is not longer than the tokens to compute again is not used.
  held.first_replayed = setup_.num_replayed > 0 ? computed : 0;
  held.last_replayed = held.first_replayed == 0 ? 0 : computed + setup_.num_replayed;
}

bool BlockLedger::extend(const RecordedScheduled& row, AuditRequest& request, std::int32_t hit) {
  if (!row.blocks) return false;
  if (row.blocks->size() != num_groups()) {
    report(AuditRule::recording, request.name,
           fmt::format("blocks of {} groups handed over; the engine has {}", row.blocks->size(),
                       num_groups()));
    return false;
  }
  const auto kept = std::exchange(held_[request].kept, {});
  const std::int32_t last_replayed = held_[request].last_replayed;
  for (std::size_t g = 0; g < num_groups(); ++g) {
    std::vector<BlockId>& table = request.tables[g];
    // Spare state blocks move to the new end of the table and are handed over again.
    const auto num_before = static_cast<std::ptrdiff_t>(table.size());
    const auto first_movable =
        std::max<std::ptrdiff_t>(0, num_before - spec_of(g).num_speculative_blocks);
    const std::span<const BlockId> own = g < kept.size() ? kept[g] : std::span<const BlockId>();
    for (const BlockId block : (*row.blocks)[g]) {
      if (index_of(block) < 0 || index_of(block) >= pool_.num_blocks()) {
        report(AuditRule::recording, request, g, -1, block,
               fmt::format("block {} is not in the pool", index_of(block)));
        continue;
      }
      const std::size_t index = table.size();
      const bool is_own = is_state(spec_of(g)) ? std::ranges::find(own, block) != own.end()
                                               : index < own.size() && own[index] == block;
      const auto movable = std::span(table).subspan(first_movable, num_before - first_movable);
      const bool moved = is_own || std::ranges::find(movable, block) != movable.end();
      table.push_back(block);
      // A block that this step zeroes was new to its first holder; later rows may have hit it.
      const bool is_fresh = std::erase(fresh_, block) > 0;
      const bool was_there =
          row.is_new && !is_fresh && is_hit(g, index, std::max(hit, last_replayed));
      // A request has a copy of the block that its hit ends in.
      const bool is_copy = !tells_copies_ && is_state(spec_of(g)) && hit % block_size(g) != 0 &&
                           std::cmp_equal(index, hit / block_size(g));
      if (block == kNullBlock || (was_there && !is_copy) || moved) continue;
      allocate(request, g, index, block);
    }
  }
  return true;
}

void BlockLedger::allocate(const AuditRequest& request, std::size_t group, std::size_t index,
                           BlockId block) {
  const auto first = static_cast<std::int32_t>(index) * block_size(group);
  if (const AuditRequest* reader = reader_of(block, &request); reader != nullptr) {
    report(AuditRule::handed_out, request, group,
           static_cast<std::int64_t>(index) * block_size(group), block,
           fmt::format("block {} becomes entry {} of the table, beyond the hit of {} tokens, while "
                       "request {} {}: it will be written while shared",
                       index_of(block), index, request.computed, reader->name,
                       what_needs_it(*reader)));
    return;
  }
  const auto g = static_cast<std::int32_t>(group);
  // A hit that is longer than the other groups' already holds the request's tokens.
  const bool is_own =
      std::cmp_less(first, request.contents.size()) && pool_.belongs_to(block, g) &&
      pool_.read(block, 0).content == request.contents[static_cast<std::size_t>(first)];
  if (is_zeroed_[group] && !is_own && !is_zeroed_now(block))
    report(
        AuditRule::zeroing, request, group, first, block,
        fmt::format("block {} becomes entry {} of the table and is not zeroed: a kernel may read "
                    "what a state left in it as numbers",
                    index_of(block), index));
  Held& held = held_[request];
  if (is_own) held.reserved_to = std::max(held.reserved_to, first + block_size(group));
  pool_.allocate(block, g, block_size(group), request.index, step_number());
  in_use_.push_back(block);
  if (std::ssize(in_use_) > 2 * pool_.num_blocks()) make_set(in_use_);
  LS_CHECK(pool_.belongs_to(block, g), "block {} of group {}", index_of(block), group);
}

void BlockLedger::reserve(const AuditRequest& request, std::int32_t end) {
  Held& held = held_[request];
  held.reserved_to =
      std::max(held.reserved_to, std::max(end, held.last_replayed) + setup_.draft_slots);
}

// Blocks of an earlier step stay when its drafts are rejected.
void BlockLedger::check_size(const AuditRow& row) {
  const AuditRequest& request = *row.request;
  if (held_[request].starts_over) return;
  for (std::size_t g = 0; g < num_groups(); ++g) {
    const auto num_held = std::ssize(request.tables[g]);
    if (is_state(spec_of(g))) {
      check_states(row, g);
      continue;
    }
    const std::int32_t needed = ceil_div32(held_[request].reserved_to, block_size(g));
    if (!keeps_tokens(spec_of(g)) || num_held <= needed) continue;
    report(AuditRule::excess_blocks, request, g, row.counted_to, request.tables[g].back(),
           fmt::format("the table has {} blocks, and {} tokens with {} slots for drafts need {}",
                       num_held, row.counted_to, setup_.draft_slots, needed));
  }
}

// The row of a worker's table has space for a state per block, or for one; and for one per draft.
void BlockLedger::check_states(const AuditRow& row, std::size_t group) const {
  const KVCacheSpec& spec = spec_of(group);
  const auto num_held = std::ssize(row.request->tables[group]);
  const std::int64_t num_max = spec.num_speculative_blocks +
                               (spec.mamba_cache_mode == MambaCacheMode::none
                                    ? 1
                                    : ceil_div32(setup_.config.max_model_len, block_size(group)));
  if (num_held > num_max)
    report(AuditRule::excess_blocks, *row.request, group, row.counted_to,
           row.request->tables[group].back(),
           fmt::format("the table has {} states, and a row has space for {}", num_held, num_max));
}

// `computed` already excludes tokens of lost blocks and rejected drafts, and a reset ends the run.
void BlockLedger::check_progress_of(const AuditRow& row) {
  const AuditRequest& request = *row.request;
  Held& held = held_[request];
  if (row.first >= request.computed || held.has_withdrawn) return;
  held.starts_over = true;
  starts_over_.insert(request.index);
  report(AuditRule::computed_again, request.name,
         fmt::format("computes tokens [{}, {}) again: it had {} computed after step {}, and no "
                     "preemption, reset, rejected draft or lost block sent it back",
                     row.first, std::min(row.last, request.computed), request.computed,
                     held.computed_in));
}

// Without a slot after the tokens of the step, the draft model writes to the null block or to
// another request's block.
void BlockLedger::check_draft_slots(const RecordedScheduled& scheduled, const AuditRow& row,
                                    bool was_loaded) {
  if (setup_.draft_slots == 0 || (scheduled.is_new && !draft_slots_at_once_ && !was_loaded)) return;
  const std::int32_t end =
      std::min(row.counted_to + setup_.draft_slots, setup_.config.max_model_len);
  for (std::size_t g = 0; g < num_groups(); ++g) {
    if (!keeps_tokens(spec_of(g))) continue;
    const std::int64_t room = std::ssize(row.request->tables[g]) * block_size(g);
    if (room >= end) continue;
    report(AuditRule::draft_slots, *row.request, g, row.counted_to, kNullBlock,
           fmt::format("tokens up to {} are scheduled, and the draft model writes {} slots after "
                       "them; the table of {} blocks ends at token {}",
                       row.counted_to, setup_.draft_slots, row.request->tables[g].size(), room));
  }
}

// A load writes every block of its table, and the waiting request releases none.
std::size_t BlockLedger::first_needed(const AuditRequest& request, std::size_t group,
                                      std::int32_t reached) const {
  if (request.transfer != Transfer::none) return 0;
  return static_cast<std::size_t>(setup_.first_read(group, reached) / block_size(group));
}

std::int32_t BlockLedger::gap_end(const AuditRequest& request, std::size_t group,
                                  std::int32_t position) const {
  const auto window = static_cast<std::int32_t>(spec_of(group).rswa_window);
  return window == 0 ? 0 : std::max(request.num_prompt, position + 1 - window);
}

bool BlockLedger::is_hit(std::size_t group, std::size_t index, std::int32_t hit) const {
  const KVCacheSpec& spec = spec_of(group);
  return !is_ring(spec) && !spec.bounded_replay &&
         static_cast<std::int64_t>(index) * block_size(group) < hit;
}

// A request other than `holder` that can still read the block, or whose transfer does; null: none.
// States are checked where they are read.
const AuditRequest* BlockLedger::reader_of(BlockId block, const AuditRequest* holder) const {
  if (!setup_.checks_rules()) return nullptr;
  for (const auto& [name, other] : requests_) {
    if (!other.keeps_blocks() || &other == holder) continue;
    for (std::size_t g = 0; g < num_groups(); ++g) {
      if (is_state(spec_of(g))) continue;
      const std::vector<BlockId>& table = other.tables[g];
      if (std::ranges::find(table, block) == table.end()) continue;
      // A finished request may have freed window blocks that its in-flight drafts had passed.
      const std::int32_t reached =
          other.has_left ? std::max(other.computed, other.scheduled_to) : other.computed;
      const auto first = std::min(first_needed(other, g, reached), table.size());
      const auto last = std::min(
          static_cast<std::size_t>(ceil_div32(other.computed, block_size(g))), table.size());
      const std::int32_t gap_last = gap_end(other, g, reached);
      for (std::size_t i = first; i < last; ++i) {
        const auto begin = static_cast<std::int32_t>(i) * block_size(g);
        const bool is_in_gap = begin >= other.num_prompt && begin + block_size(g) <= gap_last;
        if (table[i] == block && !is_in_gap) return &other;
      }
    }
  }
  return nullptr;
}

void BlockLedger::check_copies(const RecordedStep& step) {
  for (const KVCacheBlockCopy& copy : step.copies)
    if (const AuditRequest* reader = reader_of(copy.to, nullptr); reader != nullptr)
      report(AuditRule::handed_out, reader->name,
             fmt::format("block {} is copied to block {}, which this request still reads",
                         index_of(copy.from), index_of(copy.to)),
             fmt::format("copy {}", index_of(copy.to)));
}

void BlockLedger::check_common_prefix(const RecordedStep& step) {
  if (!step.common_prefix_blocks) return;
  for (std::size_t g = 0; g < std::min(num_groups(), step.common_prefix_blocks->size()); ++g) {
    const auto num_common = static_cast<std::size_t>(std::max((*step.common_prefix_blocks)[g], 0));
    if (num_common == 0) continue;
    const std::vector<BlockId>* first = nullptr;
    for (const std::string& name : step.running) {
      const AuditRequest* request = requests_.find(name);
      if (request == nullptr) continue;
      const std::vector<BlockId>& table = request->tables[g];
      if (first == nullptr) first = &table;
      if (table.size() >= num_common && first->size() >= num_common &&
          std::equal(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(num_common),
                     first->begin()))
        continue;
      report(AuditRule::common_prefix, *request, g, -1, kNullBlock,
             fmt::format("{} blocks are reported as common to all running requests; this one's "
                         "table differs",
                         num_common));
      break;
    }
  }
}

void BlockLedger::check_shown_tables(const RecordedStep& step) {
  in_flight_max_ = std::max(in_flight_max_, step.step - 1 - core_.last_output);
  if (!step.tables) return;
  check_planned(step);
  check_tables(step);
}

// Blocks of requests that do not run: loading, loaded, or to be sent. A finished request has freed
// the blocks that its window has passed; `counts_drafts`: past its drafts too.
std::vector<BlockId> BlockLedger::kept_by_transfers(bool counts_drafts) const {
  std::vector<BlockId> kept;
  for (const auto& [name, request] : requests_) {
    if (request.running || !request.keeps_blocks()) continue;
    const std::int32_t end =
        counts_drafts ? std::max(request.scheduled_to, request.computed) : request.computed;
    for (std::size_t g = 0; g < num_groups(); ++g) {
      const std::size_t first = request.has_left ? first_needed(request, g, end) : 0;
      for (std::size_t i = first; i < request.tables[g].size(); ++i)
        if (request.tables[g][i] != kNullBlock) kept.push_back(request.tables[g][i]);
    }
  }
  make_set(kept);
  return kept;
}

// Names the blocks that can be the lost ones.
void BlockLedger::report_leak(std::string what, std::int64_t num_missing,
                              const std::vector<BlockId>& held) {
  constexpr std::size_t kReported = 8;
  if (leaks_.size() >= kReported)
    return report(AuditRule::conservation, {}, std::move(what), "more and more");
  Leak leak{findings_.next_number(), step_number(), std::move(what), num_missing, {}};
  make_set(in_use_);
  if (num_missing > 0)
    std::ranges::set_difference(in_use_, held, std::back_inserter(leak.candidates));
  const auto num_dropped = std::ranges::count_if(leak.candidates, [&](BlockId block) {
    return starts_over_.contains(pool_.holders(block)[0].request);
  });
  if (num_missing > 0 && num_missing <= num_dropped) return;  // (8)
  report(AuditRule::conservation, {}, leak.what + lost_text(leak),
         fmt::format("{}", step_number()));
  leaks_.push_back(std::move(leak));
}

std::string BlockLedger::lost_text(const Leak& leak) const {
  constexpr std::int64_t kNamed = 8;
  std::string names;
  std::int64_t num = 0;
  for (const BlockId block : leak.candidates) {
    const BlockOwner& last = pool_.holders(block)[0];
    if (last.since > leak.step || last.request < 0 || ++num > kNamed) continue;
    names += fmt::format("{}block {}, last of request {} since step {}", num == 1 ? "" : "; ",
                         index_of(block), requests_.name_at(last.request), last.since);
  }
  if (num == 0) return {};
  if (num > kNamed) names += fmt::format("; {} more", num - kNamed);
  return num <= leak.num_missing ? fmt::format(". Lost: {}", names)
                                 : fmt::format(". Lost: {} of these: {}", leak.num_missing, names);
}

// Both ends of a copy stay until it has run. A request that finishes with a step in flight releases
// its window before the accepted drafts are known, and a recording does not show when: the engine's
// count lies between the two.
void BlockLedger::check_conservation(const RecordedStep& step) {
  lists_running_ = lists_running_ || !step.running.empty();
  const bool is_idle = step.running.empty() &&
                       (lists_running_ || std::ranges::none_of(requests_, [](const auto& of) {
                          return of.second.running;
                        }));
  if (!is_idle && !step.tables) return;
  // The blocks that a waiting session has released before its window are not shown.
  const bool waits =
      std::ranges::any_of(requests_, [](const auto& of) { return of.second.is_between_chunks; });
  if (!shows_all_holders_ || step.transfers.kv_holding || step.free_blocks < 0) return;
  if (waits && !std::ranges::all_of(setup_.groups, [](const KVCacheGroupSpec& group) {
        return keeps_all_tokens(group.spec);
      }))
    return;
  adds_up_blocks_ = adds_up_blocks_ || !in_use_.empty();
  const std::vector<BlockId> kept = kept_by_transfers(false);
  const std::int64_t num_sinks = num_sink_blocks(setup_.groups);
  const auto total_of = [&](const std::vector<BlockId>& held) {
    return std::ssize(held) + step.free_blocks + 1 + num_sinks;
  };
  const auto adds_up = [&](const std::vector<BlockId>& held) {
    const std::int64_t excess = total_of(held) - pool_.num_blocks();
    if (excess > 0) return excess <= std::ssize(kept) - std::ssize(kept_by_transfers(true));
    return -excess <= num_copied_;
  };
  // A block that is lost stays lost: each new total is reported once.
  const auto is_new_total = [&](std::int64_t total) {
    return std::exchange(odd_total_, total) != total;
  };
  if (is_idle) {
    if (adds_up(kept))
      in_use_ = kept;
    else if (is_new_total(total_of(kept)))
      report_leak(
          fmt::format("no request runs, and {} of {} blocks are free besides the null block{}",
                      step.free_blocks, pool_.num_blocks() - 1,
                      kept.empty() ? "" : fmt::format(", with {} kept for transfers", kept.size())),
          pool_.num_blocks() - total_of(kept), kept);
  }
  if (!step.tables) return;
  std::vector<BlockId> held = shown_blocks(*step.tables);
  held.insert(held.end(), kept.begin(), kept.end());
  make_set(held);
  const std::int64_t total = total_of(held);
  if (adds_up(held))
    in_use_ = std::move(held);
  else if (is_new_total(total))
    report_leak(fmt::format("{} blocks are held and {} free, with the null block {} of {}",
                            held.size(), step.free_blocks, total, pool_.num_blocks()),
                pool_.num_blocks() - total, held);
}

// All blocks of the tables but the null block, in order; reports a block of two groups.
std::vector<BlockId> BlockLedger::shown_blocks(const std::vector<RecordedTable>& tables) const {
  std::vector<std::tuple<BlockId, std::size_t, const RecordedTable*>> shown;
  for (const RecordedTable& table : tables)
    for (std::size_t g = 0; g < table.blocks.size(); ++g)
      for (const BlockId block : table.blocks[g])
        if (block != kNullBlock) shown.emplace_back(block, g, &table);
  std::ranges::stable_sort(shown, {}, [](const auto& one) { return std::get<0>(one); });
  std::vector<BlockId> blocks;
  std::size_t group = 0;  // of the first table that has the last of `blocks`
  for (const auto& [block, g, table] : shown) {
    if (blocks.empty() || blocks.back() != block) {
      blocks.push_back(block);
      group = g;
    } else if (g != group) {
      report(AuditRule::conservation, table->id,
             fmt::format("block {} is in the tables of group {} and of group {}", index_of(block),
                         group, g),
             fmt::format("two groups, block {}", index_of(block)));
    }
  }
  return blocks;
}

void BlockLedger::check_tables(const RecordedStep& step) {
  for (const RecordedTable& table : *step.tables) {
    const AuditRequest* request = requests_.find(table.id);
    if (request == nullptr || !request->running || held_[*request].starts_over) continue;
    for (std::size_t g = 0; g < std::min(num_groups(), table.blocks.size()); ++g) {
      if (!keeps_tokens(spec_of(g))) continue;
      const std::vector<BlockId>& handed = request->tables[g];
      const std::vector<BlockId>& shown = table.blocks[g];
      std::size_t i = 0;
      while (i < shown.size() &&
             (shown[i] == kNullBlock || (i < handed.size() && handed[i] == shown[i])))
        ++i;
      if (i == shown.size()) continue;
      report(AuditRule::handed_out, *request, g, static_cast<std::int64_t>(i) * block_size(g),
             shown[i],
             i < handed.size() ? fmt::format("the scheduler's table has block {} as entry {}, but "
                                             "the worker received block {}",
                                             index_of(shown[i]), i, index_of(handed[i]))
                               : fmt::format("the scheduler's table has block {} as entry {}, but "
                                             "the worker received {} blocks",
                                             index_of(shown[i]), i, handed.size()));
    }
  }
}

// A plan counts the running state, the previous one, and one per draft. A step in flight may keep
// further ones (docs/findings.md, 5).
void BlockLedger::check_planned(const RecordedStep& step) {
  if (setup_.scope == AuditScope::running_engine) return;
  for (const RecordedTable& table : *step.tables) {
    if (requests_.find(table.id) == nullptr) continue;
    for (std::size_t g = 0; g < std::min(num_groups(), table.blocks.size()); ++g) {
      const KVCacheSpec& spec = spec_of(g);
      if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
      const std::int64_t planned = max_blocks_per_request(spec, plan_options_of(setup_.config));
      const std::int64_t spare =
          in_flight_max_ + (keeps_states_of_drafts_ ? spec.num_speculative_blocks : 0);
      const auto held =
          std::ssize(table.blocks[g]) - std::ranges::count(table.blocks[g], kNullBlock);
      if (held <= planned + spare) continue;
      report(AuditRule::planned_blocks, table.id,
             fmt::format("{} states of group {} are held; the pool is planned for {} per request, "
                         "and {} more may be kept for what is not known yet",
                         held, g, planned, spare));
      break;
    }
  }
}

}  // namespace lockstep
