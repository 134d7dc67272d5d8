// States beyond what 31 and 32 bits reach, in an arena that is mostly not there.
#include <gtest/gtest.h>

#include "tests/cuda_backend/kernel_device.h"

namespace lockstep::cuda {
namespace {

// A token that forgets nothing and learns nothing takes a state to another block as it is.
TEST(FarStates, BlocksBeyondTwoAndFourGibibytesAreReadAndWritten) {
  constexpr std::int64_t kPage = std::int64_t{1} << 30;
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed, 6 * kPage);
    auto* memory = device.room<std::byte>(6 * kPage, "states");
    std::vector<float> state(32);
    for (int i = 0; i < 32; ++i) state[i] = static_cast<float>(i) - 7.5f;
    device->upload(memory + 5 * kPage, state.data(), 128);
    const float* nothing = device.put(std::vector<float>(32, 0.0f), "zeros");
    const GatedDeltaParams p{{memory, kPage, DType::fp32, 1, 1, 32},
                             device.put(std::vector<RecurrentItem>{{5, 0, 1}}, "items"),
                             device.put(std::vector<std::int32_t>{3}, "targets"),
                             nothing,
                             nothing,
                             nothing,
                             nothing,
                             nothing,
                             device.room<float>(1, "outputs"),
                             1.0f,
                             false,
                             1,
                             1};
    device->launch(device.engine().gated_delta, p);
    EXPECT_EQ(device.get(reinterpret_cast<float*>(memory + 3 * kPage), 32), state);
    device.expect_no_reports();
  });
}

}  // namespace
}  // namespace lockstep::cuda
