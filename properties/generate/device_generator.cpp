// How the device does its work: from captured graphs, and with real numbers. Nothing of it changes
// a decision.
#include <algorithm>

#include "properties/generate/generator_parts.h"

namespace lockstep {
namespace {

// fp4 has no kernel, and the scales behind rows must lie on multiples of 4 bytes in every page.
bool has_no_real_rows(const SavedCase& saved, const KVCacheGroupSpec& group) {
  switch (group.spec.kv_quant_mode) {
    case KVQuantMode::none:
    case KVQuantMode::fp8_per_tensor:
      return false;
    case KVQuantMode::nvfp4:
      return true;
    default:
      return group.spec.head_size % 4 != 0 ||
             std::ranges::any_of(saved.cache.tensors, [&](const KVCacheTensor& tensor) {
               return tensor.size_bytes / saved.cache.num_blocks % 4 != 0;
             });
  }
}

}  // namespace

void draw_device_modes(Draw& draw, SavedCase& saved) {
  if (draw.has(Feature::captured_graphs))
    saved.max_cudagraph_capture_size = draw.choices.one_of({8, 16, 64});
  const auto cannot = [&](const KVCacheGroupSpec& group) { return has_no_real_rows(saved, group); };
  if (!draw.has(Feature::real_numbers) || std::ranges::any_of(saved.cache.groups, cannot)) return;
  saved.numbers = Numbers::real;
}

}  // namespace lockstep
