// What all ranks hold together: found missing where every rank by itself is right.
#include "sim/ranks/rank_union.h"

#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "reference/plan/rank_plan.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

BackendConfig two_ranks(std::int32_t tp_size, std::int32_t pp_size) {
  BackendConfig device = make_world({make_group("a", 2, full_spec())}, 6).backend;
  device.parallel.tp_size = tp_size;
  device.parallel.pp_size = pp_size;
  return device;
}

// Twenty tokens of one request, in blocks 3 and 5.
StepProgram one_step() {
  StepProgram program;
  program.table_updates = {{.row = 0, .group = 0, .first = 0, .begin = 0, .count = 2}};
  program.table_block_ids = {BlockId{3}, BlockId{5}};
  program.rows = {{.row = 0, .first_position = 0, .num_tokens = 20, .first_token = 0}};
  for (std::uint64_t t = 0; t < 20; ++t) program.contents.push_back(0x1234567 * (t + 1));
  program.num_padded_tokens = 24;
  return program;
}

// The union of ranks configured as `ranks`, in model and backend, compared with `taken_for` where
// it is given.
std::optional<Divergence> union_of(const BackendConfig& device,
                                   const std::vector<std::int32_t>& ranks,
                                   const BackendConfig* taken_for = nullptr) {
  const StepProgram program = one_step();
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::unique_ptr<MemoryModel>> models;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<BackendConfig> configs;
  configs.reserve(ranks.size());
  std::vector<RankMemory> memory;
  for (const std::int32_t rank : ranks) {
    const BackendConfig& as = taken_for == nullptr ? device : *taken_for;
    const BackendConfig& own = configs.emplace_back(config_of_rank(as, rank));
    const auto plan = rank_plan(as.plan, own.parallel, device.queries_per_kv);
    auto model = MemoryModel::create(plan->plan, device.attention_backend, device.layout,
                                     device.layout_rule, 0, Numbers::words, plan->layers);
    models.push_back(std::make_unique<MemoryModel>(std::move(*model)));
    workers.push_back(std::make_unique<Worker>(device.num_rows, own.context, *models.back()));
    backends.push_back(std::move(*make_simt_backend(own)));
    StepReadback readback;
    EXPECT_TRUE(backends.back()->execute(program, readback));
    memory.push_back({own, *models.back(), *workers.back(), *backends.back(), program});
  }
  RankUnion together;
  RunSummary summary;
  together.begin(device, memory, summary);
  Checked checked = together.step_compared();
  if (checked) checked = together.finish(true);
  EXPECT_FALSE(checked.has_error());
  if (checked.has_diverged()) return checked.divergence();
  // Tokens of block 3, then all of them; layers, parts, heads.
  EXPECT_EQ(summary.union_rows_checked, (16 + 20) * 2 * 2 * 2);
  return std::nullopt;
}

TEST(RankUnion, RanksThatShareTheModelHoldAllOfIt) {
  EXPECT_FALSE(union_of(two_ranks(2, 1), {0, 1}));
  EXPECT_FALSE(union_of(two_ranks(1, 2), {0, 1}));
  EXPECT_FALSE(union_of(two_ranks(4, 1), {0, 1, 2, 3}));
}

TEST(RankUnion, HeadsThatBothRanksTakeForTheirOwnLeaveOthersToNobody) {
  const auto found = union_of(two_ranks(2, 1), {1, 1});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->phase, Phase::ranks_together);
  EXPECT_EQ(found->head, 0);
  EXPECT_EQ(found->block, 3);
  EXPECT_NE(found->message.find("0 of 2 ranks hold it"), std::string::npos) << found->message;
}

TEST(RankUnion, ReplicasThatAreUnevenAreFound) {
  // Head 0 on three of the ranks, head 1 on one.
  const auto found = union_of(two_ranks(4, 1), {0, 1, 1, 2});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->head, 1);
}

// Each rank shards what the whole model replicates.
TEST(RankUnion, RowsThatOneRankAloneHasOfACacheThatAllKeepAreFound) {
  BackendConfig device = two_ranks(1, 1);
  device.context.num_ranks = 2;
  const BackendConfig dealt_out = device;
  device.plan.groups.front().spec.dcp_sharded = false;
  EXPECT_FALSE(union_of(device, {0, 1}));
  const auto found = union_of(device, {0, 1}, &dealt_out);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->phase, Phase::ranks_together);
  EXPECT_EQ(found->expected, "on 2 of the ranks, as other rows");
  EXPECT_EQ(found->found, "on 1");
}

TEST(RankUnion, ALayerThatNoStageHoldsIsFound) {
  const auto found = union_of(two_ranks(1, 2), {0, 0});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->layer_name, "a.1");
  EXPECT_NE(to_text(*found).find("group 0, layer 1 (a.1), "), std::string::npos) << to_text(*found);
  EXPECT_NE(found->message.find("layer 1 (a.1), token"), std::string::npos) << found->message;
}

}  // namespace
}  // namespace lockstep
