// What a rank keeps is what the planner gives a worker of that rank, and the shares of all ranks
// cover the model.
#include "reference/plan/rank_plan.h"

#include <gtest/gtest.h>

#include <fmt/core.h>

#include <map>
#include <set>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

KVCacheConfig attention_plan(std::int64_t heads, int layers) {
  KVCacheGroupSpec group;
  group.spec.num_kv_heads = heads;
  for (int i = 0; i < layers; ++i) group.layer_names.push_back(fmt::format("layers.{}.attn", i));
  KVCacheConfig plan{.num_blocks = 7, .tensors = {}, .groups = {group}};
  for (const std::string& name : group.layer_names)
    plan.tensors.push_back({7 * page_size_bytes(group.spec), {name}});
  return plan;
}

TEST(RankPlan, OneRankKeepsThePlanAsItIs) {
  const KVCacheConfig whole = attention_plan(4, 3);
  const auto rank = rank_plan(whole, {}, 2);
  ASSERT_TRUE(rank);
  EXPECT_EQ(rank->plan, whole);
  for (std::int32_t i = 0; i < 3; ++i)
    EXPECT_EQ(
        rank->layers[static_cast<std::size_t>(i)],
        (LayerShare{.layer = i, .first_head = 0, .queries_per_kv = 2, .first_query_head = 0}));
}

struct Degrees {
  std::int32_t tp;
  std::int32_t pp;
  std::int64_t heads;
  std::int64_t copies;  // of every head
};

TEST(RankPlan, AllRanksHoldEveryHeadOfEveryLayerEquallyOften) {
  for (const Degrees& at : {Degrees{2, 1, 4, 1}, Degrees{4, 1, 2, 2}, Degrees{1, 3, 2, 1},
                            Degrees{8, 2, 1, 8}, Degrees{4, 4, 4, 1}}) {
    const KVCacheConfig whole = attention_plan(at.heads, 7);
    std::map<std::pair<std::int32_t, std::int64_t>, std::int64_t> holders;
    std::map<std::pair<std::int32_t, std::int64_t>, std::int64_t> answers;
    for (ParallelRank rank{.tp_size = at.tp, .pp_size = at.pp}; rank.pp_rank < at.pp;
         ++rank.pp_rank)
      for (rank.tp_rank = 0; rank.tp_rank < at.tp; ++rank.tp_rank) {
        const auto own = rank_plan(whole, rank, 8);
        ASSERT_TRUE(own) << own.error().message;
        EXPECT_EQ(own->plan.num_blocks, whole.num_blocks);
        ASSERT_EQ(own->layers.size(), own->plan.groups.front().layer_names.size());
        const std::int64_t heads = own->plan.groups.front().spec.num_kv_heads;
        for (const LayerShare& share : own->layers) {
          for (std::int64_t head = 0; head < heads; ++head)
            ++holders[{share.layer, share.first_head + head}];
          for (std::int64_t query = 0; query < heads * share.queries_per_kv; ++query) {
            ++answers[{share.layer, share.first_query_head + query}];
            const std::int64_t reads = (share.first_query_head + query) / 8;
            EXPECT_EQ(reads, share.first_head + query / share.queries_per_kv);
          }
        }
      }
    EXPECT_EQ(std::ssize(holders), 7 * at.heads);
    for (const auto& [row, count] : holders) EXPECT_EQ(count, at.copies);
    EXPECT_EQ(std::ssize(answers), 7 * at.heads * 8);
    for (const auto& [row, count] : answers) EXPECT_EQ(count, 1);
  }
}

TEST(RankPlan, StagesBeforeTheLastTakeWhatDoesNotDivide) {
  const KVCacheConfig whole = attention_plan(1, 11);
  std::vector<std::size_t> lengths;
  for (std::int32_t stage = 0; stage < 4; ++stage) {
    const auto own = rank_plan(whole, {.pp_size = 4, .pp_rank = stage}, 1);
    ASSERT_TRUE(own);
    lengths.push_back(own->layers.size());
  }
  EXPECT_EQ(lengths, (std::vector<std::size_t>{3, 3, 3, 2}));
  const auto second = rank_plan(whole, {.pp_size = 4, .pp_rank = 1}, 1);
  EXPECT_EQ(second->layers.front().layer, 3);
  EXPECT_EQ(second->plan.tensors.size(), 3u);
}

TEST(RankPlan, PagesShrinkWithTheHeadsAndKeepWhatTheyArePaddedBeyondTheLargest) {
  KVCacheConfig whole = attention_plan(4, 2);
  KVCacheGroupSpec states;
  states.layer_names = {"layers.2.state"};
  states.spec.kind = CacheKind::mamba;
  states.spec.states = {{{3, 8}, DType::bf16}, {{4, 4, 8}, DType::fp32}};
  const std::int64_t page = page_size_bytes(whole.groups[0].spec) + 64;
  for (KVCacheGroupSpec* group : {&whole.groups[0], &states}) group->spec.page_size_padded = page;
  whole.groups.push_back(states);
  whole.tensors[0].shared_by.push_back("layers.2.state");
  for (KVCacheTensor& tensor : whole.tensors) tensor.size_bytes = 7 * page;
  const auto own = rank_plan(whole, {.tp_size = 2, .tp_rank = 1}, 1);
  ASSERT_TRUE(own) << own.error().message;
  const std::int64_t half = (page - 64) / 2 + 64;
  EXPECT_EQ(own->plan.groups[0].spec.page_size_padded, half);
  EXPECT_EQ(own->plan.groups[1].spec.page_size_padded, half);
  EXPECT_EQ(own->plan.groups[1].spec.states[0].dims, (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(own->plan.groups[1].spec.states[1].dims, (std::vector<std::int64_t>{2, 4, 8}));
  EXPECT_EQ(own->layers.back().first_head, 1);
  for (const KVCacheTensor& tensor : own->plan.tensors) EXPECT_EQ(tensor.size_bytes, 7 * half);
}

}  // namespace
}  // namespace lockstep
