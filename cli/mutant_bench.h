// What a search for mutants puts to the test: the backend on the CPU executor, and its views and
// figures of memory plans, each with the defect that a name plants.
#pragma once

#include "properties/mutants/mutant_search.h"

namespace lockstep {

MutantBench mutant_bench();

}  // namespace lockstep
