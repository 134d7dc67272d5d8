#include "cuda_backend/views/views_capacity.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda_backend/views/views.h"

namespace lockstep::cuda {
namespace {

std::int64_t blocks_for(std::int64_t tokens, std::int64_t block_size) {
  return tokens / block_size + (tokens % block_size != 0 ? 1 : 0);
}

// Blocks that one request of max_model_len holds of a group at most.
std::int64_t held_blocks(const KVCacheSpec& spec, const RequestLimits& limits) {
  const std::int64_t length = limits.max_model_len;
  const std::int64_t chunk = limits.max_num_batched_tokens;
  if (is_state_kind(spec.kind)) {
    const std::int64_t drafts = spec.num_speculative_blocks;
    if (spec.mamba_cache_mode == MambaCacheMode::all)
      return blocks_for(length, spec.block_size) + drafts;
    return (spec.mamba_cache_mode == MambaCacheMode::align ? 2 : 1) + drafts;
  }
  if (is_sliding_window(spec.kind)) {
    const std::int64_t tokens = std::min(length, spec.sliding_window - 1 + chunk);
    return blocks_for(tokens, spec.block_size) + 1;
  }
  if (is_cross_attention(spec.kind)) return blocks_for(chunk, spec.block_size);
  if (is_chunked(spec.kind))
    return blocks_for(std::min(length, spec.attention_chunk_size + chunk), spec.block_size);
  return blocks_for(blocks_for(length, limits.context_ranks), spec.block_size);
}

// Pages of one block in all layers that the group's own plan counts: the layers' sum where each has
// a page of its own, one layer's (or pack's) elsewhere.
std::int64_t group_page_bytes(const KVCacheGroupSpec& group) {
  constexpr auto kAnyBackend = AttentionBackend::flash_attn;
  if (group.layer_specs.empty()) return page_bytes(group.spec, kAnyBackend) * group.layers_per_page;
  std::int64_t bytes = 0;
  for (const KVCacheSpec& spec : group.layer_specs) bytes += page_bytes(spec, kAnyBackend);
  return bytes;
}

// The shortest run of tokens that fills a whole number of blocks in every group.
std::int64_t hit_step(const KVCacheConfig& plan, const RequestLimits& limits) {
  std::int64_t step = 1;
  for (const KVCacheGroupSpec& group : plan.groups) {
    std::int64_t tokens = group.spec.block_size;
    if (is_state_kind(group.spec.kind)) {
      if (group.spec.mamba_cache_mode == MambaCacheMode::none) return 0;
    } else {
      tokens *= limits.context_ranks;
    }
    std::int64_t common = step;
    while (common % tokens != 0) common += step;
    step = common;
  }
  return step;
}

}  // namespace

Result<EngineCapacity> engine_capacity(const KVCacheConfig& plan, const RequestLimits& limits) {
  EngineCapacity capacity;
  std::int64_t request_bytes = 0;
  bool states = false;
  for (const KVCacheGroupSpec& group : plan.groups) {
    request_bytes += held_blocks(group.spec, limits) * group_page_bytes(group);
    if (is_state_kind(group.spec.kind))
      states = true;
    else
      capacity.slot_buffer_rows =
          std::max(capacity.slot_buffer_rows, plan.num_blocks * group.spec.block_size);
  }
  const std::int64_t blocks_per_request =
      blocks_for(request_bytes, group_page_bytes(plan.groups.front()));
  const double concurrency =
      static_cast<double>(plan.num_blocks) / static_cast<double>(blocks_per_request);
  capacity.capacity_tokens =
      static_cast<std::int64_t>(concurrency * static_cast<double>(limits.max_model_len));
  capacity.hit_step_tokens = hit_step(plan, limits);
  capacity.max_num_seqs = limits.max_num_seqs;
  if (states && limits.max_num_seqs > plan.num_blocks)
    return fail(fmt::format("{} requests at once need a state block each and there are {}",
                            limits.max_num_seqs, plan.num_blocks));
  return capacity;
}

}  // namespace lockstep::cuda
