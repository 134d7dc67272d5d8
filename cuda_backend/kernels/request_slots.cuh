// Slot mappings of a step, request by request, where ranks share the tokens of a group (decode or
// prefill context parallelism) and where a captured graph pads the batch.
//
// A block of a shared group stands for block_size * size tokens. They are dealt to the ranks in
// runs of `interleave`, which divides the kernel's block size, and a rank keeps its runs one after
// the other in its own block of block_size.
//
// 1. A token of another rank, of a padded request or past the last request gets pad_slot.
// 2. No entry past a row's length is read: groups with fewer blocks have shorter rows, and a row
//    that was used before has stale entries behind its length (vLLM issues 53982 and 42273).
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

__device__ __forceinline__ Slot slot_of(const GroupTable& table, const ContextShare& share,
                                        std::int32_t row, std::int32_t position, Slot pad_slot) {
  const std::int32_t block_size = table.slot_block_size;
  const std::int32_t run = share.interleave;
  const std::int64_t tokens_per_block = std::int64_t(block_size) * share.size;
  const std::int64_t index = position / tokens_per_block;
  const auto within = std::int32_t(position - index * tokens_per_block);
  if (within / run % share.size != share.rank) return pad_slot;
  const std::int32_t offset = within / (run * share.size) * run + within % run;
  if (index >= std::int64_t(table.lengths[row]) * table.blocks_per_kv_block) return pad_slot;
  const std::int64_t width = std::int64_t(table.width) * table.blocks_per_kv_block;
  return Slot{table.kernel_entries[row * width + index]} * block_size + offset;
}

// Grid: x is the request, and one more for the padding; y is the group.
__global__ void request_slots_kernel(RequestSlotsParams p) {
  const std::int32_t group = blockIdx.y, request = blockIdx.x;
  Slot* slots = p.slots + group * p.slots_stride;
  const std::int32_t begin = p.query_start_loc[request];
  if (request == p.num_requests) {
    for (std::int32_t i = begin + threadIdx.x; i < p.num_padded_tokens; i += blockDim.x)
      slots[i] = p.pad_slot;
    return;
  }
  const GroupTable table = p.groups[group];
  const ContextShare share = p.shares[group];
  const std::int32_t row = p.rows[request], end = p.query_start_loc[request + 1];
  for (std::int32_t i = begin + threadIdx.x; i < end; i += blockDim.x)
    slots[i] = row < 0 ? p.pad_slot : slot_of(table, share, row, p.positions[i], p.pad_slot);
}

// The block tables of a step's batch, in the order of its requests, out of the rows that requests
// keep for their lifetime: what attention kernels are given.
//
// 1. Entries past a row's length, and all entries of a padded request, are the null block: a freed
//    block's id never reaches a kernel (vLLM issue 42273).
// 2. Blocks whose every token lies before the window of the request's first query are the null
//    block as well. 3. Every entry of the batch's table is written.
//
// Grid: x is the request of the padded batch, y the group; threads share the entries.
__global__ void batch_tables_kernel(BatchTablesParams p) {
  const std::int32_t request = blockIdx.x, row = p.rows[request];
  const GroupTable table = p.groups[blockIdx.y];
  const BatchTable batch = p.batches[blockIdx.y];
  const std::int32_t width = table.width * table.blocks_per_kv_block;
  std::int32_t first = 0, last = 0;
  if (row >= 0) {
    last = table.lengths[row] * table.blocks_per_kv_block;
    const std::int32_t unseen = p.num_computed_tokens[request] + 1 - batch.window;
    if (batch.window > 0 && unseen > 0) first = unseen / table.kernel_block_size;
  }
  for (std::int32_t i = threadIdx.x; i < width; i += blockDim.x) {
    const bool kept = i >= first && i < last;
    batch.entries[std::int64_t(request) * width + i] =
        kept ? table.kernel_entries[std::int64_t(row) * width + i] : 0;
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
