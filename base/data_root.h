// Where the files lie that come with the command: samples of traces, and the Python packages.
#pragma once

#include <filesystem>

namespace lockstep {

// PREFIX/share/lockstep of an installed PREFIX/bin/lockstep; else the sources of this build. Both
// hold traces/samples; a wheel's Python packages are in the interpreter's folder.
std::filesystem::path data_root();

// The folder of the running program; empty if unknown.
std::filesystem::path folder_of_program();

}  // namespace lockstep
