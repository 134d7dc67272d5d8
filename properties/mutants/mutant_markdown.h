// docs/mutants.md: the catalogue of planted defects as a page.
#pragma once

#include <string>

namespace lockstep {

std::string mutants_markdown();

}  // namespace lockstep
