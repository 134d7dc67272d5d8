// Defaults of a server of each release for options that are not set.
#include "reference/plan/model_spec.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "reference/plan/planner.h"

namespace lockstep {
namespace {

EngineConfig served_engine(std::string release, SpecMethod method = SpecMethod::none) {
  EngineConfig engine;
  engine.engine = std::move(release);
  engine.spec_method = method;
  engine.num_spec_tokens = method == SpecMethod::none ? 0 : 2;
  return engine;
}

LayerKind attention() {
  LayerKind kind;
  kind.name = "attn";
  kind.spec.kind = CacheKind::full_attention;
  kind.spec.block_size = 0;
  kind.spec.num_kv_heads = 2;
  kind.spec.head_size = 256;
  return kind;
}

LayerKind states(StateFamily family) {
  LayerKind kind;
  kind.name = "linear";
  kind.spec.kind = CacheKind::mamba;
  kind.states = {.family = family,
                 .num_heads = 32,
                 .head_dim = 128,
                 .num_k_heads = 16,
                 .head_k_dim = 128,
                 .intermediate_size = 4096,
                 .n_groups = 8,
                 .state_size = 128,
                 .conv_kernel = 4};
  kind.ssm_dtype = DType::fp32;
  return kind;
}

ModelSpec hybrid(std::vector<LayerKind> of_states) {
  ModelSpec model;
  model.kinds = {attention()};
  model.layers = {{0, 0}};
  for (LayerKind& kind : of_states) {
    model.kinds.push_back(std::move(kind));
    model.layers.push_back({std::ssize(model.layers), model.kinds.size() - 1});
  }
  return model;
}

// Of each state layer; 0: none.
std::vector<std::int64_t> checkpoints(const ModelSpec& model, const char* release) {
  PlanOptions options;
  options.mamba_cache_mode = MambaCacheMode::align;
  LayerSpecs layers = layer_specs(model, options).value();
  EXPECT_TRUE(take_served_checkpoints(release, model, options, layers));
  std::vector<std::int64_t> alignments;
  for (const NamedSpec& layer : layers) {
    if (layer.spec.kind != CacheKind::mamba) continue;
    alignments.push_back(layer.spec.prefill_checkpoint_alignment);
    EXPECT_EQ(layer.spec.num_prefill_checkpoint_blocks, alignments.back() > 0 ? 1 : 0);
  }
  return alignments;
}

TEST(ServingDefaults, ScheduleAsynchronouslyUnlessTheDrafterCannot) {
  using enum SpecMethod;
  const auto is_async = [](const char* release, SpecMethod method) {
    return serving_defaults(served_engine(release, method)).async_scheduling;
  };
  for (const char* release : {"vllm-0.20.2", "vllm-0.22.1", "vllm-0.28.0", "vllm-0.33.0"}) {
    EXPECT_TRUE(is_async(release, none)) << release;
    EXPECT_TRUE(is_async(release, eagle)) << release;
  }
  EXPECT_FALSE(is_async("vllm-0.22.1", draft_model));
  EXPECT_TRUE(is_async("vllm-0.28.0", draft_model));
  EXPECT_FALSE(is_async("vllm-0.32.0", ngram));
  EXPECT_TRUE(is_async("vllm-0.33.0", ngram));
}

TEST(ServingDefaults, RetainSparselyFrom0290On) {
  const auto interval = [](const char* release) {
    return serving_defaults(served_engine(release)).prefix_cache_retention_interval;
  };
  EXPECT_EQ(interval("vllm-0.28.0"), kDenseRetention);
  EXPECT_EQ(interval("vllm-0.29.0"), 0);
  EXPECT_EQ(interval("vllm-0.33.0-repaired"), 0);
}

TEST(ServingDefaults, KeepStatesOfMambaInModeAllUpTo0271) {
  const auto mode = [](const char* release, StateFamily family) {
    return served_cache_mode(served_engine(release), hybrid({states(family)}));
  };
  EXPECT_EQ(mode("vllm-0.27.1", StateFamily::mamba2), MambaCacheMode::all);
  EXPECT_EQ(mode("vllm-0.28.0", StateFamily::mamba2), MambaCacheMode::align);
  EXPECT_EQ(mode("vllm-0.22.1", StateFamily::gated_delta_net), MambaCacheMode::align);
  EXPECT_EQ(served_cache_mode(served_engine("vllm-0.33.0"), hybrid({})), MambaCacheMode::none);
  // vllm/config/model.py: no prefix caching without attention.
  ModelSpec states_only = hybrid({states(StateFamily::mamba2)});
  states_only.kinds.erase(states_only.kinds.begin());
  EXPECT_EQ(served_cache_mode(served_engine("vllm-0.33.0"), states_only), MambaCacheMode::none);
}

TEST(ServingDefaults, ExportCheckpointsByTheKindOfLayer) {
  using Alignments = std::vector<std::int64_t>;
  const ModelSpec mamba2 = hybrid({states(StateFamily::mamba2)});
  const ModelSpec delta = hybrid({states(StateFamily::gated_delta_net)});
  EXPECT_EQ(checkpoints(mamba2, "vllm-0.31.0"), Alignments{0});
  EXPECT_EQ(checkpoints(mamba2, "vllm-0.33.0"), Alignments{1});
  EXPECT_EQ(checkpoints(delta, "vllm-0.32.0"), Alignments{0});
  EXPECT_EQ(checkpoints(delta, "vllm-0.33.0"), Alignments{1088});  // its block, on a grid of 64
  EXPECT_EQ(checkpoints(hybrid({states(StateFamily::kda)}), "vllm-0.33.0"), Alignments{0});

  LayerKind flash_kda = states(StateFamily::kda);
  flash_kda.prefill_checkpoint_alignment = 16;
  EXPECT_EQ(checkpoints(hybrid({flash_kda}), "vllm-0.33.0"), Alignments{16});

  // One layer that cannot keeps gated delta nets from it too, and no other kind.
  const LayerKind conv = states(StateFamily::short_conv);
  EXPECT_EQ(checkpoints(hybrid({states(StateFamily::gated_delta_net), conv}), "vllm-0.33.0"),
            (Alignments{0, 0}));
  EXPECT_EQ(checkpoints(hybrid({states(StateFamily::mamba2), conv}), "vllm-0.33.0"),
            (Alignments{1, 0}));
}

}  // namespace
}  // namespace lockstep
