// Copies carry definedness and origin; what has not arrived yet is undefined.
#include <gtest/gtest.h>


#include "tests/cuda_backend/simt_kernels/moves.h"
#include "tests/cuda_backend/simt_test_device.h"

namespace lockstep {
namespace {

using simt::Mode;
using simt::ReportKind;
using simt_checked::move_kernels;

// A page of 8 vectors of which only the first `defined` bytes are written.
std::uint8_t* half_filled_page(TestDevice& device, const char* name, int defined) {
  auto* page = device.undefined<std::uint8_t>(128, name);
  EXPECT_EQ(move_kernels.write_bytes(device.stream(), page, 0, defined), simt::success);
  device.expect_clean();
  return page;
}

void expect_undefined_from(TestDevice& device, const std::uint8_t* page, std::size_t defined) {
  const auto found = device.executor().first_undefined(page, 128);
  EXPECT_EQ(found, std::optional<std::size_t>(defined));
  for (std::size_t i = 0; i < 128; ++i) {
    const bool is_defined = !device.executor().first_undefined(page + i, 1).has_value();
    EXPECT_EQ(is_defined, i < defined) << "byte " << i;
  }
}

TEST(SimtMoves, Copy16OfAHalfFilledPageIsLegalAndLeavesTheCopyHalfDefined) {
  TestDevice device(Mode::check);
  for (const int defined : {1, 16, 37, 64, 127}) {
    const auto* page = half_filled_page(device, "page", defined);
    auto* copy = device.undefined<std::uint8_t>(128, "copy");
    ASSERT_EQ(move_kernels.copy16(device.stream(), copy, page, 8), simt::success);
    device.expect_clean();
    expect_undefined_from(device, copy, static_cast<std::size_t>(defined));

    auto* again = device.undefined<std::uint8_t>(128, "copy of the copy");
    ASSERT_EQ(move_kernels.copy16(device.stream(), again, copy, 8), simt::success);
    device.expect_clean();
    expect_undefined_from(device, again, static_cast<std::size_t>(defined));
  }
}

TEST(SimtMoves, CopyingUndefinedBytesOverDefinedOnesMakesThemUndefined) {
  TestDevice device(Mode::check);
  const auto* page = half_filled_page(device, "page", 37);
  auto* target = half_filled_page(device, "target", 128);
  ASSERT_EQ(move_kernels.copy16(device.stream(), target, page, 8), simt::success);
  device.expect_clean();
  expect_undefined_from(device, target, 37);
}

TEST(SimtMoves, NarrowCopiesAndMemcpyCarryDefinednessToTheByte) {
  TestDevice device(Mode::check);
  const auto* page = half_filled_page(device, "page", 37);
  auto* copy = device.undefined<std::uint16_t>(64, "copy");
  ASSERT_EQ(move_kernels.copy_values(device.stream(), copy,
                                     reinterpret_cast<const std::uint16_t*>(page), 64),
            simt::success);
  device.expect_clean();
  expect_undefined_from(device, reinterpret_cast<std::uint8_t*>(copy), 37);

  auto* by_memcpy = device.undefined<std::uint8_t>(128, "copy by memcpy");
  ASSERT_EQ(move_kernels.copy_by_memcpy(device.stream(), by_memcpy, page, 128), simt::success);
  device.expect_clean();
  expect_undefined_from(device, by_memcpy, 37);
  EXPECT_EQ(device.read(by_memcpy, 37), std::vector<std::uint8_t>(37, 7));
}

TEST(SimtMoves, ReadingAnUndefinedCopyIsReportedWithTheCopier) {
  TestDevice device(Mode::check);
  const auto* page = half_filled_page(device, "page", 16);
  auto* copy = device.undefined<std::uint8_t>(128, "copy");
  ASSERT_EQ(move_kernels.copy16(device.stream(), copy, page, 8), simt::success);
  auto* out = device.undefined<unsigned>(1, "out");
  ASSERT_EQ(move_kernels.load_by_memcpy(device.stream(), copy, out), simt::success);
  device.expect_clean();
  ASSERT_EQ(move_kernels.load_by_memcpy(device.stream(), copy + 16, out), simt::success);
  const simt::Report report = device.take_only(ReportKind::uninitialised_read);
  EXPECT_EQ(report.allocation, "copy");
  ASSERT_TRUE(report.other.has_value());
  EXPECT_EQ(report.other->kernel, "copy16");
  EXPECT_EQ(report.other->thread, 1u) << "vector 1";
}

TEST(SimtMoves, WhatAThreadHasReadOnceMayBecomeUndefinedUnderIt) {
  TestDevice device(Mode::check);
  int* data = device.uploaded<int>({5}, "data");
  int* out = device.undefined<int>(2, "out");
  const int* other = device.uploaded<int>({6}, "other");
  ASSERT_EQ(move_kernels.read_copy_read(device.stream(), data, other, out), simt::success);
  device.expect_clean();
  other = device.undefined<int>(1, "undefined");
  ASSERT_EQ(move_kernels.read_copy_read(device.stream(), data, other, out), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::uninitialised_read).allocation, "data");
  EXPECT_EQ(device.executor().last_launch().reports_total(), 1u) << "the first read was right";
}

TEST(SimtMoves, LoadAnyReadsUndefinedMemoryAndStillChecksBounds) {
  TestDevice device(Mode::check);
  const auto* page = half_filled_page(device, "page", 16);
  auto* out = device.undefined<unsigned>(1, "out");
  const auto* words = reinterpret_cast<const std::uint32_t*>(page);
  ASSERT_EQ(move_kernels.hash_any(device.stream(), words, out, 32), simt::success);
  device.expect_clean();
  ASSERT_EQ(move_kernels.hash_any(device.stream(), words, out, 33), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::out_of_bounds).byte_offset, 128);
}

TEST(SimtMoves, WhoWroteNamesTheCopierAndTheAuthor) {
  TestDevice device(Mode::check);
  const auto* page = half_filled_page(device, "page", 40);
  auto* copy = device.undefined<std::uint8_t>(128, "copy");
  auto* again = device.undefined<std::uint8_t>(128, "again");
  ASSERT_EQ(move_kernels.copy16(device.stream(), copy, page, 8), simt::success);
  ASSERT_EQ(move_kernels.copy_by_memcpy(device.stream(), again, copy, 128), simt::success);

  const auto direct = device.executor().who_wrote(page + 20);
  ASSERT_TRUE(direct.has_value());
  EXPECT_EQ(direct->writer.kernel, "write_bytes");
  EXPECT_EQ(direct->writer.thread, 20u);
  EXPECT_FALSE(direct->author.has_value());

  const auto copied = device.executor().who_wrote(copy + 20);
  ASSERT_TRUE(copied.has_value());
  EXPECT_EQ(copied->writer.kernel, "copy16");
  EXPECT_EQ(copied->writer.thread, 1u);
  ASSERT_TRUE(copied->author.has_value());
  EXPECT_EQ(copied->author->kernel, "write_bytes");
  EXPECT_EQ(copied->author->thread, 16u) << "an origin is that of the granule's first byte";

  const auto twice = device.executor().who_wrote(again + 20);
  ASSERT_TRUE(twice.has_value());
  EXPECT_EQ(twice->writer.kernel, "copy_by_memcpy");
  ASSERT_TRUE(twice->author.has_value());
  EXPECT_EQ(twice->author->kernel, "write_bytes");

  const auto undefined = device.executor().who_wrote(copy + 64);
  ASSERT_TRUE(undefined.has_value());
  EXPECT_FALSE(undefined->defined);
  EXPECT_FALSE(device.executor().who_wrote(page + 64).has_value()) << "never written";

  // A write of one's own ends the origin.
  ASSERT_EQ(move_kernels.write_bytes(device.stream(), copy, 16, 16), simt::success);
  EXPECT_FALSE(device.executor().who_wrote(copy + 20)->author.has_value());
}

}  // namespace
}  // namespace lockstep
