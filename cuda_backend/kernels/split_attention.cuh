// Softmax attention over a paged cache, split along the context: each CTA covers a run of keys for
// one query and one query head and leaves a partial softmax, which the kernel below it joins.
// It serves decoding requests and prefill chunks, with any layout, dtype and scaling of PartLayout.
//
// 1. A query at position p sees [first, p]. A window keeps the last `window` of them, a local chunk
//    the positions of p's chunk. A query that is not causal sees its whole request. Explicit ranges
//    replace this rule.
// 2. Entries of the block table outside that range are not read: they may be null or stale.
// 3. The order of every sum follows from the shape, so CPU and GPU agree in every bit.
// 4. Tolerance, with u = 2^-24: a score is a chain of head_size fmaf, a product with each scale and
//    a difference, so it is off by at most (head_size + 4) u times the largest scale * sum |q k|. A
//    weight is exp(score - maximum) within 4 u plus u times that difference, at most the range R of
//    the scores; each of the T tiles of 64 keys and of the S splits rescales it by another such
//    factor, and n keys are added up. Together, with the same error in numerator and denominator:
//    2 (score error + (4 (T + S + 1) + R + n + 4) u) max |v|
//    Elements of packed rows are exact in fp32: e2m1 times e4m3 has 6 bits, int4 less its zero 5.
//    (attention_bound() of tests/cuda_backend/attention_oracle.h).
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/number_formats.cuh"
#include "cuda_backend/kernels/packed_rows.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline constexpr std::int32_t kMaxHeadSize = 1024;
// Elements of V that one lane adds up, and the floats from one lane's to the next lane's.
inline constexpr std::int32_t kLaneElements = kMaxHeadSize / 32, kLaneStride = kLaneElements + 1;
// Keys between two rendezvous of the warp; each lane scores two of them.
inline constexpr std::int32_t kTileKeys = 64;

__device__ __forceinline__ KeyRange visible_keys(const SplitAttentionParams& p, std::int64_t token,
                                                 std::int32_t row) {
  if (p.ranges != nullptr) return p.ranges[token];
  if (!p.causal) return {0, p.seq_lens[row]};
  const std::int32_t last = p.positions[token] + 1;
  std::int32_t first = 0;
  if (p.window > 0 && last > p.window) first = last - p.window;
  if (p.chunk > 0) {
    const std::int32_t chunk_first = (last - 1) / p.chunk * p.chunk;
    first = first < chunk_first ? chunk_first : first;
  }
  return {first, last};
}
// Splits count from the first visible key.
__device__ __forceinline__ std::int32_t splits_of(const KeyRange& keys, std::int32_t split_keys) {
  return (keys.last - keys.first + split_keys - 1) / split_keys;
}

// Where a query's partial of a split lies: maximum, sum, weighted values.
__device__ __forceinline__ float* partial_of(const SplitAttentionParams& p, std::int64_t token,
                                             std::int32_t query_head, std::int32_t split) {
  const std::int64_t index = (token * p.num_query_heads + query_head) * p.num_splits + split;
  return p.partials + index * (2 + p.value.head_size);
}

__device__ __forceinline__ RowPlace place_of_key(const SplitAttentionParams& p, std::int32_t row,
                                                 std::int32_t position) {
  if (p.rows != nullptr) return place_of_position(*p.rows, row, position);
  const std::uint32_t index = divide(std::uint32_t(position), p.key.block_size);
  return {p.block_table[row * p.table_width + index],
          position - std::int32_t(index * p.key.block_size.value), nullptr};
}
// A row that is not on the device has one head and stands for K and V.
__device__ __forceinline__ std::byte* row_at(const PartLayout& part, const RowPlace& place,
                                             std::int32_t head) {
  if (place.away != nullptr) return const_cast<std::byte*>(place.away);
  return part_row(part, place.block, place.offset, head);
}

__device__ __forceinline__ float scale_of_row(const PartLayout& part, const RowPlace& place,
                                              std::int32_t head) {
  if (part.scaling == Scaling::none || part.scaling >= kFirstLatent) return 1.0f;
  if (part.scaling == Scaling::per_tensor) return *part_scale(part, 0, 0, 0);
  if (part.scaling == Scaling::fp4_groups) return *part.layer_scale;
  const float scale = *part_scale(part, place.block, place.offset, head);
  return part.scaling == Scaling::int4_rows ? __uint_as_float(__float_as_uint(scale) & ~15u)
                                            : scale;
}

__device__ __forceinline__ PackedRow packed_row(const PartLayout& part, const RowPlace& place,
                                                std::int32_t head) {
  PackedRow row{place.block, place.offset, head, 0.0f};
  if (part.scaling == Scaling::int4_rows)
    row.zero = float(__float_as_uint(*part_scale(part, place.block, place.offset, head)) & 15);
  return row;
}

// q . k in element order, before the scale of a row or a layer.
template <int kItem>
__device__ __forceinline__ float dot_with_key(const float* query, const PartLayout& part,
                                              const RowPlace& place, std::int32_t head) {
  std::byte* row = row_at(part, place, head);
  const std::int32_t bytes = element_bytes(part.dtype);
  float score = 0.0f;
  if (part.scaling >= kFirstPacked) {
    const PackedRow packed = packed_row(part, place, head);
    for (std::int32_t at = 0; at < part.head_size; at += kItem) {
      float values[kItem];
      load_packed<kItem>(values, part, row, packed, at);
      SIMT_UNROLL
      for (int i = 0; i < kItem; ++i) score = fmaf(query[at + i], values[i], score);
    }
    return score;
  }
  for (std::int32_t at = 0; at < part.head_size; at += kItem) {
    std::uint32_t bits[kItem];
    load_bits<kItem>(bits, part_element(part, row, at), bytes);
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i) score = fmaf(query[at + i], decode(bits[i], part.dtype), score);
  }
  return score;
}

// What the warp keeps while it walks over its keys: a softmax, and of the weighted values the items
// that this lane owns. Lanes share a row of V, several rows at a time where rows are short.
template <int kItem>
struct SplitState {
  static constexpr int kItems = kLaneElements / kItem;
  float maximum = -INFINITY;
  float sum = 0.0f;  // of this lane's keys
  float weighted[kItems * kItem] = {};
  std::int32_t lanes_per_row = 1, row = 0, item = 0;

  __device__ __forceinline__ void share(std::int32_t items) {
    while (lanes_per_row < items && lanes_per_row < 32) lanes_per_row *= 2;
    row = std::int32_t(threadIdx.x) / lanes_per_row;
    item = std::int32_t(threadIdx.x) % lanes_per_row;
  }
};

// The CTA's shared memory: the query, and weights and places of a tile of keys. Tiles use the
// halves of both arrays in turn, so one __syncwarp per tile orders them.
struct SplitShared {
  float* query;      // [kMaxHeadSize]
  float* weights;    // [kTileKeys], a half
  RowPlace* places;  // [kTileKeys], a half
  float* parts;      // [32, kLaneStride]: at the end, each lane's weighted values
};

// Scores the tile [first, last) of at most kTileKeys keys and weighs them.
template <int kItem>
__device__ __forceinline__ void weigh_keys(SplitState<kItem>& state, const SplitShared& shared,
                                           const SplitAttentionParams& p, const KeyRange& keys,
                                           std::int32_t row, std::int32_t kv_head,
                                           std::int32_t first, std::int32_t last) {
  constexpr int kLaneKeys = kTileKeys / 32;
  const std::int32_t lane = threadIdx.x;
  float scores[kLaneKeys], value_scales[kLaneKeys], best = -INFINITY;
  SIMT_UNROLL
  for (int n = 0; n < kLaneKeys; ++n) {
    const std::int32_t at = lane + 32 * n, key = first + at;
    scores[n] = -INFINITY;
    value_scales[n] = 1.0f;
    if (key >= last) continue;
    const RowPlace place = place_of_key(p, row, key < keys.gap_first ? key : key + keys.gap);
    shared.places[at] = place;
    const float dot = dot_with_key<kItem>(shared.query, p.key, place, kv_head);
    scores[n] = dot * scale_of_row(p.key, place, kv_head) * p.scale;
    value_scales[n] = scale_of_row(p.value, place, kv_head);
    best = best < scores[n] ? scores[n] : best;
  }
  const float highest = simt::warp_max(best);
  const float maximum = state.maximum < highest ? highest : state.maximum;
  const float kept = state.maximum > -INFINITY ? exp_nonpositive(state.maximum - maximum) : 0.0f;
  float sum = 0.0f;
  SIMT_UNROLL
  for (int n = 0; n < kLaneKeys; ++n) {
    const bool seen = first + lane + 32 * n < last;
    const float weight = seen ? exp_nonpositive(scores[n] - maximum) : 0.0f;
    shared.weights[lane + 32 * n] = weight * value_scales[n];
    sum += weight;
  }
  state.sum = fmaf(state.sum, kept, sum);
  state.maximum = maximum;
  for (float& weighted : state.weighted) weighted *= kept;
}

template <int kItem>
__device__ __forceinline__ void add_values(SplitState<kItem>& state, const SplitShared& shared,
                                           const PartLayout& part, std::int32_t kv_head,
                                           std::int32_t keys) {
  const std::int32_t bytes = element_bytes(part.dtype);
  for (std::int32_t key = state.row; key < keys; key += 32 / state.lanes_per_row) {
    const RowPlace place = shared.places[key];
    std::byte* row = row_at(part, place, kv_head);
    const float weight = shared.weights[key];
    const bool is_in_halves = part.scaling >= kFirstPacked;
    PackedRow packed{};
    if (is_in_halves) packed = packed_row(part, place, kv_head);
    SIMT_UNROLL
    for (int n = 0; n < SplitState<kItem>::kItems; ++n) {
      const std::int32_t at = (state.item + n * state.lanes_per_row) * kItem;
      if (at >= part.head_size) continue;
      if (is_in_halves) {
        float values[kItem];
        load_packed<kItem>(values, part, row, packed, at);
        SIMT_UNROLL
        for (int i = 0; i < kItem; ++i)
          state.weighted[n * kItem + i] = fmaf(weight, values[i], state.weighted[n * kItem + i]);
        continue;
      }
      std::uint32_t bits[kItem];
      load_bits<kItem>(bits, part_element(part, row, at), bytes);
      SIMT_UNROLL
      for (int i = 0; i < kItem; ++i) {
        float& sum = state.weighted[n * kItem + i];
        sum = fmaf(weight, decode(bits[i], part.dtype), sum);
      }
    }
  }
}

// Adds up the lanes' weighted values, in the order of the rows that they belong to, times `factor`.
template <int kItem>
__device__ __forceinline__ void write_values(const SplitState<kItem>& state,
                                             const SplitShared& shared, float* out,
                                             std::int32_t head_size, float factor) {
  const std::int32_t lanes = state.lanes_per_row;
  SIMT_UNROLL
  for (int i = 0; i < kLaneElements; ++i)
    if ((state.item + i / kItem * lanes) * kItem < head_size)
      shared.parts[threadIdx.x * kLaneStride + i] = state.weighted[i];
  __syncwarp();
  for (std::int32_t at = threadIdx.x; at < head_size; at += 32) {
    const std::int32_t item = at / kItem;
    const float* part =
        shared.parts + item % lanes * kLaneStride + item / lanes * kItem + at % kItem;
    float sum = part[0];
    for (std::int32_t row = 1; row < 32 / lanes; ++row) sum += part[row * lanes * kLaneStride];
    out[at] = sum * factor;
  }
}

// Grid: x is the token, y the query head, z the split. CTAs of one warp. The only split of a query
// writes its output, zeros where it has no keys; of several, each writes a partial.
template <int kItem>
__global__ void split_attention_kernel(SplitAttentionParams p) {
  SIMT_SHARED_ARRAY(float, query, kMaxHeadSize);
  SIMT_SHARED_ARRAY(float, weights, 2 * kTileKeys);
  SIMT_SHARED_ARRAY(RowPlace, places, 2 * kTileKeys);
  SIMT_SHARED_ARRAY(float, parts, 32 * kLaneStride);
  SplitShared shared{query, weights, places, parts};
  const std::int64_t token = blockIdx.x;
  const std::int32_t query_head = blockIdx.y, split = blockIdx.z;
  const std::int32_t row = p.token_rows[token];
  if (row < 0) return;
  const KeyRange keys = visible_keys(p, token, row);
  const std::int32_t num_splits = splits_of(keys, p.split_keys);
  if (split > 0 && split >= num_splits) return;

  const std::int32_t query_bytes = element_bytes(p.query_dtype);
  const std::byte* query_row = p.queries + (token * p.num_query_heads + query_head) *
                                               std::int64_t(p.key.head_size) * query_bytes;
  for (std::int32_t at = threadIdx.x; at < p.key.head_size; at += 32)
    shared.query[at] = load_number(query_row + std::int64_t(at) * query_bytes, p.query_dtype);
  __syncwarp();

  const std::int32_t kv_head = query_head / (p.num_query_heads / p.key.num_heads);
  const std::int32_t first = keys.first + split * p.split_keys;
  const std::int32_t end = first + p.split_keys;
  const std::int32_t last = end < keys.last ? end : keys.last;
  SplitState<kItem> state;
  state.share((p.value.head_size + kItem - 1) / kItem);
  for (std::int32_t tile = first; tile < last; tile += kTileKeys) {
    weigh_keys<kItem>(state, shared, p, keys, row, kv_head, tile, last);
    __syncwarp();
    add_values<kItem>(state, shared, p.value, kv_head,
                      last - tile < kTileKeys ? last - tile : kTileKeys);
    const std::int32_t half =
        (tile - first) / kTileKeys % 2 == 0 ? kTileKeys : 0;  // of the next tile
    shared.weights = weights + half;
    shared.places = places + half;
  }
  const float sum = simt::warp_sum(state.sum);
  if (num_splits <= 1) {
    float* output = p.outputs + (token * p.num_query_heads + query_head) * p.value.head_size;
    write_values<kItem>(state, shared, output, p.value.head_size,
                        num_splits == 0 ? 0.0f : 1.0f / sum);
    return;
  }
  float* partial = partial_of(p, token, query_head, split);
  if (threadIdx.x == 0) {
    partial[0] = state.maximum;
    partial[1] = sum;
  }
  write_values<kItem>(state, shared, partial + 2, p.value.head_size, 1.0f);
}

// Joins the partial softmaxes of the splits: each was taken relative to its own maximum,
// so its sum and its values are rescaled to the highest of all before they are added, in the order
// of the splits. A query with one split or none has its output already.
//
// Grid: x is the token, y the query head; threads share the elements of the output.
[[maybe_unused]] static __global__ void attention_combine_kernel(SplitAttentionParams p) {
  const std::int64_t token = blockIdx.x;
  const std::int32_t query_head = blockIdx.y, row = p.token_rows[token];
  if (row < 0) return;
  float* output = p.outputs + (token * p.num_query_heads + query_head) * p.value.head_size;
  const std::int32_t num_splits = splits_of(visible_keys(p, token, row), p.split_keys);
  if (num_splits <= 1) return;
  float maximum = -INFINITY;
  for (std::int32_t split = 0; split < num_splits; ++split)
    maximum = fmaxf(maximum, partial_of(p, token, query_head, split)[0]);
  for (std::int32_t at = threadIdx.x; at < p.value.head_size; at += blockDim.x) {
    float sum = 0.0f, value = 0.0f;
    for (std::int32_t split = 0; split < num_splits; ++split) {
      const float* partial = partial_of(p, token, query_head, split);
      const float factor = exp_nonpositive(partial[0] - maximum);
      sum = fmaf(factor, partial[1], sum);
      value = fmaf(factor, partial[2 + at], value);
    }
    output[at] = sum > 0.0f ? value / sum : 0.0f;
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
