// The backend of other people: a plugin (plugin.h) behind sim's interface.
//
// 1. Contents, poison, digests and state recurrences of the protocol are computed here; where bytes
//    lie, which block a position is in and which slot a token gets are the plugin's own.
// 2. Operations are called in the order of StepProgram, one at a time.
// Not checked: single accesses, for which the kernels have to run in the SIMT executor.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// Errors: those of PluginLibrary::open; a check mode other than fast, a mutant, several streams or
// ranks; a plan with states and a plugin without; what the plugin's create() refuses.
Result<std::unique_ptr<Backend>> make_plugin_backend(const std::string& path,
                                                     const BackendConfig& config);

}  // namespace lockstep
