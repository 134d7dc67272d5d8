// Kernels whose speed under the executor is measured: one that only moves memory, one that only
// meets.
#pragma once

#include <cstdint>

#include "cuda_backend/simt/simt.h"

namespace lockstep {

// Rows of heads * dim 2-byte elements go from [tokens, row] to the slots of a paged cache (NHD,
// padded blocks). Strides in elements.
struct WriteRowsParams {
  const std::uint16_t* key;
  const std::uint16_t* value;
  std::uint16_t* key_cache;
  std::uint16_t* value_cache;
  const std::int64_t* slot_mapping;
  std::int64_t num_tokens;
  std::int64_t block_stride;
  std::int64_t row;
  int block_size;
};

struct BenchmarkKernels {
  simt::error_t (*nothing)(simt::stream_t);  // one warp
  simt::error_t (*write_rows_vec16)(simt::stream_t, const WriteRowsParams&);
  simt::error_t (*write_rows_scalar)(simt::stream_t, const WriteRowsParams&);
  // Sum of each of `rows` rows of `columns` floats, one CTA of 256 threads per row.
  simt::error_t (*sum_rows_shuffles)(simt::stream_t, const float*, float*, int rows, int columns);
  simt::error_t (*sum_rows_warp_sum)(simt::stream_t, const float*, float*, int rows, int columns);
  simt::error_t (*sum_rows_tree)(simt::stream_t, const float*, float*, int rows, int columns);
};
SIMT_DECLARE_IN_VARIANTS(extern const BenchmarkKernels benchmark_kernels;)

}  // namespace lockstep
