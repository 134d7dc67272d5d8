// A user's kernels in a shared library: plugin.h behind UserKernels.
//
// 1. The library exports the entry, has this version, and has a function.
// 2. Functions take pointers of this process, or of the first GPU (on_gpu).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/protocol/user_kernels.h"

namespace lockstep {

// `path`: the library. `layers`: of the rank. Errors, each starting with the path: no such file; no
// shared library; no lockstep_plugin_open; another version; no function; what its open() refuses.
Result<std::shared_ptr<UserKernels>> open_plugin(const std::string& path,
                                                 std::vector<KernelLayer> layers);

// The library before a run: its open() is not called. Errors: the same ones, without open()'s.
Result<std::shared_ptr<UserKernels>> load_plugin(const std::string& path);

}  // namespace lockstep
