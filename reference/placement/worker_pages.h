// What a worker makes of its plan: kernel blocks, mapped tables, the page of every layer, and what
// zeroing and block copies address. Source: vllm/v1/worker/utils.py (allocate_kv_cache,
// prepare_kernel_block_sizes, AttentionGroup, KVBlockZeroer, copy_kv_cache_blocks_inplace).
//
// 1. Blocks are the first dimension of every page: a pool of two is not ambiguous.
// 2. Byte c of row n in head h of kernel block b lies at offset + b * block_stride + h *
//    head_stride + n * row_stride + c, in every order and for every kind of cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"
#include "reference/plan/memory_plan.h"
#include "reference/types/view_types.h"

namespace lockstep {

struct CachePage {
  std::int64_t blocks = 0, heads = 0, rows = 0, content_bytes = 0;             // [B, H, N, C]
  std::int64_t offset = 0, block_stride = 0, head_stride = 0, row_stride = 0;  // bytes
  bool operator==(const CachePage&) const = default;
};

struct LayerPage {
  std::string name;
  std::size_t group = 0;
  KVCacheSpec spec;
  PageBinding binding = PageBinding::as_is;
  bool host_resident = false;
  CachePage page;   // in blocks of the group's kernel size: what connectors and copies address
  CachePage bound;  // in the backend's own kernel blocks where its table is mapped
};
// The view of a page in elements, and what the layer binds: empty where it is the page itself.
TensorView view_of(const CachePage& page, DType dtype);
std::vector<TensorView> bound_views(const LayerPage& layer);

// Layers whose backend wants smaller blocks than the manager's. With a stride their table is
// mapped: kernel block j of block b is b * kernel_block_stride + j.
struct KernelBlockGroup {
  std::size_t group = 0;
  std::string first;
  std::int64_t kernel_block_size = 0, kernel_block_stride = 0;
};

struct WorkerPages {
  std::int64_t num_blocks = 0;
  std::int64_t device_bytes = 0, host_bytes = 0;  // allocations
  std::vector<std::int64_t> kernel_block_sizes;  // of the groups that have rows of tokens or states
  std::vector<KernelBlockGroup> kernel_block_groups;
  std::vector<LayerPage> layers;              // tensor by tensor
  std::vector<std::size_t> in_backend_order;  // group by group, layers of equal backend and spec
};

// The page of the tensor's first layer, in kernel blocks of `kernel_block_size` tokens. Those of
// further layers are layer_stride apart. An Error: blocks that cannot be split, or rows that are
// not whole elements.
Result<CachePage> first_page(const PlacedTensor& tensor, CacheLayout order, std::int64_t num_blocks,
                             std::int64_t kernel_block_size);

// An Error: the engine core takes the plan and the worker does not.
Result<WorkerPages> worker_pages(const Placement& plan, const std::vector<PlacementLayer>& layers,
                                 const PlacementOptions& options);

// The segments that zeroing clears in every new block: rows of tokens only, one a kernel block and
// head group outside it; of several at an address the widest. An Error: they are not whole words.
Result<std::vector<BlockRegion>> zero_segments(const WorkerPages& pages);

// Layers that lose bytes when a block is copied, by how many of how many bytes.
struct LostBytes {
  std::int64_t bytes = 0, of = 0, layers = 0;
  std::string first;
};
// `by_layer_index`: views in the order of layer numbers, as in model runner V1; otherwise tensor by
// tensor. The engine copies the first of several views at one address.
std::vector<LostBytes> lost_in_copies(const WorkerPages& pages, bool by_layer_index);

// What connectors that keep blocks in host memory address in an overlaid allocation. Block ids have
// no group there: a block is moved as all regions of its id, so these must hold the union of the
// views at each address. Sources: vllm/v1/simple_kv_offload/worker.py (register_kv_caches),
// vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py (the same).
//
// 1. Byte c of block b lies at begin + b * block_stride + c.
// Not here: transfers by canonical pages, which translate rows of one rank for another.

struct OffloadRegion : BlockRegion {
  std::string first;  // layer that it is registered for
};

// SimpleCPUOffloadConnector: by the geometry of tensors. With layers outermost a region for every
// layer, in order LHBNC for every head slot of one; else the whole block.
std::vector<OffloadRegion> simple_offload_regions(const Placement& plan);

// OffloadingConnector, of the groups that are found by prefix: a page of each layer, or, as soon as
// blocks of a layer are not one page apart, a region as long as that stride from byte 0.
std::vector<OffloadRegion> offloading_regions(const Placement& plan, const WorkerPages& pages);
// Whether that connector moves blocks of the group.
bool is_offloaded(const KVCacheGroupSpec& group);

}  // namespace lockstep
