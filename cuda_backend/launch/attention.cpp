// Launchers for reads of the cache through block tables: digests and softmax attention.
#include "cuda_backend/kernels/attention_digest.cuh"
#include "cuda_backend/kernels/split_attention.cuh"
#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

int launch_attention_digest(const LaunchPlace& place, const DigestParams& params) {
  if (params.num_pieces == 0) return nothing_to_do();
  auto config = config_of(place, "attention_digest");
  config.grid.x = static_cast<std::uint32_t>(params.num_pieces);
  const std::int64_t threads = std::clamp<std::int64_t>(
      params.max_positions / place.items_per_reducer, 1, place.cta_threads);
  config.block.x =
      place.whole_warps ? in_whole_warps(threads) : static_cast<std::uint32_t>(threads);
  return status_of(simt::launch(config, attention_digest_kernel, params));
}

// The splits, then, where a query may have several, the kernel that joins them.
int launch_split_attention(const LaunchPlace& place, const SplitAttentionParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  if (!fits_grid(params.num_tokens, params.num_query_heads) || params.num_splits > kMaxGridYZ ||
      params.key.head_size > kMaxHeadSize || params.value.head_size > kMaxHeadSize)
    return too_large();
  auto config = config_of(place, "split_attention");
  config.grid = dim3(static_cast<std::uint32_t>(params.num_tokens),
                     static_cast<std::uint32_t>(params.num_query_heads),
                     static_cast<std::uint32_t>(std::max(params.num_splits, 1)));
  config.block.x = 32;
  const bool eights = in_eights(params.key) && in_eights(params.value);
  const int status = status_of(
      simt::launch(config, eights ? split_attention_kernel<8> : split_attention_kernel<1>, params));
  if (status != nothing_to_do() || params.num_splits <= 1) return status;
  config.name = "attention_combine";
  config.grid.z = 1;
  config.block.x = static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(divide_up(params.value.head_size, place.items_per_thread), 1, 128));
  return status_of(simt::launch(config, attention_combine_kernel, params));
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
