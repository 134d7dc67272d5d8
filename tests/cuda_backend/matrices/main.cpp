// Kernels over matrices of shapes: head sizes, block sizes, layouts, dtypes. A test's title is a
// sentence; the shape that it runs in is a section with a name. Tags:
//   [executor]   planted defects and reports of accesses: on a GPU neither ends well
//   [far]        takes more memory than a simulated GPU has
//   [slow]       a hundred seeds of preemption
//   [!benchmark] times; left out unless asked for
#define CATCH_CONFIG_RUNNER
#include <cstdio>

#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"

namespace lockstep::cuda {

void fail_test(const std::string& message) { FAIL_CHECK(message); }

}  // namespace lockstep::cuda

int main(int argc, char** argv) {
  if (const std::string why = lockstep::cuda::why_no_kernel_device(); !why.empty()) {
    std::printf("%s\n", why.c_str());
    return why.starts_with("no GPU") ? 0 : 2;
  }
  return Catch::Session().run(argc, argv);
}
