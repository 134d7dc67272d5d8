// The block tables of a step's batch, in the order of its requests, out of the rows that requests
// keep for their lifetime: what attention kernels are given.
//
// 1. Entries past a row's length, and all entries of a padded request, are the null block: a freed
//    block's id never reaches a kernel (vLLM issue 42273).
// 2. Blocks whose every token lies before the window of the request's first query are the null
//    block as well. 3. Every entry of the batch's table is written.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

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
