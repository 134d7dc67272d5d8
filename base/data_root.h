// Where the files lie that come with the command: samples of traces, and the Python packages.
#pragma once

#include <filesystem>

namespace lockstep {

// PREFIX/share/lockstep beside an installed PREFIX/bin/lockstep; else the sources that this was
// built from. Both hold traces/samples; a wheel leaves its Python packages to the interpreter.
std::filesystem::path data_root();

// The folder of the program that runs; empty where it cannot be told.
std::filesystem::path folder_of_program();

}  // namespace lockstep
