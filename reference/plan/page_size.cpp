#include "reference/plan/page_size.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "base/check.h"

namespace lockstep {
namespace {

// Bytes of one stored token in the MLA layouts that are defined in bytes.
// V3.2: 512 fp8 values, 4 fp32 scales, 64 bf16 rope values; or 512 fp4 values, 32 fp8 scales and 64
// fp8 rope values. V4: 448 fp8, 64 bf16, 8 scale bytes.
constexpr std::int64_t kDeepseekV32TokenBytes = 656;
constexpr std::int64_t kDeepseekV32Fp4TokenBytes = 352;
constexpr std::int64_t kDeepseekV4TokenBytes = 584;
constexpr std::int64_t kScaleBytes = 4;  // fp32

// Packed fp4: two values a byte, and one fp8 scale for 16 values.
constexpr std::int64_t nvfp4_full_dim(std::int64_t head_size) {
  return head_size / 2 + head_size / 16;
}

std::int64_t mla_page_size_bytes(const KVCacheSpec& spec) {
  if (spec.model_version == "deepseek_v4" &&
      (is_sliding_window(spec.kind) || spec.cache_dtype_str == "fp8_ds_mla"))
    return storage_block_size(spec) * kDeepseekV4TokenBytes;
  if (!is_sliding_window(spec.kind) && spec.cache_dtype_str == "fp8_ds_mla")
    return spec.block_size * kDeepseekV32TokenBytes;
  if (!is_sliding_window(spec.kind) && spec.cache_dtype_str == "nvfp4_ds_mla")
    return spec.block_size * kDeepseekV32Fp4TokenBytes;
  return storage_block_size(spec) * spec.num_kv_heads * spec.head_size * itemsize_bytes(spec.dtype);
}

std::int64_t pair_page_size_bytes(const KVCacheSpec& spec) {
  const std::int64_t k = spec.head_size;
  const std::int64_t v = head_size_v(spec);
  const std::int64_t row_pair =
      spec.kv_quant_mode == KVQuantMode::nvfp4 ? nvfp4_full_dim(k) + nvfp4_full_dim(v)
      : spec.kv_quant_mode == KVQuantMode::int4_per_token_head ? k / 2 + v / 2
                                                               : k + v;
  return storage_block_size(spec) * spec.num_kv_heads * row_pair * itemsize_bytes(spec.dtype);
}

}  // namespace

std::int64_t storage_block_size(const KVCacheSpec& spec) {
  return rows_in(spec.tokens_per_state, spec.block_size);
}

std::int64_t head_size_v(const KVCacheSpec& spec) {
  return spec.head_size_v == 0 ? spec.head_size : spec.head_size_v;
}

std::int64_t num_elements(const StateTensorSpec& state) {
  return std::accumulate(state.dims.begin(), state.dims.end(), std::int64_t{1},
                         std::multiplies<>());
}

std::int64_t size_bytes(const StateTensorSpec& state) {
  return num_elements(state) * itemsize_bytes(state.dtype);
}

std::int64_t real_page_size_bytes(const KVCacheSpec& spec) {
  if (is_state_kind(spec.kind)) {
    std::int64_t bytes = 0;
    for (const StateTensorSpec& state : spec.states) bytes += size_bytes(state);
    return bytes;
  }
  return has_single_rows(spec) ? mla_page_size_bytes(spec) : pair_page_size_bytes(spec);
}

std::int64_t unpadded_page_size_bytes(const KVCacheSpec& spec) {
  const std::int64_t real = real_page_size_bytes(spec);
  if (is_state_kind(spec.kind) || !is_per_token_head(spec.kv_quant_mode)) return real;
  return real + 2 * storage_block_size(spec) * spec.num_kv_heads * kScaleBytes;
}

std::int64_t page_size_bytes(const KVCacheSpec& spec) {
  const std::int64_t unpadded = unpadded_page_size_bytes(spec);
  if (!spec.page_size_padded) return unpadded;
  LS_CHECK(*spec.page_size_padded >= unpadded, "page_size_padded {} < {} bytes",
           *spec.page_size_padded, unpadded);
  return *spec.page_size_padded;
}

std::int64_t page_size_bytes(const KVCacheGroupSpec& group) {
  LS_CHECK(!group.is_uniform_type() || group.layer_specs.size() == group.layer_names.size(),
           "{} specs, {} layers", group.layer_specs.size(), group.layer_names.size());
  std::int64_t bytes = 0;
  for (const KVCacheSpec& spec : specs_of(group)) bytes += page_size_bytes(spec);
  return bytes;
}

std::int64_t pool_page_size_bytes(const KVCacheGroupSpec& group) {
  return page_size_bytes(group) * group.layers_per_page;
}

KVCacheSpec with_alignment_padding(KVCacheSpec spec) {
  if (spec.alignment == 0) return spec;
  const std::int64_t real = real_page_size_bytes(spec);
  const std::int64_t padded = round_up(real, spec.alignment);
  if (padded != real) spec.page_size_padded = padded;
  return spec;
}

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

bool KernelSizes::takes(std::int64_t block_size) const {
  return std::ranges::find(listed, block_size) != listed.end() ||
         (multiple_of != 0 && block_size % multiple_of == 0);
}

std::int64_t KernelSizes::smallest() const {
  return multiple_of != 0 ? multiple_of : *std::ranges::min_element(listed);
}

Result<std::int64_t> common_kernel_block(std::int64_t block_size,
                                         const std::vector<KernelSizes>& sizes) {
  const auto all_take = [&](std::int64_t size) {
    return std::ranges::all_of(sizes, [&](const KernelSizes& s) { return s.takes(size); });
  };
  if (all_take(block_size)) return block_size;
  std::set<std::int64_t, std::greater<>> candidates;
  for (const KernelSizes& s : sizes)
    for (const std::int64_t size : s.listed)
      if (block_size % size == 0) candidates.insert(size);
  for (const std::int64_t size : candidates)
    if (all_take(size)) return size;
  return fail(
      "no kernel block size divides blocks of {} tokens and suits every backend of the group; "
      "choose another --block-size",
      block_size);
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

KernelSizes kernel_sizes(AttentionBackend backend, bool fp32_states) {
  switch (backend) {
    case AttentionBackend::flash_attn:
      if (fp32_states) return {{16, 32, 64}};
      return {{}, 16};
    case AttentionBackend::flashinfer:
      return {{16, 32, 64}};
    case AttentionBackend::triton_attn:
    case AttentionBackend::triton_mla:
      return {{}, 16};
    case AttentionBackend::flashmla:
      return {{64}};
    case AttentionBackend::cache_only:
    case AttentionBackend::any_size:
      break;
  }
  return {{}, 1};
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

  std::vector<KernelSizes> kernels;
  for (std::size_t layer = 0; layer < group.layer_names.size(); ++layer)
    kernels.push_back(kernel_sizes(*layer_backend(group.layer_spec(layer), chosen), fp32_states));
  if (const auto size = common_kernel_block(block_size, kernels)) return size;
  std::int64_t step = 1;
  for (const KernelSizes& sizes : kernels) step = std::max(step, sizes.smallest());
  return fail(
      "group {}: no kernel of {} takes a block of {} tokens or a part of it; the nearest block "
      "size that works is {}",
      group_index, name_of(chosen), block_size, round_up(block_size, step));
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
