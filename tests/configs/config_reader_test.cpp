// The rules of a config.json reader, one behaviour each; config_plans_test.cpp checks whole plans.
#include "traces/configs/config_reader.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "reference/memory/model_placement.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

LayerSpecs layers_of(const std::string& text) {
  const auto model = model_from_hf_config(text, "config.json");
  EXPECT_TRUE(model) << model.error().message;
  if (!model) return {};
  return *layer_specs(*model, PlanOptions{});
}

std::string refusal_of(const std::string& text) {
  const auto model = model_from_hf_config(text, "config.json");
  return model ? "read" : model.error().message;
}

constexpr std::string_view kLlama =
    R"("architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
       "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 1024)";

std::string llama_with(std::string_view more) { return fmt::format("{{{}, {}}}", kLlama, more); }

// Case 01: a real server of this model held 626,949 tokens in 64.68 GiB.
TEST(ConfigReader, Gemma4sFullLayersHaveTheirOwnHeads) {
  std::string types;
  for (int i = 0; i < 60; ++i)
    types += fmt::format("{}\"{}\"", i == 0 ? "" : ", ",
                         i % 6 == 5 ? "full_attention" : "sliding_attention");
  const auto model = model_from_hf_config(
      fmt::format(R"({{"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "dtype": "bfloat16", "text_config": {{"model_type": "gemma4_text", "hidden_size": 5376,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "attention_k_eq_v": true, "sliding_window": 1024, "layer_types": [{}],
        "max_position_embeddings": 262144, "num_kv_shared_layers": 0}}}})",
                  types),
      "config.json");
  ASSERT_TRUE(model) << model.error().message;
  PlanOptions options;
  options.memory_bytes = static_cast<std::int64_t>(64.68 * (1 << 30));
  options.max_model_len = model->max_model_len;
  const auto placed = place_served_model(*model, options, "vllm-0.33.0", "");
  ASSERT_TRUE(placed) << placed.error().message;
  EXPECT_EQ(capacity_of(placed->stages.workers.front(), placed->options)->tokens, 626949);
}

// configuration_gemma4.py sets the last entry of the file's own list.
TEST(ConfigReader, Gemma4sLastLayerIsFullInAListToo) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["Gemma4ForCausalLM"],
      "model_type": "gemma4_text", "num_hidden_layers": 3, "layer_types": ["sliding_attention",
      "full_attention", "sliding_attention"]})");
  ASSERT_EQ(layers.size(), 3u);
  EXPECT_EQ(layers[0].spec.kind, CacheKind::sliding_window);
  EXPECT_EQ(layers[2].spec, layers[1].spec);
}

// Qwen2's layer, which it has, divides hidden_size (qwen2.py).
TEST(ConfigReader, MiMoDoesNotReadHeadDim) {
  EXPECT_EQ(layers_of(R"({"architectures": ["MiMoForCausalLM"], "model_type": "mimo",
      "num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 512, "head_dim": 128})")
                .front()
                .spec.head_size,
            64);
}

// Case 03.
TEST(ConfigReader, AListOfOnesMeansAttentionEverywhere) {
  const std::string head = R"({"architectures": ["MiniMaxM2ForCausalLM"], "model_type":
      "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 48,
      "num_key_value_heads": 8, "head_dim": 128, "attn_type_list": )";
  const LayerSpecs layers = layers_of(head + "[1, 1, 1]}");
  ASSERT_EQ(layers.size(), 3u);
  EXPECT_EQ(layers[0].spec.num_kv_heads, 8);
  EXPECT_NE(refusal_of(head + "[1, 0, 1]}").find("attn_type_list"), std::string::npos);
}

TEST(ConfigReader, AKeyThatCouldShapeTheCacheIsRefusedByName) {
  const std::string reason = refusal_of(llama_with(R"("num_shadow_kv_heads": 3)"));
  EXPECT_NE(reason.find("`num_shadow_kv_heads`"), std::string::npos) << reason;
  EXPECT_NE(reason.find("lockstep model CONFIG --from vllm:DIR"), std::string::npos) << reason;
  EXPECT_EQ(layers_of(llama_with(R"("rms_norm_eps": 1e-5, "num_shadow_kv_heads": null)")).size(),
            2u);
}

TEST(ConfigReader, AnUnlistedArchitectureIsReadAsADecoderAndTheModelSaysSo) {
  const auto model = model_from_hf_config(
      R"({"architectures": ["NewForCausalLM"], "model_type": "new", "num_hidden_layers": 2,
          "num_attention_heads": 4, "hidden_size": 64})",
      "config.json");
  ASSERT_TRUE(model) << model.error().message;
  ASSERT_EQ(model->assumptions.size(), 3u);  // and the dtype and the length
  EXPECT_NE(model->assumptions.back().find("NewForCausalLM"), std::string::npos);
}

TEST(ConfigReader, KeysThatTheFileLeavesOutAreThoseOfItsClass) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["Gemma2ForCausalLM"],
      "model_type": "gemma2", "dtype": "bfloat16"})");
  ASSERT_EQ(layers.size(), 26u);
  EXPECT_EQ(layers[0].spec.kind, CacheKind::sliding_window);
  EXPECT_EQ(layers[0].spec.sliding_window, 4096);
  EXPECT_EQ(layers[1].spec.kind, CacheKind::full_attention);
}

TEST(ConfigReader, NullMeansThatTheClassDerivesTheValue) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["Qwen3ForCausalLM"],
      "model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 8,
      "num_key_value_heads": null, "head_dim": null, "hidden_size": 512})");
  EXPECT_EQ(layers[0].spec.num_kv_heads, 8);
  EXPECT_EQ(layers[0].spec.head_size, 64);
}

TEST(ConfigReader, LayersThatReadAnotherLayersCacheHaveNone) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["Gemma3nForCausalLM"],
      "model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 4})");
  EXPECT_EQ(layers.size(), 6u);
}

TEST(ConfigReader, LatentKeysAreLatentRowsOnlyForModelsThatKeepThem) {
  const std::string keys = R"("num_hidden_layers": 1, "num_attention_heads": 40,
      "hidden_size": 2560, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
      "v_head_dim": 64})";
  const LayerSpecs whole =
      layers_of(R"({"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", )" + keys);
  EXPECT_EQ(whole[0].spec.kind, CacheKind::full_attention);
  EXPECT_EQ(whole[0].spec.head_size, 96);
  const LayerSpecs latent = layers_of(
      R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", )" + keys);
  EXPECT_EQ(latent[0].spec.kind, CacheKind::mla);
  EXPECT_EQ(latent[0].spec.head_size, 288);
}

TEST(ConfigReader, SharedIndexersHaveNoRows) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["DeepseekV32ForCausalLM"],
      "model_type": "deepseek_v32", "num_hidden_layers": 4, "kv_lora_rank": 512,
      "qk_rope_head_dim": 64, "index_topk": 2048, "index_head_dim": 128, "index_topk_freq": 2})");
  const auto indexers = std::ranges::count_if(
      layers, [](const NamedSpec& layer) { return layer.spec.head_size == 132; });
  EXPECT_EQ(layers.size() - static_cast<std::size_t>(indexers), 4u);
  EXPECT_EQ(indexers, 3);
}

TEST(ConfigReader, Float32IsServedInBfloat16AndFloat16StaysIt) {
  for (const auto& [name, served] :
       {std::pair{"float32", DType::bf16}, std::pair{"float16", DType::fp16},
        std::pair{"bfloat16", DType::bf16}}) {
    const auto model = model_from_hf_config(
        llama_with(fmt::format("\"torch_dtype\": \"{}\"", name)), "config.json");
    ASSERT_TRUE(model);
    EXPECT_EQ(model->dtype, served) << name;
  }
}

// vLLM falls back from a type of torch that it does not serve; another word fails in transformers.
TEST(ConfigReader, ADtypeThatIsNotServedIsNamed) {
  const auto with = [](std::string_view dtype) {
    return llama_with(fmt::format("\"torch_dtype\": \"{}\"", dtype));
  };
  for (const char* dtype : {"int8", "float64"}) {
    const auto model = model_from_hf_config(with(dtype), "config.json");
    ASSERT_TRUE(model) << model.error().message;
    EXPECT_EQ(model->assumptions.at(0),
              fmt::format("dtype {} is not served: the engine falls back to bf16", dtype));
  }
  for (const char* dtype : {"torch.bfloat16", "bf16"})
    EXPECT_NE(refusal_of(with(dtype)).find(fmt::format("dtype '{}' is no type of torch", dtype)),
              std::string::npos);
}

// As get_kv_cache_quant_algo_string() of vLLM 0.33.0 answers; its warnings and errors are refusals.
TEST(ConfigReader, AQuantizedCheckpointAsksForItsCacheFormat) {
  for (const auto& [config, format] : {
           std::pair{R"("quant_method": "compressed-tensors",
               "kv_cache_scheme": {"num_bits": 8, "type": "float"})",
                     "fp8"},
           std::pair{R"("quant_method": "compressed-tensors",
               "kv_cache_scheme": {"num_bits": 8, "type": "int"})",
                     "refused"},
           std::pair{
               R"("quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"})", ""},
           std::pair{R"("quant_method": "modelopt",
               "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": false})",
                     "fp8"},
           std::pair{R"("quant_method": "modelopt",
               "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": true})",
                     "refused"},
           std::pair{R"("quant_method": "modelopt_fp4",
               "kv_cache_scheme": {"num_bits": 4, "type": "float"})",
                     "nvfp4"},
           std::pair{
               R"("quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "nvfp4"})",
               "nvfp4"},
           std::pair{R"("producer": {"name": "modelopt"},
               "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})",
                     "fp8"},
           std::pair{R"("quant_method": "modelopt", "kv_cache_quant_algo": "FP8",
               "kv_cache_scheme": {"num_bits": 4, "type": "float"})",
                     "nvfp4"},
           std::pair{R"("quant_method": "modelopt", "kv_cache_quant_algo": "INT8")", "refused"},
           std::pair{R"("quant_method": "modelopt", "kv_cache_quant_algo": null)", ""},
       }) {
    const auto model = model_from_hf_config(
        llama_with(fmt::format(R"("quantization_config": {{{}}})", config)), "config.json");
    EXPECT_EQ(model ? model->kv_cache_dtype : "refused", format) << config;
    PlanOptions options;
    if (!model || model->kv_cache_dtype.empty()) continue;
    ASSERT_TRUE(take_checkpoint_format(*model, options));
    EXPECT_EQ(options.kv_dtype, model->kv_cache_dtype == "fp8" ? DType::fp8_e4m3 : DType::uint8);
  }
}

// vLLM 0.33.0, mla_attention.py: MLAAttention does not read the scheme of compressed-tensors.
TEST(ConfigReader, LatentRowsDoNotFollowTheSchemeOfCompressedTensors) {
  const auto model = model_from_hf_config(
      R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
          "quantization_config": {"quant_method": "compressed-tensors",
              "kv_cache_scheme": {"num_bits": 8, "type": "float"}}})",
      "config.json");
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->kv_cache_dtype, "");
  ASSERT_FALSE(model->assumptions.empty());
  EXPECT_NE(model->assumptions.back().find("kv_cache_scheme"), std::string::npos);
}

// As _get_and_verify_max_len() of vLLM 0.33.0 answers.
TEST(ConfigReader, RopeScalingExtendsTheLongestRequest) {
  for (const auto& [keys, tokens] : {
           std::pair{R"("torch_dtype": "bfloat16")", 2048},
           std::pair{R"("max_position_embeddings": 4096)", 4096},
           std::pair{R"("max_position_embeddings": 4096,
               "rope_scaling": {"type": "linear", "factor": 2.5})",
                     10240},
           std::pair{R"("max_position_embeddings": 4096,
               "rope_scaling": {"rope_type": "yarn", "factor": 4.0})",
                     4096},
           std::pair{R"("max_position_embeddings": 4096,
               "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 8},
                                   "sliding_attention": {"rope_type": "dynamic", "factor": 8}})",
                     32768},
           std::pair{R"("max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
               "rope_scaling": {"type": "longrope"})",
                     4096},
       }) {
    const auto model = model_from_hf_config(llama_with(keys), "config.json");
    ASSERT_TRUE(model) << model.error().message;
    EXPECT_EQ(model->max_model_len, tokens) << keys;
    EXPECT_EQ(model->max_model_len_limit,
              std::string_view(keys).find("longrope") == std::string_view::npos ? tokens : 131072);
  }
  const auto unknown = model_from_hf_config(
      R"({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})", "config.json");
  ASSERT_TRUE(unknown) << unknown.error().message;
  EXPECT_EQ(unknown->max_model_len, 2048);
  EXPECT_EQ(unknown->max_model_len_limit, 0);
  EXPECT_NE(unknown->assumptions.back().find("2048 tokens"), std::string::npos);
}

// vLLM 0.33.0, config/model.py, get_mamba_chunk_size().
TEST(ConfigReader, AModelsChunkSizeIsItsOwnKeyFirst) {
  for (const auto& [keys, tokens] :
       {std::pair{"", 2048}, std::pair{R"(, "chunk_size": 64)", 64},
        std::pair{R"(, "chunk_size": 64, "mamba_chunk_size": 32)", 32}}) {
    const auto model = model_from_hf_config(
        fmt::format(R"({{"architectures": ["MambaForCausalLM"], "model_type": "mamba"{}}})", keys),
        "config.json");
    ASSERT_TRUE(model) << model.error().message;
    EXPECT_EQ(model->mamba_chunk_size, tokens) << keys;
  }
}

TEST(ConfigReader, StatesOfGatedDeltaNetsHaveTheModelsDtype) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["Qwen3NextForCausalLM"],
      "model_type": "qwen3_next", "num_hidden_layers": 8, "dtype": "bfloat16",
      "unknown_to_us": [1, {"a": null}]})");
  ASSERT_EQ(layers.size(), 8u);
  EXPECT_EQ(layers[3].spec.head_size, 256);
  EXPECT_EQ(real_page_size_bytes(layers[0].spec), 3 * 8192 * 2 + 32 * 128 * 128 * 2);
}

TEST(ConfigReader, AnEncoderKeepsNothing) {
  const auto model = model_from_hf_config(
      R"({"architectures": ["BertModel"], "model_type": "bert"})", "config.json");
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_TRUE(model->layers.empty());
}

TEST(ConfigReader, IsCausalCountsWhereTheModelClassReadsIt) {
  constexpr std::string_view kKeys = R"(, "num_hidden_layers": 4, "is_causal": false})";
  for (const auto& [name, type, layers] :
       {std::tuple{"LlamaForCausalLM", "llama", 0}, std::tuple{"Phi3ForCausalLM", "phi3", 0},
        std::tuple{"DeepseekV2ForCausalLM", "deepseek_v2", 0},
        std::tuple{"MixtralForCausalLM", "mixtral", 4}, std::tuple{"OlmoForCausalLM", "olmo", 4}}) {
    const auto model = model_from_hf_config(
        fmt::format(R"({{"architectures": ["{}"], "model_type": "{}"{})", name, type, kKeys),
        "config.json");
    ASSERT_TRUE(model) << model.error().message;
    EXPECT_EQ(std::ssize(model->layers), layers) << name;
    const std::string said = fmt::format("is_causal false: {} does not read it", name);
    EXPECT_EQ(std::ranges::count(model->assumptions, said), layers == 0 ? 0 : 1) << name;
  }
  const std::string reason = refusal_of(fmt::format(
      R"({{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"{})", kKeys));
  EXPECT_NE(reason.find("is_causal"), std::string::npos) << reason;
}

// transformers, Qwen2MoeConfig: without a window in layers 0, 2, ... no layer has one.
TEST(ConfigReader, Qwen2MoesWindowsAreInEvenLayers) {
  for (const auto& [before, tokens] : {std::pair{0, 0}, std::pair{1, 512}}) {
    const LayerSpecs layers = layers_of(fmt::format(
        R"({{"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "sliding_window":
            512, "use_sliding_window": true, "num_hidden_layers": 1, "max_window_layers": {}}})",
        before));
    EXPECT_EQ(layers.at(0).spec.sliding_window, tokens) << before;
  }
}

TEST(ConfigReader, QueryHeadsThatKvHeadsDoNotDivideAreRefused) {
  const std::string reason = refusal_of(R"({"architectures": ["Qwen2MoeForCausalLM"],
      "model_type": "qwen2_moe", "num_attention_heads": 2, "num_key_value_heads": 4})");
  EXPECT_NE(reason.find("num_attention_heads 2 is not divisible"), std::string::npos) << reason;
}

// vLLM divides by the heads. Without head_dim, Llama's class refuses heads that do not divide the
// hidden size; Qwen2's does not.
TEST(ConfigReader, HeadsAreAtLeastOneAndDivideTheHiddenSizeWhereTheClassSaysSo) {
  const auto heads_of = [](std::string_view type, std::string_view keys) {
    return fmt::format(R"({{"architectures": ["LlamaForCausalLM"], "model_type": "{}", {}}})", type,
                       keys);
  };
  for (const auto& [keys, reason] :
       {std::pair{R"("num_key_value_heads": 0)", "num_key_value_heads is 0"},
        std::pair{R"("num_attention_heads": 0, "num_key_value_heads": 8, "head_dim": 96)",
                  "num_attention_heads is 0"},
        std::pair{R"("hidden_size": 4100, "num_attention_heads": 40, "head_dim": null)",
                  "hidden_size 4100 is not divisible by num_attention_heads 40"}})
    EXPECT_NE(refusal_of(heads_of("llama", keys)).find(reason), std::string::npos) << keys;
  EXPECT_FALSE(layers_of(heads_of("qwen2", R"("hidden_size": 4100, "num_attention_heads": 40,
      "num_key_value_heads": 8)"))
                   .empty());
}

// vLLM's platform aligns blocks to states with the key, although the class ignores it.
TEST(ConfigReader, AHeadSizeThatAClassWithStatesIgnoresIsRefused) {
  const auto jamba = [](std::string_view head_dim) {
    return fmt::format(R"({{"architectures": ["JambaForCausalLM"], "model_type": "jamba",
        "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": {}}})",
                       head_dim);
  };
  EXPECT_NE(refusal_of(jamba("64")).find("head_dim 64: JambaForCausalLM divides"),
            std::string::npos);
  EXPECT_EQ(refusal_of(jamba("128")), "read");
}

// transformers assigns num_attention_heads after n_head.
TEST(ConfigReader, AKeyCountsBeforeItsAlias) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["BloomForCausalLM"], "model_type":
      "bloom", "n_head": 8, "num_attention_heads": 16, "n_layer": 1, "hidden_size": 1024})");
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].spec.num_kv_heads, 16);
}

TEST(ConfigReader, MambaAttentionAndNothingByAPattern) {
  const LayerSpecs layers = layers_of(R"({"architectures": ["NemotronHForCausalLM"],
      "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"})");
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0].spec.states[0].dims, (std::vector<std::int64_t>{3, 10240}));
  EXPECT_EQ(layers[1].name, "layers.2.attn");
}

// Before, such a value counted as absent, and the plan was another model's.
TEST(ConfigReader, AValueOfAnotherTypeIsRefusedByItsKey) {
  for (const auto& [keys, key, expected] : {
           std::tuple{R"("num_key_value_heads": "8")", "num_key_value_heads", "an integer"},
           std::tuple{R"("num_key_value_heads": [8, 4])", "num_key_value_heads", "an integer"},
           std::tuple{R"("head_dim": "256")", "head_dim", "an integer"},
           std::tuple{R"("head_dim": false)", "head_dim", "an integer"},
           std::tuple{R"("sliding_window": "1024")", "sliding_window", "an integer"},
           std::tuple{R"("layer_types": "full_attention")", "layer_types", "a list"},
           std::tuple{R"("is_causal": 1)", "is_causal", "true or false"},
           std::tuple{R"("torch_dtype": 16)", "torch_dtype", "a string"},
           std::tuple{R"("rope_scaling": [1])", "rope_scaling", "an object"},
           std::tuple{R"("rope_scaling": {"rope_type": "linear", "factor": "2"})", "factor",
                      "a number"},
       }) {
    const std::string reason =
        refusal_of(fmt::format(R"({{"architectures": ["MistralForCausalLM"], "model_type":
            "mistral", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 1024,
            {}}})",
                               keys));
    EXPECT_NE(reason.find(fmt::format("{}`", key)), std::string::npos) << keys << ": " << reason;
    EXPECT_NE(reason.find(fmt::format("expected {}", expected)), std::string::npos) << reason;
  }
  // Values of published models.
  EXPECT_EQ(refusal_of(R"({"architectures": ["GraniteMoeHybridForCausalLM"], "model_type":
      "granitemoehybrid", "num_hidden_layers": 1, "layer_types": ["mamba"], "mamba_d_head": "auto",
      "mamba_n_heads": 128, "hidden_size": 1536, "num_attention_heads": 12})"),
            "read");
  EXPECT_EQ(refusal_of(llama_with(R"("sliding_window": false, "rope_scaling": null)")), "read");
}

// Python's json module writes them; a key that shapes the cache may not have them.
TEST(ConfigReader, InfinityIsReadWhereNoRuleLooks) {
  EXPECT_EQ(refusal_of(llama_with(R"("time_step_limit": [0.0, Infinity, -Infinity, NaN])")),
            "read");
  EXPECT_EQ(refusal_of(llama_with(R"("note": "an \"Infinity\" of NaN")")), "read");
  EXPECT_NE(refusal_of(llama_with(R"("head_dim": Infinity)")).find("head_dim"), std::string::npos);
}

// Keys that no model class of vLLM 0.33.0 reads, or that choose experts and norms.
TEST(ConfigReader, KeysThatLeaveTheCacheAloneAreNotRefused) {
  for (const char* keys : {R"("enable_moe_block": true)", R"("mamba_chunk_size": 256)",
                           R"("layernorm_linear_attention_beta": 1.0)", R"("full_attn_mod": 1)",
                           R"("use_parallel_block": true)", R"("compression_ratio": 1.0)"})
    EXPECT_EQ(refusal_of(llama_with(keys)), "read") << keys;
}

TEST(ConfigReader, ARefusalNamesTheFileAndTheKey) {
  for (const auto& [text, key] :
       {std::pair{R"({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2})",
                  "num_attention_heads"},
        std::pair{R"({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]})",
                  "text_config"},
        std::pair{R"({"architectures": ["DoryForCausalLM"], "num_hidden_layers": 1})",
                  "DoryForCausalLM"},
        std::pair{R"([1, 2])", "object"}, std::pair{R"({)", "config.json"}}) {
    const std::string reason = refusal_of(text);
    EXPECT_TRUE(reason.starts_with("config.json")) << reason;
    EXPECT_NE(reason.find(key), std::string::npos) << reason;
  }
}

}  // namespace
}  // namespace lockstep
