// Planted defects of the backend: BackendConfig::mutant names one of them. What each stands for,
// and what exposes it, is in the catalogue (properties/mutants/mutant_catalogue.h).
//
// 1. A defect is planted in what the backend's parts hand to each other (backend/cuda_backend.h):
//    the step's program, a plan, its views, what is uploaded and launched. Nothing of it stands in
//    the backend itself.
// 2. What happens within one launch is left to KernelDefect (launch/kernel_table.h).
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

// The seams of BackendConfig::mutant; of an empty name, none. Errors: a name that is not listed,
// and a configuration in which the defect has nothing to change.
Result<Seams> planted_seams(const BackendConfig& config);

// scale-of-other-head: the heads' scales in the opposite order.
void reverse_scales(PartLayout& part);
// window-off-by-one.
void widen_window(SplitAttentionParams& params);
// state-targets-last: every token's state goes where that of the item's last one goes.
void target_last(const RecurrentItem& item, std::span<std::int32_t> state_targets);

}  // namespace cuda
}  // namespace lockstep
