// The table of launchers of scale.cpp, once per variant: the pattern that simt.h explains.
#pragma once

#include <cstdint>

#include "cuda_backend/simt/simt.h"

namespace lockstep {

struct ScaleKernels {
  simt::error_t (*scale)(simt::stream_t, float* data, float factor, std::int64_t count);
};
SIMT_DECLARE_IN_VARIANTS(extern const ScaleKernels scale_kernels;)

}  // namespace lockstep
