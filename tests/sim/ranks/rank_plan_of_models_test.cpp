// For models of the catalogue, what a rank cuts out of the whole model's plan is what the planner
// gives a worker of that rank, and what the backend works out for itself allocates the same bytes.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "cuda_backend/views/rank_share.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "reference/plan/rank_plan.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

class RankPlanOfModels : public testing::TestWithParam<std::string> {};

TEST_P(RankPlanOfModels, IsThePlannersForEveryDegreeThatItTakes) {
  const auto model = find_model(GetParam());
  ASSERT_TRUE(model) << model.error().message;
  std::int64_t compared = 0;
  for (const std::int32_t tp : {1, 2, 4, 8})
    for (const std::int32_t pp : {1, 2, 3}) {
      PlanOptions options;
      options.tp = tp;
      options.max_model_len = 1024;
      options.num_gpu_blocks_override = 4096;
      const auto layers = layer_specs(*model, options);
      if (!layers) continue;
      const auto one_stage = plan_memory(*layers, options);
      options.pp = pp;
      const auto stages = plan_memory(*layers, options);
      if (!one_stage || !stages) continue;
      options.tp = 1;
      const auto whole_layers = layer_specs(*model, options);
      ASSERT_TRUE(whole_layers);
      const KVCacheConfig whole = whole_plan(one_stage->workers.front(), *whole_layers, tp);
      for (std::int32_t stage = 0; stage < pp; ++stage) {
        BackendConfig device;
        device.plan = whole;
        device.queries_per_kv = 64;
        device.parallel = {.tp_size = tp, .tp_rank = tp - 1, .pp_size = pp, .pp_rank = stage};
        const auto own = rank_plan(whole, device.parallel, 64);
        ASSERT_TRUE(own) << own.error().message;
        EXPECT_EQ(own->plan, stages->workers[static_cast<std::size_t>(stage)])
            << fmt::format("tp {} pp {} stage {}", tp, pp, stage);
        const auto share = cuda::share_of_rank(device);
        ASSERT_TRUE(share) << share.error().message;
        EXPECT_EQ(share->plan.tensors, own->plan.tensors);
        ++compared;
      }
    }
  EXPECT_GT(compared, 6);
}

// Models whose layers all keep a cache, of each way in which heads and states are cut.
INSTANTIATE_TEST_SUITE_P(Catalogue, RankPlanOfModels,
                         testing::Values("llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b",
                                         "deepseek-v3", "nemotron-h-8b", "kimi-linear-48b-a3b"),
                         [](const auto& name) {
                           std::string title = name.param;
                           for (char& c : title)
                             if (c == '-' || c == '.') c = '_';
                           return title;
                         });

}  // namespace
}  // namespace lockstep
