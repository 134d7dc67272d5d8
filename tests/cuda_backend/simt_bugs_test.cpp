// Planted bugs of bounds, alignment, definedness and synchronisation: each is caught, named and
// located, and the right kernel gives no report.
#include <gtest/gtest.h>

#include "tests/cuda_backend/simt_kernels/bugs.h"
#include "tests/cuda_backend/simt_test_device.h"

namespace lockstep {
namespace {

using simt::Mode;
using simt::ReportKind;
using simt_checked::bug_kernels;

#if SIMT_TEST_EXPECTS_LINES
#define EXPECT_LINE(report, text) \
  EXPECT_NE(source_line(report).find(text), std::string::npos) << source_line(report)
#else
#define EXPECT_LINE(report, text) static_cast<void>(report)
#endif

TEST(SimtBounds, AWriteOneElementPastTheAllocationIsNamedAndNotMade) {
  TestDevice device(Mode::check);
  float* data = device.undefined<float>(1000, "kv tensor 3");
  ASSERT_EQ(bug_kernels.fill(device.stream(), data, 1000), simt::success);
  device.expect_clean();

  ASSERT_EQ(bug_kernels.fill_one_too_many(device.stream(), data, 1000), simt::success);
  EXPECT_EQ(device.executor().last_launch().abandoned_threads, 1u);
  const simt::Report report = device.take_only(ReportKind::out_of_bounds);
  EXPECT_EQ(report.allocation, "kv tensor 3");
  EXPECT_EQ(report.byte_offset, 4000);
  EXPECT_EQ(report.size_bytes, 4u);
  EXPECT_EQ(report.access, simt::AccessKind::write);
  EXPECT_EQ(report.by.kernel, "fill_one_too_many");
  EXPECT_EQ(report.by.cta.x, 1000u / 128);
  EXPECT_EQ(report.thread_index.x, 1000u % 128);
  EXPECT_LINE(report, "data[global_thread()] = 1.0f");
  EXPECT_EQ(data[1000], 0.0f) << "the red zone was written";
  const std::string words = simt::in_sanitizer_words(report);
  EXPECT_TRUE(
      words.starts_with("========= Invalid __global__ write of size 4 bytes\n"
                        "=========     at fill_one_too_many()"))
      << words;
  EXPECT_TRUE(words.ends_with(
      "=========     by thread (104,0,0) in block (7,0,0)\n"
      "=========     Address 0xfa0 is out of bounds\n"
      "=========     and is 1 bytes after the nearest allocation at 0x0 of size 4000 bytes "
      "(kv tensor 3)\n"))
      << words;
}

TEST(SimtWords, EachKindOfFindingHasTheWordsOfTheToolThatFindsIt) {
  simt::Report report;
  report.by = {.launch = 3, .kernel = "k", .cta = {2, 0, 0}, .thread = 5};
  report.thread_index = {5, 0, 0};
  report.size_bytes = 4;
  report.allocation = "pool";
  report.allocation_bytes = 64;
  report.byte_offset = 18;
  const auto words = [&](ReportKind kind) {
    report.kind = kind;
    return simt::in_sanitizer_words(report);
  };
  const std::string who =
      "=========     at k()\n=========     by thread (5,0,0) in block (2,0,0)\n";
  const std::string inside =
      "=========     and is inside the nearest allocation at 0x0 of size 64 ";
  EXPECT_EQ(words(ReportKind::misaligned), "========= Invalid __global__ read of size 4 bytes\n" +
                                               who + "=========     Address 0x12 is misaligned\n" +
                                               inside + "bytes (pool)\n");
  EXPECT_EQ(words(ReportKind::use_after_free),
            "========= Invalid __global__ read of size 4 bytes\n" + who +
                "=========     Address 0x12 is out of bounds\n" + inside + "bytes (pool, freed)\n");
  EXPECT_EQ(words(ReportKind::uninitialised_read),
            "========= Uninitialized __global__ memory read of size 4 bytes\n" + who +
                "=========     Address 0x12\n");
  EXPECT_EQ(words(ReportKind::barrier_divergence),
            "========= Barrier error detected. Divergent thread(s) in block\n" + who);
  EXPECT_EQ(words(ReportKind::warp_divergence),
            "========= Barrier error detected. Divergent thread(s) in warp\n" + who);
  for (const ReportKind none :
       {ReportKind::undeclared_access, ReportKind::runaway, ReportKind::executor_limit})
    EXPECT_EQ(words(none), "");

  report.allocation = "__shared__ tile";
  report.other = simt::Party{.launch = 3, .kernel = "k", .cta = {2, 0, 0}, .thread = 37};
  EXPECT_EQ(words(ReportKind::race),
            "========= Error: Potential RAW hazard detected at __shared__ 0x12 in block (2,0,0) :\n"
            "=========     Write Thread (37,0,0) in block (2,0,0) at k()\n"
            "=========     Read Thread (5,0,0) in block (2,0,0) at k()\n");
  report.access = simt::AccessKind::write;
  EXPECT_NE(words(ReportKind::race).find("Potential WAW hazard"), std::string::npos);
  report.other_reads = true;
  EXPECT_NE(words(ReportKind::race).find("Potential WAR hazard"), std::string::npos);

  report.allocation.clear();
  EXPECT_EQ(words(ReportKind::wild_access),
            "========= Invalid __global__ write of size 4 bytes\n" + who +
                "=========     Address of no allocation is out of bounds\n");
}

TEST(SimtBounds, AccessesFarOutsideAreWild) {
  TestDevice device(Mode::check);
  float* out = device.undefined<float>(1, "out");
  std::vector<float> host_memory(1000);
  const auto* pointers = device.uploaded<const float*>({host_memory.data()}, "pointers");
  ASSERT_EQ(bug_kernels.read_through(device.stream(), pointers, out), simt::success);
  EXPECT_LINE(device.take_only(ReportKind::wild_access), "*out = **pointer");

  const float on_the_stack_of_the_host = 1.0f;
  pointers = device.uploaded<const float*>({&on_the_stack_of_the_host}, "pointers");
  ASSERT_EQ(bug_kernels.read_through(device.stream(), pointers, out), simt::success);
  device.take_only(ReportKind::wild_access);

  pointers = device.uploaded<const float*>({nullptr}, "pointers");
  ASSERT_EQ(bug_kernels.read_through(device.stream(), pointers, out), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::wild_access).detail, "null pointer + 0");

  static const float constant_of_the_program = 3.0f;
  pointers = device.uploaded<const float*>({&constant_of_the_program}, "pointers");
  ASSERT_EQ(bug_kernels.read_through(device.stream(), pointers, out), simt::success);
  device.expect_clean();
  EXPECT_EQ(device.read(out, 1)[0], 3.0f);
}

TEST(SimtBounds, AnAccessToFreedMemoryIsReported) {
  TestDevice device(Mode::check);
  float* data = device.undefined<float>(256, "scratch");
  ASSERT_EQ(device.executor().free(data), simt::success);
  ASSERT_EQ(bug_kernels.fill(device.stream(), data, 256), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::use_after_free).allocation, "scratch");
  EXPECT_EQ(device.executor().last_launch().abandoned_threads, 256u);
}

TEST(SimtBounds, AVectorStoreAtAnOddElementIsMisaligned) {
  TestDevice device(Mode::check);
  float* data = device.undefined<float>(64, "row");
  ASSERT_EQ(bug_kernels.store_pairs(device.stream(), data, 0, 16), simt::success);
  device.expect_clean();
#if defined(__clang__)
  GTEST_SKIP() << "clang tests no alignment when a struct is stored member by member";
#endif
  ASSERT_EQ(bug_kernels.store_pairs(device.stream(), data, 1, 16), simt::success);
  const simt::Report report = device.take_only(ReportKind::misaligned);
  EXPECT_EQ(report.byte_offset % 8, 4) << to_string(report);
  EXPECT_EQ(report.size_bytes, 8u);
  EXPECT_EQ(device.read(data + 33, 1)[0], 0.0f) << "a store was made";
}

// block * stride in 32 bits: right for small pools, far off for large ones.
TEST(SimtBounds, AnOffsetThatWrapsIn32BitsIsCaughtInASparsePoolOf32GiB) {
  TestDevice device(Mode::check, 1, std::size_t{48} << 30);
  constexpr std::int64_t kStride = 1 << 20, kBlocks = 8192;
  if (device.executor().arena_bytes() < std::size_t{40} << 30)
    GTEST_SKIP() << "address space is limited to " << device.executor().arena_bytes();
  float* pool = device.undefined<float>(kStride * kBlocks, "pool");
  const auto* low = device.uploaded<std::int32_t>({3, 1024, 2047}, "low blocks");
  const auto* high = device.uploaded<std::int32_t>({3, 2047, 2048, 8191}, "high blocks");

  ASSERT_EQ(bug_kernels.write_block_int32(device.stream(), low, pool, kStride, 3), simt::success);
  device.expect_clean();
  ASSERT_EQ(bug_kernels.write_block_int64(device.stream(), high, pool, kStride, 4), simt::success);
  device.expect_clean();
  ASSERT_EQ(bug_kernels.write_block_int32(device.stream(), high, pool, kStride, 4), simt::success);
  for (const simt::Report& report : device.take_reports()) {
    EXPECT_TRUE(report.kind == ReportKind::out_of_bounds || report.kind == ReportKind::wild_access)
        << to_string(report);
    EXPECT_EQ(report.access, simt::AccessKind::write);
    EXPECT_LINE(report, "pool[static_cast<std::int64_t>(offset) + threadIdx.x] = 1.0f");
  }
  EXPECT_EQ(device.executor().last_launch().abandoned_threads, 2 * 32u) << "blocks 2048 and 8191";
  EXPECT_EQ(device.executor().free(pool), simt::success);
}

TEST(SimtDefinedness, AReadOfUnwrittenBytesIsReported) {
  TestDevice device(Mode::check);
  const float* in = device.undefined<float>(300, "in");
  float* out = device.undefined<float>(300, "out");
  ASSERT_EQ(bug_kernels.copy_floats(device.stream(), in, out, 300), simt::success);
  const simt::Report report = device.take_only(ReportKind::uninitialised_read);
  EXPECT_EQ(report.allocation, "in");
  EXPECT_EQ(report.access, simt::AccessKind::read);
  EXPECT_LINE(report, "out[global_thread()] = in[global_thread()]");
  const simt::LaunchStatistics& statistics = device.executor().last_launch();
  EXPECT_EQ(statistics.reports_total(), 300u) << "all are counted";
  EXPECT_EQ(statistics.abandoned_threads, 0u) << "the thread continues";
}

TEST(SimtDefinedness, EveryByteCounts) {
  TestDevice device(Mode::check);
  auto* bytes = device.undefined<std::uint8_t>(64, "bytes");
  auto* out = device.undefined<float>(16, "out");
  const auto* floats = reinterpret_cast<const float*>(bytes);
  ASSERT_EQ(bug_kernels.fill_bytes(device.stream(), bytes, 63), simt::success);
  device.expect_clean();
  EXPECT_EQ(device.executor().first_undefined(bytes, 64), std::optional<std::size_t>(63));
  ASSERT_EQ(bug_kernels.copy_floats(device.stream(), floats, out, 15), simt::success);
  device.expect_clean();
  ASSERT_EQ(bug_kernels.copy_floats(device.stream(), floats, out, 16), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::uninitialised_read).byte_offset, 60);
}

TEST(SimtDefinedness, HostCopiesAndMemsetDefineMemory) {
  TestDevice device(Mode::check);
  float* in = device.undefined<float>(256, "in");
  float* out = device.undefined<float>(256, "out");
  ASSERT_EQ(device.executor().memset(in, 0, 1024), simt::success);
  ASSERT_EQ(bug_kernels.copy_floats(device.stream(), in, out, 256), simt::success);
  device.expect_clean();
}

TEST(SimtShared, AReadOfASharedElementThatThisCtaDidNotWriteIsReported) {
  TestDevice device(Mode::check);
  float* out = device.undefined<float>(32, "out");
  ASSERT_EQ(bug_kernels.shared_uninitialised(device.stream(), out), simt::success);
  const simt::Report report = device.take_only(ReportKind::uninitialised_read);
  EXPECT_EQ(report.allocation, "__shared__ tile");
  EXPECT_EQ(report.byte_offset, 20);
}

TEST(SimtShared, AStoreAfterTheEndOfASharedArrayIsReported) {
  TestDevice device(Mode::check);
  float* out = device.undefined<float>(1, "out");
  ASSERT_EQ(bug_kernels.shared_out_of_bounds(device.stream(), out, 7), simt::success);
  device.expect_clean();
  ASSERT_EQ(bug_kernels.shared_out_of_bounds(device.stream(), out, 8), simt::success);
  const simt::Report report = device.take_only(ReportKind::out_of_bounds);
  EXPECT_EQ(report.allocation, "__shared__ tile");
  EXPECT_EQ(report.byte_offset, 32);
}

TEST(SimtShared, DynamicSharedMemoryHasBoundsAndIsUndefinedAtFirst) {
  for (const Mode mode : {Mode::fast, Mode::check}) {
    const BugKernels& kernels =
        mode == Mode::fast ? simt_fast::bug_kernels : simt_checked::bug_kernels;
    TestDevice device(mode);
    float* out = device.undefined<float>(8, "out");
    ASSERT_EQ(kernels.dynamic_shared(device.stream(), out, 5), simt::success);
    device.expect_clean();
    EXPECT_EQ(device.read(out, 8), (std::vector<float>{1, 1, 1, 1, 1, 2, 1, 1}));
  }
  TestDevice device(Mode::check);
  float* out = device.undefined<float>(8, "out");
  ASSERT_EQ(bug_kernels.dynamic_shared(device.stream(), out, 8), simt::success);
  const std::vector<simt::Report> reports = device.take_reports();
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_EQ(reports[0].kind, ReportKind::out_of_bounds);
  EXPECT_EQ(reports[0].byte_offset, 32);
  EXPECT_EQ(reports[1].kind, ReportKind::uninitialised_read);
  EXPECT_EQ(reports[1].byte_offset, 20);
  for (const simt::Report& report : reports) EXPECT_EQ(report.allocation, "__shared__ (dynamic)");
}

TEST(SimtShared, MoreSharedMemoryThanACtaHasIsALimitInBothVariants) {
  for (const Mode mode : {Mode::fast, Mode::check}) {
    const BugKernels& kernels =
        mode == Mode::fast ? simt_fast::bug_kernels : simt_checked::bug_kernels;
    TestDevice device(mode);
    float* out = device.undefined<float>(32, "out");
    ASSERT_EQ(kernels.shared_too_large(device.stream(), out), simt::success);
    EXPECT_EQ(device.take_only(ReportKind::executor_limit).by.kernel, "shared_too_large");
    EXPECT_EQ(device.read(out, 32), std::vector<float>(32, 1.0f)) << "the threads were abandoned";
  }
}

TEST(SimtMeeting, TwoBarriersThatFaceEachOtherAreDivergence) {
  TestDevice device(Mode::check);
  float* data = device.undefined<float>(32, "data");
  ASSERT_EQ(bug_kernels.barrier_in_branch(device.stream(), data), simt::success);
  const simt::Report report = device.take_only(ReportKind::barrier_divergence);
  EXPECT_NE(report.detail.find("bugs.cpp"), std::string::npos) << report.detail;
}

TEST(SimtMeeting, ABarrierThatOthersNeverReachEndsTheCtaInEveryMode) {
  for (const Mode mode : {Mode::fast, Mode::check, Mode::hunt}) {
    const BugKernels& kernels =
        mode == Mode::fast ? simt_fast::bug_kernels : simt_checked::bug_kernels;
    TestDevice device(mode);
    float* data = device.undefined<float>(1000, "data");
    ASSERT_EQ(kernels.barrier_never_met(device.stream(), data, 1), simt::success);
    const simt::Report report = device.take_only(ReportKind::barrier_divergence);
    EXPECT_NE(report.detail.find("7 wait at __syncthreads, 25 at warp operations, 0 have exited"),
              std::string::npos)
        << report.detail;
    ASSERT_EQ(kernels.fill(device.stream(), data, 1000), simt::success);
    device.expect_clean();  // forgotten stacks do no harm
  }
}

TEST(SimtMeeting, TheStacksOfThreadsInADeadlockAreReused) {
  const auto address_space_bytes = [] {
    std::ifstream file("/proc/self/statm");
    std::size_t pages = 0;
    file >> pages;
    return pages * 4096;
  };
  TestDevice device(Mode::check);
  float* data = device.undefined<float>(32, "data");
  const std::size_t before = address_space_bytes();
  for (int i = 0; i < 200; ++i)
    ASSERT_EQ(bug_kernels.barrier_never_met(device.stream(), data, 1), simt::success);
  EXPECT_LT(address_space_bytes() - before, std::size_t{64} << 20)
      << "200 * 32 stacks would be 400 MiB";
}

// An inaccessible page below each stack keeps threads out of other stacks.
TEST(SimtStack, LocalsThatDoNotFitEndTheProcess) {
  EXPECT_DEATH(
      {
        TestDevice device(Mode::fast);
        int* out = device.undefined<int>(1, "out");
        simt_fast::bug_kernels.deep_stack(device.stream(), out);
      },
      "");
}

TEST(SimtMeeting, ExitedLanesAreNotWaitedForAndHaveNoValue) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    TestDevice device(Mode::check, seed);
    int* data = device.undefined<int>(32, "data");
    ASSERT_EQ(bug_kernels.shuffle_with_exited_lanes(device.stream(), data, 3), simt::success);
    device.expect_clean();
    ASSERT_EQ(bug_kernels.shuffle_with_exited_lanes(device.stream(), data, 20), simt::success);
    EXPECT_NE(device.take_only(ReportKind::warp_divergence).detail.find("reads lane 20"),
              std::string::npos);
    ASSERT_EQ(bug_kernels.sum_with_exited_lanes(device.stream(), data), simt::success);
    EXPECT_NE(device.take_only(ReportKind::warp_divergence).detail.find("only lanes 0000ffff"),
              std::string::npos);
    EXPECT_EQ(device.read(data, 16), std::vector<int>(16, 16));
  }
}

TEST(SimtMeeting, AThreadThatSpinsWithoutEndIsARunaway) {
  TestDevice device(Mode::check);
  const int* flag = device.uploaded<int>({0}, "flag");
  int* out = device.uploaded<int>({0}, "out");
  ASSERT_EQ(bug_kernels.spin(device.stream(), flag, out), simt::success);
  device.take_only(ReportKind::runaway);
  EXPECT_EQ(device.read(out, 1)[0], 0);
}

}  // namespace
}  // namespace lockstep
