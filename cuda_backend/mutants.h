// Planted defects of the backend: BackendConfig::mutant names one of them. Each stands for a defect
// that a real engine has had; a comparison that none of them can upset is no comparison.
#pragma once

#include <string_view>
#include <vector>

namespace lockstep {

struct MutantInfo {
  std::string_view id;          // "wrong-stride"
  std::string_view stands_for;  // what goes wrong, in one sentence
  std::string_view exposed_by;  // the configuration or the step that shows it
};

std::vector<MutantInfo> backend_mutants();

}  // namespace lockstep
