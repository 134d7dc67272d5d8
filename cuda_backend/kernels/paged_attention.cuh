// Softmax attention of one query token over the paged cache, in fp32 (sim/protocol/backend.h, rule
// 5). Decode and prefill alike: a query names its own range of positions, which is its mask.
//
// 1. One warp for each (query, query head). In a tile of keys a lane scores every 32nd; then lanes
// share
//    the V rows: as many lanes to a row as it has chunks of 16 bytes, and as many rows at a time as
//    lanes are left.
// 2. The order of every sum is fixed by the shape alone, so a result is the same on CPU and GPU.
// 3. An empty range gives zeros. Rounding: each output is a sum of n terms of weight at most 1, so
// it is
//    within (n + head_size + 8) * 2^-24 * max|V| of the exact value, scores being exact.
#pragma once

#include "cuda_backend/kernels/number_formats.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline constexpr int kKeysPerLane = 4;
inline constexpr int kTileKeys = 32 * kKeysPerLane;
// Elements of V that one lane accumulates: rows of up to 32 * 32 elements.
inline constexpr int kLaneElements = 32;

// 16 bytes of a row; bytes past its end are zero, and so are the elements that they hold.
struct Chunk {
  std::uint64_t low = 0, high = 0;
};
__device__ __forceinline__ Chunk load_chunk(const std::byte* row, std::int32_t index,
                                            const RowCache& cache) {
  const std::byte* at = row + 16 * std::int64_t(index);
  if (cache.unit_bytes == 16) {
    const simt::vec16 vector = *reinterpret_cast<const simt::vec16*>(at);
    return {low_word(vector), high_word(vector)};
  }
  const std::int32_t left = cache.row_bytes - 16 * index;
  Chunk chunk;
  chunk.low = load_word(at, left < 8 ? left : 8, cache.unit_bytes);
  if (left > 8) chunk.high = load_word(at + 8, left < 16 ? left - 8 : 8, cache.unit_bytes);
  return chunk;
}
template <int kElementBytes>
__device__ __forceinline__ float chunk_element(const Chunk& chunk, int i, DType dtype) {
  constexpr int kPerWord = 8 / kElementBytes;
  return element<kElementBytes>(i < kPerWord ? chunk.low : chunk.high, i % kPerWord, dtype);
}

// q . k in element order; the query row is padded with zeros to whole chunks.
template <int kElementBytes>
__device__ __forceinline__ float score_key(const float* query, const std::byte* key,
                                           const RowCache& cache) {
  constexpr int kPerChunk = 16 / kElementBytes;
  float score = 0.0f;
  for (std::int32_t c = 0; 16 * c < cache.row_bytes; ++c) {
    const Chunk chunk = load_chunk(key, c, cache);
    SIMT_UNROLL
    for (int quad = 0; quad < kPerChunk / 4; ++quad) {
      const simt::vec16 q = reinterpret_cast<const simt::vec16*>(query + c * kPerChunk)[quad];
      SIMT_UNROLL
      for (int i = 0; i < 4; ++i)
        score = fmaf(__uint_as_float(simt::word(q, i)),
                     chunk_element<kElementBytes>(chunk, 4 * quad + i, cache.dtype), score);
    }
  }
  return score;
}

// How the lanes of the warp share rows of V.
struct LaneShare {
  std::int32_t lanes_per_row, rows_at_once, chunk, row;  // the last two: of this lane
};
__device__ __forceinline__ LaneShare share_rows(std::int32_t chunks) {
  std::int32_t lanes = 1;
  while (lanes < chunks && lanes < 32) lanes *= 2;
  const std::int32_t lane = threadIdx.x;
  return {lanes, 32 / lanes, lane % lanes, lane / lanes};
}

// What a lane keeps while it walks over the tiles.
struct OnlineSoftmax {
  float maximum = -INFINITY;
  float sum = 0.0f;
  float weighted[kLaneElements] = {};
};

// Adds `weight` times this lane's chunks of a V row: chunks share.chunk, + lanes_per_row, ...
template <int kElementBytes>
__device__ __forceinline__ void add_value(OnlineSoftmax& state, const std::byte* value,
                                          float weight, const RowCache& cache,
                                          const LaneShare& share) {
  constexpr int kPerChunk = 16 / kElementBytes;
  SIMT_UNROLL
  for (int c = 0; c < kLaneElements / kPerChunk; ++c) {
    const std::int32_t index = share.chunk + c * share.lanes_per_row;
    if (16 * index >= cache.row_bytes) return;
    const Chunk chunk = load_chunk(value, index, cache);
    SIMT_UNROLL
    for (int i = 0; i < kPerChunk; ++i) {
      float& sum = state.weighted[c * kPerChunk + i];
      sum = fmaf(weight, chunk_element<kElementBytes>(chunk, i, cache.dtype), sum);
    }
  }
}

// What the CTA shares: weights and V offsets of a tile, and at the end each lane's part of the
// output.
struct AttentionShared {
  float* weights;        // [kTileKeys]
  std::int64_t* values;  // [kTileKeys]
  float* parts;          // [32, kLaneElements]
};

// The parts of lanes that held the same chunk of different rows, added up in the order of the
// lanes.
template <int kElementBytes>
__device__ __forceinline__ void write_output(const OnlineSoftmax& state,
                                             const AttentionShared& shared, const LaneShare& share,
                                             float* output, std::int32_t head_size) {
  constexpr int kPerChunk = 16 / kElementBytes;
  const std::int32_t lane = threadIdx.x, lanes = share.lanes_per_row;
  SIMT_UNROLL
  for (int i = 0; i < kLaneElements; ++i)
    if ((share.chunk + i / kPerChunk * lanes) * kPerChunk < head_size)
      shared.parts[lane * kLaneElements + i] = state.weighted[i];
  __syncwarp();
  for (std::int32_t at = lane; at < head_size; at += 32) {
    const std::int32_t chunk = at / kPerChunk;
    const std::int32_t place = chunk / lanes * kPerChunk + at % kPerChunk;
    float sum = 0.0f;
    for (std::int32_t row = 0; row < share.rows_at_once; ++row)
      sum += shared.parts[(chunk % lanes + row * lanes) * kLaneElements + place];
    output[at] = state.sum > 0.0f ? sum / state.sum : 0.0f;
  }
}

// Scores of this lane's keys of the tile, with their weights' sum added to the state's.
template <int kElementBytes>
__device__ __forceinline__ void weigh_tile(OnlineSoftmax& state, const AttentionShared& shared,
                                           const QueryItem& item, const RowCache& cache,
                                           const float* query, std::int32_t kv_head,
                                           std::int32_t first) {
  const std::int32_t lane = threadIdx.x;
  const float scale = 1.0f / sqrtf(float(cache.head_size));
  float scores[kKeysPerLane], highest = -INFINITY;
  SIMT_UNROLL
  for (int k = 0; k < kKeysPerLane; ++k) {
    const std::int32_t at = lane + 32 * k;
    scores[k] = -INFINITY;
    if (first + at >= item.last) continue;
    const std::int32_t position = first + at + (first + at < item.gap_first ? 0 : item.gap);
    const std::byte* key = key_of_position(cache, item.row, position) + kv_head * cache.head_stride;
    scores[k] = scale * score_key<kElementBytes>(query, key, cache);
    shared.values[at] = (key - cache.base) + (cache.num_parts == 2 ? cache.part_stride : 0);
    if (!(scores[k] <= highest)) highest = scores[k];
  }
  const float tile_highest = simt::warp_max(highest);
  const float maximum = state.maximum < tile_highest ? tile_highest : state.maximum;
  const float kept = state.sum > 0.0f ? exp_nonpositive(state.maximum - maximum) : 0.0f;
  float sum = 0.0f;
  SIMT_UNROLL
  for (int k = 0; k < kKeysPerLane; ++k) {
    if (first + lane + 32 * k >= item.last) continue;
    const float weight = exp_nonpositive(scores[k] - maximum);
    shared.weights[lane + 32 * k] = weight;
    sum += weight;
  }
  state.sum = fmaf(state.sum, kept, simt::warp_sum(sum));
  state.maximum = maximum;
  for (float& weighted : state.weighted) weighted *= kept;
}

template <int kElementBytes>
__device__ __forceinline__ void attend(const AttentionParams& p, const QueryItem& item,
                                       const RowCache& cache, std::int32_t query_head,
                                       const AttentionShared& shared) {
  const float* query =
      p.queries + item.query_begin + query_head * padded_head_size(cache.head_size);
  const LaneShare share = share_rows((cache.row_bytes + 15) / 16);
  OnlineSoftmax state;
  for (std::int32_t first = item.first; first < item.last; first += kTileKeys) {
    weigh_tile<kElementBytes>(state, shared, item, cache, query, query_head / cache.queries_per_kv,
                              first);
    __syncwarp();
    const std::int32_t left = item.last - first;
    for (std::int32_t key = share.row; key < (left < kTileKeys ? left : kTileKeys);
         key += share.rows_at_once)
      add_value<kElementBytes>(state, cache.base + shared.values[key], shared.weights[key], cache,
                               share);
    __syncwarp();
  }
  float* output = p.outputs + item.output_begin + std::int64_t(query_head) * cache.head_size;
  write_output<kElementBytes>(state, shared, share, output, cache.head_size);
}

// Grid: x is the query, y the query head. CTAs of one warp.
__global__ void paged_attention_kernel(AttentionParams p) {
  SIMT_SHARED_ARRAY(float, weights, kTileKeys);
  SIMT_SHARED_ARRAY(std::int64_t, values, kTileKeys);
  SIMT_SHARED_ARRAY(float, parts, 32 * kLaneElements);
  const AttentionShared shared{weights, values, parts};
  const QueryItem item = p.items[blockIdx.x];
  if (item.row < 0) return;
  const RowCache cache = p.layers[item.layer_index];
  const std::int32_t query_head = blockIdx.y;
  if (query_head >= cache.num_kv_heads * cache.queries_per_kv) return;
  switch (cache.row_bytes / cache.head_size) {
    case 4:
      attend<4>(p, item, cache, query_head, shared);
      break;
    case 2:
      attend<2>(p, item, cache, query_head, shared);
      break;
    default:
      attend<1>(p, item, cache, query_head, shared);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
