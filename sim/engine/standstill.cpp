#include "sim/engine/standstill.h"

#include <algorithm>

#include "base/check.h"
#include "reference/plan/context_share.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

// Blocks that a request's tokens take in a group.
std::int64_t num_blocks_for(const KVCacheSpec& spec, std::int64_t tokens) {
  if (spec.kind == CacheKind::mamba && spec.mamba_cache_mode != MambaCacheMode::all)
    return 1 + spec.num_speculative_blocks;
  std::int64_t kept = tokens;
  if (spec.kind == CacheKind::sliding_window)
    kept = std::min(tokens, spec.sliding_window + spec.block_size);
  if (spec.kind == CacheKind::chunked_local)
    kept = std::min(tokens, spec.attention_chunk_size + spec.block_size);
  return cdiv(kept, spec.block_size);
}

}  // namespace

std::int64_t num_blocks_for(std::span<const KVCacheGroupSpec> groups, std::int64_t tokens) {
  std::int64_t count = 0;
  for (const KVCacheGroupSpec& group : groups) count += num_blocks_for(group.spec, tokens);
  return count;
}

std::int64_t num_blocks_missing(const EngineConfig& engine,
                                std::span<const KVCacheGroupSpec> groups, std::int64_t num_tokens,
                                std::int64_t num_computed_tokens, std::int64_t blocks_held) {
  std::int64_t tokens = num_tokens;
  if (num_computed_tokens > 0)
    tokens = std::min<std::int64_t>(tokens + num_lookahead_tokens(engine), engine.max_model_len);
  if (!engine.scheduler_reserve_full_isl)
    tokens = std::min(tokens, num_computed_tokens + engine.max_num_batched_tokens);
  const std::int64_t num_ranks = num_context_ranks(engine, groups.front().spec);
  return std::max<std::int64_t>(num_blocks_for(groups, cdiv(tokens, num_ranks)) - blocks_held, 0);
}

std::int64_t num_blocks_held(const DecisionSource& decisions, RequestId request,
                             std::size_t num_groups) {
  std::int64_t count = 0;
  for (std::size_t g = 0; g < num_groups; ++g)
    count += std::ranges::count_if(decisions.block_table(request, static_cast<std::int32_t>(g)),
                                   [](BlockId block) { return block != kNullBlock; });
  return count;
}

void HoldingWatch::step(const DecisionSource& decisions, std::int64_t step) {
  std::map<RequestId, std::int64_t> now;
  for (const SkippedRequest& request : decisions.skipped()) {
    if (decisions.block_table(request.id, 0).empty()) continue;
    const auto before = since_.find(request.id);
    now.insert({request.id, before == since_.end() ? step : before->second});
  }
  since_ = std::move(now);
}

std::int64_t HoldingWatch::since(RequestId request) const {
  const auto found = since_.find(request);
  return found == since_.end() ? -1 : found->second;
}

Standstill standstill_of(const DecisionSource& decisions, const EngineConfig& engine,
                         const KVCacheConfig& plan, const HoldingWatch& watch) {
  LS_CHECK(decisions.running().empty(), "{} requests run", decisions.running().size());
  Standstill standstill;
  standstill.free_blocks = decisions.num_free_blocks();
  standstill.total_blocks = plan.num_blocks - 1;
  const auto add = [&](RequestId id, bool is_loading) {
    const std::int64_t held = num_blocks_held(decisions, id, plan.groups.size());
    standstill.queue.push_back(
        {.name = std::string(decisions.name(id)),
         .blocks_held = held,
         .blocks_missing = num_blocks_missing(engine, plan.groups, decisions.num_tokens(id),
                                              decisions.num_computed_tokens(id), held),
         .held_since = watch.since(id),
         .is_loading = is_loading});
  };
  for (const SkippedRequest& request : decisions.skipped()) add(request.id, request.is_loading);
  for (const RequestId id : decisions.waiting()) add(id, false);
  for (const HeldRequest& request : decisions.held())
    standstill.blocks_held_by_finished +=
        num_blocks_held(decisions, request.id, plan.groups.size());
  return standstill;
}

}  // namespace lockstep
