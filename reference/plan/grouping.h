// Which layers share a block table. A block has one size for all groups, so groups have layers
// whose pages can be made equal, equally many each.
//
// 1. Every layer is in exactly one group; the groups keep the order in which kinds first appear.
// 2. All layers of a group have equal specs, or (uniform type) need the same token slots.
// 3. Unless the groups are of uniform type, every group's page has the same size.
// 4. A kind with more layers than the group size is split round robin, layers[i::n], so that each
//    pipeline stage has its share of every group.
// 5. Hidden-state layers are removed first and added back one by one, padded to the common page.
// Rules: vllm/v1/core/kv_cache_utils.py (get_kv_cache_groups).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"
#include "reference/types/plan_options.h"

namespace lockstep {

// Requires every block_size to be set. No layers: no groups (a model that keeps no cache).
Result<std::vector<KVCacheGroupSpec>> kv_cache_groups(const LayerSpecs& layers,
                                                      const PlanOptions& options);

// Whether both layers need the same token slots, and all layers, so that they can share one group
// with pages of their own. `is_overlaid`: by the rules of 0.33.0, which compares the pages of
// states, too (kv_cache_interface.py: is_uniform_type).
bool need_same_slots(const KVCacheSpec& first, const KVCacheSpec& other, bool is_overlaid);
bool is_uniform_type(const LayerSpecs& layers, bool is_overlaid = false);

// One group of all these layers, each with a page of its own. REQUIRES: is_uniform_type(layers).
KVCacheGroupSpec uniform_type_group(const LayerSpecs& layers);
// One group of all these layers, which share a spec.
KVCacheGroupSpec one_spec_group(const LayerSpecs& layers, KVCacheSpec spec);
// The group with those of its layers that `holds` names; it may come out empty.
KVCacheGroupSpec with_layers(const KVCacheGroupSpec& whole,
                             const std::function<bool(const std::string& name)>& holds);
// The layers of the groups, group by group.
LayerSpecs layers_of(std::span<const KVCacheGroupSpec> groups);
// Layers of equal spec, in order of first appearance.
std::vector<LayerSpecs> by_equal_spec(const LayerSpecs& layers);
// Layers of each page size, sizes in order of first appearance.
using PageBuckets = std::vector<std::pair<std::int64_t, LayerSpecs>>;
PageBuckets by_page_size(const LayerSpecs& layers,
                         std::int64_t (*page_of)(const KVCacheSpec& spec));
// Groups of uniform type: group i has every count-th layer of each page size, from layer i.
// REQUIRES: as many layers of each size.
std::vector<KVCacheGroupSpec> dealt_groups(const PageBuckets& buckets, std::int64_t count);
// Layers of the commonest page size: how many tuples the layers make.
std::int64_t num_layer_tuples(const LayerSpecs& layers);

// Layers per group when kinds have these many: the smallest, unless the largest is under 1.5 times
// it.
std::int64_t layers_per_group(std::span<const std::int64_t> layers_of_kind);

// The chunk size in [lower_bound, max] that rounding `values` up to it pads least; ties take the
// larger.
std::int64_t approximate_gcd(std::span<const std::int64_t> values, std::int64_t lower_bound);

// Attention packing: N full-attention layers share one page, so a block holds 1/N of the tokens
// that a page of one layer would, and prefixes hit in smaller steps; the states take N times as
// many groups.
//
// 1. page_size_bytes of an attention spec stays that of one layer; a page of the pool holds N of
//    them.
// 2. Layer i of a group lies in tensor i / N at place i % N.
// 3. The last pack may hold fewer than N layers: its free places are wasted in every block.
// Source: vLLM pull request 35703 (mamba_num_attn_pages).

// Layers of this kind that share a page when the option is `attn_pack`.
std::int64_t layers_per_page(const KVCacheSpec& spec, std::int64_t attn_pack);

// Places that stand empty in the last pack of the group; each wastes one layer's page a block.
std::int64_t empty_places(const KVCacheGroupSpec& group);

}  // namespace lockstep
