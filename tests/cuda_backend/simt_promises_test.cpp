// Declared ranges of a launch, which the executor enforces, and the counts of what launches did.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/cuda_backend/simt_kernels/promises.h"
#include "tests/cuda_backend/simt_test_device.h"

namespace lockstep {
namespace {

using simt::Mode;
using simt::ReportKind;
using simt_checked::promise_kernels;

std::vector<int> numbers(int count) {
  std::vector<int> made(static_cast<std::size_t>(count));
  std::iota(made.begin(), made.end(), 0);
  return made;
}

// Elements [first, last) of an array.
void allow(simt::DeclaredRanges& ranges, const int* array, int first, int last, bool to_write) {
  ranges.allow(reinterpret_cast<std::uintptr_t>(array + first),
               reinterpret_cast<std::uintptr_t>(array + last), to_write);
}

TEST(SimtPromises, AnAccessOutsideOfWhatWasDeclaredIsReportedAndMade) {
  TestDevice device(Mode::check);
  const int* from = device.uploaded(numbers(64), "from");
  int* to = device.undefined<int>(64, "to");
  simt::DeclaredRanges ranges;
  allow(ranges, from, 0, 20, false);
  allow(ranges, from, 20, 32, false);  // neighbours are one range
  allow(ranges, to, 0, 31, true);
  ranges.merge();
  device.executor().declare(&ranges);
  ASSERT_EQ(promise_kernels.add_one(device.stream(), to, from, 31), simt::success);
  device.expect_clean();
  ASSERT_EQ(promise_kernels.add_one(device.stream(), to, from, 32), simt::success);
  const simt::Report report = device.take_only(ReportKind::undeclared_access);
  EXPECT_EQ(report.access, simt::AccessKind::write);
  EXPECT_EQ(report.allocation, "to");
  EXPECT_EQ(report.byte_offset, 31 * 4);
  EXPECT_EQ(device.read(to, 32)[31], 32);
  // To read is not to write; what may be written may be read.
  ASSERT_EQ(promise_kernels.shift(device.stream(), to, to + 16, 15), simt::success);
  device.expect_clean();
  ASSERT_EQ(promise_kernels.shift(device.stream(), const_cast<int*>(from), to, 1), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::undeclared_access).allocation, "from");
  device.executor().declare(nullptr);
  ASSERT_EQ(promise_kernels.add_one(device.stream(), to, from, 32), simt::success);
  device.expect_clean();
}

TEST(SimtPromises, TotalsOfAKernelAreTheSumsOfItsLaunches) {
  TestDevice device(Mode::check);
  const int* from = device.uploaded(numbers(32), "from");
  int* to = device.undefined<int>(32, "to");
  std::uint64_t switches = 0;
  for (const int count : {32, 5}) {
    ASSERT_EQ(promise_kernels.add_one(device.stream(), to, from, count), simt::success);
    switches += device.executor().last_launch().switches;
  }
  ASSERT_EQ(promise_kernels.shift(device.stream(), to, from, 3), simt::success);
  const auto totals = device.executor().kernel_totals();
  ASSERT_EQ(totals.size(), 2u);
  EXPECT_EQ(totals.at("add_one"), (simt::KernelTotals{.launches = 2,
                                                      .ctas = 2,
                                                      .threads = 64,
                                                      .accesses = 2 * (32 + 5),
                                                      .switches = switches,
                                                      .barriers = 0}));
  EXPECT_EQ(totals.at("shift").accesses, 6u);
}

}  // namespace
}  // namespace lockstep
