// The caches of the overlaid memory in hunt mode: threads are preempted between accesses by a seed,
// and every access is checked for bounds, definedness and races. What replays show must not depend
// on it.
#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "tests/properties/cache_kinds.h"

namespace lockstep {
namespace {

using tests::CacheKindCase;

Outcome hunted(SavedCase saved, std::uint64_t seed) {
  saved.check = CheckMode::hunt;
  saved.seed = seed;
  return judge(saved, make_simt_backend);
}

// The same run, whatever the seed of the hunt.
void expect_same(const Outcome& sound, const Outcome& hunt, const std::string& where) {
  EXPECT_EQ(name_of(hunt.kind), "agreed") << where << ": " << hunt.what;
  EXPECT_EQ(hunt.steps, sound.steps) << where;
  EXPECT_EQ(hunt.bytes_checked, sound.bytes_checked) << where;
  EXPECT_GT(hunt.bytes_checked, 0) << where;
}

void hunt_in(const CacheKindCase& kind, CacheLayout order, std::uint64_t seeds) {
  SavedCase saved = tests::case_in(kind, order);
  saved.check = CheckMode::fast;
  const Outcome sound = judge(saved, make_simt_backend);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed)
    expect_same(sound, hunted(saved, seed), kind.name + " in " + std::string(name_of(order)));
}

// Each kind in one layout; neighbours in the list in different ones.
TEST(OverlaidHunts, EveryKindOfCacheIsTheSameUnderPreemptionInOneOrder) {
  std::size_t place = 0;
  for (const CacheKindCase& kind : tests::cache_kinds()) {
    const auto order =
        std::next(kind.orders.begin(), static_cast<std::ptrdiff_t>(place++ % kind.orders.size()));
    hunt_in(kind, *order, 1);
  }
}

TEST(OverlaidHuntsSlow, EveryKindOfCacheIsTheSameInEveryOrderUnderTenSeeds) {
  for (const CacheKindCase& kind : tests::cache_kinds())
    for (const CacheLayout order : kOverlaidLayouts)
      if (kind.orders.contains(order)) hunt_in(kind, order, 10);
}

// Copies of blocks that are hit in part, and of states: in every order that the case takes.
int hunt_partial_hits(std::uint64_t cases, std::uint64_t seeds) {
  const GeneratorOptions options{
      .engine = "vllm-0.33.0",
      .always = {Feature::full_attention, Feature::prefix_caching, Feature::long_prompts,
                 Feature::shared_prefixes, Feature::sessions, Feature::hits_inside_blocks},
      .never = {Feature::two_block_pool},
      .backend = "simt",
      .check = "fast"};
  std::set<CacheLayout> hunted_in;
  for (std::uint64_t number = 1; number <= cases; ++number)
    for (const CacheLayout order : kOverlaidLayouts) {
      SavedCase saved = generate_case(number, options);
      saved.layout = order;
      const Outcome sound = judge(saved, make_simt_backend);
      if (sound.kind == OutcomeKind::refused) continue;
      hunted_in.insert(order);
      // The engine's own decisions may be at fault: what is found then must be the same as well.
      EXPECT_TRUE(name_of(sound.kind) == "agreed" || sound.check == "audit.state_read")
          << "case " << number << " in " << name_of(order) << ": " << sound.what;
      for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        const Outcome hunt = hunted(saved, seed);
        EXPECT_EQ(name_of(hunt.kind), name_of(sound.kind))
            << "case " << number << " in " << name_of(order) << ", seed " << seed;
        EXPECT_EQ(hunt.what, sound.what) << "case " << number << " in " << name_of(order);
      }
    }
  return static_cast<int>(hunted_in.size());
}

TEST(OverlaidHunts, CopiesOfBlocksThatAreHitInPartAreTheSameUnderPreemption) {
  EXPECT_EQ(hunt_partial_hits(1, 1), 4);
}
TEST(OverlaidHuntsSlow, CopiesOfBlocksThatAreHitInPartAreTheSameInTwentyCases) {
  EXPECT_EQ(hunt_partial_hits(20, 5), 6);
}

// A hunt that finds nothing is worth what it finds where something is planted: two threads that
// write one row, in every kind of cache with rows, in every order.
TEST(OverlaidHuntsSlow, APlantedRaceIsFoundInEveryKindAndOrderWithRows) {
  for (const CacheKindCase& kind : tests::cache_kinds())
    for (const CacheLayout order : kind.orders) {
      if (kind.groups.front().spec.kind == CacheKind::mamba) continue;
      SavedCase saved = tests::case_in(kind, order);
      saved.mutants = {"race"};
      const Outcome outcome = hunted(saved, 1);
      EXPECT_EQ(outcome.check, "memory_check") << kind.name << " in " << name_of(order) << ": "
                                               << name_of(outcome.kind) << " " << outcome.what;
    }
}

}  // namespace
}  // namespace lockstep
