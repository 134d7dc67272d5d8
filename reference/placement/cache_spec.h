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

using NamedCacheSpec = std::pair<std::string, KVCacheSpec>;
using NamedCacheSpecs = std::vector<NamedCacheSpec>;  // in layer order

std::int64_t num_heads(const KVCacheSpec& spec);                         // H
std::int64_t rows_of(const KVCacheSpec& spec, std::int64_t block_size);  // N of such a block
std::int64_t content_bytes(const KVCacheSpec& spec);                     // C
std::int64_t unpadded_page_bytes(const KVCacheSpec& spec);               // H * N * C
std::int64_t page_bytes(const KVCacheSpec& spec);                        // as padded
// Whether its class says that later requests find its blocks. That of cross attention does, though
// its engine caches no prefixes.
bool is_cacheable_by_class(const KVCacheSpec& spec);
// 1: any stride; 0: a kernel block holds no KV entry, so there is none.
std::int64_t stride_alignment_bytes(const KVCacheSpec& spec);

// The same rows in blocks of another size. A page that `alignment` padded is padded again, but
// keeps its old padding where the new page needs none (kv_cache_interface.py:
// _apply_alignment_padding).
KVCacheSpec with_block_size(KVCacheSpec spec, std::int64_t block_size);
// Pads the page to `alignment`, as the constructor of an MLA spec does.
void apply_alignment(KVCacheSpec& spec);

// One spec for all of `specs`, by the rules of the first one's class. Merging drops fields that
// vLLM's merge drops (`alignment`; of MLA windows also the quantization).
struct Merged {
  std::optional<KVCacheSpec> spec;  // absent: they cannot share one
  std::string refused;              // a mix that stops the engine instead of making more groups
};
Merged merge_specs(const std::vector<KVCacheSpec>& specs);

// Whether layers of both need the same token slots (kv_cache_interface.py: is_uniform_type).
bool is_uniform_type(const KVCacheSpec& first, const KVCacheSpec& other);

// What a request of the longest length is bounded by.
struct RequestBounds {
  std::int64_t max_model_len = 0;
  std::int64_t max_in_flight_tokens = 0;  // scheduled and not yet settled
  std::int64_t max_encoder_tokens = 0;
  std::int64_t dcp = 1;
  bool states_aligned = false;  // the engine's mamba_cache_mode is align
};
// Blocks that it takes of this cache. An Error: windows whose positions DCP shards.
Result<std::int64_t> blocks_per_request(const KVCacheSpec& spec, const RequestBounds& bounds);

}  // namespace lockstep
