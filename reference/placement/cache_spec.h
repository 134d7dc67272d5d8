// What one layer keeps in a cache of logical shape [B, H, N, C]: blocks, head slots, stored rows,
// bytes of one row in one slot. Pages are H * N * C bytes, padded to page_size_padded where it is
// set.
//
// Types mirror vLLM's spec classes (vllm/v1/kv_cache_interface.py), which grouping and merging
// check; fields that a type does not have keep their default. State layers are [B, 1, 1, C].
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

inline std::int64_t divided_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t round_up_to(std::int64_t value, std::int64_t unit) {
  return divided_up(value, unit) * unit;
}

// What the stride between blocks must be a multiple of: bytes, or whole kernel blocks of up to this
// many tokens. Neither: 1.
struct StrideAlignment {
  std::int64_t bytes = 0;
  std::int64_t kernel_tokens = 0;
  bool is_set() const { return bytes != 0 || kernel_tokens != 0; }
  bool operator==(const StrideAlignment&) const = default;
};

// A flag that does not tell specs apart.
struct UncomparedFlag {
  bool value = false;
  bool operator==(const UncomparedFlag&) const { return true; }
};

struct CacheSpec {
  CacheKind kind = CacheKind::full_attention;
  std::int64_t block_size = 16;  // tokens
  std::int64_t num_kv_heads = 1;
  std::int64_t head_size = 0;    // elements
  std::int64_t head_size_v = 0;  // elements; 0 in rows of MLA and rings
  DType dtype = DType::bf16;
  KVQuantMode kv_quant_mode = KVQuantMode::none;
  std::optional<std::int64_t> page_size_padded;     // bytes
  std::optional<std::int64_t> num_head_slots;       // H; absent: num_kv_heads
  std::optional<std::int64_t> state_content_bytes;  // C; absent: K and V of the head
  std::int64_t tokens_per_state = 1;                // tokens to a stored row
  bool dcp_sharded = false;                         // positions are shared out over DCP's ranks
  std::optional<std::int64_t> max_tp_shards;        // ranks of TP beyond this hold copies
  StrideAlignment block_stride_alignment;
  UncomparedFlag is_draft;
  std::optional<std::int64_t> sliding_window;        // tokens
  std::int64_t extra_retained_tokens = 0;            // kept below a window
  std::optional<std::int64_t> attention_chunk_size;  // tokens
  std::optional<std::int64_t> rswa_window;
  std::optional<std::int64_t> sink_len;
  bool non_causal = false;  // some layer attends to what follows
  // MLA rows.
  std::optional<std::string> cache_dtype_str;
  std::optional<std::int64_t> topk_buffer_width;
  std::optional<std::int64_t> alignment;  // bytes that pages are rounded up to
  std::optional<std::string> model_version;
  bool is_indexer = false;  // cache_role
  bool is_index_group_leader = false;
  bool bounded_replay = false;
  bool non_causal_multi_token_decode = false;
  // States.
  std::vector<StateTensorSpec> states;
  std::string mamba_type;
  bool tp_replicated = false;  // every rank of TP holds the whole state
  MambaCacheMode mamba_cache_mode = MambaCacheMode::none;
  std::int64_t num_speculative_blocks = 0;
  std::int64_t num_prefill_checkpoint_blocks = 0;
  std::optional<std::int64_t> prefill_checkpoint_alignment;
  // HiSparse.
  std::int64_t hisparse_page_bytes = 0;
  std::int64_t blocks_per_request = 0;
  bool operator==(const CacheSpec&) const = default;
};

using NamedCacheSpec = std::pair<std::string, CacheSpec>;
using NamedCacheSpecs = std::vector<NamedCacheSpec>;  // in layer order

std::int64_t num_heads(const CacheSpec& spec);                         // H
std::int64_t rows_of(const CacheSpec& spec, std::int64_t block_size);  // N of such a block
std::int64_t content_bytes(const CacheSpec& spec);                     // C
std::int64_t unpadded_page_bytes(const CacheSpec& spec);               // H * N * C
std::int64_t page_bytes(const CacheSpec& spec);                        // as padded
bool is_prefix_cacheable(const CacheSpec& spec);
// 1: any stride; 0: a kernel block holds no KV entry, so there is none.
std::int64_t stride_alignment_bytes(const CacheSpec& spec);

// The same rows in blocks of another size. A page that `alignment` padded is padded again, but
// keeps its old padding where the new page needs none (kv_cache_interface.py:
// _apply_alignment_padding).
CacheSpec with_block_size(CacheSpec spec, std::int64_t block_size);
// Pads the page to `alignment`, as the constructor of an MLA spec does.
void apply_alignment(CacheSpec& spec);

// One spec for all of `specs`, by the rules of the first one's class. Merging drops fields that
// vLLM's merge drops (`alignment`; of MLA windows also the quantization).
struct Merged {
  std::optional<CacheSpec> spec;  // absent: they cannot share one
  std::string refused;            // a mix that stops the engine instead of making more groups
};
Merged merge_specs(const std::vector<CacheSpec>& specs);

// Whether layers of both need the same token slots (kv_cache_interface.py: is_uniform_type).
bool is_uniform_type(const CacheSpec& first, const CacheSpec& other);

// What a request of the longest length is bounded by.
struct RequestBounds {
  std::int64_t max_model_len = 0;
  std::int64_t max_in_flight_tokens = 0;  // scheduled and not yet settled
  std::int64_t max_encoder_tokens = 0;
  std::int64_t dcp = 1;
  bool states_aligned = false;  // the engine's mamba_cache_mode is align
};
// Blocks that it takes of this cache. An Error: windows whose positions DCP shards.
Result<std::int64_t> blocks_per_request(const CacheSpec& spec, const RequestBounds& bounds);

}  // namespace lockstep
