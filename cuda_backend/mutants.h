// Planted defects of the backend: BackendConfig::mutant names one of them. What each stands for,
// and what exposes it, is in the catalogue (properties/mutants/mutant_catalogue.h).
#pragma once

#include <string_view>
#include <vector>

namespace lockstep {

std::vector<std::string_view> backend_defect_names();

}  // namespace lockstep
