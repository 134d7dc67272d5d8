#include "cuda_backend/views/views_shape.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace lockstep::cuda {
namespace {

bool is_mla_backend(AttentionBackend backend) {
  return backend == AttentionBackend::triton_mla || backend == AttentionBackend::flashmla;
}

// The last dimension of a K/V cache. The scale of per-token-head quantization follows the row (one
// float). int4 has two values per byte and a scale, fp4 two values per byte and a scale byte per
// sixteen.
std::int64_t pair_row(const KVCacheSpec& spec) {
  const std::int64_t head_size = spec.head_size;
  switch (spec.kv_quant_mode) {
    case KVQuantMode::nvfp4:
      return head_size / 2 + head_size / 16;
    case KVQuantMode::int4_per_token_head:
      return head_size / 2 + std::int64_t{sizeof(float)};
    case KVQuantMode::int8_per_token_head:
    case KVQuantMode::fp8_per_token_head:
      return head_size + std::int64_t{sizeof(float)} / itemsize_bytes(spec.dtype);
    default:
      return head_size;
  }
}

// The last dimension of an MLA cache. Layouts in bytes: fp8_ds_mla 656, nvfp4_ds_mla 352
// (DeepSeek-V3.2), 584 (V4; its window layers have it whatever the cache dtype is called).
std::int64_t mla_row(const KVCacheSpec& spec) {
  const bool v4 = spec.model_version == "deepseek_v4";
  if (is_sliding_window(spec.kind)) return v4 ? 584 : spec.head_size;
  if (spec.cache_dtype_str == "fp8_ds_mla") return v4 ? 584 : 656;
  if (spec.cache_dtype_str == "nvfp4_ds_mla") return 352;
  return spec.head_size;
}

}  // namespace

std::optional<AttentionBackend> backend_of(const KVCacheSpec& spec, AttentionBackend chosen) {
  if (is_state_kind(spec.kind)) return std::nullopt;
  if (is_hidden_state(spec.kind)) return AttentionBackend::cache_only;
  if (keeps_pairs(spec))
    return is_mla_backend(chosen) || chosen == AttentionBackend::cache_only ||
                   chosen == AttentionBackend::any_size
               ? AttentionBackend::triton_attn
               : chosen;
  return is_mla_backend(chosen) ? chosen : AttentionBackend::triton_mla;
}

bool KernelSizes::takes(std::int64_t size) const {
  if (!listed.empty()) return std::ranges::find(listed, size) != listed.end();
  return size % base == 0;
}

KernelSizes kernel_sizes(AttentionBackend backend, bool hybrid_fp32) {
  switch (backend) {
    case AttentionBackend::flash_attn:
      if (hybrid_fp32) return {{64, 32, 16}, 16};
      return {{}, 16};
    case AttentionBackend::flashinfer:
      return {{64, 32, 16}, 16};
    case AttentionBackend::triton_attn:
    case AttentionBackend::triton_mla:
      return {{}, 16};
    case AttentionBackend::flashmla:
      return {{64}, 64};
    case AttentionBackend::cache_only:
    case AttentionBackend::any_size:
      break;
  }
  return {{}, 1};
}

Dims cache_shape(AttentionBackend backend, const KVCacheSpec& spec, std::int64_t num_blocks,
                 std::int64_t block_size) {
  switch (backend) {
    case AttentionBackend::flash_attn:
      return {2, num_blocks, block_size, spec.num_kv_heads, pair_row(spec)};
    case AttentionBackend::flashinfer:
    case AttentionBackend::triton_attn:
      return {num_blocks, 2, block_size, spec.num_kv_heads, pair_row(spec)};
    case AttentionBackend::triton_mla:
    case AttentionBackend::flashmla:
      return {num_blocks, block_size, mla_row(spec)};
    case AttentionBackend::any_size:
    case AttentionBackend::cache_only:
      break;
  }
  return {num_blocks, block_size, spec.num_kv_heads, spec.head_size};
}

Order stride_order(AttentionBackend backend, CacheLayout layout, bool layers_dimension) {
  const bool nhd = layout == CacheLayout::NHD;
  switch (backend) {
    case AttentionBackend::flash_attn:
      if (layers_dimension) return nhd ? Order{2, 0, 1, 3, 4, 5} : Order{2, 4, 0, 1, 3, 5};
      return nhd ? Order{0, 1, 2, 3, 4} : Order{0, 1, 3, 2, 4};
    case AttentionBackend::flashinfer:
    case AttentionBackend::triton_attn:
      if (layers_dimension) return nhd ? Order{1, 0, 2, 3, 4, 5} : Order{1, 2, 4, 0, 3, 5};
      return nhd ? Order{0, 1, 2, 3, 4} : Order{0, 1, 3, 2, 4};
    case AttentionBackend::triton_mla:
    case AttentionBackend::flashmla:
      return layers_dimension ? Order{1, 0, 2, 3} : Order{0, 1, 2};
    case AttentionBackend::cache_only:
    case AttentionBackend::any_size:
      break;
  }
  return layers_dimension ? Order{1, 0, 2, 3, 4} : Order{0, 1, 2, 3};
}

DimRoles dim_roles(AttentionBackend backend) {
  constexpr std::int64_t kBlocks = 1234567;
  constexpr std::int64_t kTokens = 7654321;
  constexpr std::int64_t kHeads = 3456789;
  KVCacheSpec telling;
  telling.num_kv_heads = kHeads;
  telling.head_size = 9876543;
  const Dims shape = cache_shape(backend, telling, kBlocks, kTokens);
  const auto find = [&](std::int64_t number) {
    const auto at = std::ranges::find(shape, number);
    return at == shape.end() ? -1 : static_cast<std::int32_t>(at - shape.begin());
  };
  return {find(kBlocks), find(2), find(kTokens), find(kHeads)};
}

std::int64_t numel(std::span<const std::int64_t> dims) {
  return std::accumulate(dims.begin(), dims.end(), std::int64_t{1}, std::multiplies<>());
}

Dims dense_strides(const Dims& shape) {
  Dims strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

Dims ordered_strides(const Dims& shape, const Order& order) {
  Dims physical;
  for (std::int32_t dim : order) physical.push_back(shape[dim]);
  const Dims dense = dense_strides(physical);
  Dims strides(shape.size());
  for (std::size_t i = 0; i < order.size(); ++i) strides[order[i]] = dense[i];
  return strides;
}

}  // namespace lockstep::cuda
