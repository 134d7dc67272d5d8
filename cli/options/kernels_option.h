// --kernels module:Class or FILE.so: the user's cache writes and attention on Lockstep's pages. The
// backend's name is "kernels:module:Class" or the file's, in saved cases too.
#pragma once

#include <functional>
#include <string>

#include "sim/session/session.h"

namespace CLI {
class App;
}

namespace lockstep {

// REQUIRES: the command has --backend. `take` receives the backend's name, after that of --backend.
void declare_kernels(CLI::App& command, std::function<void(const std::string& backend)> take);

// Starts a class's process for the first run; one process serves all runs of this command that
// follow one another. REQUIRES: is_user_kernels(backend).
BackendFactory kernels_factory(const std::string& backend);

}  // namespace lockstep
