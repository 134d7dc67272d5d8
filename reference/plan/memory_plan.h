// The memory of one worker as bytes, whichever planner placed it: tensors, and the offset and
// strides of every part of every layer. Replays, the prover and the drawings read nothing else, so
// the plan that is proved is the plan that runs.
//
// 1. Tensors are back to back; addresses count from the first.
// 2. Row n of head h of kernel block k of block b of a part begins at byte_of(part, {b, k, h, n}).
// 3. A layer's regions are the bytes of block 0 that it lies in, padding and empty places of a pack
//    included; block b's are b * block_stride later. K and V of a block may be apart: two regions.
// 4. The tensors of a layer follow each other and are equally large.
// 5. Two layers share bytes only across blocks of different groups; a block belongs to one group at
//    a time (sim/check/plan_prover.h proves rules 2 to 5).
// Not here: layers on the host or without a cache, the rows of backends with mapped tables, and
// whether a backend's view agrees (cuda_backend/views/views.h has its own arithmetic).
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/types/view_types.h"

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

constexpr std::int64_t bytes_of(const PartRows& part) {
  return part.kernel_blocks * part.heads * part.rows * part.row_bytes;
}

struct BlockRegion {
  std::int64_t begin = 0, bytes = 0, block_stride = 0;
  bool operator==(const BlockRegion&) const = default;
};

struct LayerMemory {
  std::string name;
  std::size_t group = 0, layer = 0;  // index in the group's layers; in WorkerPages of an allocation
  std::int32_t tensor = 0, last_tensor = 0;  // that it lies in
  std::int64_t begin = 0, end = 0;           // of the first, of the last
  std::vector<PartRows> parts = {};          // K and V; rows of both; or states
  std::vector<BlockRegion> regions = {};

  bool keeps_rows() const { return !parts.empty() && parts.front().kind != PartKind::state; }
  // Rows of a token: 2 (K, V), 1 (MLA, hidden states), 0 (states).
  std::int64_t num_kv() const { return keeps_rows() ? std::ssize(parts) : 0; }
  // REQUIRES: keeps_rows(). Rows of a head in a block, and the byte where one of them begins.
  std::int64_t rows_per_block() const { return parts.front().kernel_blocks * parts.front().rows; }
  std::int64_t row_begin(BlockId block, std::int64_t kv, std::int64_t row,
                         std::int64_t head) const {
    const PartRows& part = parts[static_cast<std::size_t>(kv)];
    const std::int64_t kernel_block = row / part.rows;
    return byte_of(part, {index_of(block), kernel_block, head, row - kernel_block * part.rows});
  }
  std::int64_t page_bytes() const;  // of a block in each tensor
};

struct MemoryPlan {
  std::int64_t num_blocks = 0;
  std::vector<std::int64_t> tensor_size_bytes;
  std::vector<std::int64_t> layers_per_page{};  // of each group
  std::vector<LayerMemory> layers{};            // group by group, or tensor by tensor
};

// The first byte of each tensor, and the end of the last.
std::vector<std::int64_t> tensor_begins(const std::vector<std::int64_t>& size_bytes);
// A part for each state of a page of states that begins at `offset`.
std::vector<PartRows> state_parts(const KVCacheSpec& spec, std::int64_t offset,
                                  std::int64_t block_stride);
// A state of every block as a strided view; offset and stride in bytes.
TensorView state_view(const StateTensorSpec& state, std::int64_t num_blocks, std::int64_t offset,
                      std::int64_t block_stride);

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
