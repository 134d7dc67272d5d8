// Softmax attention over a paged cache, split along the context: each CTA covers a run of keys for
// one query and a few query heads of one KV head, and leaves a partial softmax for each, which the
// kernel below it joins. So a row is loaded once for these heads. It serves decoding requests and
// prefill chunks, with any layout, dtype and scaling of PartLayout.
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
// Keys between two rendezvous of the warp; each lane scores two of them.
inline constexpr std::int32_t kTileKeys = 64;
// A thread runs kLanes lanes, so it has every kLaneStep-th key of a tile, key n of lane l at place
// n * kLanes + l, and scores kScoredKeys of them together: the chains of a CPU's thread overlap.
inline constexpr int kLanes = simt::kLanesPerThread, kLaneStep = 32 / kLanes;
inline constexpr int kThreadKeys = kTileKeys / kLaneStep;
inline constexpr int kScoredKeys = kLanes == 1 ? kThreadKeys : 8;

// What a kernel is compiled for: elements loaded at once, the loads of a row of V that one lane
// adds up, the format of the rows (kAny: that of the parameters, packed ones too), and query heads.
template <int kElements, int kLoads, int kRowFormat, int kQueryHeads>
struct AttentionShape {
  static constexpr int kItem = kElements, kItems = kLoads, kFormat = kRowFormat;
  static constexpr int kHeads = kQueryHeads;
  static constexpr int kLaneElements = kItem * kItems, kLaneStride = kLaneElements + 1;
  static constexpr int kValueSize = 32 * kLaneElements;  // at most
  // Of a key at most: in MLA the latent and its rope.
  static constexpr int kKeySize = kValueSize == 512 ? 640 : kValueSize;
};

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

// Elements [first, first + kItem) of a row, before the scale of the row or the layer.
template <class Shape>
__device__ __forceinline__ void load_values(float (&values)[Shape::kItem], const PartLayout& part,
                                            std::byte* row, const PackedRow& packed,
                                            std::int32_t first) {
  constexpr int kItem = Shape::kItem;
  if (Shape::kFormat == kAny && part.scaling >= kFirstPacked)
    return load_packed<kItem>(values, part, row, packed, first);
#if KERNELS_HAVE_FOUR_WORDS
  // In two instructions of a CPU instead of two for each element.
  if constexpr (kItem == 8 && Shape::kFormat == int(DType::bf16)) {
    typedef std::uint16_t Halves __attribute__((vector_size(16)));
    typedef std::uint32_t Numbers __attribute__((vector_size(32)));
    Halves halves;
    __builtin_memcpy(&halves, part_element(part, row, first), sizeof(halves));
    const Numbers numbers = __builtin_convertvector(halves, Numbers) << 16;
    __builtin_memcpy(values, &numbers, sizeof(numbers));
    return;
  }
#endif
  const DType dtype = format_of<Shape::kFormat>(part.dtype);
  std::uint32_t bits[kItem];
  load_bits<kItem>(bits, part_element(part, row, first), element_bytes(dtype));
  SIMT_UNROLL
  for (int i = 0; i < kItem; ++i) values[i] = decode(bits[i], dtype);
}
template <class Shape>
__device__ __forceinline__ PackedRow packed_of(const PartLayout& part, const RowPlace& place,
                                               std::int32_t head) {
  if (Shape::kFormat != kAny || part.scaling < kFirstPacked) return {};
  return packed_row(part, place, head);
}

// What the warp keeps while it walks over its keys: for each head a softmax, and of the weighted
// values the items that each lane owns. Lanes share a row of V, several rows at a time where rows
// are short.
template <class Shape>
struct SplitState {
  float maximum[kLanes][Shape::kHeads];   // one for all, unless a score is NaN
  float sum[kLanes][Shape::kHeads] = {};  // of a lane's keys
  float weighted[kLanes][Shape::kHeads][Shape::kLaneElements] = {};
  std::int32_t log2_lanes_per_row = 0;

  __device__ __forceinline__ explicit SplitState(std::int32_t items) {
    for (auto& lane : maximum)
      for (float& one : lane) one = -INFINITY;
    while (1 << log2_lanes_per_row < items && log2_lanes_per_row < 5) ++log2_lanes_per_row;
  }
  __device__ __forceinline__ std::int32_t lanes_per_row() const { return 1 << log2_lanes_per_row; }
  __device__ __forceinline__ std::int32_t rows() const { return 32 >> log2_lanes_per_row; }
  __device__ __forceinline__ std::int32_t row_of(int lane) const {
    return (std::int32_t(threadIdx.x) + lane) >> log2_lanes_per_row;
  }
  __device__ __forceinline__ std::int32_t item_of(int lane) const {
    return (std::int32_t(threadIdx.x) + lane) & (lanes_per_row() - 1);
  }
};

// The CTA's shared memory: the queries, and weights and places of a tile of keys. Tiles use the
// halves of both arrays in turn, so one sync_lanes() per tile orders them.
template <class Shape>
struct SplitShared {
  float* queries;    // [kKeySize, kHeads]
  float* weights;    // [kTileKeys, kHeads], a half
  RowPlace* places;  // [kTileKeys], a half
  float* parts;      // [32, kLaneStride]: at the end, each lane's weighted values of a head
};

// What a CTA works on.
struct SplitJob {
  KeyRange keys;
  std::int32_t row, kv_head, first_head, num_heads;  // query heads
  std::int32_t first, last;                          // keys of the split
};

// q . k for kScoredKeys keys and every head, in element order. A key without a row has no score.
template <class Shape>
__device__ __forceinline__ void score_keys(float (*scores)[Shape::kHeads], const float* queries,
                                           const PartLayout& part,
                                           std::byte* const (&rows)[kScoredKeys],
                                           const PackedRow (&packed)[kScoredKeys]) {
  constexpr int kHeads = Shape::kHeads, kItem = Shape::kItem;
  for (std::int32_t at = 0; at < part.head_size; at += kItem) {
    SIMT_UNROLL
    for (int n = 0; n < kScoredKeys; ++n) {
      if (rows[n] == nullptr) continue;
      float values[kItem];
      load_values<Shape>(values, part, rows[n], packed[n], at);
      SIMT_UNROLL
      for (int i = 0; i < kItem; ++i) {
        SIMT_UNROLL
        for (int head = 0; head < kHeads; ++head)
          scores[n][head] = fmaf(queries[(at + i) * kHeads + head], values[i], scores[n][head]);
      }
    }
  }
}

// The scores of a thread's keys from place `base` on, with the scales of their values.
template <class Shape>
__device__ __forceinline__ void score_places(float (*scores)[Shape::kHeads], float* value_scales,
                                             const SplitShared<Shape>& shared,
                                             const SplitAttentionParams& p, const SplitJob& job,
                                             std::int32_t first, int base) {
  float key_scales[kScoredKeys] = {};
  std::byte* rows[kScoredKeys] = {};
  PackedRow packed[kScoredKeys] = {};
  SIMT_UNROLL
  for (int n = 0; n < kScoredKeys; ++n) {
    const std::int32_t at = threadIdx.x + kLaneStep * (base + n), key = first + at;
    if (key >= job.last) continue;
    const RowPlace place =
        place_of_key(p, job.row, key < job.keys.gap_first ? key : key + job.keys.gap);
    shared.places[at] = place;
    rows[n] = row_at(p.key, place, job.kv_head);
    packed[n] = packed_of<Shape>(p.key, place, job.kv_head);
    key_scales[n] = scale_of_row(p.key, place, job.kv_head);
    value_scales[n] = scale_of_row(p.value, place, job.kv_head);
  }
  score_keys<Shape>(scores, shared.queries, p.key, rows, packed);
  SIMT_UNROLL
  for (int n = 0; n < kScoredKeys; ++n) {
    SIMT_UNROLL
    for (int head = 0; head < Shape::kHeads; ++head)
      scores[n][head] = scores[n][head] * key_scales[n] * p.scale;
  }
}

// Scores the tile of at most kTileKeys keys from `first` on and weighs them.
template <class Shape>
__device__ __forceinline__ void weigh_keys(SplitState<Shape>& state,
                                           const SplitShared<Shape>& shared,
                                           const SplitAttentionParams& p, const SplitJob& job,
                                           std::int32_t first) {
  constexpr int kHeads = Shape::kHeads;
  float scores[kThreadKeys][kHeads] = {}, value_scales[kThreadKeys] = {};
  for (int base = 0; base < kThreadKeys; base += kScoredKeys)
    score_places<Shape>(scores + base, value_scales + base, shared, p, job, first, base);
  const auto is_seen = [&](int n) {
    return first + std::int32_t(threadIdx.x) + kLaneStep * n < job.last;
  };
  float highest[kLanes][kHeads];
  for (auto& lane : highest)
    for (float& one : lane) one = -INFINITY;
  SIMT_UNROLL
  for (int n = 0; n < kThreadKeys; ++n) {
    if (!is_seen(n)) continue;
    SIMT_UNROLL
    for (int head = 0; head < kHeads; ++head) {
      float& most = highest[n % kLanes][head];
      most = most < scores[n][head] ? scores[n][head] : most;
    }
  }
  simt::warp_max_each(highest);
  SIMT_UNROLL
  for (int head = 0; head < kHeads; ++head) {
    float kept = 0.0f, kept_from = 0.0f, kept_to = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) {
      const float before = state.maximum[lane][head];
      const float maximum = before < highest[lane][head] ? highest[lane][head] : before;
      if (lane == 0 || before != kept_from || maximum != kept_to)
        kept = before > -INFINITY ? exp_nonpositive(before - maximum) : 0.0f;
      kept_from = before;
      kept_to = maximum;
      float sum = 0.0f;
      SIMT_UNROLL
      for (int n = lane; n < kThreadKeys; n += kLanes) {
        const float weight = is_seen(n) ? exp_nonpositive(scores[n][head] - maximum) : 0.0f;
        shared.weights[(threadIdx.x + kLaneStep * n) * kHeads + head] =
            is_seen(n) ? weight * value_scales[n] : 0.0f;
        sum += weight;
      }
      state.sum[lane][head] = fmaf(state.sum[lane][head], kept, sum);
      state.maximum[lane][head] = maximum;
      for (float& weighted : state.weighted[lane][head]) weighted *= kept;
    }
  }
}

// Loads the tile from key `first` on into a CPU's caches, while the previous one is computed.
__device__ __forceinline__ void prefetch_tile(const SplitAttentionParams& p, const SplitJob& job,
                                              std::int32_t first) {
  const std::int32_t end = KERNELS_HAVE_WIDE_WORDS ? first + kTileKeys : first;
  for (std::int32_t key = first; key < end && key < job.last; ++key) {
    const RowPlace place =
        place_of_key(p, job.row, key < job.keys.gap_first ? key : key + job.keys.gap);
    prefetch_row(row_at(p.key, place, job.kv_head), p.key.head_size * element_bytes(p.key.dtype));
    prefetch_row(row_at(p.value, place, job.kv_head),
                 p.value.head_size * element_bytes(p.value.dtype));
  }
}

template <class Shape>
__device__ __forceinline__ void add_values(SplitState<Shape>& state,
                                           const SplitShared<Shape>& shared, const PartLayout& part,
                                           std::int32_t kv_head, std::int32_t keys, int lane) {
  constexpr int kItem = Shape::kItem, kHeads = Shape::kHeads;
  const std::int32_t item = state.item_of(lane);
  for (std::int32_t key = state.row_of(lane); key < keys; key += state.rows()) {
    const RowPlace& place = shared.places[key];
    std::byte* row = row_at(part, place, kv_head);
    const PackedRow packed = packed_of<Shape>(part, place, kv_head);
    float weights[kHeads];
    SIMT_UNROLL
    for (int head = 0; head < kHeads; ++head) weights[head] = shared.weights[key * kHeads + head];
    SIMT_UNROLL
    for (int n = 0; n < Shape::kItems; ++n) {
      const std::int32_t at = (item + n * state.lanes_per_row()) * kItem;
      if (at >= part.head_size) break;
      float values[kItem];
      load_values<Shape>(values, part, row, packed, at);
      SIMT_UNROLL
      for (int head = 0; head < kHeads; ++head) {
        SIMT_UNROLL
        for (int i = 0; i < kItem; ++i) {
          float& sum = state.weighted[lane][head][n * kItem + i];
          sum = fmaf(weights[head], values[i], sum);
        }
      }
    }
  }
}

// Adds up the lanes' weighted values, in the order of the rows that they belong to, times `factor`.
template <class Shape>
__device__ __forceinline__ void write_values(const SplitState<Shape>& state,
                                             const SplitShared<Shape>& shared, int head, float* out,
                                             std::int32_t head_size, float factor) {
  constexpr int kItem = Shape::kItem;
  const std::int32_t lanes = state.lanes_per_row();
  for (int lane = 0; lane < kLanes; ++lane) {
    SIMT_UNROLL
    for (int i = 0; i < Shape::kLaneElements; ++i) {
      if ((state.item_of(lane) + i / kItem * lanes) * kItem >= head_size) break;
      shared.parts[(threadIdx.x + lane) * Shape::kLaneStride + i] = state.weighted[lane][head][i];
    }
  }
  simt::sync_lanes();
  for (std::int32_t at = threadIdx.x; at < head_size; at += kLaneStep) {
    const std::int32_t item = at / kItem;
    const float* part =
        shared.parts + item % lanes * Shape::kLaneStride + item / lanes * kItem + at % kItem;
    float sum = part[0];
    for (std::int32_t row = 1; row < state.rows(); ++row)
      sum += part[row * lanes * Shape::kLaneStride];
    out[at] = sum * factor;
  }
}

// The queries of the CTA's heads, in fp32; zeros for heads that it does not have.
template <class Shape>
__device__ __forceinline__ void load_queries(const SplitShared<Shape>& shared,
                                             const SplitAttentionParams& p, const SplitJob& job,
                                             std::int64_t token) {
  const std::int32_t bytes = element_bytes(p.query_dtype), size = p.key.head_size;
  const std::byte* rows =
      p.queries + (token * p.num_query_heads + job.first_head) * std::int64_t(size) * bytes;
  for (std::int32_t at = threadIdx.x; at < size * Shape::kHeads; at += kLaneStep) {
    const std::int32_t head = at / size, element = at - head * size;
    shared.queries[element * Shape::kHeads + head] =
        head < job.num_heads ? load_number(rows + std::int64_t(at) * bytes, p.query_dtype) : 0.0f;
  }
}

// Grid: x is the token, y the KV head and kHeads of its query heads, z the split. CTAs of one warp.
// The only split of a query writes its output, zeros where it has no keys; of several, each writes
// a partial.
template <class Shape>
__global__ void split_attention_kernel(SplitAttentionParams p) {
  constexpr int kHeads = Shape::kHeads;
  SIMT_SHARED_ARRAY(float, queries, Shape::kKeySize* kHeads);
  SIMT_SHARED_ARRAY(float, weights, 2 * kTileKeys * kHeads);
  SIMT_SHARED_ARRAY(RowPlace, places, 2 * kTileKeys);
  SIMT_SHARED_ARRAY(float, parts, 32 * Shape::kLaneStride);
  SplitShared<Shape> shared{queries, weights, places, parts};
  const std::int64_t token = blockIdx.x;
  const std::int32_t split = blockIdx.z, queries_per_kv = p.num_query_heads / p.key.num_heads;
  const std::int32_t ctas_per_kv = (queries_per_kv + kHeads - 1) / kHeads;
  SplitJob job;
  job.row = p.token_rows[token];
  if (job.row < 0) return;
  job.keys = visible_keys(p, token, job.row);
  const std::int32_t num_splits = splits_of(job.keys, p.split_keys);
  if (split > 0 && split >= num_splits) return;
  job.kv_head = blockIdx.y / ctas_per_kv;
  const std::int32_t first_of_kv = (blockIdx.y - job.kv_head * ctas_per_kv) * kHeads;
  job.first_head = job.kv_head * queries_per_kv + first_of_kv;
  job.num_heads = queries_per_kv - first_of_kv < kHeads ? queries_per_kv - first_of_kv : kHeads;
  load_queries(shared, p, job, token);
  simt::sync_lanes();

  job.first = job.keys.first + split * p.split_keys;
  const std::int32_t end = job.first + p.split_keys;
  job.last = end < job.keys.last ? end : job.keys.last;
  SplitState<Shape> state((p.value.head_size + Shape::kItem - 1) / Shape::kItem);
  prefetch_tile(p, job, job.first);
  for (std::int32_t tile = job.first; tile < job.last; tile += kTileKeys) {
    prefetch_tile(p, job, tile + kTileKeys);
    weigh_keys(state, shared, p, job, tile);
    simt::sync_lanes();
    for (int lane = 0; lane < kLanes; ++lane)
      add_values(state, shared, p.value, job.kv_head,
                 job.last - tile < kTileKeys ? job.last - tile : kTileKeys, lane);
    const bool odd = (tile - job.first) / kTileKeys % 2 == 0;  // the next tile
    shared.weights = weights + (odd ? kTileKeys * kHeads : 0);
    shared.places = places + (odd ? kTileKeys : 0);
  }
  simt::warp_sum_each(state.sum);
  SIMT_UNROLL
  for (int head = 0; head < kHeads; ++head) {
    if (head >= job.num_heads) break;
    const std::int32_t query_head = job.first_head + head;
    const float sum = state.sum[0][head];
    float* out = p.outputs + (token * p.num_query_heads + query_head) * p.value.head_size;
    float factor = num_splits == 0 ? 0.0f : 1.0f / sum;
    if (num_splits > 1) {
      float* partial = partial_of(p, token, query_head, split);
      if (threadIdx.x == 0) {
        partial[0] = state.maximum[0][head];
        partial[1] = sum;
      }
      out = partial + 2;
      factor = 1.0f;
    }
    if (head > 0) simt::sync_lanes();
    write_values(state, shared, head, out, p.value.head_size, factor);
  }
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
