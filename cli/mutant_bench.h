// Provides what the search for mutants tests: the backend on the CPU executor, and its views and
// byte offsets of memory plans. Each function plants the defect of a given name, or none for the
// empty name.
//
// It is here because properties/ must not depend on cuda_backend/: a search receives its suspects
// from the caller.
#pragma once

#include "properties/mutants/mutant_search.h"

namespace lockstep {

MutantBench mutant_bench();

}  // namespace lockstep
