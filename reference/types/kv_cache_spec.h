// What one layer keeps in the cache, and the plan that says where: plain types, no arithmetic.
// The names are vLLM's (vllm/v1/kv_cache_interface.py); sizes are worked out in page_size.h by the
// reference and, independently, by the backend.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class DType : std::uint8_t { bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, uint8 };
constexpr std::int64_t itemsize_bytes(DType dtype) {
  switch (dtype) {
    case DType::fp32:
      return 4;
    case DType::bf16:
    case DType::fp16:
      return 2;
    default:
      return 1;
  }
}

enum class CacheKind : std::uint8_t {
  full_attention,
  mla,  // one latent head per token, K and V in one row: num_kv_heads = 1
  sliding_window,
  chunked_local,
  mamba,            // Mamba1/2 and linear attention (GatedDeltaNet, KDA): states, not tokens
  hidden_state,     // rows of num_kv_heads * head_size elements, one row per token, no K/V pair
  cross_attention,  // rows of a request's encoder, one each
  encoder_only,
  circular_buffer,  // one block per request: a ring of keys not yet compressed
  // Device pages of rows that live in a host pool, and a request's device copy of the rows that it
  // reads most (reference/types/hisparse.h).
  hisparse_resident,
  hisparse_hot,
};

enum class MambaCacheMode : std::uint8_t { none, align, all };

// Extra content of a quantized cache: nothing, one scale per tensor (stored elsewhere), one fp32
// scale per token and head (inline, after the row; int4 has the row's zero in its lowest bits), or
// packed fp4 with its block scales.
enum class KVQuantMode : std::uint8_t {
  none,
  fp8_per_tensor,
  int8_per_token_head,
  fp8_per_token_head,
  nvfp4,
  int4_per_token_head
};
constexpr bool is_per_token_head(KVQuantMode mode) {
  return mode == KVQuantMode::int8_per_token_head || mode == KVQuantMode::fp8_per_token_head ||
         mode == KVQuantMode::int4_per_token_head;
}

// One tensor of a state page (conv, then ssm): [dims...] elements of dtype, C order.
struct StateTensorSpec {
  std::vector<std::int64_t> dims;
  DType dtype = DType::bf16;
  bool operator==(const StateTensorSpec&) const = default;
};

// The cache of one layer. Fields that a kind does not use keep their default.
struct KVCacheSpec {
  CacheKind kind = CacheKind::full_attention;
  std::int64_t block_size = 16;  // tokens in one block
  std::int64_t num_kv_heads = 1;
  std::int64_t head_size = 64;  // elements
  DType dtype = DType::bf16;
  std::int64_t sliding_window = 0;        // tokens; sliding_window only
  std::int64_t attention_chunk_size = 0;  // tokens; chunked_local only
  // Rows of the model itself before every request's first token, in whole blocks of their own
  // (SinkFullAttentionSpec). full_attention only.
  std::int64_t sink_len = 0;
  // Of what is generated the last tokens alone are attended to; the prompt stays (RSWASpec).
  std::int64_t rswa_window = 0;  // tokens; full_attention only
  // Tokens before the window that are kept and not attended to: several modules of MTP.
  std::int64_t extra_retained_tokens = 0;  // sliding_window only
  // After a hit the window is computed again, and its blocks are not cached (DeepSeek-V4.1).
  bool bounded_replay = false;          // sliding_window with mla_rows only
  std::vector<StateTensorSpec> states;  // mamba only, in page order
  MambaCacheMode mamba_cache_mode = MambaCacheMode::none;
  std::int64_t num_speculative_blocks = 0;  // mamba only
  // Blocks for a state that a prefill exports from inside a chunk, and the alignment of its
  // position relative to the chunk's start (0: the kernel exports none). mamba only.
  std::int64_t num_prefill_checkpoint_blocks = 0;
  std::int64_t prefill_checkpoint_alignment = 0;  // tokens
  std::optional<std::int64_t> page_size_padded;   // bytes; absent: no padding
  std::int64_t head_size_v = 0;                   // elements of a V row; 0: as head_size
  KVQuantMode kv_quant_mode = KVQuantMode::none;
  // MLA rows (kind mla, hidden_state, or sliding_window with mla_rows = SlidingWindowMLASpec); of a
  // circular_buffer: keys without values.
  bool mla_rows = false;
  // "fp8_ds_mla", "nvfp4_ds_mla": layouts in bytes of their own; empty: dtype rules
  std::string cache_dtype_str;
  std::string model_version;        // "deepseek_v4" or empty
  std::int64_t compress_ratio = 1;  // tokens that share one stored row (tokens_per_state)
  std::int64_t alignment = 0;       // bytes the page is rounded up to; 0: none
  // Bytes that the stride between blocks is a multiple of, where groups overlay one allocation:
  // what the layer's backend asks for.
  std::int64_t block_stride_alignment = 1;
  // True if decode context parallelism shards its tokens; false: replicated on every rank. Ignored
  // for states, which every rank keeps.
  bool dcp_sharded = true;
  // Of hisparse_resident and hisparse_hot: bytes of a page; and blocks of a request's hot region.
  std::int64_t hisparse_page_bytes = 0;
  std::int64_t blocks_per_request = 0;
  bool operator==(const KVCacheSpec&) const = default;
};

// Whether a block of it on several ranks of a context holds tokens of its own on each.
constexpr bool is_dealt_out(const KVCacheSpec& spec) {
  return spec.dcp_sharded && spec.kind != CacheKind::mamba;
}
constexpr bool is_ring(const KVCacheSpec& spec) { return spec.kind == CacheKind::circular_buffer; }
constexpr bool is_cross_attention(const KVCacheSpec& spec) {
  return spec.kind == CacheKind::cross_attention;
}
// True if attention reads rows other than a run of a request's tokens: an encoder's, sinks, or both
// sides of a gap.
constexpr bool reads_beside_tokens(const KVCacheSpec& spec) {
  return is_cross_attention(spec) || spec.sink_len > 0 || spec.rswa_window > 0;
}

// Whether it is one of HiSparse's device groups, whose prefixes the host's group has.
constexpr bool is_hisparse(const KVCacheSpec& spec) {
  return spec.kind == CacheKind::hisparse_resident || spec.kind == CacheKind::hisparse_hot;
}

// Whether the blocks of its group are found by later requests.
constexpr bool is_prefix_cacheable(const KVCacheSpec& spec) {
  return !is_ring(spec) && !spec.bounded_replay && !is_cross_attention(spec) && !is_hisparse(spec);
}

// Layers that share a block table. Each has the spec `spec`, unless the group is of uniform type
// (vLLM's UniformTypeKVCacheSpecs: the same token slots, different page sizes): then `layer_specs`
// has one entry a layer and `spec` is the first of them.
struct KVCacheGroupSpec {
  std::vector<std::string> layer_names;
  KVCacheSpec spec;
  std::vector<KVCacheSpec> layer_specs = {};
  // Attention packing: this many layers of the group lie side by side in one page of one tensor.
  std::int64_t layers_per_page = 1;
  bool is_eagle_group = false;  // has a drafter's layers
  std::string role{};           // vLLM's KVCacheGroupRole; empty: the default

  bool is_uniform_type() const { return !layer_specs.empty(); }
  const KVCacheSpec& layer_spec(std::size_t layer) const {
    return layer_specs.empty() ? spec : layer_specs[layer];
  }
  bool operator==(const KVCacheGroupSpec&) const = default;
};

// Whether a layer of the group keeps a row for several tokens.
constexpr bool has_compressed_rows(const KVCacheGroupSpec& group) {
  if (group.spec.compress_ratio != 1) return true;
  for (const KVCacheSpec& spec : group.layer_specs)
    if (spec.compress_ratio != 1) return true;
  return false;
}

// True if a request has rows of an encoder in addition to those of its tokens.
constexpr bool has_cross_attention(const std::vector<KVCacheGroupSpec>& groups) {
  for (const KVCacheGroupSpec& group : groups)
    if (is_cross_attention(group.spec)) return true;
  return false;
}

// One raw buffer, shared by the named layers (one of each group, or layers_per_page of a packed
// one); a block belongs to one group at a time, so they never collide.
struct KVCacheTensor {
  std::int64_t size_bytes = 0;
  std::vector<std::string> shared_by;
  bool operator==(const KVCacheTensor&) const = default;
};

// The whole plan of one worker.
struct KVCacheConfig {
  std::int64_t num_blocks = 0;  // the null block included
  std::vector<KVCacheTensor> tensors;
  std::vector<KVCacheGroupSpec> groups;
  // Layers of a draft model by module, in order: EAGLE and draft models have one. Empty: no draft
  // model, or its layers are unknown.
  std::vector<std::vector<std::string>> draft_modules = {};
  bool operator==(const KVCacheConfig&) const = default;
};

// The module of the drafter that the layer belongs to; -1: it is the model's own.
std::int32_t draft_module_of(const KVCacheConfig& plan, const std::string& layer_name);

// The words that recordings and model files use: "full", "mla", "sliding_window", ...; "bf16", ...
std::string_view name_of(CacheKind kind);
std::string_view name_of(DType dtype);
std::string_view name_of(MambaCacheMode mode);
std::string_view name_of(KVQuantMode mode);
std::optional<CacheKind> cache_kind_from_name(std::string_view name);
std::optional<DType> dtype_from_name(std::string_view name);
std::optional<MambaCacheMode> mamba_cache_mode_from_name(std::string_view name);
std::optional<KVQuantMode> kv_quant_mode_from_name(std::string_view name);

}  // namespace lockstep
