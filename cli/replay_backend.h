// Backends by their names on the command line.
#pragma once

#include <memory>
#include <string_view>

#include "base/result.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// "auto", "cuda", "simt", a plugin's file; "none": null. Errors: a backend that this machine does
// not have, or that cannot do what the configuration asks for.
Result<std::unique_ptr<Backend>> make_backend(std::string_view name, const BackendConfig& config);

}  // namespace lockstep
