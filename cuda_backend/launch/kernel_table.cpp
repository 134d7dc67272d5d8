#include "cuda_backend/launch/kernel_table.h"

#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {
namespace {
const char* error_text(int error) { return simt::error_string(static_cast<simt::error_t>(error)); }
}  // namespace

#define LOCKSTEP_LAUNCHER(name, Params) launch_##name,
extern const KernelTable kernel_table = {LOCKSTEP_PROTOCOL_KERNELS(LOCKSTEP_LAUNCHER) error_text};
extern const EngineKernels engine_kernels = {LOCKSTEP_ENGINE_KERNELS(LOCKSTEP_LAUNCHER)};
#undef LOCKSTEP_LAUNCHER

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
