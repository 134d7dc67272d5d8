// The pattern that simt.h explains, from kernel file to result, in every mode.
#include <gtest/gtest.h>

#include <vector>

#include "cuda_backend/simt/executor/executor.h"
#include "tests/cuda_backend/simt_kernels/scale.h"

namespace lockstep {
namespace {

class SimtPattern : public testing::TestWithParam<simt::Mode> {};

TEST_P(SimtPattern, AKernelFileRunsInBothVariantsThroughItsTable) {
  const simt::Mode mode = GetParam();
  simt::ExecutorOptions options;
  options.mode = mode;
  auto device = simt::Executor::create(options);
  ASSERT_TRUE(device) << device.error().message;
  const ScaleKernels& kernels =
      mode == simt::Mode::fast ? simt_fast::scale_kernels : simt_checked::scale_kernels;

  std::vector<float> numbers(1000);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  auto data = (*device)->allocate_array<float>(numbers.size(), "numbers");
  ASSERT_TRUE(data) << data.error().message;
  ASSERT_EQ((*device)->memcpy_h2d(*data, numbers.data(), 4000), simt::success);
  ASSERT_EQ(kernels.scale((*device)->stream(), *data, 2.0f, 1000), simt::success);
  ASSERT_EQ((*device)->memcpy_d2h(numbers.data(), *data, 4000), simt::success);

  for (std::size_t i = 0; i < numbers.size(); ++i)
    ASSERT_EQ(numbers[i], 2.0f * static_cast<float>(i)) << i;
  for (const simt::Report& report : (*device)->reports()) ADD_FAILURE() << to_string(report);
  const simt::LaunchStatistics& statistics = (*device)->last_launch();
  EXPECT_EQ(statistics.kernel, "scale");
  EXPECT_EQ(statistics.ctas, 8u);
  EXPECT_EQ(statistics.threads, 1024u);
  EXPECT_EQ(statistics.accesses, mode == simt::Mode::fast ? 0u : 2000u)
      << "one read, one write each";
  if (mode != simt::Mode::hunt) {
    EXPECT_EQ(statistics.switches, 2 * 8u) << "no switch inside a CTA";
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, SimtPattern,
                         testing::Values(simt::Mode::fast, simt::Mode::check, simt::Mode::hunt));

}  // namespace
}  // namespace lockstep
