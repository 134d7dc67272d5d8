// What one layer keeps in a cache of logical shape [B, H, N, C]: blocks, head slots, stored rows,
// bytes of one row in one slot. Pages are H * N * C bytes, padded to page_size_padded where it is
// set.
//
// Types mirror vLLM's spec classes (vllm/v1/kv_cache_interface.py), which grouping and merging
// check; fields that a type does not have keep their default. State layers are [B, 1, 1, C].
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/plan/page_size.h"
#include "reference/types/plan_options.h"
#include "reference/types/view_types.h"

namespace lockstep {

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

// One spec for all layers, by the rules of the first one's class; absent: they cannot share one.
// Merging drops fields that vLLM's merge drops (`alignment`; of MLA windows also the quantization).
// An Error: a mix that stops the engine instead of making more groups.
Result<std::optional<KVCacheSpec>> merge_specs(const LayerSpecs& layers);

// The six layouts of [L, B, H, N, C] in memory, outermost first, and the one stride function for
// all of them (vllm/v1/kv_cache_layout.py, compute_layout_strides).
//
// LBNHC (old name NHD) and LBHNC (HND) keep a layer together, BLNHC and BLHNC a block; LHBNC and
// BHLNC separate the heads of one page.

constexpr bool is_block_outermost(CacheLayout order) { return order >= CacheLayout::BLNHC; }
// The bytes of a page are one run.
constexpr bool is_block_compact(CacheLayout order) {
  return order != CacheLayout::LHBNC && order != CacheLayout::BHLNC;
}

// Byte strides along L, B, H, N, C.
struct OrderStrides {
  std::int64_t layer = 0, block = 0, head = 0, row = 0, byte = 1;
};
// `kernel_block_size` 0: blocks are not split. A stride that is not 0 in layer_stride or
// block_stride is fixed from outside, and what lies outside it counts from it. An Error: a padded
// page whose heads or rows lie outside layers or blocks, or a padded block that is split.
Result<OrderStrides> order_strides(const KVCacheSpec& spec, std::int64_t num_blocks,
                                   std::int64_t num_layers, CacheLayout order,
                                   std::int64_t kernel_block_size = 0,
                                   std::int64_t layer_stride = 0, std::int64_t block_stride = 0);

// The layouts that a set of backends supports, best first: identical lists stay; different lists
// are intersected, layouts with the most first places first. An empty list in `declared` accepts
// any.
// An Error: no layout is in all of them.
Result<std::vector<CacheLayout>> supported_orders(
    const std::vector<std::vector<CacheLayout>>& declared);

struct ChosenOrder {
  CacheLayout order = CacheLayout::LBNHC;
  std::string_view by;  // option, connector, backends, default
};
// `asked` is the user's, `connector` the connector's preference; `declared`: some backend has a
// list.
// An Error: the user's layout is not a candidate, or there is none.
Result<ChosenOrder> choose_order(const std::vector<CacheLayout>& supported, bool declared,
                                 const LayerSpecs& specs, const std::optional<std::string>& asked,
                                 std::optional<CacheLayout> connector);

// What each attention backend of the engine asks of a cache: kernel block sizes, orders, whether it
// serves prefill context parallelism, and what a layer makes of its page. One row a backend; the
// names are those of the recordings, the facts those of vLLM's backends
// (vllm/v1/attention/backends, vllm/models/deepseek_v4*, vllm/models/qwen4_exp).

// The GPU family that backends depend on.
enum class DeviceFamily : std::uint8_t { none, sm90, sm100 };

// What a layer makes of its page [B, H, N, C].
enum class PageBinding : std::uint8_t {
  as_is,
  rows,            // [B, N, C]: one head
  rows_then_head,  // [B, N, H, C]
  states,          // one view a state
};

struct CacheBackend {
  std::string_view name;
  std::vector<std::int64_t> listed = {};  // kernel sizes in tokens
  std::int64_t multiple_of = 0;
  std::vector<CacheLayout> orders = {};  // best first; empty: any
  PageBinding binding = PageBinding::as_is;
  bool serves_pcp = false;
};
// nullptr: not a backend that the model knows.
const CacheBackend* find_cache_backend(std::string_view name);

// `spec`: of a layer of the backend, or its facts.
KernelSizes kernel_sizes(const CacheBackend& backend, DeviceFamily device, const KVCacheSpec& spec);
std::vector<CacheLayout> declared_orders(const CacheBackend& backend, DeviceFamily device);
bool is_state_backend(const CacheBackend& backend);

}  // namespace lockstep
