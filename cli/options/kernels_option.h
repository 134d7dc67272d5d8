// Declares --kernels module:Class or FILE.so: the user's cache writes and attention run on
// Lockstep's pages (docs/check_your_kernels.md). The backend's name becomes "kernels:module:Class",
// "cuda_kernels:module:Class" on a GPU, or the file's path, also in saved cases.
#pragma once

#include <functional>
#include <string>

#include "sim/session/session.h"

namespace CLI {
class App;
}

namespace lockstep {

// Declares the option. `take` receives the name of the backend, after --backend has set its own.
// REQUIRES: the command has --backend.
void declare_kernels(CLI::App& command, std::function<void(const std::string& backend)> take);

// Loads the library, or constructs the class once: a run of which a missing or broken library
// refuses every case would check only what needs no backend. Errors: kernels that no run can use.
// REQUIRES: is_user_kernels(backend).
Result<void> check_kernels(const std::string& backend);

// Returns the factory of a backend with the user's kernels. A Python class starts a process at the
// first run, and that process serves all later runs of this command. REQUIRES:
// is_user_kernels(backend).
BackendFactory kernels_factory(const std::string& backend);

}  // namespace lockstep
