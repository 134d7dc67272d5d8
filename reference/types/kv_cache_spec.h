// What one layer keeps in the cache, and the plan that says where: plain types, no arithmetic.
// The names are vLLM's (vllm/v1/kv_cache_interface.py); sizes are worked out in page_size.h by the
// reference and, independently, by the backend.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/names.h"
#include "reference/types/cache_kinds.h"

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
  int4_per_token_head,
  // In plans only: no replay has such rows.
  nvfp4_ds_mla,
  turboquant_k8v4,
  turboquant_4bit_nc,
  turboquant_k3v4_nc,
  turboquant_3bit_nc,
};
constexpr bool is_planned_only(KVQuantMode mode) { return mode >= KVQuantMode::nvfp4_ds_mla; }
constexpr bool is_turboquant(KVQuantMode mode) { return mode >= KVQuantMode::turboquant_k8v4; }
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

// A flag that does not tell specs apart.
struct UncomparedFlag {
  bool value = false;
  bool operator==(const UncomparedFlag&) const { return true; }
};

// Tokens that one stored row covers (vLLM's tokens_per_state): several tokens share a row, or a
// token has several rows (an encoder that pools them). One of the two is 1.
struct TokensPerState {
  std::int64_t tokens = 1;
  std::int64_t rows = 1;
  auto operator<=>(const TokensPerState&) const = default;
};
constexpr bool shares_rows(const TokensPerState& per_row) { return per_row.tokens > 1; }
constexpr bool has_several_rows(const TokensPerState& per_row) { return per_row.rows > 1; }
constexpr bool is_one_row(const TokensPerState& per_row) { return per_row == TokensPerState{}; }

// What a plan with overlaid memory (0.33.0) says of a layer in addition; 0: absent. A replay's
// specs have none of it.
struct PlanFacts {
  std::int64_t num_head_slots = 0;       // H of a page [H, N, C]; 0: num_kv_heads
  std::int64_t state_content_bytes = 0;  // C: a stored row of one slot; 0: K and V of the head
  std::int64_t max_tp_shards = 0;        // ranks of TP beyond this hold copies
  std::int64_t stride_kernel_tokens =
      0;  // blocks are whole kernel blocks of N tokens or fewer apart
  UncomparedFlag is_draft;
  bool non_causal = false;  // some layer attends to what follows
  bool non_causal_multi_token_decode = false;
  std::int64_t topk_buffer_width = 0;
  bool is_indexer = false;  // cache_role
  bool is_index_group_leader = false;
  std::string mamba_type{};
  bool tp_replicated = false;  // every rank of TP holds the whole state
  bool operator==(const PlanFacts&) const = default;
};

// The cache of one layer, in a plan and in a replay. Fields that a kind does not use keep their
// default.
struct KVCacheSpec {
  CacheKind kind = CacheKind::full_attention;
  std::int64_t block_size = 16;  // tokens in one block
  std::int64_t num_kv_heads = 1;
  std::int64_t head_size = 64;  // elements
  DType dtype = DType::bf16;
  std::int64_t sliding_window = 0;        // tokens; sliding_window only
  std::int64_t attention_chunk_size = 0;  // tokens; chunked_local only
  // Rows of the model itself before every request's first token, in whole blocks of their own.
  // sink_full only.
  std::int64_t sink_len = 0;
  // Of what is generated the last tokens alone are attended to; the prompt stays.
  std::int64_t rswa_window = 0;  // tokens; rswa only
  // Tokens before the window that are kept and not attended to: several modules of MTP.
  std::int64_t extra_retained_tokens = 0;  // sliding_window only
  // After a hit the window is computed again, and its blocks are not cached (DeepSeek-V4.1).
  bool bounded_replay = false;          // sliding_window_mla only
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
  bool keys_alone = false;  // a row per token without a value; circular_buffer only
  // "fp8_ds_mla", "nvfp4_ds_mla": layouts in bytes of their own; empty: dtype rules
  std::string cache_dtype_str;
  std::string model_version;  // "deepseek_v4" or empty
  TokensPerState tokens_per_state;
  std::int64_t alignment = 0;  // bytes the page is rounded up to; 0: none
  // Bytes that the stride between blocks is a multiple of, where groups overlay one allocation:
  // what the layer's backend asks for.
  std::int64_t block_stride_alignment = 1;
  // True if decode context parallelism shards its tokens; false: replicated on every rank. Ignored
  // for states, which every rank keeps.
  bool dcp_sharded = true;
  // Of device copies of host pages: bytes of a page; and blocks of a request's hot region.
  std::int64_t page_copy_bytes = 0;
  std::int64_t blocks_per_request = 0;
  PlanFacts plan{};
  bool operator==(const KVCacheSpec&) const = default;
};

// Whether a block of it on several ranks of a context holds tokens of its own on each.
constexpr bool is_dealt_out(const KVCacheSpec& spec) {
  return spec.dcp_sharded && traits_of(spec.kind).is_sharded;
}
constexpr bool is_ring(const KVCacheSpec& spec) { return is_ring(spec.kind); }
constexpr bool is_cross_attention(const KVCacheSpec& spec) { return is_cross_attention(spec.kind); }
// True if vLLM serves models with such layers without prefix caching (models/config.py).
constexpr bool is_served_uncached(const KVCacheSpec& spec) {
  return is_cross_attention(spec) || spec.rswa_window > 0;
}
// True if attention reads rows other than a run of a request's tokens: an encoder's, sinks, or both
// sides of a gap.
constexpr bool reads_beside_tokens(const KVCacheSpec& spec) {
  return is_cross_attention(spec) || spec.sink_len > 0 || spec.rswa_window > 0;
}
// Whether it is a group of device copies of host pages, whose prefixes the host's group has.
constexpr bool keeps_pages(const KVCacheSpec& spec) { return keeps_pages(spec.kind); }
// Whether the blocks of its group are found by later requests.
constexpr bool is_prefix_cacheable(const KVCacheSpec& spec) {
  return traits_of(spec.kind).is_prefix_cacheable && !spec.bounded_replay;
}
// Whether a token has one row (MLA, hidden states) rather than a K row and a V row.
constexpr bool has_single_rows(const KVCacheSpec& spec) {
  const RowShape rows = traits_of(spec.kind).rows;
  return rows == RowShape::single || (rows == RowShape::single_if_keys_alone && spec.keys_alone);
}
// K and V by head, which tensor parallelism cuts by heads.
constexpr bool keeps_pairs(const KVCacheSpec& spec) {
  return is_attention(spec.kind) && !has_single_rows(spec);
}
// Full attention of the class that its sinks or its window make it.
constexpr void settle_full_attention(KVCacheSpec& spec) {
  if (!is_full_of_pairs(spec.kind)) return;
  spec.kind = spec.sink_len > 0      ? CacheKind::sink_full
              : spec.rswa_window > 0 ? CacheKind::rswa
                                     : CacheKind::full_attention;
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
  bool is_eagle_group = false;              // has a drafter's layers
  Residence residence = Residence::device;  // host: other groups hold copies of its rows
  std::string role{};                       // vLLM's KVCacheGroupRole; empty: the default
  // Layers that `layer_specs` has in place of the group's own, which are all in other pipeline
  // stages: the engine plans tensors for them in this stage, too.
  std::vector<std::string> foreign_layers = {};

  bool is_uniform_type() const { return !layer_specs.empty(); }
  const KVCacheSpec& layer_spec(std::size_t layer) const {
    return layer_specs.empty() ? spec : layer_specs[layer];
  }
  const std::vector<std::string>& planned_layers() const {
    return layer_names.empty() ? foreign_layers : layer_names;
  }
  bool operator==(const KVCacheGroupSpec&) const = default;
};

constexpr bool is_on_host(const KVCacheGroupSpec& group) {
  return group.residence == Residence::host;
}
// Whether its rows take blocks of the device.
constexpr bool is_on_device(const KVCacheGroupSpec& group) {
  return group.residence == Residence::device &&
         traits_of(group.spec.kind).residence == Residence::device;
}

// True if each token has one row, in all layers of the group.
constexpr bool has_row_per_token(const KVCacheGroupSpec& group) {
  if (!is_one_row(group.spec.tokens_per_state)) return false;
  for (const KVCacheSpec& spec : group.layer_specs)
    if (!is_one_row(spec.tokens_per_state)) return false;
  return true;
}
// True if several tokens share a row in a layer of the group.
constexpr bool has_compressed_rows(const KVCacheGroupSpec& group) {
  if (shares_rows(group.spec.tokens_per_state)) return true;
  for (const KVCacheSpec& spec : group.layer_specs)
    if (shares_rows(spec.tokens_per_state)) return true;
  return false;
}

// True if a request has rows of an encoder in addition to those of its tokens.
constexpr bool has_cross_attention(const std::vector<KVCacheGroupSpec>& groups) {
  for (const KVCacheGroupSpec& group : groups)
    if (is_cross_attention(group.spec)) return true;
  return false;
}
// True if one of the groups, layers or kinds of layers keeps recurrent states.
constexpr bool has_states(const auto& parts) {
  return std::ranges::any_of(parts, [](const auto& part) { return is_state_kind(part.spec.kind); });
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

// The words that recordings and model files use: "bf16", ...
std::string_view name_of(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);
// Upper case, as the engine names its modes in plans.
std::string planned_name_of(KVQuantMode mode);
std::optional<KVQuantMode> kv_quant_mode_from_planned_name(std::string_view name);

}  // namespace lockstep
