// Every planted defect of a plan's figures shows: the engine reports less than the pool holds, a
// buffer is too short, or requests starve.
#include <gtest/gtest.h>

#include "properties/judge/transfer_judge.h"
#include "reference/plan/capacity.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

// Qwen3.6-35B-A3B, as in pull request 40384.
struct Planned {
  KVCacheConfig plan;
  PlanOptions options;
};

Planned planned_model(const char* name, std::int64_t max_model_len) {
  Planned planned;
  planned.options.max_model_len = max_model_len;
  const auto model = find_model(name);
  const auto layers = layer_specs(*model, planned.options);
  planned.plan = plan_memory(*layers, planned.options)->workers.front();
  planned.options.max_num_seqs = 8;
  return planned;
}

// Tokens of requests of max_model_len that are admitted one after the other until a block is
// missing.
std::int64_t tokens_held(const Planned& planned) {
  const Capacity capacity = capacity_of(planned.plan, planned.options);
  return planned.plan.num_blocks / capacity.blocks_per_request * planned.options.max_model_len;
}

TEST(CapacityMutants, AllGroupsReportsAThirdOfWhatThePoolHolds) {
  const Planned planned = planned_model("qwen3.6-35b-a3b", 131072);
  const auto engine =
      planted_figures(planned.plan, planned.options, CapacityDefect::capacity_all_groups);
  EXPECT_LT(3 * engine->capacity_tokens, tokens_held(planned));
}

TEST(CapacityMutants, SlidingWindowsThatDivideReportLessThanThePoolHolds) {
  const Planned planned = planned_model("gpt-oss-20b", 131072);
  const auto engine =
      planted_figures(planned.plan, planned.options, CapacityDefect::capacity_sliding);
  EXPECT_LT(engine->capacity_tokens, tokens_held(planned));
}

// A buffer with a row for every slot, as routed experts keep; the last block's slots are written.
TEST(CapacityMutants, ABufferOfCapacityRowsIsTooShortForTheLastSlots) {
  const Planned planned = planned_model("qwen3.6-35b-a3b", 32768);
  const std::int64_t last_slot =
      planned.plan.num_blocks * planned.plan.groups.back().spec.block_size - 1;
  const auto rows = [&](CapacityDefect defect) {
    return planted_figures(planned.plan, planned.options, defect)->slot_buffer_rows;
  };
  EXPECT_GT(rows(CapacityDefect::none), last_slot);
  EXPECT_LE(rows(CapacityDefect::routed_buffer), last_slot);
}

TEST(CapacityMutants, TooFewStateBlocksAreRefusedByBothAndCappedByTheMutant) {
  Planned planned = planned_model("qwen3.5-397b-a17b", 32768);
  planned.options.max_num_seqs = 1024;
  const auto layers = layer_specs(*find_model("qwen3.5-397b-a17b"), planned.options);
  const auto reference = plan_memory(*layers, planned.options);
  ASSERT_FALSE(reference);
  EXPECT_NE(reference.error().message.find("use at most 667"), std::string::npos)
      << reference.error().message;
  EXPECT_FALSE(planted_figures(planned.plan, planned.options, CapacityDefect::none));
  const auto mutant =
      planted_figures(planned.plan, planned.options, CapacityDefect::state_blocks_capped);
  ASSERT_TRUE(mutant);
  EXPECT_LT(mutant->max_num_seqs, 1024);
}

}  // namespace
}  // namespace lockstep
