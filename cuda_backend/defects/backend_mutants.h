// Planted defects of the backend: BackendConfig::mutant names one of them. The catalogue
// (properties/mutants/mutant_search.h) has the mechanism and the exposure of each.
//
// 1. A defect changes what the backend's parts pass to each other (backend/cuda_backend.h): the
//    step's program, a plan, its views, uploads and launches. The backend itself contains no
//    defect.
// 2. What happens within one launch is a launcher of kernels/defect_table.h, in the product's
//    place.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/kernels/engine_params.h"

namespace lockstep {

std::vector<std::string_view> backend_defect_names();

namespace cuda {

// The seams of BackendConfig::mutant; empty name: none. Errors: an unknown name, or a configuration
// in which the defect has nothing to change.
Result<Seams> planted_seams(const BackendConfig& config);

// scale-of-other-head: reverses the order of the heads' scales.
void reverse_scales(PartLayout& part);
// window-off-by-one.
void widen_window(SplitAttentionParams& params);
// state-targets-last: every token's state goes to the target of the item's last token.
void target_last(const RecurrentItem& item, std::span<std::int32_t> state_targets);

}  // namespace cuda
}  // namespace lockstep
