#include "reference/plan/kernel_blocks.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

constexpr bool reads_mla_rows(AttentionBackend backend) {
  return backend == AttentionBackend::triton_mla || backend == AttentionBackend::flashmla;
}

// Kernels of compressed rows, of MLA windows (DeepSeek-V4), of rings take the manager's blocks as
// they are.
bool addresses_whole_blocks(const KVCacheSpec& spec) {
  return shares_rows(spec.tokens_per_state) || is_mla_window(spec.kind) || is_ring(spec);
}

}  // namespace

bool SupportedBlockSizes::contains(std::int64_t block_size) const {
  if (multiple_of > 0) return block_size % multiple_of == 0;
  return std::ranges::find(exact, block_size) != exact.end();
}

std::optional<AttentionBackend> layer_backend(const KVCacheSpec& spec, AttentionBackend chosen) {
  if (is_state_kind(spec.kind)) return std::nullopt;
  if (is_hidden_state(spec.kind)) return AttentionBackend::cache_only;
  if (has_single_rows(spec)) return reads_mla_rows(chosen) ? chosen : AttentionBackend::triton_mla;
  // A model that names an MLA backend may still have plain attention layers.
  const bool is_attention =
      chosen == AttentionBackend::flash_attn || chosen == AttentionBackend::flashinfer;
  return is_attention ? chosen : AttentionBackend::triton_attn;
}

SupportedBlockSizes supported_block_sizes(AttentionBackend backend, bool fp32_states) {
  switch (backend) {
    case AttentionBackend::flash_attn:
      if (fp32_states) return {.exact = {16, 32, 64}, .multiple_of = 0};
      return {.exact = {}, .multiple_of = 16};
    case AttentionBackend::flashinfer:
      return {.exact = {16, 32, 64}, .multiple_of = 0};
    case AttentionBackend::triton_attn:
    case AttentionBackend::triton_mla:
      return {.exact = {}, .multiple_of = 16};
    case AttentionBackend::flashmla:
      return {.exact = {64}, .multiple_of = 0};
    case AttentionBackend::cache_only:
    case AttentionBackend::any_size:
      break;
  }
  return {.exact = {}, .multiple_of = 1};
}

bool has_fp32_states(const KVCacheConfig& config) {
  bool attention = false;
  bool fp32 = false;
  for (const KVCacheGroupSpec& group : config.groups) {
    attention |= !is_state_kind(group.spec.kind);
    for (const StateTensorSpec& state : group.spec.states) fp32 |= state.dtype == DType::fp32;
  }
  return attention && fp32;
}

Result<std::int64_t> kernel_block_size(const KVCacheGroupSpec& group, AttentionBackend chosen,
                                       bool fp32_states, std::size_t group_index) {
  const std::int64_t block_size = group.spec.block_size;
  if (is_state_kind(group.spec.kind) || chosen == AttentionBackend::any_size) return block_size;
  for (std::size_t layer = 0; layer < group.layer_names.size(); ++layer)
    if (addresses_whole_blocks(group.layer_spec(layer))) return block_size;

  std::vector<SupportedBlockSizes> backends;
  std::vector<std::int64_t> candidates{block_size};
  for (std::size_t layer = 0; layer < group.layer_names.size(); ++layer) {
    const auto backend = layer_backend(group.layer_spec(layer), chosen);
    backends.push_back(supported_block_sizes(*backend, fp32_states));
    const auto& exact = backends.back().exact;
    candidates.insert(candidates.end(), exact.begin(), exact.end());
  }
  // The block size itself where every backend takes it, else the largest listed size that divides
  // it.
  std::sort(candidates.begin() + 1, candidates.end(), std::greater<>());
  for (std::int64_t size : candidates) {
    if (block_size % size != 0) continue;
    if (std::ranges::all_of(backends, [&](const auto& sizes) { return sizes.contains(size); }))
      return size;
  }
  std::int64_t step = 1;
  for (const SupportedBlockSizes& sizes : backends) step = std::max(step, sizes.smallest());
  return fail(
      fmt::format("group {}: no kernel of {} takes a block of {} tokens or a part of it; the "
                  "nearest block size "
                  "that works is {}",
                  group_index, name_of(chosen), block_size, round_up(block_size, step)));
}

Result<std::vector<std::int64_t>> kernel_block_sizes(const KVCacheConfig& config,
                                                     AttentionBackend chosen) {
  const bool fp32_states = has_fp32_states(config);
  std::vector<std::int64_t> sizes;
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    if (!is_on_device(config.groups[g])) continue;
    LS_ASSIGN_OR_RETURN(auto size, kernel_block_size(config.groups[g], chosen, fp32_states, g));
    sizes.push_back(size);
  }
  return sizes;
}

}  // namespace lockstep
