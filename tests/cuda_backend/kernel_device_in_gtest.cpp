// What tests of single kernels need of GoogleTest (kernel_device.h).
#include <gtest/gtest.h>

#include "tests/cuda_backend/kernel_device.h"

namespace lockstep::cuda {

void fail_test(const std::string& message) { ADD_FAILURE() << message; }

namespace {

// Before the first test: a word that means nothing fails the run, a GPU that is not there skips it.
class DeviceOfTests : public ::testing::Environment {
  void SetUp() override {
    const std::string why = why_no_kernel_device();
    if (why.starts_with("no GPU")) GTEST_SKIP() << why;
    if (!why.empty()) FAIL() << why;
  }
};
const ::testing::Environment* const device_of_tests =
    ::testing::AddGlobalTestEnvironment(new DeviceOfTests);

}  // namespace
}  // namespace lockstep::cuda
