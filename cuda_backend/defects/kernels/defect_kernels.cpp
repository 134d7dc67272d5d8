// The kernels and launchers of defect_table.h. Simple loops: a defect need not be fast.
#include "cuda_backend/defects/kernels/defect_table.h"
#include "cuda_backend/kernels/block_moves.cuh"
#include "cuda_backend/kernels/gated_delta.cuh"
#include "cuda_backend/kernels/selective_state.cuh"
#include "cuda_backend/kernels/sparse_rows.cuh"
#include "cuda_backend/kernels/split_attention.cuh"
#include "cuda_backend/launch/recurrence_grids.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {
namespace {

__device__ __forceinline__ const std::byte* source_row(const PartWrite& part, std::int64_t row,
                                                       std::int32_t head) {
  return part.source + row * part.source_row_stride + head * part.source_head_stride;
}
__device__ __forceinline__ void copy_bytes(std::byte* to, const std::byte* from,
                                           std::int32_t count) {
  for (std::int32_t i = 0; i < count; ++i) to[i] = from[i];
}
__device__ __forceinline__ std::int32_t bytes_of_row(const PartLayout& part) {
  return part.head_size * element_bytes(part.dtype);
}

// Grid: two CTAs of one thread, the first for the first source row, the second for the last.
__global__ void write_twice_kernel(WritePartsParams p) {
  const Slot slot = slot_of_row(p.token_rows, p.slots, 0);
  if (slot < 0) return;
  const std::int64_t row = blockIdx.x == 0 ? 0 : p.num_rows - 1;
  for (std::int32_t i = 0; i < p.num_parts; ++i) {
    const PartWrite& part = p.parts[i];
    const SlotPlace place = place_of_slot(slot, part.to.block_size);
    for (std::int32_t head = 0; head < part.to.num_heads; ++head)
      copy_bytes(part_row(part.to, place.block, place.offset, head), source_row(part, row, head),
                 bytes_of_row(part.to));
  }
}

// Grid: x is the source row, y the part; threads share the heads.
__global__ void write_in_32_bits_kernel(WritePartsParams p) {
  const PartWrite& part = p.parts[blockIdx.y];
  const Slot slot = slot_of_row(p.token_rows, p.slots, blockIdx.x);
  if (slot < 0) return;
  const SlotPlace place = place_of_slot(slot, part.to.block_size);
  const auto wrapped =
      std::int32_t(std::uint32_t(place.block) * std::uint32_t(part.to.block_stride));
  for (std::int32_t head = threadIdx.x; head < part.to.num_heads; head += blockDim.x)
    copy_bytes(part_row(part.to, 0, place.offset, head) + wrapped,
               source_row(part, blockIdx.x, head), bytes_of_row(part.to));
}

// Grid: x is the source row, y the head, z the part; one thread.
__global__ void lose_scales_kernel(WritePartsParams p) {
  const PartLayout& part = p.parts[blockIdx.z].to;
  const std::int32_t head = blockIdx.y;
  const Slot slot = slot_of_row(p.token_rows, p.slots, blockIdx.x);
  if (slot < 0 || head >= part.num_heads) return;
  const SlotPlace place = place_of_slot(slot, part.block_size);
  if (part.scaling == Scaling::per_token_head || part.scaling == Scaling::int4_rows)
    *part_scale(part, place.block, place.offset, head) = 0.0f;
  for (std::int32_t group = 0;
       part.scaling == Scaling::fp4_groups && group < part.head_size / kGroupElements; ++group)
    *group_scale(part, place.block, place.offset, head, group) = std::byte(0);
  if (part.scaling < kFirstLatent) return;
  const LatentTiles tiles = latent_tiles(part.scaling);
  const std::int32_t bytes = part.scaling == Scaling::latent_fp8_rows ? 4 : 1;
  for (std::int32_t tile = 0; tile < tiles.elements / tiles.tile; ++tile)
    for (std::int32_t i = 0; i < bytes; ++i)
      scale_of_tile(part, place.block, place.offset, tile)[i] = std::byte(0);
}

// Grid: two CTAs of one thread.
__global__ void update_twice_kernel(StateUpdateParams p) {
  const StateUpdateItem item = p.items[0];
  if (item.group < 0) return;
  const RegionRange range = p.groups[item.group];
  if (range.begin == range.end) return;
  const StateCache state = p.states[range.begin];
  state.base[item.target * state.page_stride] = std::byte(blockIdx.x + 1);
}

// Grid: x is the source row, y the query head; threads share the elements of the output.
__global__ void combine_unscaled_kernel(SplitAttentionParams p) {
  const std::int64_t token = blockIdx.x;
  const std::int32_t query_head = blockIdx.y, row = p.token_rows[token];
  if (row < 0) return;
  const std::int32_t num_splits = splits_of(visible_keys(p, token, row), p.split_keys);
  if (num_splits <= 1) return;
  float* output = p.outputs + (token * p.num_query_heads + query_head) * p.value.head_size;
  for (std::int32_t at = threadIdx.x; at < p.value.head_size; at += blockDim.x) {
    float sum = 0.0f, value = 0.0f;
    for (std::int32_t split = 0; split < num_splits; ++split) {
      const float* partial = partial_of(p, token, query_head, split);
      sum += partial[1];
      value += partial[2 + at];
    }
    output[at] = value / sum;
  }
}

// Grid: as selective_chunks_kernel. Adds what the carried state's decay took from each output.
template <int kPerLane>
__global__ void selective_undecayed_kernel(SelectiveStateParams p) {
  for_each_selective_piece<kPerLane>(
      p, [&](const PieceShared& shared, WarpRows<kPerLane>& rows, std::int32_t first,
             std::int32_t count, std::int32_t group) {
        const WarpRows<kPerLane> carried = rows;
        advance_rows(p, shared, rows, first, count, group);
        for (std::int32_t t = 0; t < count; ++t) {
          const std::int64_t token = first + t, at = token * p.states.num_heads + rows.head;
          const float* C = p.C + (token * p.num_groups + group) * p.states.columns;
          float lost[kRowsOfWarp];
          carried.multiply(lost, C, p.states.columns);
          simt::warp_sum_each(lost);
          if (std::int32_t(threadIdx.x % 32) != t) continue;
          for (int i = 0; i < rows.count; ++i) {
            const std::int64_t output = at * p.states.rows + rows.first + i;
            const float one = lost[i] * (1.0f - exp_nonpositive(shared.decayed[t]));
            p.y[output] += p.z == nullptr ? one : one * silu(p.z[output]);
          }
        }
      });
}

// Grid: as delta_chunks_kernel. Tokens read the carried state back as if it had not decayed.
template <int kPerLane>
__global__ void delta_undecayed_kernel(GatedDeltaParams p) {
  for_each_delta_piece<kPerLane>(
      p, [&](const DeltaShared& shared, const DeltaPiece& piece, WarpRows<kPerLane>& rows) {
        float v[kRowsOfWarp], carried[kRowsOfWarp];
        own_values(v, p, piece, rows);
        for (std::int32_t t = 0; t < piece.count; ++t) {
          rows.multiply(carried, piece.k + t * piece.stride, p.states.columns);
          simt::warp_sum_each(carried);
          if (std::int32_t(threadIdx.x % 32) != t) continue;
          for (int i = 0; i < kRowsOfWarp; ++i)
            v[i] -= (1.0f - exp_nonpositive(shared.decayed[t])) * shared.k_factor[t] * carried[i];
        }
        advance_delta_rows(p, shared, piece, rows, v);
      });
}

// Grid: x is the read; one thread.
__global__ void evict_used_kernel(HotReadParams p) {
  const HotReadItem read = p.reads[blockIdx.x];
  const AwayRows& rows = p.away[0];
  std::int32_t used = -1, missed = -1;
  for (std::int32_t i = 0; i < read.num_positions; ++i) {
    const HotSwap swap = p.swaps[read.first + i];
    if (swap.host_row < 0)
      used = swap.slot;
    else if (missed < 0)
      missed = read.first + i;
  }
  if (used < 0 || missed < 0) return;
  HotSwap& swap = p.swaps[missed];
  swap.slot = used;
  p.held[std::int64_t(read.row) * rows.num_slots + used] = swap.host_row;
  p.places[std::int64_t(read.row) * rows.num_positions + p.positions[missed]] = used;
}

// Grid: as swap_rows_kernel.
__global__ void swap_by_slot_kernel(SwapRowsParams p) {
  const HotSwap swap = p.swaps[blockIdx.x];
  if (swap.host_row < 0) return;
  const AwayRows rows = p.away[blockIdx.y];
  copy_row(hot_row_address(rows, swap.row, swap.slot), host_row_address(rows, swap.slot), rows);
}

std::int32_t most_heads(const WritePartsParams& params) {
  std::int32_t heads = 1;
  for (std::int32_t i = 0; i < params.num_parts; ++i)
    heads = std::max(heads, params.parts[i].to.num_heads);
  return heads;
}

// The product's launch, then `kernel` in `grid` CTAs of `threads`, under the name of the product's.
template <class Params>
int then(int status, const LaunchPlace& place, const char* name, dim3 grid, std::uint32_t threads,
         void (*kernel)(Params), const Params& params) {
  if (status != nothing_to_do() || grid.x == 0) return status;
  auto config = config_of(place, name);
  config.grid = grid;
  config.block.x = threads;
  return status_of(simt::launch(config, kernel, params));
}

int write_twice(const LaunchPlace& place, const WritePartsParams& params) {
  return then(launch_write_parts(place, params), place, "write_rows",
              grid_of(params.num_rows == 0 ? 0 : 2), 1, write_twice_kernel, params);
}
int write_in_32_bits(const LaunchPlace& place, const WritePartsParams& params) {
  return then(nothing_to_do(), place, "write_rows", grid_of(params.num_rows, params.num_parts), 32,
              write_in_32_bits_kernel, params);
}
int lose_scales(const LaunchPlace& place, const WritePartsParams& params) {
  return then(launch_write_parts(place, params), place, "write_parts",
              grid_of(params.num_rows, most_heads(params), params.num_parts), 1, lose_scales_kernel,
              params);
}
int update_twice(const LaunchPlace& place, const StateUpdateParams& params) {
  const bool updates = params.num_items > 0 && params.max_states > 0;
  return then(launch_update_states(place, params), place, "update_states", grid_of(updates ? 2 : 0),
              1, update_twice_kernel, params);
}
int combine_unscaled(const LaunchPlace& place, const SplitAttentionParams& params) {
  return then(launch_split_attention(place, params), place, "attention_combine",
              grid_of(params.num_tokens, params.num_query_heads), 32, combine_unscaled_kernel,
              params);
}
int selective_undecayed(const LaunchPlace& place, const SelectiveStateParams& params) {
  return recur(place, "selective_chunks", selective_undecayed_kernel<4>,
               selective_undecayed_kernel<8>, params);
}
int delta_undecayed(const LaunchPlace& place, const GatedDeltaParams& params) {
  return recur(place, "delta_chunks", delta_undecayed_kernel<4>, delta_undecayed_kernel<8>, params);
}
int evict_used(const LaunchPlace& place, const HotReadParams& params) {
  return then(launch_hot_reads(place, params), place, "hot_reads", grid_of(params.num_reads), 1,
              evict_used_kernel, params);
}
int swap_by_slot(const LaunchPlace& place, const SwapRowsParams& params) {
  return then(nothing_to_do(), place, "swap_rows", grid_of(params.num_swaps, params.num_layers), 32,
              swap_by_slot_kernel, params);
}

}  // namespace

extern const DefectKernels defect_kernels = {.write_twice = write_twice,
                                             .write_in_32_bits = write_in_32_bits,
                                             .lose_scales = lose_scales,
                                             .update_twice = update_twice,
                                             .combine_unscaled = combine_unscaled,
                                             .selective_undecayed = selective_undecayed,
                                             .delta_undecayed = delta_undecayed,
                                             .evict_used = evict_used,
                                             .swap_by_slot = swap_by_slot};

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
