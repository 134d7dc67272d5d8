// The entry of one libFuzzer executable; LOCKSTEP_FUZZ_TARGET names its target. Its first run
// begins with the target's own inputs.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const lockstep::FuzzTarget& target = lockstep::fuzz_target(LOCKSTEP_FUZZ_TARGET);
  target.run({data, size});
  return 0;
}
