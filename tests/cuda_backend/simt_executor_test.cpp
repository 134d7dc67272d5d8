// The executor as a device: warp operations and barriers have a GPU's results, launches are counted
// and named, and the seed decides every choice.
#include "cuda_backend/simt/executor/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "cuda_backend/simt/random.h"
#include "tests/cuda_backend/simt_kernels/bugs.h"
#include "tests/cuda_backend/simt_kernels/scale.h"
#include "tests/cuda_backend/simt_kernels/synchronisation.h"
#include "tests/cuda_backend/simt_test_device.h"

namespace lockstep {
namespace {

using simt::Mode;
using simt::ReportKind;

class SimtMeetings : public testing::TestWithParam<Mode> {
 protected:
  SimtMeetings()
      : device(GetParam()),
        kernels(GetParam() == Mode::fast ? simt_fast::meeting_kernels
                                         : simt_checked::meeting_kernels) {}
  TestDevice device;
  const MeetingKernels& kernels;
};
INSTANTIATE_TEST_SUITE_P(Modes, SimtMeetings, testing::Values(Mode::fast, Mode::check, Mode::hunt));

float butterfly_sum(std::vector<float> lanes) {
  for (std::size_t offset = 16; offset > 0; offset /= 2) {
    std::vector<float> next(32);
    for (std::size_t i = 0; i < 32; ++i) next[i] = lanes[i] + lanes[i ^ offset];
    lanes = next;
  }
  return lanes[0];
}

TEST_P(SimtMeetings, WarpOperationsGiveWhatLoopsGive) {
  constexpr int kWarps = 5;
  simt::Random random(3);
  std::vector<float> in(kWarps * 32);
  for (float& x : in) x = static_cast<float>(random.below(100000)) / 7.0f;
  auto* out = device.undefined<LaneResults>(in.size(), "out");
  ASSERT_EQ(kernels.lanes(device.stream(), device.uploaded(in, "in"), out, kWarps), simt::success);
  device.expect_clean();
  const auto results = device.read(out, in.size());
  for (std::size_t t = 0; t < in.size(); ++t) {
    const LaneResults& r = results[t];
    const std::vector<float> warp(in.begin() + t / 32 * 32, in.begin() + t / 32 * 32 + 32);
    const std::size_t lane = t % 32;
    EXPECT_EQ(r.sum, butterfly_sum(warp)) << "bit for bit";
    EXPECT_EQ(r.max, *std::max_element(warp.begin(), warp.end()));
    int integer_sum = 0;
    unsigned ballot = 0;
    for (std::size_t i = 0; i < 32; ++i) {
      integer_sum += static_cast<int>(warp[i]);
      ballot |= static_cast<unsigned>(static_cast<int>(warp[i]) % 3 == 0) << i;
    }
    EXPECT_EQ(r.integer_sum, integer_sum);
    EXPECT_EQ(r.from_lane_3, warp[3]);
    EXPECT_EQ(r.from_xor_5, warp[lane ^ 5]);
    EXPECT_EQ(r.from_up_2, lane < 2 ? warp[lane] : warp[lane - 2]);
    EXPECT_EQ(r.from_down_2, lane > 29 ? warp[lane] : warp[lane + 2]);
    EXPECT_EQ(r.from_segment, warp[lane / 8 * 8 + 1]);
    EXPECT_EQ(r.ballot, ballot);
    EXPECT_EQ(r.any, 0);
    EXPECT_EQ(r.all, 1);
  }
}

TEST_P(SimtMeetings, HalvesOfAWarpMeetUnderTheirOwnMasks) {
  int* out = device.undefined<int>(32, "out");
  ASSERT_EQ(kernels.half_warps(device.stream(), out), simt::success);
  device.expect_clean();
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(device.read(out, 32)[i], i < 16 ? 120 : 376);
}

TEST_P(SimtMeetings, BarriersOrderSharedMemoryForAnyShapeOfCta) {
  const unsigned shapes[][3] = {{1, 1, 1}, {33, 1, 1}, {8, 4, 2}, {1, 1, 64}, {1024, 1, 1}};
  for (const auto& [x, y, z] : shapes) {
    const std::size_t threads = std::size_t{x} * y * z;
    std::vector<int> in(threads);
    std::iota(in.begin(), in.end(), 0);
    auto* out = device.undefined<BarrierResults>(threads, "out");
    ASSERT_EQ(kernels.barriers(device.stream(), device.uploaded(in, "in"), out, x, y, z),
              simt::success);
    device.expect_clean();
    EXPECT_EQ(device.executor().last_launch().barriers, 1u);
    const auto results = device.read(out, threads);
    for (std::size_t i = 0; i < threads; ++i) {
      EXPECT_EQ(results[i].neighbour, static_cast<int>((i + 1) % threads));
      EXPECT_EQ((results[i].z * y + results[i].y) * x + results[i].x, i);
    }
  }
}

TEST_P(SimtMeetings, AtomicsAreExactAndNoRace) {
  constexpr unsigned kThreads = 640;
  std::vector<unsigned> zeros(8, 0);
  zeros[2] = 0xffffffffu;
  unsigned* results = device.uploaded(zeros, "results");
  float* sum = device.uploaded<float>({0.0f}, "sum");
  ASSERT_EQ(kernels.all_atomics(device.stream(), results, sum, kThreads), simt::success);
  device.expect_clean();
  unsigned all_xor = 0;
  for (unsigned i = 0; i < kThreads; ++i) all_xor ^= i;
  EXPECT_EQ(device.read(results, 8),
            (std::vector<unsigned>{kThreads, kThreads - 1, 0, 0xffffffffu, all_xor, 2 * kThreads,
                                   kThreads, kThreads}));
  EXPECT_EQ(device.read(sum, 1)[0], kThreads / 2.0f);
}

TEST_P(SimtMeetings, TheCompilersAtomicsAreAtomicToo) {
  int* counter = device.uploaded<int>({0}, "counter");
  int* out = device.undefined<int>(64, "out");
  ASSERT_EQ(kernels.atomic_ref(device.stream(), counter, out, false), simt::success);
  device.expect_clean();
  EXPECT_EQ(device.read(counter, 1)[0], 128);
  ASSERT_EQ(kernels.atomic_ref(device.stream(), counter, out, true), simt::success);
  EXPECT_EQ(device.read(counter, 1)[0], 256);
  if (GetParam() == Mode::fast) return;
  EXPECT_EQ(device.take_only(ReportKind::race).allocation, "counter");
}

TEST_P(SimtMeetings, LaunchesThatNoGpuTakesAreRefused) {
  const auto stream = device.stream();
  const auto launch = [&](simt::stream_t on, unsigned grid, unsigned threads, std::size_t smem,
                          bool large_shared = false) {
    return kernels.nothing({dim3(grid), dim3(threads), smem, on, "nothing", large_shared});
  };
  EXPECT_EQ(launch(stream, 1, 1, 0), simt::success);
  EXPECT_EQ(launch(stream, 1, 1024, 48 * 1024), simt::success);
  EXPECT_EQ(launch(stream, 0, 32, 0), simt::invalid_configuration);
  EXPECT_EQ(launch(stream, 1, 0, 0), simt::invalid_configuration);
  EXPECT_EQ(launch(stream, 1, 1025, 0), simt::invalid_configuration);
  EXPECT_EQ(launch(nullptr, 1, 32, 0), simt::invalid_value);
}

TEST_P(SimtMeetings, MoreThan48KibibytesOfSharedMemoryNeedAnOptIn) {
  const auto launch = [&](std::size_t smem, bool large_shared) {
    return kernels.nothing({dim3(1), dim3(32), smem, device.stream(), "nothing", large_shared});
  };
  EXPECT_EQ(launch(48 * 1024 + 1, false), simt::invalid_configuration);
  EXPECT_EQ(launch(48 * 1024 + 1, true), simt::success);
  EXPECT_EQ(launch(227 * 1024, true), simt::success);
  EXPECT_EQ(launch(227 * 1024 + 1, true), simt::invalid_configuration);
}

TEST(SimtExecutor, LanesOrderSharedMemoryWithSyncwarpOnly) {
  std::vector<int> in(64);
  std::iota(in.begin(), in.end(), 0);
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    TestDevice device(Mode::check, seed);
    const int* data = device.uploaded(in, "in");
    int* out = device.undefined<int>(64, "out");
    ASSERT_EQ(simt_checked::meeting_kernels.warp_exchange(device.stream(), data, out, true),
              simt::success);
    device.expect_clean();
    for (int i = 0; i < 64; ++i)
      EXPECT_EQ(device.read(out, 64)[static_cast<std::size_t>(i)], i ^ 1);
    ASSERT_EQ(simt_checked::meeting_kernels.warp_exchange(device.stream(), data, out, false),
              simt::success);
    EXPECT_FALSE(device.take_reports().empty()) << "seed " << seed;
  }
}

// ---- determinism

struct Trace {
  std::vector<int> counters;
  std::vector<std::string> reports;
  std::vector<simt::LaunchStatistics> statistics;
  bool operator==(const Trace&) const = default;
};

Trace run_racy_kernels(Mode mode, std::uint64_t seed) {
  TestDevice device(mode, seed);
  Trace trace;
  for (int i = 0; i < 5; ++i) {
    int* counter = device.uploaded<int>({0}, "counter");
    EXPECT_EQ(simt_checked::bug_kernels.count_up(device.stream(), counter, false, 4),
              simt::success);
    trace.counters.push_back(device.read(counter, 1)[0]);
    trace.statistics.push_back(device.executor().last_launch());
    float* sum = device.undefined<float>(1, "sum");
    EXPECT_EQ(simt_checked::bug_kernels.sum(device.stream(),
                                            device.uploaded(std::vector<float>(500, 0.25f), "in"),
                                            sum, 500, false),
              simt::success);
    int bits = 0;
    std::memcpy(&bits, sum, 4);
    trace.counters.push_back(bits);
    trace.statistics.push_back(device.executor().last_launch());
  }
  for (const simt::Report& report : device.take_reports())
    trace.reports.push_back(simt::to_string(report));
  return trace;
}

TEST(SimtDeterminism, TheSameSeedGivesTheSameResultsReportsAndStatistics) {
  for (const Mode mode : {Mode::check, Mode::hunt})
    for (const std::uint64_t seed : {1, 2, 77}) {
      const Trace first = run_racy_kernels(mode, seed);
      EXPECT_EQ(first, run_racy_kernels(mode, seed)) << "seed " << seed;
      EXPECT_FALSE(first.reports.empty());
    }
}

TEST(SimtDeterminism, OtherSeedsGiveOtherInterleavings) {
  EXPECT_NE(run_racy_kernels(Mode::hunt, 1).counters, run_racy_kernels(Mode::hunt, 2).counters);
  EXPECT_NE(run_racy_kernels(Mode::check, 1).reports, run_racy_kernels(Mode::check, 2).reports);
}

// Three launches of many CTAs: atomics, plain rows, and CTAs that are given up.
Trace run_in_threads(int num_threads) {
  TestDevice device(Mode::fast, 1, std::size_t{1} << 30, num_threads);
  const BugKernels& kernels = simt_fast::bug_kernels;
  Trace trace;
  const auto note = [&] { trace.statistics.push_back(device.executor().last_launch()); };
  int* counter = device.uploaded<int>({0}, "counter");
  EXPECT_EQ(kernels.count_up(device.stream(), counter, true, 500), simt::success);
  note();
  trace.counters.push_back(device.read(counter, 1)[0]);
  std::vector<std::int64_t> slots(300);
  std::iota(slots.rbegin(), slots.rend(), 0);
  float* cache = device.uploaded(std::vector<float>(300 * 48, 0.0f), "cache");
  EXPECT_EQ(kernels.write_rows(device.stream(), device.uploaded(slots, "slots"), cache, 300, 48),
            simt::success);
  note();
  const auto rows = device.read(cache, 300 * 48);
  trace.counters.push_back(static_cast<int>(std::ranges::count(rows, 1.0f)));
  float* data = device.undefined<float>(100 * 32, "data");
  EXPECT_EQ(kernels.barrier_never_met(device.stream(), data, 100), simt::success);
  note();
  for (const simt::Report& report : device.take_reports())
    trace.reports.push_back(simt::to_string(report));
  return trace;
}

TEST(SimtDeterminism, ResultsReportsAndStatisticsDoNotDependOnTheNumberOfThreads) {
  const Trace one = run_in_threads(1);
  EXPECT_EQ(one.counters, (std::vector<int>{500 * 64, 300 * 48}));
  EXPECT_EQ(one.statistics.back().reports_total(), 34u) << "every third of 100 CTAs";
  EXPECT_FALSE(one.reports.empty());
  for (const int num_threads : {2, 5})
    for (int i = 0; i < 5; ++i) EXPECT_EQ(run_in_threads(num_threads), one) << num_threads;
}

// ---- statistics

TEST(SimtExecutor, WhoWroteNamesLaunchKernelCtaAndThread) {
  TestDevice device(Mode::check);
  float* data = device.uploaded(std::vector<float>(1000, 1.0f), "data");
  const auto before = device.executor().who_wrote(data + 700);
  ASSERT_TRUE(before.has_value());
  EXPECT_TRUE(before->writer.is_host);
  EXPECT_EQ(before->writer.kernel, "memcpy_h2d");
  EXPECT_EQ(before->writer.launch, 1u);
  ASSERT_EQ(simt_checked::scale_kernels.scale(device.stream(), data, 2.0f, 800), simt::success);
  const auto after = device.executor().who_wrote(data + 700);
  ASSERT_TRUE(after.has_value());
  EXPECT_EQ(after->writer.kernel, "scale");
  EXPECT_EQ(after->writer.launch, 2u);
  EXPECT_EQ(after->writer.cta.x, 700u / 128);
  EXPECT_EQ(after->writer.thread, 700u % 128);
  EXPECT_TRUE(device.executor().who_wrote(data + 900)->writer.is_host) << "not scaled";
  EXPECT_FALSE(device.executor().who_wrote(data + 1000).has_value()) << "past the end";
  EXPECT_FALSE(device.executor().who_wrote(&device).has_value()) << "host memory";
}

TEST(SimtExecutor, ReportsAreCappedPerPlaceAndAllAreCounted) {
  TestDevice device(Mode::check);
  const float* in = device.undefined<float>(5000, "in");
  float* out = device.undefined<float>(5000, "out");
  ASSERT_EQ(simt_checked::bug_kernels.copy_floats(device.stream(), in, out, 5000), simt::success);
  EXPECT_EQ(device.executor().reports().size(), simt::kReportsPerPlace);
  const simt::LaunchStatistics& statistics = device.executor().last_launch();
  EXPECT_EQ(statistics.reports[static_cast<std::size_t>(ReportKind::uninitialised_read)], 5000u);
  EXPECT_EQ(statistics.reports_total(), 5000u);
  device.take_reports();
  EXPECT_TRUE(device.executor().reports().empty());
}

TEST(SimtExecutor, AfterAnUncheckedLaunchUndefinedReadsAreNotReportedAndStatisticsShowIt) {
  TestDevice device(Mode::check);
  float* data = device.undefined<float>(100, "data");
  float* out = device.undefined<float>(100, "out");
  ASSERT_EQ(simt_fast::bug_kernels.fill(device.stream(), data, 100), simt::success);
  ASSERT_EQ(simt_checked::bug_kernels.copy_floats(device.stream(), data, out, 100), simt::success);
  device.expect_clean();
  EXPECT_FALSE(device.executor().last_launch().definedness_known);
  ASSERT_EQ(simt_checked::bug_kernels.shared_uninitialised(device.stream(), out), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::uninitialised_read).allocation, "__shared__ tile");
}

TEST(SimtExecutor, ACheckedLaunchNeedsAnExecutorWithAShadow) {
  TestDevice device(Mode::fast);
  float* data = device.undefined<float>(100, "data");
  EXPECT_EQ(simt_checked::bug_kernels.fill(device.stream(), data, 100),
            simt::invalid_configuration);
  EXPECT_EQ(simt_fast::bug_kernels.fill(device.stream(), data, 100), simt::success);
  EXPECT_FALSE(device.executor().who_wrote(data).has_value());
}

TEST(SimtExecutor, TwoExecutorsTakeTurns) {
  TestDevice a(Mode::check), b(Mode::hunt);
  int* in_a = a.uploaded<int>({0}, "a");
  int* in_b = b.uploaded<int>({0}, "b");
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(simt_checked::bug_kernels.count_up(a.stream(), in_a, true, 2), simt::success);
    ASSERT_EQ(simt_checked::bug_kernels.count_up(b.stream(), in_b, true, 1), simt::success);
  }
  a.expect_clean();
  b.expect_clean();
  EXPECT_EQ(a.read(in_a, 1)[0], 6 * 64);
  EXPECT_EQ(b.read(in_b, 1)[0], 3 * 64);
}

TEST(SimtExecutor, OsThreadsRunTheirOwnExecutorsSideBySide) {
  const std::vector<float> ones(1024, 1.0f);
  const auto run = [&ones](Mode mode) {
    const BugKernels& kernels =
        mode == Mode::fast ? simt_fast::bug_kernels : simt_checked::bug_kernels;
    TestDevice device(mode);
    const float* in = device.uploaded(ones, "in");
    float* out = device.undefined<float>(1, "out");
    for (int i = 0; i < 50; ++i) {
      ASSERT_EQ(kernels.sum(device.stream(), in, out, 1024, true), simt::success);
      ASSERT_EQ(device.read(out, 1)[0], 1024.0f);
    }
    device.expect_clean();
  };
  std::thread fast(run, Mode::fast), check(run, Mode::check), hunt(run, Mode::hunt);
  fast.join();
  check.join();
  hunt.join();
}

TEST(SimtExecutor, AnExecutorMayMoveToAnotherOsThread) {
  TestDevice device(Mode::check);
  const std::vector<float> ones(1024, 1.0f);
  const float* in = device.uploaded(ones, "in");
  float* out = device.undefined<float>(1, "out");
  const auto sum = [&] {
    ASSERT_EQ(simt_checked::bug_kernels.sum(device.stream(), in, out, 1024, true), simt::success);
    EXPECT_EQ(device.read(out, 1)[0], 1024.0f);
  };
  for (int i = 0; i < 3; ++i) {
    sum();
    std::thread(sum).join();
  }
  device.expect_clean();
}

// Stamps hold 22 bits of the launch number; after that they begin again.
TEST(SimtExecutor, AfterFourMillionLaunchesReportsAreStillRight) {
  TestDevice device(Mode::check);
  float* early = device.undefined<float>(8, "early");
  int* counter = device.uploaded<int>({0}, "counter");
  for (int i = 0; i < 100; ++i) ASSERT_EQ(device.executor().memset(counter, 0, 4), simt::success);
  ASSERT_EQ(simt_checked::bug_kernels.fill(device.stream(), early, 4), simt::success);
  for (int i = 0; i < (1 << 22) + 10; ++i)
    ASSERT_EQ(device.executor().memset(counter, 0, 4), simt::success);
  float* out = device.undefined<float>(8, "out");
  ASSERT_EQ(simt_checked::bug_kernels.copy_floats(device.stream(), early, out, 4), simt::success);
  ASSERT_EQ(simt_checked::bug_kernels.count_up(device.stream(), counter, true, 2), simt::success);
  device.expect_clean();
  EXPECT_GT(device.executor().last_launch().launch, std::uint64_t{1} << 22);
  EXPECT_EQ(device.executor().who_wrote(early)->writer.kernel, "(one of the launches before)");
  ASSERT_EQ(simt_checked::bug_kernels.copy_floats(device.stream(), early, out, 5), simt::success);
  EXPECT_EQ(device.take_only(ReportKind::uninitialised_read).byte_offset, 16);
}

}  // namespace
}  // namespace lockstep
