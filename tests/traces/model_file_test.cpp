// Model files: the plan follows their content; an error in them is one message.
#include "traces/models/model_file.h"

#include <gtest/gtest.h>

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

// Classes such as Zamba 2's create their layers in another order than that of their indices.
TEST(ModelFile, LayersInAnotherOrderAreWrittenByIndex) {
  auto model = find_model("qwen3.5-0.8b");
  ASSERT_TRUE(model) << model.error().message;
  const std::string expected = model_to_json(*model);
  std::ranges::rotate(model->layers, model->layers.begin() + 3);
  EXPECT_EQ(model_to_json(*model), expected);
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

}  // namespace
}  // namespace lockstep
