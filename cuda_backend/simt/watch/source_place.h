// From an instruction to its line in the source.
#pragma once

#include <cstdint>
#include <string>

namespace simt {

// "FILE:LINE" of the innermost (inlined) function that contains the call returning to pc; empty
// without debug information, or when built without libbacktrace, which comes with g++.
std::string source_place(std::uintptr_t pc);

}  // namespace simt
