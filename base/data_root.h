// Finds the files that are distributed with the command: sample traces and the Python packages.
#pragma once

#include <filesystem>

namespace lockstep {

// Returns PREFIX/share/lockstep for an installed PREFIX/bin/lockstep, otherwise the source tree of
// this build. Both contain traces/samples. A wheel keeps its Python packages in the interpreter's
// folder instead. Does not check that the files are there.
std::filesystem::path data_root();

// Returns the folder of the running program, with links resolved; empty if /proc is not mounted.
std::filesystem::path folder_of_program();

}  // namespace lockstep
