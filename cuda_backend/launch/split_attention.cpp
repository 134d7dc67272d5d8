// Launcher of split attention: the splits, then the joining of those queries that have several.
#include "cuda_backend/kernels/split_attention.cuh"

#include "cuda_backend/kernels/attention_combine.cuh"
#include "cuda_backend/launch/engine_launchers.h"
#include "cuda_backend/launch/grid.h"
#include "cuda_backend/launch/part_access.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

namespace {

template <bool kRescaled>
int attend_and_combine(const LaunchPlace& place, const SplitAttentionParams& params) {
  auto config = config_of(place, "split_attention");
  config.grid = dim3(static_cast<std::uint32_t>(params.num_tokens),
                     static_cast<std::uint32_t>(params.num_query_heads),
                     static_cast<std::uint32_t>(params.num_splits));
  config.block.x = 32;
  const bool eights = in_eights(params.key) && in_eights(params.value);
  const int status = status_of(
      simt::launch(config, eights ? split_attention_kernel<8> : split_attention_kernel<1>, params));
  if (status != nothing_to_do()) return status;
  config.name = "attention_combine";
  config.grid.z = 1;
  config.block.x = static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(divide_up(params.value.head_size, place.items_per_thread), 1, 128));
  return status_of(simt::launch(config, attention_combine_kernel<kRescaled>, params));
}

}  // namespace

int launch_split_attention(const LaunchPlace& place, const SplitAttentionParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  if (!fits_grid(params.num_tokens, params.num_query_heads) || params.num_splits > kMaxGridYZ ||
      params.key.head_size > kMaxHeadSize || params.value.head_size > kMaxHeadSize)
    return too_large();
  return place.defect == KernelDefect::combine_unscaled ? attend_and_combine<false>(place, params)
                                                        : attend_and_combine<true>(place, params);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
