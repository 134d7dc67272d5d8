// A request's answers do not depend on the ranks that work them out.
#include "tests/properties/rank_outputs.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"

namespace lockstep {
namespace {

TEST(RankOutputs, OneDeviceAndItsRanksAnswerEveryQueryAlike) {
  std::int64_t related = 0, pipeline = 0;
  for (std::uint64_t seed = 1; related < 12 && seed < 200; ++seed) {
    FeatureSet always{Feature::tensor_parallel};
    if (seed % 2 == 0) always.add(Feature::pipeline_parallel);
    const SavedCase saved = generate_case(
        seed, {.engine = "vllm-0.33.0",
               .always = always,
               .never = {Feature::async_scheduling, Feature::context_parallel,
                         Feature::data_parallel, Feature::connector_peers, Feature::host_tier},
               .backend = "simt",
               .check = "fast",
               .requests_max = 4});
    if (saved.tensor_parallel_size == 1 || !saved.connector.parts.empty()) continue;
    const auto outputs = outputs_of(saved, make_simt_backend);
    ASSERT_TRUE(outputs) << "seed " << seed << ": " << outputs.error().message;
    if (outputs->empty()) continue;
    ++related;
    pipeline += saved.pipeline_parallel_size > 1 ? 1 : 0;
    const auto differs = check_rank_outputs(saved, make_simt_backend);
    ASSERT_TRUE(differs) << "seed " << seed << ": " << differs.error().message;
    EXPECT_FALSE(*differs) << "seed " << seed << ": " << **differs;
  }
  EXPECT_EQ(related, 12);
  EXPECT_GT(pipeline, 0);
}

// A backend that silently answers for query heads other than its own.
TEST(RankOutputs, TheRelationBreaksWhereARankAnswersForTheHeadsOfAnother) {
  const BackendFactory mixed_up = [](const BackendConfig& config) {
    BackendConfig other = config;
    if (config.parallel.tp_size > 1) other.parallel.tp_rank = 0;
    return make_simt_backend(other);
  };
  for (std::uint64_t seed = 1; seed < 200; ++seed) {
    const SavedCase saved = generate_case(
        seed, {.engine = "vllm-0.33.0",
               .always = {Feature::tensor_parallel, Feature::mla},
               .never = {Feature::async_scheduling, Feature::context_parallel,
                         Feature::data_parallel, Feature::several_groups, Feature::full_attention,
                         Feature::sliding_window, Feature::chunked_local, Feature::states,
                         Feature::connector_peers, Feature::host_tier},
               .backend = "simt",
               .check = "fast",
               .requests_max = 4});
    if (saved.tensor_parallel_size == 1 || !saved.connector.parts.empty()) continue;
    // Latent rows are the same on every rank, so that the answers alone are wrong.
    const auto differs = check_rank_outputs(saved, mixed_up);
    ASSERT_FALSE(differs) << "seed " << seed;
    EXPECT_NE(differs.error().message.find("attention_output"), std::string::npos)
        << differs.error().message;
    return;
  }
  FAIL() << "no case with tensor parallel ranks";
}

}  // namespace
}  // namespace lockstep
