#include "reference/placement/cache_spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

// The fields of AttentionSpec that two specs must share to be merged.
bool same_rows(const KVCacheSpec& a, const KVCacheSpec& b) {
  return a.block_size == b.block_size && a.dcp_sharded == b.dcp_sharded &&
         a.block_stride_alignment == b.block_stride_alignment &&
         a.plan.stride_kernel_tokens == b.plan.stride_kernel_tokens &&
         a.plan.max_tp_shards == b.plan.max_tp_shards && a.num_kv_heads == b.num_kv_heads &&
         a.head_size == b.head_size && a.dtype == b.dtype && a.head_size_v == b.head_size_v &&
         a.kv_quant_mode == b.kv_quant_mode && a.page_size_padded == b.page_size_padded &&
         a.plan.num_head_slots == b.plan.num_head_slots &&
         a.plan.state_content_bytes == b.plan.state_content_bytes &&
         a.tokens_per_state == b.tokens_per_state;
}

template <class Field>
bool all_equal(const std::vector<KVCacheSpec>& specs, Field field) {
  return std::ranges::all_of(specs,
                             [&](const KVCacheSpec& s) { return field(s) == field(specs[0]); });
}

bool any_says(const std::vector<KVCacheSpec>& specs, bool PlanFacts::*fact) {
  return std::ranges::any_of(specs, [&](const KVCacheSpec& spec) { return spec.plan.*fact; });
}

// The rows of `spec` and nothing else of its class.
KVCacheSpec rows_alone(const KVCacheSpec& spec) {
  KVCacheSpec merged;
  merged.kind = spec.kind;
  merged.block_size = spec.block_size;
  merged.block_stride_alignment = spec.block_stride_alignment;
  merged.plan.stride_kernel_tokens = spec.plan.stride_kernel_tokens;
  merged.num_kv_heads = spec.num_kv_heads;
  merged.head_size = spec.head_size;
  merged.head_size_v = spec.head_size_v;
  merged.dtype = spec.dtype;
  merged.kv_quant_mode = spec.kv_quant_mode;
  merged.dcp_sharded = spec.dcp_sharded;
  merged.plan.max_tp_shards = spec.plan.max_tp_shards;
  merged.page_size_padded = spec.page_size_padded;
  merged.plan.num_head_slots = spec.plan.num_head_slots;
  merged.plan.state_content_bytes = spec.plan.state_content_bytes;
  merged.tokens_per_state = spec.tokens_per_state;
  return merged;
}

Merged merge_mla(const std::vector<KVCacheSpec>& specs) {
  const auto identity = [](const KVCacheSpec& s) {
    return std::tuple(s.cache_dtype_str, s.plan.topk_buffer_width, s.tokens_per_state,
                      s.model_version, s.plan.is_indexer, s.plan.is_index_group_leader);
  };
  for (const KVCacheSpec& spec : specs)
    if (!is_mla(spec.kind) || !same_rows(spec, specs[0])) return {};
  if (!all_equal(specs, identity)) return {};
  KVCacheSpec merged = rows_alone(specs[0]);
  merged.cache_dtype_str = specs[0].cache_dtype_str;
  merged.plan.topk_buffer_width = specs[0].plan.topk_buffer_width;
  merged.model_version = specs[0].model_version;
  merged.plan.is_indexer = specs[0].plan.is_indexer;
  merged.plan.is_index_group_leader = specs[0].plan.is_index_group_leader;
  merged.plan.non_causal_multi_token_decode =
      any_says(specs, &PlanFacts::non_causal_multi_token_decode);
  merged.head_size_v = 0;
  return {merged, {}};
}

Merged merge_mla_windows(const std::vector<KVCacheSpec>& specs) {
  const auto identity = [](const KVCacheSpec& s) {
    return std::tuple(s.kind, s.cache_dtype_str, s.tokens_per_state, s.model_version,
                      s.sliding_window, s.extra_retained_tokens, s.bounded_replay,
                      s.block_stride_alignment, s.plan.stride_kernel_tokens, s.dcp_sharded,
                      s.plan.max_tp_shards);
  };
  if (!all_equal(specs, identity)) return {};
  KVCacheSpec merged = rows_alone(specs[0]);
  merged.kv_quant_mode = KVQuantMode::none;
  merged.sliding_window = specs[0].sliding_window;
  merged.extra_retained_tokens = specs[0].extra_retained_tokens;
  merged.cache_dtype_str = specs[0].cache_dtype_str;
  merged.model_version = specs[0].model_version;
  merged.bounded_replay = specs[0].bounded_replay;
  merged.head_size_v = 0;
  return {merged, {}};
}

Merged merge_full(const std::vector<KVCacheSpec>& specs) {
  const CacheKind kind = specs[0].kind;
  std::set<std::int64_t> windows, chunks;
  for (const KVCacheSpec& spec : specs) {
    if (!is_full_attention(spec.kind)) return {};
    if (kind == CacheKind::rswa && (spec.kind != kind || spec.rswa_window != specs[0].rswa_window))
      return {};
    if (spec.sliding_window != 0) windows.insert(spec.sliding_window);
    if (spec.attention_chunk_size != 0) chunks.insert(spec.attention_chunk_size);
  }
  for (const KVCacheSpec& spec : specs)
    if (is_mla(spec.kind)) return {};
  if (windows.size() > 1 || chunks.size() > 1)
    return {{},
            "layers of full attention with different windows: one group must have one window size; "
            "keep the hybrid manager"};
  for (const KVCacheSpec& spec : specs)
    if (!same_rows(spec, specs[0]) ||
        (kind == CacheKind::sink_full && !is_one_row(spec.tokens_per_state)))
      return {};
  if (!windows.empty() && !chunks.empty()) return {};
  KVCacheSpec merged = rows_alone(specs[0]);
  if (!windows.empty()) merged.sliding_window = *windows.begin();
  if (!chunks.empty()) merged.attention_chunk_size = *chunks.begin();
  merged.rswa_window = specs[0].rswa_window;
  merged.sink_len = specs[0].sink_len;
  merged.plan.non_causal = any_says(specs, &PlanFacts::non_causal);
  return {merged, {}};
}

}  // namespace

std::int64_t num_heads(const KVCacheSpec& spec) {
  if (!is_attention(spec.kind)) return 1;
  return spec.plan.num_head_slots != 0 ? spec.plan.num_head_slots : spec.num_kv_heads;
}

std::int64_t rows_of(const KVCacheSpec& spec, std::int64_t block_size) {
  return is_attention(spec.kind) ? rows_in(spec.tokens_per_state, block_size) : 1;
}

std::int64_t content_bytes(const KVCacheSpec& spec) {
  if (!has_layer_views(spec.kind)) return spec.hisparse_page_bytes;
  if (spec.plan.state_content_bytes != 0) return spec.plan.state_content_bytes;
  if (!is_state_kind(spec.kind))
    return (spec.head_size + spec.head_size_v) * itemsize_bytes(spec.dtype);
  std::int64_t bytes = 0;
  for (const StateTensorSpec& state : spec.states)
    bytes += std::accumulate(state.dims.begin(), state.dims.end(), itemsize_bytes(state.dtype),
                             std::multiplies<>());
  return bytes;
}

std::int64_t unpadded_page_bytes(const KVCacheSpec& spec) {
  return num_heads(spec) * rows_of(spec, spec.block_size) * content_bytes(spec);
}

std::int64_t page_bytes(const KVCacheSpec& spec) {
  return spec.page_size_padded.value_or(unpadded_page_bytes(spec));
}

bool is_cacheable_by_class(const KVCacheSpec& spec) {
  return is_prefix_cacheable(spec) || (is_cross_attention(spec) && !spec.bounded_replay);
}

std::int64_t stride_alignment_bytes(const KVCacheSpec& spec) {
  const std::int64_t tokens = spec.plan.stride_kernel_tokens;
  if (tokens == 0) return spec.block_stride_alignment;
  const std::int64_t kernel = std::gcd(tokens, spec.block_size);
  if (kernel == spec.block_size) return 1;
  return page_bytes(with_block_size(spec, kernel));
}

void apply_alignment(KVCacheSpec& spec) {
  if (spec.alignment == 0) return;
  const std::int64_t real = unpadded_page_bytes(spec);
  const std::int64_t padded = round_up_to(real, spec.alignment);
  if (padded != real) spec.page_size_padded = padded;
}

KVCacheSpec with_block_size(KVCacheSpec spec, std::int64_t block_size) {
  spec.block_size = block_size;
  apply_alignment(spec);
  return spec;
}

Merged merge_specs(const std::vector<KVCacheSpec>& specs) {
  const CacheKind kind = specs[0].kind;
  if (is_mla(kind)) return merge_mla(specs);
  if (is_full_attention(kind)) return merge_full(specs);
  if (is_mla_window(kind)) return merge_mla_windows(specs);
  for (const KVCacheSpec& spec : specs)
    if (!(spec == specs[0])) return {};
  return {specs[0], {}};
}

bool is_uniform_type(const KVCacheSpec& first, const KVCacheSpec& other) {
  if (first.block_size != other.block_size || first.dcp_sharded != other.dcp_sharded) return false;
  if (traits_of(first.kind).keeps != traits_of(other.kind).keeps) return false;
  // Windows of MLA rows are windows to the plain class, but not the other way round.
  if (is_mla_window(first.kind) && other.kind != first.kind) return false;
  switch (traits_of(first.kind).keeps) {
    case Keeps::window:
      return first.sliding_window == other.sliding_window &&
             (!is_mla_window(first.kind) || first.bounded_replay == other.bounded_replay);
    case Keeps::chunk:
      return first.attention_chunk_size == other.attention_chunk_size;
    case Keeps::states:
      return first.num_speculative_blocks == other.num_speculative_blocks &&
             first.num_prefill_checkpoint_blocks == other.num_prefill_checkpoint_blocks &&
             first.prefill_checkpoint_alignment == other.prefill_checkpoint_alignment &&
             page_bytes(first) == page_bytes(other) &&
             first.plan.tp_replicated == other.plan.tp_replicated;
    case Keeps::pages:
      return first.kind == other.kind;
    default:
      return true;
  }
}

Result<std::int64_t> blocks_per_request(const KVCacheSpec& spec, const RequestBounds& bounds) {
  const std::int64_t len = bounds.max_model_len;
  const std::int64_t in_flight = bounds.max_in_flight_tokens;
  switch (traits_of(spec.kind).keeps) {
    case Keeps::every_token:
      return divided_up(spec.dcp_sharded ? divided_up(len, bounds.dcp) : len, spec.block_size);
    case Keeps::window:
      if (spec.dcp_sharded && bounds.dcp > 1)
        return fail(
            fmt::format("windows of {} tokens cannot be shared out over dcp {}; serve this "
                        "model with dcp 1",
                        spec.sliding_window, bounds.dcp));
      return divided_up(std::min(std::max<std::int64_t>(spec.sliding_window, 1) - 1 +
                                     spec.extra_retained_tokens + in_flight,
                                 len),
                        spec.block_size) +
             1;
    case Keeps::chunk:
      return divided_up(std::min(spec.attention_chunk_size + in_flight, len), spec.block_size);
    case Keeps::ring:
      return 1;
    case Keeps::encoder_rows:
      return divided_up(bounds.max_encoder_tokens, spec.block_size);
    case Keeps::states:
      return spec.num_speculative_blocks +
             (bounds.states_aligned ? 2 + spec.num_prefill_checkpoint_blocks : 1);
    case Keeps::pages:
      return is_hot_pages(spec.kind) ? spec.blocks_per_request
                                     : divided_up(std::min(in_flight, len), spec.block_size);
    case Keeps::nothing:
      break;
  }
  return 0;
}

}  // namespace lockstep
