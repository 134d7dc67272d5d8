// Launchers of cache writes: parts that move or have one scale go together, and so do parts with a
// scale for each token and head.
#include "cuda_backend/kernels/cache_write.cuh"

#include "cuda_backend/launch/engine_launchers.h"
#include "cuda_backend/launch/grid.h"
#include "cuda_backend/launch/part_access.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

namespace {

bool walks_in_eights(const PartWrite& part) {
  return in_eights(part.to) && aligned_to(bytes_of_eight(part.source_dtype), part.source,
                                          part.source_token_stride, part.source_head_stride, 0, 0);
}

// The parts that one launch can write: scaled alike, and walked alike (V of the x-split layout goes
// element by element, its K does not).
WritePartsParams parts_where(const WritePartsParams& params, bool per_token_head, bool eights) {
  WritePartsParams chosen = params;
  chosen.num_parts = 0;
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const PartWrite& part = params.parts[i];
    if ((part.to.scaling == Scaling::per_token_head) == per_token_head &&
        walks_in_eights(part) == eights)
      chosen.parts[chosen.num_parts++] = part;
  }
  return chosen;
}

template <int kItem>
int write_each_element(const LaunchPlace& place, const WritePartsParams& params) {
  std::int64_t items = 0;
  PartDivisors by;
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const PartLayout& part = params.parts[i].to;
    by.items_per_row[i] = make_divisor(static_cast<std::uint32_t>(part.head_size / kItem));
    by.heads[i] = make_divisor(static_cast<std::uint32_t>(part.num_heads));
    items = std::max<std::int64_t>(
        items, std::int64_t{params.num_tokens} * part.num_heads * (part.head_size / kItem));
  }
  if (items >= kMaxFlatItems) return too_large();
  auto config = flat_grid(place, "write_parts", items);
  config.grid.y = static_cast<std::uint32_t>(params.num_parts);
  return status_of(simt::launch(config, write_parts_kernel<kItem>, params, by));
}

template <int kItem>
int quantise_rows(const LaunchPlace& place, const WritePartsParams& params) {
  auto config = config_of(place, "quantise_rows");
  std::int32_t heads = 0;
  for (std::int32_t i = 0; i < params.num_parts; ++i)
    heads = std::max(heads, params.parts[i].to.num_heads);
  if (!fits_grid(params.num_tokens, heads)) return too_large();
  config.grid =
      dim3(static_cast<std::uint32_t>(params.num_tokens), static_cast<std::uint32_t>(heads),
           static_cast<std::uint32_t>(params.num_parts));
  config.block.x = 32;
  auto* kernel = place.defect == KernelDefect::scale_not_stored ? quantise_rows_kernel<kItem, false>
                                                                : quantise_rows_kernel<kItem, true>;
  return status_of(simt::launch(config, kernel, params));
}

}  // namespace

int launch_write_parts(const LaunchPlace& place, const WritePartsParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  for (const bool per_token_head : {false, true})
    for (const bool eights : {false, true}) {
      const WritePartsParams parts = parts_where(params, per_token_head, eights);
      if (parts.num_parts == 0) continue;
      int status = nothing_to_do();
      if (per_token_head)
        status = eights ? quantise_rows<8>(place, parts) : quantise_rows<1>(place, parts);
      else
        status = eights ? write_each_element<8>(place, parts) : write_each_element<1>(place, parts);
      if (status != nothing_to_do()) return status;
    }
  return nothing_to_do();
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
