// The network loses, repeats, delays, damages and swallows what its options say, and nothing else;
// whatever it does, its counts add up and a second run does the same.
#include "sim/pair/transfer_protocol.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>

#include "tests/sim/pair/pairs.h"

namespace lockstep {
namespace {

struct Arrival {
  std::int64_t at_ns = 0;
  std::vector<std::uint8_t> bytes;
  bool operator==(const Arrival&) const = default;
};

struct Journal {
  std::vector<Arrival> arrivals;
  NetworkCounts counts;
  bool operator==(const Journal&) const = default;
};

// `num_packets` from endpoint 0 to 1, one every `gap_ns`, each holding its own number.
Journal send_all(const NetworkOptions& options, std::int64_t num_packets, std::int64_t gap_ns) {
  Network network(options);
  Journal journal;
  std::int64_t now_ns = 0;
  const auto deliver = [&](std::int64_t until_ns) {
    while (network.next_due_ns().value_or(until_ns + 1) <= until_ns) {
      now_ns = std::max(now_ns, *network.next_due_ns());
      while (const auto packet = network.deliver(now_ns))
        journal.arrivals.push_back({now_ns, packet->bytes});
    }
    now_ns = until_ns;
  };
  for (std::int64_t i = 0; i < num_packets; ++i) {
    deliver(i * gap_ns);
    network.send(now_ns, {Endpoint{0},
                          Endpoint{1},
                          {static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(i >> 8)}});
  }
  deliver(now_ns + 1'000'000'000'000);
  journal.counts = network.counts();
  return journal;
}

// Faults that come and go within a test's microseconds.
NetworkOptions lossy(std::uint64_t seed) {
  NetworkOptions options = worst_network(seed);
  options.period_ns = 1'000'000;
  options.straggler_ns = 5'000'000;
  return options;
}

TEST(Network, WithoutFaultsEverythingArrivesOnceWithinItsDelay) {
  const NetworkOptions options{.seed = 4, .delay_ns_min = 5, .delay_ns_max = 9};
  const Journal journal = send_all(options, 300, 20);
  ASSERT_EQ(journal.arrivals.size(), 300u);
  for (std::size_t i = 0; i < 300; ++i) {
    const std::int64_t delay_ns = journal.arrivals[i].at_ns - static_cast<std::int64_t>(i) * 20;
    EXPECT_TRUE(delay_ns >= 5 && delay_ns <= 9) << delay_ns;
    EXPECT_EQ(journal.arrivals[i].bytes[0], static_cast<std::uint8_t>(i));
  }
  EXPECT_EQ(journal.counts, (NetworkCounts{.sent = 300, .delivered = 300}));
}

TEST(Network, AnEndpointThatIsAlwaysDeadSwallowsEverything) {
  const Journal journal = send_all({.seed = 1, .dead_percent = 100}, 100, 1'000);
  EXPECT_TRUE(journal.arrivals.empty());
  EXPECT_EQ(journal.counts.swallowed, 100);
}

TEST(Network, ADeadEndpointComesBack) {
  const Network network({.seed = 1, .period_ns = 10, .dead_percent = 50});
  int deaths = 0;
  int returns = 0;
  for (std::int64_t t = 10; t < 1'000; t += 10) {
    const bool before = network.is_dead(Endpoint{0}, t - 10);
    const bool after = network.is_dead(Endpoint{0}, t);
    deaths += !before && after ? 1 : 0;
    returns += before && !after ? 1 : 0;
  }
  EXPECT_GT(deaths, 10);
  EXPECT_GT(returns, 10);
}

TEST(Network, ItsCountsAddUpUnderAllFaultsAtOnce) {
  NetworkCounts seen;
  EXPECT_TRUE(rc::check("sent and copied is lost, swallowed or delivered", [&] {
    const auto options = lossy(*rc::gen::arbitrary<std::uint64_t>());
    const Journal journal = send_all(options, *rc::gen::inRange<std::int64_t>(1, 300),
                                     *rc::gen::inRange<std::int64_t>(1, 200'000));
    const NetworkCounts& c = journal.counts;
    RC_ASSERT(c.sent + c.duplicated == c.lost + c.swallowed + c.delivered);
    RC_ASSERT(std::ssize(journal.arrivals) == c.delivered);
    RC_ASSERT(std::ranges::is_sorted(journal.arrivals, {}, &Arrival::at_ns));
    seen.lost += c.lost;
    seen.swallowed += c.swallowed;
    seen.duplicated += c.duplicated;
    seen.damaged += c.damaged;
    seen.straggled += c.straggled;
    seen.slowed += c.slowed;
    seen.reordered += c.reordered;
  }));
  for (const std::int64_t count : {seen.lost, seen.swallowed, seen.duplicated, seen.damaged,
                                   seen.straggled, seen.slowed, seen.reordered})
    EXPECT_GT(count, 20);
}

TEST(Network, TheSameSeedDoesTheSameAndAnotherOneDoesNot) {
  EXPECT_EQ(send_all(lossy(3), 200, 10'000), send_all(lossy(3), 200, 10'000));
  EXPECT_NE(send_all(lossy(3), 200, 10'000), send_all(lossy(4), 200, 10'000));
}

TEST(TransferMessage, ReadingWhatWasWrittenIsTheIdentityAndNoChangedBitPasses) {
  std::int64_t num_flipped = 0;
  EXPECT_TRUE(rc::check("encode, then decode", [&] {
    const TransferMessage message{
        .kind = static_cast<TransferMessage::Kind>(*rc::gen::inRange(0, 5)),
        .transfer = {*rc::gen::arbitrary<std::uint64_t>(), *rc::gen::arbitrary<std::uint32_t>()},
        .place = {*rc::gen::arbitrary<std::int32_t>(), *rc::gen::arbitrary<std::int32_t>()},
        .bytes = *rc::gen::arbitrary<std::vector<std::uint8_t>>()};
    std::vector<std::uint8_t> bytes = encode(message);
    RC_ASSERT(decode(bytes) == message);
    const auto bit = *rc::gen::inRange<std::size_t>(0, bytes.size() * 8);
    bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
    RC_ASSERT(!decode(bytes));
    bytes.resize(*rc::gen::inRange<std::size_t>(0, bytes.size()));
    RC_ASSERT(!decode(bytes));
    ++num_flipped;
  }));
  EXPECT_GE(num_flipped, 100);
}

}  // namespace
}  // namespace lockstep
