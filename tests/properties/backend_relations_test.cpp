// What attention reads on a device depends only on a request's tokens: not on their position, nor
// on other decisions. Two devices are compared without a model.
#include "properties/relations/backend_relations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/shrink/case_parts.h"
#include "reference/profiles/policies.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kPlaceSeeds = 80;

struct TallyOfRelations {
  std::int64_t applied = 0;
  std::int64_t compared = 0;
  std::int64_t pages = 0;
};

SavedCase with_kernels(std::uint64_t seed, std::string_view mutant = {},
                       bool has_connector = false) {
  GeneratorOptions options;
  options.engine = "vllm-0.33.0";
  // In overlaid memory all attention backends have the same views, and nothing is packed.
  if (!mutant.empty()) options.engine = "vllm-0.22.1";
  if (has_connector) {
    options.engine = profile_without("vllm-0.22.1", 0);
    options.always = {Feature::connector_peers, Feature::host_tier, Feature::prefix_caching,
                      Feature::shared_prefixes};
    options.never = {Feature::states, Feature::async_scheduling, Feature::failing_loads};
  }
  options.check = "fast";
  options.requests_max = 5;
  options.never = unrelated_features();  // one device: rank_outputs_test.cpp has several
  options.never.add(Feature::scaled_rows);
  SavedCase saved = generate_case(seed, options);
  if (!mutant.empty()) saved.mutants = {std::string(mutant)};
  return saved;
}

void expect_holds(const Relation& relation, std::uint64_t seeds, TallyOfRelations& tally) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const SavedCase saved = with_kernels(seed, {}, relation.of_connectors);
    if (!why_not_read(saved).empty()) continue;
    const auto check = check_on_backend(saved, relation, make_simt_backend);
    ASSERT_TRUE(check) << "seed " << seed << ": " << check.error().message;
    if (!*check || !(*check)->refused.empty()) continue;
    ASSERT_FALSE((*check)->breach) << "seed " << seed << ": " << (*check)->breach->what;
    ++tally.applied;
    tally.compared += (*check)->compared;
    tally.pages += (*check)->pages;
  }
}

std::string place_name(const testing::TestParamInfo<Relation>& relation) {
  std::string name(relation.param.name);
  std::ranges::replace(name, ' ', '_');
  return name;
}

class PlaceRelation : public testing::TestWithParam<Relation> {};

TEST_P(PlaceRelation, HoldsOverGeneratedCases) {
  TallyOfRelations tally;
  expect_holds(GetParam(), kPlaceSeeds, tally);
  EXPECT_GT(tally.applied, 2);
  EXPECT_GT(tally.compared, 500);
  EXPECT_EQ(tally.pages > 0, GetParam().moves_nothing);
}

TEST_P(PlaceRelation, BreaksUnderADefectOfTheBackend) {
  ASSERT_FALSE(GetParam().mutant.empty());
  bool broken = false;
  for (std::uint64_t seed = 1; seed <= 10 * kPlaceSeeds && !broken; ++seed) {
    SavedCase saved = with_kernels(seed, GetParam().mutant);
    // A lost order can show only where there is one to lose.
    if (GetParam().moves_nothing) saved.num_streams = 2;
    if (!why_not_read(saved).empty() || !GetParam().change(saved)) continue;
    const auto check = check_on_backend(saved, GetParam(), make_simt_backend);
    broken = check && *check && (*check)->breach;
  }
  EXPECT_TRUE(broken) << GetParam().mutant;
}

INSTANTIATE_TEST_SUITE_P(Each, PlaceRelation,
                         testing::ValuesIn(place_relations().begin(), place_relations().end()),
                         place_name);

// Without those that change what is sampled: outputs are planned by a request's place in the trace.
std::vector<Relation> of_decisions() {
  std::vector<Relation> kept;
  for (const Relation& relation : relations())
    if (relation.name != "batch mates") kept.push_back(relation);
  return kept;
}

class DecisionRelation : public testing::TestWithParam<Relation> {};

TEST_P(DecisionRelation, HoldsOnADeviceToo) {
  TallyOfRelations tally;
  expect_holds(GetParam(), kPlaceSeeds / 4, tally);
  EXPECT_GT(tally.applied, 0);
  EXPECT_GT(tally.compared, 100);
}

TEST(ContextRanks, ThatKeepTheirTokensElsewhereBreakTheMean) {
  const Relation& over_ranks =
      *std::ranges::find(relations(), std::string_view("context ranks"), &Relation::name);
  bool broken = false;
  for (std::uint64_t seed = 1; seed <= 10 * kPlaceSeeds && !broken; ++seed) {
    const SavedCase saved = with_kernels(seed, "slot-interleave-ignored");
    if (!why_not_read(saved).empty()) continue;
    const auto check = check_on_backend(saved, over_ranks, make_simt_backend);
    broken = check && *check && (*check)->breach;
  }
  EXPECT_TRUE(broken);
}

INSTANTIATE_TEST_SUITE_P(Each, DecisionRelation, testing::ValuesIn(of_decisions()), place_name);

}  // namespace
}  // namespace lockstep
