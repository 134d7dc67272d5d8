#include "reference/plan/limits.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

struct Count {
  std::string_view name;
  std::int64_t value = 0;
  std::int64_t min = 0;
  std::int64_t max = kTokensMax;
};

Result<void> check(std::span<const Count> counts, std::string_view prefix) {
  for (const Count& count : counts)
    if (count.value < count.min || count.value > count.max)
      return fail("{}{}: {}; expected {} to {}", prefix, count.name, count.value, count.min,
                  count.max);
  return {};
}

// Whether the product of numbers of at least 1 is at most `max`.
bool product_fits(std::initializer_list<std::int64_t> factors, std::int64_t max) {
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (factor > max / product) return false;
    product *= factor;
  }
  return true;
}

constexpr std::int64_t kItemBytesMax = 8;

Result<void> check_spec(const KVCacheSpec& spec, std::int64_t num_ranks) {
  const std::string_view kind = name_of(spec.kind);
  const Count counts[] = {
      {"block_size", spec.block_size, 1, kTokensMax / num_ranks},
      {"sliding_window", spec.sliding_window, is_sliding_window(spec.kind) ? 1 : 0},
      {"attention_chunk_size", spec.attention_chunk_size, is_chunked(spec.kind) ? 1 : 0},
      {"sink_len", spec.sink_len},
      {"rswa_window", spec.rswa_window},
      {"num_speculative_blocks", spec.num_speculative_blocks, 0, kSpecTokensMax},
      {"num_prefill_checkpoint_blocks", spec.num_prefill_checkpoint_blocks, 0, kSpecTokensMax},
      {"prefill_checkpoint_alignment", spec.prefill_checkpoint_alignment},
      {"extra_retained_tokens", spec.extra_retained_tokens, 0, kSpecTokensMax},
      {"tokens_per_state", spec.tokens_per_state.tokens, 1},
  };
  if (auto sound = check(counts, fmt::format("groups: {}: ", kind)); !sound) return sound;
  if (spec.sink_len % spec.block_size != 0)
    return fail("sink_len {}: use whole blocks of {}", spec.sink_len, spec.block_size);
  if (!page_fits(spec, kPageBytesMax))
    return fail("groups: {}: a page of more than {} bytes", kind, kPageBytesMax);
  if (spec.page_size_padded && *spec.page_size_padded < unpadded_page_size_bytes(spec))
    return fail("groups: {}: page_size_padded: {}; its rows take {} bytes", kind,
                *spec.page_size_padded, unpadded_page_size_bytes(spec));
  return {};
}

}  // namespace

bool page_fits(const KVCacheSpec& spec, std::int64_t bytes_max) {
  if (spec.page_size_padded.value_or(0) > bytes_max) return false;
  std::int64_t left = bytes_max;  // a page has all states
  for (const StateTensorSpec& state : spec.states) {
    std::int64_t elements = kItemBytesMax;
    for (const std::int64_t dim : state.dims) {
      if (!product_fits({elements, dim}, bytes_max)) return false;
      elements *= dim;
    }
    left -= elements;
    if (left < 0) return false;
  }
  if (is_state_kind(spec.kind)) return true;
  // Twice the elements leave room for scales, and 32 of them for fixed layouts.
  const std::int64_t row = std::max({spec.head_size, spec.head_size_v, std::int64_t{32}});
  const std::int64_t rows = std::max({spec.block_size, storage_block_size(spec), std::int64_t{1}});
  return product_fits({4 * kItemBytesMax, rows, spec.num_kv_heads, row}, bytes_max);
}

Result<void> check_step(std::int64_t max_num_batched_tokens, std::int64_t max_num_seqs) {
  if (max_num_batched_tokens >= max_num_seqs) return {};
  return fail(
      "--max-num-batched-tokens {} is less than --max-num-seqs {}: a step could not schedule one "
      "token per running request",
      max_num_batched_tokens, max_num_seqs);
}

Result<void> check_limits(const EngineConfig& config) {
  const Count counts[] = {
      {"max_num_seqs", config.max_num_seqs, 1},
      {"max_num_batched_tokens", config.max_num_batched_tokens, 1},
      {"max_model_len", config.max_model_len, 1},
      {"block_size", config.block_size, 1},
      {"mamba_block_size", config.mamba_block_size},
      {"long_prefill_token_threshold", config.long_prefill_token_threshold},
      {"num_spec_tokens", config.num_spec_tokens, 0, kSpecTokensMax},
      {"dcp", config.dcp, 1, kContextRanksMax},
      {"pcp", config.pcp, 1, kContextRanksMax},
      {"num_hash_lookahead_tokens", config.num_hash_lookahead_tokens, -1,
       std::clamp<std::int64_t>(config.num_prefill_lookahead_tokens, 1, kSpecTokensMax)},
      {"num_prefill_lookahead_tokens", config.num_prefill_lookahead_tokens, 0, kSpecTokensMax},
      {"prefix_match_unit", config.prefix_match_unit},
      {"prefix_cache_retention_interval", config.prefix_cache_retention_interval, kDenseRetention},
  };
  if (auto sound = check(counts, ""); !sound) return sound;
  if (std::int64_t{config.block_size} * config.dcp * config.pcp > kTokensMax)
    return fail("block_size: {} with dcp {} and pcp {}; expected a product of at most {}",
                config.block_size, config.dcp, config.pcp, kTokensMax);
  return {};
}

Result<void> check_limits(const EngineConfig& config, std::span<const KVCacheGroupSpec> groups,
                          std::int64_t num_blocks) {
  if (auto sound = check_limits(config); !sound) return sound;
  if (num_blocks > kPoolBlocksMax)
    return fail("num_blocks: {}; expected at most {}", num_blocks, kPoolBlocksMax);
  const std::int64_t num_ranks = std::int64_t{config.dcp} * config.pcp;
  std::int64_t lcm = 1;
  for (const KVCacheGroupSpec& group : groups) {
    if (auto sound = check_spec(group.spec, num_ranks); !sound) return sound;
    for (const KVCacheSpec& spec : group.layer_specs)
      if (auto sound = check_spec(spec, num_ranks); !sound) return sound;
    lcm = std::lcm(lcm, group.spec.block_size * num_ranks);
    if (lcm > kTokensMax)
      return fail("groups: block sizes whose least common multiple is {}; expected at most {}", lcm,
                  kTokensMax);
  }
  return {};
}

}  // namespace lockstep
