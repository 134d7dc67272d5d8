#include "properties/invariants/invariants.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "reference/plan/capacity.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

std::span<const BlockId> behind(std::span<const BlockId> table, std::int64_t entry) {
  return table.subspan(std::min(static_cast<std::size_t>(entry), table.size()));
}

// Tokens of a hit that windows compute again; 0: none of the plan does.
std::int64_t replayed_tokens_of(const KVCacheConfig& plan) {
  std::int64_t tokens = 0;
  for (const KVCacheGroupSpec& group : plan.groups)
    if (group.spec.bounded_replay) tokens = std::max(tokens, group.spec.sliding_window);
  return tokens;
}

}  // namespace

Invariants::Invariants(const EngineConfig& engine, const KVCacheConfig& plan)
    : engine_(engine),
      plan_(plan),
      profile_(engine_profile(engine.engine)),
      holders_(plan.num_blocks),
      writers_(plan.num_blocks),
      has_pages_(has_host_pages(plan.groups)),
      cached_(plan.num_blocks),
      cached_before_(plan.num_blocks) {
  for (std::int32_t block = 1; block < plan.num_blocks; ++block)
    queue_before_.push_back(BlockId{block});
  for (const KVCacheGroupSpec& group : plan.groups) {
    planned_.push_back(max_blocks_per_request(group, plan_options_of(engine)));
    left_out_.push_back(is_page_source(group) || is_resident_pages(group.spec.kind));
  }
}

void Invariants::fail(std::string_view name, std::string request, std::string what) {
  if (violation_) return;
  violation_ = {name, step_, std::move(request), std::move(what)};
}

// Tokens that one table entry covers.
std::int64_t Invariants::block_size(std::int64_t group) const {
  const KVCacheSpec& spec = plan_.groups[group].spec;
  if (plan_.groups.size() == 1 && !is_state_kind(spec.kind)) return scheduler_block_size_;
  // A sharded group among several has as many tokens on every rank.
  return is_dealt_out(spec) ? spec.block_size * engine_.dcp : spec.block_size;
}

void Invariants::count_holders(const StepView& view) {
  std::ranges::fill(holders_, Holders{});
  for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g) {
    const KVCacheSpec& spec = plan_.groups[g].spec;
    for (std::int64_t i = 0; i < spec.sink_len / spec.block_size; ++i)  // its sinks' alone
      holders_[static_cast<BlockId>(1 + i)] = {.count = 1, .group = g};
  }
  for (const RequestId id : holding_) {
    for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g) {
      if (is_left_out(g)) continue;
      for (const BlockId block : view.model().block_table(id, g)) {
        if (block == kNullBlock) continue;
        Holders& holders = holders_[block];
        if (holders.count++ > 0 && holders.group != g)
          fail("one_group", std::string(view.model().name(id)),
               fmt::format("block {} is in a table of group {} and in one of group {}",
                           index_of(block), holders.group, g));
        holders.group = g;
      }
    }
  }
}

void Invariants::check_pool(const StepView& view) {
  const Scheduler& engine = view.model();
  const BlockPool& pool = engine.pool();
  is_free_.assign(holders_.size(), false);
  for (const BlockId block : queue_) {
    if (block == kNullBlock) return fail("null_block", {}, "the null block is in the free queue");
    if (is_free_[index_of(block)])
      return fail("conservation", {}, fmt::format("block {} is free twice", index_of(block)));
    is_free_[index_of(block)] = true;
  }
  if (std::ssize(queue_) != engine.num_free_blocks())
    return fail("conservation", {},
                fmt::format("{} blocks are in the free queue, which says it has {}", queue_.size(),
                            engine.num_free_blocks()));
  late_.assign(holders_.size(), 0);
  for (const BlockId block : engine.freed_late()) ++late_[index_of(block)];
  for (std::int32_t block = 1; block < plan_.num_blocks; ++block) {
    const std::int32_t held = holders_[BlockId{block}].count + late_[block];
    const std::int32_t count = pool.ref_cnt(BlockId{block});
    if (has_pages_ ? count < held : count != held)
      return fail("ref_cnt", {},
                  fmt::format("block {} has a reference count of {} and is in {} table entries",
                              block, count, held));
    if (is_free_[block] != (count == 0))
      return fail("conservation", {},
                  fmt::format("block {} is in {} table entries and is {}", block, held,
                              is_free_[block] ? "free" : "not free"));
  }
}

void Invariants::check_cache(const StepView& view) {
  const Scheduler& engine = view.model();
  if (cached_[kNullBlock]) return fail("null_block", {}, "the null block is cached");
  if (std::ranges::find(view.decision.zero, kNullBlock) != view.decision.zero.end())
    return fail("null_block", {}, "the null block is to be zeroed");
  for (std::int32_t block = 1; block < plan_.num_blocks; ++block) {
    const auto& content = cached_[BlockId{block}];
    if (!content) continue;
    const BlockId found = engine.find_cached(*content);
    if (found == kNullBlock || !engine.is_cached_as(found, *content))
      return fail("hash_to_block", {},
                  fmt::format("block {} is cached, and a lookup of its content finds {}", block,
                              found == kNullBlock ? std::string("nothing")
                                                  : fmt::format("block {}", index_of(found))));
    const Holders& holders = holders_[BlockId{block}];
    if (holders.count > 0 && holders.group != content->group)
      return fail("hash_to_block", {},
                  fmt::format("block {} is cached for group {} and held in group {}", block,
                              content->group, holders.group));
  }
}

void Invariants::check_limits(const StepView& view) {
  const SchedulerOutput& decision = view.decision;
  if (decision.total_num_scheduled_tokens > engine_.max_num_batched_tokens)
    return fail("limits", {},
                fmt::format("{} tokens are scheduled; a step has {}",
                            decision.total_num_scheduled_tokens, engine_.max_num_batched_tokens));
  const auto running = view.decisions.running();
  if (std::ssize(running) > engine_.max_num_seqs)
    return fail("limits", {},
                fmt::format("{} requests run; {} may", running.size(), engine_.max_num_seqs));
  const auto waiting = view.decisions.waiting();
  const std::vector<SkippedRequest> skipped = view.decisions.skipped();
  const std::vector<HeldRequest> held = view.decisions.held();
  for (const RequestId id : running)
    if (std::ranges::count(running, id) != 1 || std::ranges::count(waiting, id) != 0 ||
        std::ranges::count(skipped, id, &SkippedRequest::id) != 0 ||
        std::ranges::count(held, id, &HeldRequest::id) != 0)
      return fail("limits", std::string(view.name(id)),
                  "it runs twice, or runs and waits or has finished");
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    const auto name = [&] { return std::string(view.name(scheduled.id)); };
    if (scheduled.num_tokens < 1)
      return fail("limits", name(), fmt::format("{} tokens are scheduled", scheduled.num_tokens));
    if (std::ranges::count(running, scheduled.id) != 1)
      return fail("limits", name(), "it is scheduled and does not run");
    if (std::ranges::count(decision.scheduled, scheduled.id, &ScheduledRequest::id) != 1)
      return fail("limits", name(), "it is scheduled twice in one step");
  }
}

// Tokens of a hit that lie in blocks of the group, where `found` of them are not computed again.
std::int64_t Invariants::num_hit(std::size_t group, std::int64_t found) const {
  if (found == 0 || is_left_out(static_cast<std::int64_t>(group)) ||
      !is_prefix_cacheable(plan_.groups[group].spec))
    return 0;
  return found + replayed_tokens_of(plan_);
}

// Whole blocks of a prefix that was found here are cached as this request's own, by a hash that
// may cover more than their tokens.
void Invariants::check_hit(const StepView& view, RequestId id, std::int64_t num_tokens) {
  const std::span<const BlockKey> keys = view.model().block_keys(id);
  const std::int64_t hash_size = view.model().hash_block_size();
  for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
    const auto table = view.model().block_table(id, static_cast<std::int32_t>(g));
    const std::int64_t size = block_size(g);
    const std::int64_t end =
        std::min<std::int64_t>(num_hit(g, num_tokens) / size, std::ssize(table));
    for (std::int64_t i = 0; i < end; ++i) {
      const BlockId block = table[i];
      if (block == kNullBlock) continue;
      const auto content = view.model().cached_as(block);
      const auto last_hash = static_cast<std::size_t>((i + 1) * size / hash_size - 1);
      if (!content || last_hash >= keys.size() || content->key != keys[last_hash])
        fail("hit", std::string(view.model().name(id)),
             fmt::format("a hit of {} tokens uses block {} of group {}, which is {}", num_tokens,
                         index_of(block), g, content ? "cached as something else" : "not cached"));
    }
  }
}

// A scheduled request's hit, and the blocks that it, or its load, is about to write.
void Invariants::check_request(const StepView& view, std::size_t index) {
  const ScheduledRequest& scheduled = view.decision.scheduled[index];
  const auto name = [&] { return std::string(view.name(scheduled.id)); };
  const std::int64_t first = scheduled.computed;
  const std::int64_t last = first + scheduled.num_tokens;
  if (scheduled.is_new && first >= view.decisions.num_tokens(scheduled.id))
    fail("hit", name(),
         fmt::format("a hit of {} of {} tokens: none is left to compute", first,
                     view.decisions.num_tokens(scheduled.id)));
  const std::int64_t found = num_found_here(view, scheduled);
  if (scheduled.is_new) check_hit(view, scheduled.id, found);
  const std::int64_t computed_from =
      scheduled.is_new && is_asked(view, scheduled.id) ? found : first;
  replayed_to_.resize(std::max<std::size_t>(replayed_to_.size(), index_of(scheduled.id) + 1));
  if (scheduled.is_new || scheduled.is_resumed)
    replayed_to_[scheduled.id] =
        first == 0 || replayed_tokens_of(plan_) == 0 ? 0 : first + replayed_tokens_of(plan_);
  for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
    const auto table = view.model().block_table(scheduled.id, static_cast<std::int32_t>(g));
    const std::int64_t size = block_size(g);
    const KVCacheSpec& spec = plan_.groups[g].spec;
    const bool one_block = is_ring(spec) || (is_state_kind(spec.kind) &&
                                             spec.mamba_cache_mode == MambaCacheMode::none);
    std::int64_t written_from = is_ring(spec) ? 0 : computed_from;
    if (is_prefix_cacheable(spec))
      written_from = std::max(written_from, replayed_to_[scheduled.id]);
    if (is_cross_attention(spec)) {
      check_encoder_blocks(scheduled, name(), g, table);
      continue;
    }
    const bool is_hot = is_hot_pages(spec.kind);  // of a size of its own
    if (!one_block && !is_hot && std::ssize(table) * size < last)
      fail("table_covers", name(),
           fmt::format("tokens [{}, {}) are scheduled, and its table of group {} ends at {}", first,
                       last, g, std::ssize(table) * size));
    if (is_left_out(static_cast<std::int64_t>(g)) || is_hot) continue;
    const std::int64_t end = std::min<std::int64_t>(cdiv(last, size), std::ssize(table));
    for (std::int64_t i = 0; i < end; ++i) {
      const BlockId block = table[i];
      if (block == kNullBlock) continue;
      if (i >= written_from / size && writers_[block]++ > 0)
        fail("one_writer", name(),
             fmt::format("tokens [{}, {}) write block {} of group {}, which another request of the "
                         "step writes too",
                         written_from, last, index_of(block), g));
    }
  }
}

// All rows of an encoder are written in the step that computes them.
void Invariants::check_encoder_blocks(const ScheduledRequest& scheduled, const std::string& name,
                                      std::size_t group, std::span<const BlockId> table) {
  const std::int64_t size = plan_.groups[group].spec.block_size;
  if (scheduled.num_encoder_rows == 0) return;
  if (std::ssize(table) * size < scheduled.num_encoder_rows)
    fail("table_covers", name,
         fmt::format("its encoder computes {} rows, and its table of group {} ends at {}",
                     scheduled.num_encoder_rows, group, std::ssize(table) * size));
  for (const BlockId block : table)
    if (writers_[block]++ > 0)
      fail("one_writer", name,
           fmt::format("its encoder's rows go to block {} of group {}, which another request of "
                       "the step writes too",
                       index_of(block), group));
}

// By a request that this step has preempted: it may have been about to publish what it had computed
// before.
bool Invariants::was_computed(const StepView& view, std::int32_t group, BlockId block) const {
  for (const RequestId id : view.decision.preempted) {
    const Held* held = find_held(id);
    const auto computed = std::ranges::find(computed_, id, &decltype(computed_)::value_type::first);
    if (held == nullptr || computed == computed_.end()) continue;
    const auto& table = held->tables[static_cast<std::size_t>(group)];
    const auto entry = std::ranges::find(table, block);
    const std::int64_t end = (entry - table.begin() + 1) * block_size(group);
    if (entry != table.end() && end <= computed->second) return true;
  }
  return false;
}

// Content that has become findable with this decision is content that this step computes.
void Invariants::check_published(const StepView& view) {
  for (std::int32_t block = 1; block < plan_.num_blocks; ++block) {
    const auto& content = cached_[BlockId{block}];
    if (!content || content == cached_before_[BlockId{block}]) continue;
    const std::int32_t group = content->group;
    bool computed = was_computed(view, content->group, BlockId{block}) ||
                    was_loaded(view, content->group, BlockId{block});
    const std::int64_t part_end = view.model().num_cached_tokens(BlockId{block});
    for (const KVCacheBlockCopy& copy : view.decision.copies)
      computed |= copy.to == BlockId{block} && content == cached_before_[copy.from];
    for (const ScheduledRequest& scheduled : view.decision.scheduled) {
      const auto table = view.model().block_table(scheduled.id, content->group);
      const auto entry = std::ranges::find(table, BlockId{block});
      const std::int64_t end =
          part_end > 0 ? part_end : (entry - table.begin() + 1) * block_size(group);
      computed |= entry != table.end() && end <= scheduled.computed + scheduled.num_tokens;
    }
    if (!computed)
      return fail("published", {},
                  fmt::format("block {} of group {} can now be hit, and no request of the step "
                              "computes all of its tokens",
                              block, group));
  }
}

// Of the blocks that were free before the step, those newly allocated precede all that stay free. A
// preemption frees and allocates within the step: such steps are not checked.
void Invariants::check_queue_front(const StepView& view) {
  const SchedulerOutput& decision = view.decision;
  // Host pages leave the queue from any place, and come back to its end, within a step.
  if (!decision.preempted.empty() || has_pages_) return;
  // Both ends of a copy are held until it is noted, and may be free again.
  const auto is_copied = [&](BlockId block) {
    return std::ranges::any_of(decision.copies, [&](const KVCacheBlockCopy& copy) {
      return copy.from == block || copy.to == block;
    });
  };
  const auto first_to_stay = std::ranges::find_if(queue_before_, [&](BlockId block) {
    return view.model().ref_cnt(block) == 0 && !is_copied(block);
  });
  const std::span<const BlockId> staying(first_to_stay, queue_before_.end());
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const ScheduledRequest& scheduled = decision.scheduled[i];
    for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g) {
      const auto handed = decision.blocks(i, g);
      if (handed.empty()) continue;
      const std::int64_t found = scheduled.is_new ? num_found_here(view, scheduled) : 0;
      const std::int64_t hit = cdiv(num_hit(static_cast<std::size_t>(g), found), block_size(g));
      check_new_blocks(view, scheduled.id, behind(handed, hit), staying);
    }
  }
  for (const SkippedRequest& request : view.decisions.skipped()) {
    const auto from = loads_from_.find(request.id);
    if (from == loads_from_.end() || !is_asked(view, request.id)) continue;
    for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g) {
      const auto table = view.model().block_table(request.id, g);
      const std::int64_t hit = cdiv(from->second, block_size(g));
      check_new_blocks(view, request.id, behind(table, hit), staying);
    }
  }
}

void Invariants::check_new_blocks(const StepView& view, RequestId id,
                                  std::span<const BlockId> blocks,
                                  std::span<const BlockId> staying) {
  for (const BlockId block : blocks)
    if (std::ranges::find(staying, block) != staying.end())
      return fail("queue_front", std::string(view.model().name(id)),
                  fmt::format("block {} is allocated, and block {} has been free longer",
                              index_of(block), index_of(staying.front())));
}

// Whether blocks of such a group that cache nothing go before all that are free when their request
// ends.
bool Invariants::puts_unhashed_first(CacheKind kind) const {
  switch (profile_.freed_blocks) {
    case FreedBlocks::append:
      return false;
    case FreedBlocks::unhashed_behind_windows_first:
      return is_sliding_window(kind);
    case FreedBlocks::unhashed_first:
      return true;
    case FreedBlocks::unhashed_first_if_caching:
      return engine_.enable_prefix_caching;
  }
  return false;
}

// A naive model of the queue: each group of an ended request frees its blocks from the last to the
// first; blocks without another holder join after all free blocks, or, where the release requires
// it and they cache nothing, before them.
void Invariants::check_free_order(const StepView& view) {
  if (has_connector_) return check_free_order_beside_transfers(view);
  const auto running = view.decisions.running();
  for (const Held& held : held_) {
    const bool ended =
        std::ranges::find(view.stopped, held.id, &StoppedRequest::id) != view.stopped.end();
    if (!ended && std::ranges::find(running, held.id) == running.end())
      return;  // aborted meanwhile
  }
  const std::vector<BlockId>& actual = queue_;
  if (view.stopped.empty() && actual == queue_before_) return;
  // Where the ends of prompts are registered too, a block may have a hash that is not shown: it
  // counts as hashed if it has been put behind.
  const auto behind =
      queue_before_.empty() ? actual.begin() : std::ranges::find(actual, queue_before_.back());
  const auto is_hashed = [&](BlockId block) {
    return view.model().is_cached(block) ||
           (profile_.caches_prompt_tails && std::find(behind, actual.end(), block) != actual.end());
  };
  std::vector<BlockId> expected = queue_before_;
  for (const StoppedRequest& stopped : view.stopped) {
    const Held* held = find_held(stopped.id);
    if (held == nullptr) continue;
    for (std::size_t g = 0; g < held->tables.size(); ++g) {
      const std::vector<BlockId>& table = held->tables[g];
      const bool unhashed_first = puts_unhashed_first(plan_.groups[g].spec.kind);
      std::int64_t front = 0;
      for (auto block = table.rbegin(); block != table.rend(); ++block) {
        if (*block == kNullBlock) continue;
        if (--holders_[*block].count > 0) continue;
        const bool first = unhashed_first && !is_hashed(*block);
        expected.insert(first ? expected.begin() + front++ : expected.end(), *block);
      }
    }
  }
  const bool tails_unknown = profile_.caches_prompt_tails && queue_before_.empty();
  if (actual == expected || tails_unknown) return;
  const auto [at, place] = std::ranges::mismatch(actual, expected);
  fail(
      "free_order", {},
      fmt::format("position {} of the free queue holds {}; expected {}", at - actual.begin(),
                  at == actual.end() ? "nothing" : fmt::format("block {}", index_of(*at)),
                  place == expected.end() ? "nothing" : fmt::format("block {}", index_of(*place))));
}

void Invariants::look(const StepView& view) {
  queue_ = view.model().pool().free_queue(std::move(queue_));
  view.model().all_cached(cached_);
}

void Invariants::remember() {
  queue_before_.swap(queue_);
  std::swap(cached_before_, cached_);
}

const Invariants::Held* Invariants::find_held(RequestId id) const {
  const auto held = std::ranges::find(held_, id, &Held::id);
  return held == held_.end() ? nullptr : &*held;
}

void Invariants::decided(const StepView& view, std::span<const RecordedConnectorAnswer> answers) {
  if (violation_) return;
  step_ = view.decision.step;
  answers_ = answers;
  has_connector_ |= !answers.empty();
  scheduler_block_size_ = view.model().scheduler_block_size();
  look(view);
  holding_ = holding(view, std::move(holding_));
  count_holders(view);
  check_pool(view);
  check_cache(view);
  check_limits(view);
  std::ranges::fill(writers_, 0);
  for (std::size_t i = 0; i < view.decision.scheduled.size() && !violation_; ++i)
    check_request(view, i);
  check_loads(view);
  if (engine_.enable_prefix_caching) check_published(view);
  check_queue_front(view);
  check_planned(view);
  remember();
  held_.resize(holding_.size());
  for (std::size_t i = 0; i < holding_.size(); ++i) {
    held_[i].id = holding_[i];
    held_[i].tables.resize(plan_.groups.size());
    for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g) {
      const auto table = view.model().block_table(holding_[i], g);
      held_[i].tables[static_cast<std::size_t>(g)].assign(table.begin(), table.end());
    }
  }
}

void Invariants::finished(const StepView& view) {
  if (violation_) return;
  look(view);
  check_free_order(view);
  // Drafts in flight are counted, and not known to stand.
  computed_.clear();
  for (const RequestId id : view.decisions.running())
    computed_.emplace_back(
        id, std::min(view.model().num_computed_tokens(id), view.decisions.num_tokens(id)));
  remember();
}

void Invariants::end(const Scheduler& decisions) {
  if (decisions.has_unfinished_requests()) return;
  if (has_pages_ && (decisions.has_pages_under_way() || !decisions.held().empty())) return;
  step_ = -1;
  std::vector<bool> is_held(holders_.size());
  for (const HeldRequest& request : decisions.held())
    for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g)
      for (const BlockId block : decisions.block_table(request.id, g))
        is_held[index_of(block)] = block != kNullBlock;
  for (const BlockId block : decisions.freed_late()) is_held[index_of(block)] = true;
  const std::int64_t held = std::ranges::count(is_held, true);
  if (decisions.num_free_blocks() + held + num_sink_blocks(plan_.groups) != plan_.num_blocks - 1)
    fail("leak", {},
         fmt::format("no request is live, {} of {} blocks are free, and {} are sent or in flight",
                     decisions.num_free_blocks(), plan_.num_blocks - 1, held));
}

// Whether pools are planned for what requests hold.

// Pools are planned without what a step takes while another is in flight, and without the slots of
// drafts (docs/findings.md, 5 and 6), states without the copy of a part of a block (18): that many
// blocks are allowed here, and liveness judges the result.
void Invariants::check_planned(const StepView& view) {
  // In addition to the step just decided. Blocks kept by one of them stay until the next one.
  in_flight_max_ = std::max(in_flight_max_, view.model().num_steps_in_flight() - 1);
  for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g) {
    const KVCacheGroupSpec& group = plan_.groups[g];
    if (is_left_out(g)) continue;
    std::int64_t most = planned_[static_cast<std::size_t>(g)];
    if (engine_.async_scheduling)
      most += in_flight_max_ * (is_state_kind(group.spec.kind)
                                    ? 1 + group.spec.num_prefill_checkpoint_blocks
                                    : cdiv(engine_.max_num_batched_tokens, group.spec.block_size));
    // States are planned with a block for each draft; where the release retires by scheduled tokens
    // it keeps as many again, in case drafts are rejected.
    if (!is_state_kind(group.spec.kind) || profile_.retire_basis == RetireBasis::scheduled)
      most += cdiv(engine_.num_spec_tokens, group.spec.block_size);
    if (profile_.hits_parts_of_blocks && is_state_kind(group.spec.kind) &&
        group.spec.block_size > view.model().hash_block_size())
      ++most;
    for (const RequestId id : holding_) {
      const auto table = view.model().block_table(id, g);
      if (std::ssize(table) <= most) continue;
      const auto held = std::ssize(table) - std::ranges::count(table, kNullBlock);
      if (held > most)
        return fail(
            "planned_blocks", std::string(view.model().name(id)),
            fmt::format(
                "{} blocks of group {} are held, and the pool is planned for {} per request", held,
                g, most));
    }
  }
}

}  // namespace lockstep
