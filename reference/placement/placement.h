// The plan of memory in which every worker has one allocation: groups overlay each other from byte
// 0, and the page of layer l, block b of a tensor lies at offset + l * layer_stride + b *
// block_stride. That is sound because a block belongs to one group at a time.
//
// Stages, in the engine's order: order (cache_spec.h), groups (cache_groups.cpp), bytes per block,
// tensors, admission, workers, capacity. Source: vllm/v1/core/kv_cache_planning.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/placement/cache_spec.h"
#include "reference/plan/block_sizes.h"

namespace lockstep {

// PlanOptions::kv_dtype and kv_quant_mode are not read here: `format` names both.
struct PlacementOptions : PlanOptions {
  // Of the draft model's own parallel configuration: one that runs at 1 under a sharded target
  // keeps all its tokens on every rank (DFlash without MLA); EAGLE's and MTP's run as the target
  // (v1/worker/gpu/model_runner.py, get_kv_cache_spec).
  std::int64_t draft_dcp = 1;
  std::string format = "auto";  // of the cache, as the engine names formats
  DType model_dtype = DType::bf16;
  DeviceFamily device = DeviceFamily::none;
  std::optional<std::int64_t> prefix_match_unit;
  bool prefix_caching = true;
  std::string spec_method;
  std::optional<std::string> order;  // the user's
  std::string connector;
  std::vector<std::string> skip_layers;  // asked to be left unquantized

  bool has_host_pages() const { return host_pool_bytes > 0; }
  // Tokens that are drafted a step; without a method nothing is.
  std::int64_t drafted_tokens() const { return spec_method.empty() ? 0 : num_spec; }
};

struct PlacementLayer {
  std::string name;
  std::optional<KVCacheSpec> spec;    // absent: needs no cache
  std::string backend;                // empty: no backend of its own
  std::int64_t fixed_block_size = 0;  // tokens, of rows in a format of their own; 0: by rule
  bool is_unquantized = false;        // keeps the model's element type whatever kv_dtype says
};

struct PlacedTensor {
  std::int64_t size_bytes = 0;  // of the whole allocation
  std::vector<std::string> layers;
  KVCacheSpec spec;                                             // of each of them
  std::int64_t layer_stride = 0, block_stride = 0, offset = 0;  // bytes
  bool host_resident = false;
};

struct HostPool {
  std::int64_t num_blocks = 0;
  std::int64_t block_stride = 0;  // bytes
  bool is_shared = false;
};

// One worker's.
struct Placement {
  std::int64_t num_blocks = 0;
  CacheLayout order = CacheLayout::LBNHC;
  std::vector<KVCacheGroupSpec> groups;
  std::vector<PlacedTensor> tensors;
  std::optional<HostPool> host;
  std::int64_t kv_tp_replicas = 1;
};

// Bytes that one block of the pool takes.
std::int64_t bytes_per_block(const std::vector<KVCacheGroupSpec>& groups, CacheLayout order);

// A worker's plan of `num_blocks`. An Error: the layout cannot express the pages.
Result<Placement> place_blocks(const std::vector<KVCacheGroupSpec>& groups, CacheLayout order,
                               std::int64_t num_blocks, const PlacementOptions& options);

struct WorkerShare {
  std::vector<std::string> layer_names;
  std::int64_t memory_bytes = 0;
};
// The plans of all workers; the smallest pool rules. An Error: a request of the longest length does
// not fit, or place_blocks.
Result<std::vector<Placement>> place_workers(const std::vector<KVCacheGroupSpec>& groups,
                                             CacheLayout order,
                                             const std::vector<WorkerShare>& workers,
                                             const PlacementOptions& options);

// Blocks of the device's pool that one request of the longest length takes.
Result<std::int64_t> blocks_per_request(const std::vector<KVCacheGroupSpec>& groups,
                                        const PlacementOptions& options);

struct PlacementCapacity {
  double max_concurrency = 0;
  std::int64_t tokens = 0;
};
Result<PlacementCapacity> capacity_of(const Placement& plan, const PlacementOptions& options);

// New blocks are zeroed: states are read before they are written whole, and rows of one precision
// must not be read as another's.
bool needs_zeroing(const Placement& plan);

// Tokens of the smallest block that later requests find: the engine's block_size.
std::int64_t cache_config_block(const Placement& plan);
// Tokens of the scheduler's block and of a hash, and what hits are multiples of. An Error: a
// prefix_match_unit that the blocks cannot be cut into.
Result<BlockSizes> hash_sizes(const Placement& plan, const PlacementOptions& options);

// From the facts of a layer to the spec that the planner receives: the platform's block sizes, then
// each backend's packing of rows, quantization and strides.
//
// Facts of a layer are its type, heads, head sizes, window, chunk, states, tokens per row and
// reader; everything else of its spec is derived here. Sources: vllm/platforms/interface.py
// (update_block_size_for_backend), customize_spec of each backend, get_kv_cache_spec of each kind
// of layer.

struct BlockAlignment {
  std::int64_t block_size = 0;        // tokens
  std::int64_t mamba_block_size = 0;  // of states; max_model_len when they are not cached
  std::optional<std::int64_t> mamba_page_size_padded;
  std::optional<std::int64_t> skip_page_size_padded;  // shared by quantized and unquantized layers
};

// Takes away what is worked out here.
void forget_plan(KVCacheSpec& spec);
// The layer without it.
PlacementLayer layer_facts(const PlacementLayer& layer);

// An Error: backends that share no block size, or an aligned one that a backend does not take.
Result<BlockAlignment> align_blocks(const std::vector<PlacementLayer>& facts,
                                    const PlacementOptions& options);

// The layers with their specs, those of host pages among them.
Result<std::vector<PlacementLayer>> layers_with_specs(const std::vector<PlacementLayer>& facts,
                                                      const BlockAlignment& alignment,
                                                      const PlacementOptions& options);

// The backend's packing: bytes of a row, head slots, strides between blocks.
KVCacheSpec customized(const CacheBackend& backend, DeviceFamily device, KVCacheSpec spec);

// All stages of a plan in the engine's order, each kept; a refusal names its stage and leaves the
// later ones empty.

struct PlacementStages {
  std::optional<BlockAlignment> alignment;
  std::vector<PlacementLayer> layers;  // with the specs that the planner gets
  std::vector<CacheLayout> supported;
  std::optional<ChosenOrder> order;
  std::vector<KVCacheGroupSpec> groups;
  std::vector<Placement> workers;  // empty: refused
  std::string_view refused_stage;  // options, specs, layout, groups, plan; empty: planned
  Error refused;
};

// A connector's preferred layout: by its name, where the layers allow it.
std::optional<CacheLayout> order_wish(const std::vector<PlacementLayer>& layers,
                                      const PlacementOptions& options);

// `layers` are facts of a model's layers; `is_bare`: layers without a model, whose specs stand as
// they are.
PlacementStages plan_stages(const std::vector<PlacementLayer>& layers, bool is_bare,
                            const std::vector<WorkerShare>& workers,
                            const PlacementOptions& options);

// Which layers share a block table: the rules of vllm/v1/core/kv_cache_planning.py
// (get_kv_cache_groups), the first one that applies.

// The groups of the whole model; windows have got their extra_retained_tokens and groups with a
// drafter's layers are marked. An Error: the layers cannot be brought together.
Result<std::vector<KVCacheGroupSpec>> cache_groups(LayerSpecs specs, CacheLayout order,
                                                   const PlacementOptions& options);

// An Error: the layer's block holds no KV entry. The engine divides by the page where it compares
// pages, so it refuses such a layer while grouping, or while planning at the latest.
Result<void> check_page(const std::string& name, const KVCacheSpec& spec);

// The host group of sparse MLA pages, the indexers, and the resident and hot groups of the device
// (reference/types/host_pages.h). Requires MLA layers.
Result<std::vector<KVCacheGroupSpec>> host_page_groups(const LayerSpecs& specs, CacheLayout order,
                                                       const PlacementOptions& options);

}  // namespace lockstep
