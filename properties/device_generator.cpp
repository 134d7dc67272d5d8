// How the device does its work: from captured graphs, and with real numbers. Nothing of it changes
// a decision.
#include <algorithm>

#include "properties/case_parts.h"
#include "properties/generator_parts.h"

namespace lockstep {
namespace {

// A replay has one scale a layer.
bool is_scaled_by_row(const KVCacheGroupSpec& group) {
  return group.spec.kv_quant_mode != KVQuantMode::none &&
         group.spec.kv_quant_mode != KVQuantMode::fp8_per_tensor;
}

}  // namespace

void draw_device_modes(Draw& draw, SavedCase& saved) {
  if (draw.has(Feature::captured_graphs))
    set_setting(saved, "max_cudagraph_capture_size", draw.choices.one_of({8, 16, 64}));
  if (!draw.has(Feature::real_numbers) || std::ranges::any_of(saved.cache.groups, is_scaled_by_row))
    return;
  set_setting(saved, "real_numbers", 1);
}

}  // namespace lockstep
