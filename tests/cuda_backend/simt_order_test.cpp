// Order between threads: races are found whatever the schedule was, and what is ordered is not
// reported.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/cuda_backend/simt_kernels/bugs.h"
#include "tests/cuda_backend/simt_test_device.h"

namespace lockstep {
namespace {

using simt::Mode;
using simt::ReportKind;
using simt_checked::bug_kernels;

TEST(SimtOrder, AMissingBarrierIsARaceOrAnUninitialisedReadForEverySeed) {
  const std::vector<float> ones(1024, 1.0f);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    TestDevice device(Mode::check, seed);
    const float* in = device.uploaded(ones, "in");
    float* out = device.undefined<float>(1, "out");
    ASSERT_EQ(bug_kernels.sum(device.stream(), in, out, 1024, true), simt::success);
    device.expect_clean();
    EXPECT_EQ(device.read(out, 1)[0], 1024.0f);

    ASSERT_EQ(bug_kernels.sum(device.stream(), in, out, 1024, false), simt::success);
    const auto reports = device.take_reports();
    ASSERT_FALSE(reports.empty()) << "seed " << seed;
    for (const simt::Report& report : reports) {
      EXPECT_TRUE(report.kind == ReportKind::race || report.kind == ReportKind::uninitialised_read)
          << to_string(report);
      EXPECT_EQ(report.allocation, "__shared__ parts");
    }
  }
}

TEST(SimtOrder, ALostUpdateIsARaceAndAnAtomicIsNot) {
  TestDevice device(Mode::check);
  int* counter = device.uploaded<int>({0}, "counter");
  ASSERT_EQ(bug_kernels.count_up(device.stream(), counter, true, 3), simt::success);
  device.expect_clean();
  EXPECT_EQ(device.read(counter, 1)[0], 3 * 64);

  ASSERT_EQ(bug_kernels.count_up(device.stream(), counter, false, 3), simt::success);
  const simt::Report report = device.take_only(ReportKind::race);
  ASSERT_TRUE(report.other.has_value());
  EXPECT_EQ(report.other->launch, report.by.launch);
  EXPECT_TRUE(report.other->thread != report.by.thread || report.other->cta.x != report.by.cta.x);
}

TEST(SimtOrder, HuntShowsWhatALostUpdateDoes) {
  TestDevice device(Mode::hunt);
  int* counter = device.uploaded<int>({0}, "counter");
  ASSERT_EQ(bug_kernels.count_up(device.stream(), counter, false, 1), simt::success);
  EXPECT_LT(device.read(counter, 1)[0], 64);
  EXPECT_GT(device.executor().last_launch().preemptions, 0u);
  device.take_only(ReportKind::race);

  counter = device.uploaded<int>({0}, "counter");
  ASSERT_EQ(bug_kernels.count_up(device.stream(), counter, true, 1), simt::success);
  EXPECT_EQ(device.read(counter, 1)[0], 64);
  device.expect_clean();
}

// What one CTA at a time cannot run: in mode hunt three of them take turns.
TEST(SimtOrder, CtasThatWaitForEachOtherRunInHuntAsFarAsTheyAreResident) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    TestDevice device(Mode::hunt, seed);
    unsigned* turn = device.uploaded<unsigned>({0}, "turn");
    int* sums = device.undefined<int>(3, "sums");
    ASSERT_EQ(bug_kernels.relay(device.stream(), turn, sums, 3, true), simt::success);
    device.expect_clean();
    EXPECT_EQ(device.read(sums, 3), (std::vector<int>{1, 2, 3}));
    turn = device.uploaded<unsigned>({0}, "turn");
    ASSERT_EQ(bug_kernels.relay(device.stream(), turn, sums, 3, false), simt::success);
    device.take_only(ReportKind::race);

    unsigned* arrived = device.uploaded<unsigned>({0}, "arrived");
    int* passed = device.uploaded<int>({0}, "passed");
    ASSERT_EQ(bug_kernels.grid_barrier(device.stream(), arrived, passed, 3), simt::success);
    device.expect_clean();
    EXPECT_EQ(device.read(passed, 1)[0], 3);
  }
  TestDevice device(Mode::hunt);
  unsigned* arrived = device.uploaded<unsigned>({0}, "arrived");
  int* passed = device.uploaded<int>({0}, "passed");
  ASSERT_EQ(bug_kernels.grid_barrier(device.stream(), arrived, passed, 5), simt::success);
  device.take_only(ReportKind::runaway);
  EXPECT_LT(device.read(passed, 1)[0], 5);
}

TEST(SimtOrder, HuntShowsAnUpdateThatAnotherCtaLoses) {
  std::size_t lost = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    TestDevice device(Mode::hunt, seed);
    int* counter = device.uploaded<int>({0}, "counter");
    ASSERT_EQ(bug_kernels.count_up_alone(device.stream(), counter, 64), simt::success);
    lost += device.read(counter, 1)[0] < 64;
    device.take_only(ReportKind::race);
  }
  EXPECT_EQ(lost, 20u);
}

TEST(SimtOrder, TwoCtasThatWriteOneRowRace) {
  TestDevice device(Mode::check);
  const auto* slots = device.uploaded<std::int64_t>({3, 9, -1, 5, 9, 0}, "slot_mapping");
  float* cache = device.undefined<float>(10 * 64, "key_cache");
  ASSERT_EQ(bug_kernels.write_rows(device.stream(), slots, cache, 4, 64), simt::success);
  device.expect_clean();
  ASSERT_EQ(bug_kernels.write_rows(device.stream(), slots, cache, 6, 64), simt::success);
  const simt::Report report = device.take_only(ReportKind::race);
  EXPECT_EQ(report.byte_offset / 256, 9) << "slot 9";
  ASSERT_TRUE(report.other.has_value());
  EXPECT_EQ(report.by.cta.x + report.other->cta.x, 1u + 4u);
}

TEST(SimtOrder, AStateShiftedInPlaceByAParallelCopyRacesAndTokenByTokenItDoesNot) {
  constexpr int kInner = 48, kWidth = 4;
  std::vector<std::uint16_t> state(kInner * kWidth);
  std::iota(state.begin(), state.end(), std::uint16_t{0});
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    TestDevice device(Mode::check, seed);
    auto* ordered = device.uploaded(state, "conv state");
    ASSERT_EQ(bug_kernels.shift_left(device.stream(), ordered, kInner, kWidth, 1, true),
              simt::success);
    device.expect_clean();
    const auto shifted = device.read(ordered, state.size());
    for (std::size_t i = 0; i < kInner * (kWidth - 1); ++i)
      ASSERT_EQ(shifted[i], state[i + kInner]) << i;

    auto* parallel = device.uploaded(state, "conv state");
    ASSERT_EQ(bug_kernels.shift_left(device.stream(), parallel, kInner, kWidth, 1, false),
              simt::success);
    EXPECT_EQ(device.take_only(ReportKind::race).allocation, "conv state") << "seed " << seed;
  }
}

TEST(SimtOrder, NeighbouringBytesOfOtherThreadsAreNoRace) {
  TestDevice device(Mode::hunt);
  auto* bytes = device.undefined<std::uint8_t>(1000, "bytes");
  for (int repeat = 0; repeat < 3; ++repeat) {
    ASSERT_EQ(bug_kernels.fill_bytes(device.stream(), bytes, 1000), simt::success);
    device.expect_clean();
  }
}

// threadfence and an atomic counter: the last CTA reads what the others wrote.
TEST(SimtOrder, TheLastCtaMayReadWhatOthersReleasedAndNotWhatTheyDidNot) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    TestDevice device(Mode::check, seed);
    float* parts = device.undefined<float>(20, "parts");
    unsigned* done = device.uploaded<unsigned>({0}, "done");
    float* out = device.undefined<float>(1, "out");
    ASSERT_EQ(bug_kernels.last_cta_sums(device.stream(), parts, done, out, 20, true),
              simt::success);
    device.expect_clean();
    EXPECT_EQ(device.read(out, 1)[0], 190.0f);

    done = device.uploaded<unsigned>({0}, "done");
    ASSERT_EQ(bug_kernels.last_cta_sums(device.stream(), parts, done, out, 20, false),
              simt::success);
    EXPECT_EQ(device.take_only(ReportKind::race).allocation, "parts");
  }
}

// Two readers, one of which writes later: only a barrier of both makes it legal.
// Half of the seeds let the writer read last, so that its own read hides the other one from a naive
// check.
TEST(SimtOrder, AWriteAfterReadsOfOthersNeedsABarrierWithAllOfThem) {
  struct Case {
    int ctas, distance;
    bool warp_is_enough, cta_is_enough;
  };
  for (const Case& c : {Case{1, 1, true, true}, Case{1, 32, false, true}, Case{2, 1, false, false}})
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      TestDevice device(Mode::check, seed);
      int* data = device.uploaded<int>({0}, "data");
      int* out = device.undefined<int>(64, "out");
      const auto races = [&](Meet meet) {
        EXPECT_EQ(bug_kernels.read_then_write(device.stream(), data, out, c.ctas, c.distance, meet),
                  simt::success);
        const auto reports = device.take_reports();
        for (const auto& report : reports) EXPECT_EQ(report.kind, ReportKind::race);
        return !reports.empty();
      };
      EXPECT_TRUE(races(Meet::not_at_all)) << c.ctas << " " << c.distance << " seed " << seed;
      EXPECT_EQ(races(Meet::in_warp), !c.warp_is_enough) << c.distance << " seed " << seed;
      EXPECT_EQ(races(Meet::in_cta), !c.cta_is_enough) << c.distance << " seed " << seed;
    }
}

TEST(SimtOrder, ReadingWhatAnotherCtaHasReleasedNeedsAnAcquireFirst) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    TestDevice device(Mode::check, seed);
    float* parts = device.uploaded<float>({0, 0}, "parts");
    unsigned* done = device.uploaded<unsigned>({0}, "done");
    ASSERT_EQ(bug_kernels.peek_before_acquire(device.stream(), parts, done), simt::success);
    EXPECT_EQ(device.take_only(ReportKind::race).allocation, "parts") << "seed " << seed;
  }
}

TEST(SimtOrder, ThreeThousandWarpBarriersKeepTheirOrder) {
  TestDevice device(Mode::check);
  int* out = device.undefined<int>(32, "out");
  ASSERT_EQ(bug_kernels.ping_pong_in_warp(device.stream(), out, 3000), simt::success);
  device.expect_clean();
  for (int i = 0; i < 32; ++i)
    EXPECT_EQ(device.read(out, 32)[static_cast<std::size_t>(i)], (i + 3000) % 32 + 3000);
}

TEST(SimtOrder, FiveThousandBarriersKeepTheirOrderAndOneThatIsLeftOutIsMissed) {
  TestDevice device(Mode::check);
  int* out = device.undefined<int>(3 * 64, "out");
  for (const int rounds : {2, 1022, 1023, 1024, 5000}) {
    ASSERT_EQ(bug_kernels.ping_pong(device.stream(), out, rounds, false), simt::success);
    device.expect_clean();
    EXPECT_EQ(device.executor().last_launch().barriers,
              3 * (static_cast<std::uint64_t>(rounds) + 1));
    for (unsigned cta = 0; cta < 3; ++cta)
      EXPECT_EQ(device.executor().who_wrote(out + cta * 64 + 9)->writer.cta.x, cta);

    ASSERT_EQ(bug_kernels.ping_pong(device.stream(), out, rounds, true), simt::success);
    const simt::Report report = device.take_only(ReportKind::race);
    EXPECT_EQ(report.allocation, "__shared__ buffers") << rounds << " rounds";
    EXPECT_EQ(report.by.cta.x, 1u);
    EXPECT_EQ(report.other->cta.x, 1u);
  }
}

}  // namespace
}  // namespace lockstep
