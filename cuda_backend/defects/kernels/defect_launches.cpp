// The launchers of defect_table.h.
#include "cuda_backend/defects/kernels/defect_kernels.cuh"
#include "cuda_backend/defects/kernels/defect_table.h"
#include "cuda_backend/launch/recurrence_grids.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {
namespace {

std::uint32_t most_heads(const WritePartsParams& params) {
  std::int32_t heads = 1;
  for (std::int32_t i = 0; i < params.num_parts; ++i)
    heads = std::max(heads, params.parts[i].to.num_heads);
  return static_cast<std::uint32_t>(heads);
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
              dim3(params.num_tokens == 0 ? 0 : 2), 1, write_twice_kernel, params);
}
int write_in_32_bits(const LaunchPlace& place, const WritePartsParams& params) {
  return then(nothing_to_do(), place, "write_rows",
              dim3(static_cast<std::uint32_t>(params.num_tokens),
                   static_cast<std::uint32_t>(params.num_parts)),
              32, write_in_32_bits_kernel, params);
}
int lose_scales(const LaunchPlace& place, const WritePartsParams& params) {
  return then(launch_write_parts(place, params), place, "write_parts",
              dim3(static_cast<std::uint32_t>(params.num_tokens), most_heads(params),
                   static_cast<std::uint32_t>(params.num_parts)),
              1, lose_scales_kernel, params);
}
int update_twice(const LaunchPlace& place, const StateUpdateParams& params) {
  const bool updates = params.num_items > 0 && params.max_states > 0;
  return then(launch_update_states(place, params), place, "update_states", dim3(updates ? 2 : 0), 1,
              update_twice_kernel, params);
}
int combine_unscaled(const LaunchPlace& place, const SplitAttentionParams& params) {
  return then(launch_split_attention(place, params), place, "attention_combine",
              dim3(static_cast<std::uint32_t>(params.num_tokens),
                   static_cast<std::uint32_t>(params.num_query_heads)),
              32, combine_unscaled_kernel, params);
}
int selective_undecayed(const LaunchPlace& place, const SelectiveStateParams& params) {
  return recur(pieces_grid, place, "selective_chunks", selective_undecayed_kernel, params);
}
int delta_undecayed(const LaunchPlace& place, const GatedDeltaParams& params) {
  return recur(pieces_grid, place, "delta_chunks", delta_undecayed_kernel, params);
}
int evict_used(const LaunchPlace& place, const HotReadParams& params) {
  return then(launch_hot_reads(place, params), place, "hot_reads",
              dim3(static_cast<std::uint32_t>(params.num_reads)), 1, evict_used_kernel, params);
}
int swap_by_slot(const LaunchPlace& place, const SwapRowsParams& params) {
  return then(nothing_to_do(), place, "swap_rows",
              dim3(static_cast<std::uint32_t>(params.num_swaps),
                   static_cast<std::uint32_t>(params.num_layers)),
              32, swap_by_slot_kernel, params);
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
