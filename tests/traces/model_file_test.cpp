// Model files: the plan follows their content; an error in them is one message; a config.json of
// each family of architectures gives the layers that its engine keeps.
#include "traces/models/model_file.h"

#include <gtest/gtest.h>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

constexpr std::string_view kTenLines = R"({
  "model_file": 1,
  "name": "ten-lines",
  "max_model_len": 4096,
  "layer_kinds": {
    "linear": {"kind": "mamba", "states": "mamba1", "intermediate_size": 64,
               "state_size": 16, "conv_kernel": 4},
    "attn": {"kind": "full", "num_kv_heads": 2, "head_size": 64}
  },
  "layers": [{"repeat": 2, "of": ["linear", ["attn", "linear"], []]}]
})";

std::string changed(std::string_view from, std::string_view to) {
  std::string text(kTenLines);
  text.replace(text.find(from), from.size(), to);
  return text;
}

TEST(ModelFile, TenLinesMakeAModel) {
  const auto model = model_from_text(kTenLines, "m.json");
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->name, "ten-lines");
  ASSERT_EQ(model->layers.size(), 6u);
  PlanOptions options;
  options.tp = 2;
  const auto layers = layer_specs(*model, options);
  ASSERT_TRUE(layers) << layers.error().message;
  EXPECT_EQ((*layers)[0].name, "layers.0.linear");
  EXPECT_EQ((*layers)[1].name, "layers.1.attn");
  EXPECT_EQ((*layers)[2].name, "layers.1.linear");
  EXPECT_EQ((*layers)[3].name, "layers.3.linear");  // layer 2 keeps nothing
  EXPECT_EQ((*layers)[1].spec.num_kv_heads, 1);
  EXPECT_EQ((*layers)[0].spec.states[0].dims, (std::vector<std::int64_t>{3, 32}));
}

TEST(ModelFile, WhatIsWrittenIsReadBack) {
  for (const std::string& name : model_names()) {
    const auto model = find_model(name);
    ASSERT_TRUE(model) << model.error().message;
    const auto again = model_from_text(model_to_json(*model), "again.json");
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_TRUE(*again == *model) << name;
  }
}

TEST(ModelFile, TheCatalogueHasTwentyFiveModelsAndNamesThemWhenAskedForAnother) {
  EXPECT_EQ(model_names().size(), 25u);
  const auto missing = find_model("qwen");
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message.find("qwen3.5-0.8b"), std::string::npos);
}

struct Wrong {
  const char* name;
  std::string_view from, to, expected;
};
class WrongModelFiles : public testing::TestWithParam<Wrong> {};

TEST_P(WrongModelFiles, AreRefusedWithTheField) {
  const auto model = model_from_text(changed(GetParam().from, GetParam().to), "m.json");
  ASSERT_FALSE(model);
  EXPECT_NE(model.error().message.find(GetParam().expected), std::string::npos)
      << model.error().message;
  EXPECT_TRUE(model.error().message.starts_with("m.json")) << model.error().message;
}

INSTANTIATE_TEST_SUITE_P(
    Each, WrongModelFiles,
    testing::Values(
        Wrong{"UnknownKind", "\"full\"", "\"fulll\"", "kind of cache"},
        Wrong{"MissingHeads", "\"num_kv_heads\": 2, ", "", "num_kv_heads"},
        Wrong{"UnknownLayer", "[\"attn\", \"linear\"]", "[\"attn\", \"liner\"]", "layer_kinds"},
        Wrong{"KeyOfAnotherFamily", "\"state_size\": 16", "\"state_size\": 16, \"n_groups\": 8",
              "n_groups"},
        Wrong{"ZeroHeads", "\"num_kv_heads\": 2", "\"num_kv_heads\": 0", "num_kv_heads"},
        Wrong{"HeadsBeyondAnyModel", "\"num_kv_heads\": 2", "\"num_kv_heads\": 99999", "16384"},
        Wrong{"NothingRepeated", "\"of\": [\"linear\", [\"attn\", \"linear\"], []]", "\"of\": []",
              "at least one layer"},
        Wrong{"TooManyLayers", "\"repeat\": 2", "\"repeat\": 99999", "at most 100000"},
        Wrong{"NoLayer", "[{\"repeat\": 2, \"of\": [\"linear\", [\"attn\", \"linear\"], []]}]",
              "[]", "no layer"}),
    [](const auto& one) { return one.param.name; });

// The figures that tell a family apart, as its config.json has them.
TEST(HfConfig, GatedDeltaNetWithAnAttentionLayerInFour) {
  const auto model = model_from_hf_config(R"({"model_type": "qwen3_next", "num_hidden_layers": 8,
      "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
      "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
      "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
      "max_position_embeddings": 262144,
      "hidden_size": 2048, "unknown_to_us": [1, {"a": null}]})",
                                          "config.json");
  ASSERT_TRUE(model) << model.error().message;
  const auto layers = layer_specs(*model, PlanOptions{});
  ASSERT_EQ(layers->size(), 8u);
  EXPECT_EQ((*layers)[3].spec.head_size, 256);
  EXPECT_EQ(real_page_size_bytes((*layers)[0].spec), 3 * 8192 * 2 + 32 * 128 * 128 * 4);
}

TEST(HfConfig, WindowsAndFullAttentionByLayerTypesInsideTextConfig) {
  const auto model = model_from_hf_config(R"({"model_type": "gemma3", "text_config": {
      "model_type": "gemma3_text", "num_hidden_layers": 3, "num_attention_heads": 8,
      "num_key_value_heads": 4, "hidden_size": 1024, "sliding_window": 512,
      "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}})",
                                          "config.json");
  ASSERT_TRUE(model) << model.error().message;
  const auto layers = layer_specs(*model, PlanOptions{});
  EXPECT_EQ((*layers)[0].spec.kind, CacheKind::sliding_window);
  EXPECT_EQ((*layers)[0].spec.sliding_window, 512);
  EXPECT_EQ((*layers)[2].spec.kind, CacheKind::full_attention);
  EXPECT_EQ((*layers)[2].spec.head_size, 128);
}

TEST(HfConfig, LatentRowsAndTheIndexerBesideThem) {
  const auto model = model_from_hf_config(R"({"model_type": "deepseek_v32", "num_hidden_layers": 2,
      "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
      "index_head_dim": 128})",
                                          "config.json");
  ASSERT_TRUE(model) << model.error().message;
  const auto layers = layer_specs(*model, PlanOptions{});
  ASSERT_EQ(layers->size(), 4u);
  EXPECT_EQ((*layers)[0].spec.head_size, 576);
  EXPECT_EQ((*layers)[1].spec.head_size, 132);
  EXPECT_EQ((*layers)[1].spec.dtype, DType::uint8);
}

TEST(HfConfig, MambaAttentionAndNothingByAPattern) {
  const auto model = model_from_hf_config(R"({"model_type": "nemotron_h", "num_hidden_layers": 4,
      "hybrid_override_pattern": "M-*E", "num_attention_heads": 32, "num_key_value_heads": 8,
      "head_dim": 128, "hidden_size": 4096, "mamba_num_heads": 128, "mamba_head_dim": 64,
      "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128})",
                                          "config.json");
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->mamba_chunk_size, 128);
  const auto layers = layer_specs(*model, PlanOptions{});
  ASSERT_EQ(layers->size(), 2u);
  EXPECT_EQ((*layers)[0].spec.states[0].dims, (std::vector<std::int64_t>{3, 10240}));
  EXPECT_EQ((*layers)[1].name, "layers.2.attn");
}

TEST(HfConfig, KdaStatesBesideLatentRows) {
  const auto model = model_from_hf_config(R"({"model_type": "kimi_linear", "num_hidden_layers": 4,
      "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": {"kda_layers": [1, 2, 3],
      "full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}})",
                                          "config.json");
  ASSERT_TRUE(model) << model.error().message;
  const auto layers = layer_specs(*model, PlanOptions{});
  EXPECT_EQ((*layers)[0].spec.states.size(), 4u);
  EXPECT_EQ((*layers)[3].spec.kind, CacheKind::mla);
}

TEST(HfConfig, OneWindowForAllLayersWhereItIsUsed) {
  const std::string head =
      R"({"model_type": "mistral", "num_hidden_layers": 2,
      "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512, )";
  const auto windowed = model_from_hf_config(head + R"("sliding_window": 4096})", "config.json");
  ASSERT_TRUE(windowed) << windowed.error().message;
  EXPECT_EQ(windowed->kinds.front().spec.kind, CacheKind::sliding_window);
  const auto unused = model_from_hf_config(
      head + R"("sliding_window": 4096, "use_sliding_window": false})", "config.json");
  ASSERT_TRUE(unused) << unused.error().message;
  EXPECT_EQ(unused->kinds.front().spec.kind, CacheKind::full_attention);
}

TEST(HfConfig, UnknownStatesAndMissingFiguresAreRefused) {
  for (const char* text :
       {R"({"model_type": "falcon_h1", "mamba_d_ssm": 1, "num_hidden_layers": 1,
             "num_attention_heads": 1, "hidden_size": 1})",
        R"({"model_type": "llama", "num_hidden_layers": 2})",
        R"({"model_type": "llama", "num_hidden_layers": 0, "num_attention_heads": 4,
             "hidden_size": 64})",
        R"([1, 2])", R"({)"}) {
    const auto model = model_from_hf_config(text, "config.json");
    ASSERT_FALSE(model) << text;
    EXPECT_TRUE(model.error().message.starts_with("config.json")) << model.error().message;
  }
}

}  // namespace
}  // namespace lockstep
