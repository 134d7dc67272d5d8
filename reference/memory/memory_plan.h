// The memory of one worker as bytes, whichever planner placed it: tensors, and the offset and
// strides of every part of every layer. The prover and the drawings read nothing else.
//
// 1. Tensors are back to back; addresses count from the first.
// 2. Row n of head h of kernel block k of block b of a part begins at byte_of(part, {b, k, h, n}).
// 3. A layer's regions are the bytes of block 0 that it lies in, padding and empty places of a pack
//    included; block b's are b * block_stride later.
// Not here: layers on the host or without a cache, and the rows of backends with mapped tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/placement/worker_pages.h"
#include "reference/plan/layout.h"

namespace lockstep {

enum class PartKind : std::uint8_t {
  k,            // K rows
  v,            // V rows
  row,          // K and V together, MLA rows, hidden states
  state,        // one state tensor; `part` is its index
  padding,      // of a page longer than its content; or owned by another group
  empty_place,  // space of a pack that no layer fills
};

struct PartRows {
  PartKind kind = PartKind::row;
  std::int32_t part = 0;
  // Bytes.
  std::int64_t offset = 0, block_stride = 0, kernel_block_stride = 0, head_stride = 0;
  std::int64_t row_stride = 0, row_bytes = 0;
  std::int64_t kernel_blocks = 1, heads = 1, rows = 1;  // of a block, a kernel block, a head
};

struct RowIndex {
  std::int64_t block = 0, kernel_block = 0, head = 0, row = 0;
};
constexpr std::int64_t byte_of(const PartRows& part, const RowIndex& at) {
  return part.offset + at.block * part.block_stride + at.kernel_block * part.kernel_block_stride +
         at.head * part.head_stride + at.row * part.row_stride;
}

struct BlockRegion {
  std::int64_t begin = 0, bytes = 0, block_stride = 0;
  bool operator==(const BlockRegion&) const = default;
};

struct LayerMemory {
  std::string name;
  std::size_t group = 0, layer = 0;  // index in the group's layers; in WorkerPages of an allocation
  std::size_t tensor = 0;            // the first that it lies in
  std::int64_t end = 0;              // of the last
  std::vector<PartRows> parts;
  std::vector<BlockRegion> regions;
};

struct MemoryPlan {
  std::int64_t num_blocks = 0;
  std::vector<std::int64_t> tensor_size_bytes;
  std::vector<std::int64_t> layers_per_page;  // of each group
  std::vector<LayerMemory> layers;            // group by group, or tensor by tensor
};

// Tensors that layers share, a layer's place in each.
MemoryPlan memory_plan(const KVCacheConfig& config, const PoolLayout& pool);
// Groups that overlay one allocation: addresses by the closed form of the plan's order, sizes of
// pages by the worker.
MemoryPlan memory_plan(const Placement& plan, const WorkerPages& pages);

// A run of bytes of one block while one group owns it. Bytes count from the block's first, its
// regions laid end to end.
struct BlockRun {
  std::int64_t begin = 0, end = 0;
  PartKind kind = PartKind::padding;
  std::int32_t part = 0;
  std::int32_t layer = -1;  // of those that the group has in the tensor; -1: none
  bool operator==(const BlockRun&) const = default;
};
// The layers that a group has in a tensor, in order.
std::vector<const LayerMemory*> layers_in(const MemoryPlan& plan, std::size_t group,
                                          std::size_t tensor);
// Their rows, ascending: contiguous rows of one kernel block and part are one run.
std::vector<BlockRun> row_runs(const MemoryPlan& plan, std::size_t group, std::size_t tensor);
// The whole block: neighbouring runs of one layer and part merged, gaps filled.
std::vector<BlockRun> block_runs(const MemoryPlan& plan, std::size_t group, std::size_t tensor);

}  // namespace lockstep
