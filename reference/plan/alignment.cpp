#include "reference/plan/alignment.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "reference/plan/kernel_blocks.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

struct HybridSizes {
  std::int64_t bytes_per_token = 0;  // of one attention layer
  std::int64_t state_page_bytes = 0;
  bool fp32_states = false;
  std::int64_t checkpoint_alignment = 1;  // tokens; 1 where not every state layer has one
};

// The sizes that alignment weighs: one token of an attention layer, one set of states.
Result<HybridSizes> hybrid_sizes(const LayerSpecs& layers) {
  HybridSizes sizes;
  bool all_export = true;
  std::int64_t exports_every = 1;
  for (const NamedSpec& layer : layers) {
    KVCacheSpec one_token = layer.spec;
    if (is_state_kind(one_token.kind)) {
      all_export &= one_token.prefill_checkpoint_alignment > 0;
      if (all_export)
        exports_every = std::lcm(exports_every, one_token.prefill_checkpoint_alignment);
      sizes.state_page_bytes = std::max(sizes.state_page_bytes, real_page_size_bytes(one_token));
      for (const StateTensorSpec& state : one_token.states)
        sizes.fp32_states |= state.dtype == DType::fp32;
      continue;
    }
    if (is_hidden_state(one_token.kind)) continue;  // its page follows the common one
    one_token.block_size = 1;
    one_token.page_size_padded.reset();
    const std::int64_t bytes = unpadded_page_size_bytes(one_token);
    if (sizes.bytes_per_token != 0 && sizes.bytes_per_token != bytes)
      return fail(fmt::format(
          "{}: one token takes {} bytes here and {} in the attention layers before it; a hybrid "
          "needs one size for all of them",
          layer.name, bytes, sizes.bytes_per_token));
    sizes.bytes_per_token = bytes;
  }
  if (all_export) sizes.checkpoint_alignment = exports_every;
  return sizes;
}

}  // namespace

bool is_hybrid(const LayerSpecs& layers) {
  const auto any = [&](auto&& matches) {
    return std::ranges::any_of(layers, [&](const NamedSpec& l) { return matches(l.spec.kind); });
  };
  return any(is_state_kind) &&
         any([](CacheKind kind) { return !is_state_kind(kind) && !is_hidden_state(kind); });
}

Result<AlignedSizes> aligned_sizes(const LayerSpecs& layers, const PlanOptions& options) {
  const bool hybrid = is_hybrid(layers);
  HybridSizes sizes;
  if (hybrid) {
    LS_ASSIGN_OR_RETURN(auto weighed, hybrid_sizes(layers));
    sizes = weighed;
  }
  // The backend that speaks for the model is that of its first attention layer.
  const auto attention = std::ranges::find_if(
      layers, [](const NamedSpec& layer) { return !is_state_kind(layer.spec.kind); });
  const AttentionBackend backend = attention == layers.end()
                                       ? options.backend
                                       : *layer_backend(attention->spec, options.backend);
  const SupportedBlockSizes supported = supported_block_sizes(backend, sizes.fp32_states);

  AlignedSizes aligned;
  aligned.block_size = supported.contains(options.default_block_size) ? options.default_block_size
                                                                      : supported.smallest();
  if (options.block_size) {
    if (*options.block_size % supported.smallest() != 0)
      return fail(
          fmt::format("block_size {}: {} takes multiples of {}; the nearest that works is {}",
                      *options.block_size, name_of(backend), supported.smallest(),
                      round_up(*options.block_size, supported.smallest())));
    aligned.block_size = *options.block_size;
  }
  if (!hybrid || sizes.state_page_bytes == 0) return aligned;

  std::int64_t alignment = std::max(supported.smallest(), aligned.block_size);
  if (options.mamba_cache_mode == MambaCacheMode::align)
    alignment = std::lcm(alignment, sizes.checkpoint_alignment);
  const std::int64_t page_1_token = sizes.bytes_per_token * options.attn_pack;
  std::int64_t attn_block_size = 0;
  if (options.mamba_cache_mode == MambaCacheMode::all) {
    const std::int64_t chunk =
        std::lcm(options.mamba_block_size.value_or(options.mamba_chunk_size), alignment);
    attn_block_size = chunk * cdiv(cdiv(sizes.state_page_bytes, page_1_token), chunk);
    aligned.mamba_block_size = attn_block_size;
  } else {
    attn_block_size = alignment * cdiv(sizes.state_page_bytes, alignment * page_1_token);
  }
  aligned.block_size = std::max(aligned.block_size, attn_block_size);
  if (options.mamba_cache_mode == MambaCacheMode::align)
    aligned.mamba_block_size = aligned.block_size;
  const std::int64_t page = aligned.block_size * page_1_token;
  if (page != sizes.state_page_bytes) aligned.mamba_page_size_padded = page;
  return aligned;
}

LayerSpecs with_aligned_sizes(LayerSpecs layers, const AlignedSizes& sizes,
                              const PlanOptions& options) {
  for (NamedSpec& layer : layers) {
    KVCacheSpec& spec = layer.spec;
    if (is_state_kind(spec.kind)) {
      spec.block_size = sizes.mamba_block_size.value_or(options.max_model_len);
      spec.page_size_padded = sizes.mamba_page_size_padded;
      spec.mamba_cache_mode = options.mamba_cache_mode;
    } else if (spec.block_size == 0) {
      spec.block_size = sizes.block_size;
    }
    spec = with_alignment_padding(spec);
  }
  return layers;
}

}  // namespace lockstep
