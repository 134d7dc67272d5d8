// Options of a plan for a config.json: cache formats, ranks, stages and drafts as vLLM 0.33.0 plans
// or refuses them on a Hopper GPU. The figures are those of its own planner.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <tuple>

#include "reference/memory/model_placement.h"
#include "reference/plan/model_spec.h"
#include "traces/configs/config_reader.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

// A config.json of a published model, as far as its caches depend on it.
std::string config_of(std::string_view keys) {
  return fmt::format(R"({{"torch_dtype": "bfloat16", "max_position_embeddings": 131072, {}}})",
                     keys);
}

const std::string kLatent = R"("num_attention_heads": 64, "hidden_size": 7168, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128)";
const std::string kKimiK2 = config_of(
    R"("architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
       "num_hidden_layers": 61, )" +
    kLatent);
const std::string kDeepseekV32 = config_of(
    R"("architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
       "num_hidden_layers": 61, "index_topk": 2048, "index_head_dim": 128, )" +
    kLatent);
const std::string kKimiLinear = config_of(
    R"("architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
       "num_hidden_layers": 27, "num_attention_heads": 32, "hidden_size": 2304,
       "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
       "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
         "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25,
                       26]})");
const std::string kLongcat =
    config_of(R"("architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash")");
// The last five of 56 layers keep nothing.
const std::string kNemotron = config_of(
    R"("architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
       "num_hidden_layers": 56, "num_attention_heads": 40, "num_key_value_heads": 8,
       "head_dim": 128, "hidden_size": 4480, "mamba_num_heads": 128, "mamba_head_dim": 80,
       "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "hybrid_override_pattern":
       "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-")");
const std::string kQwen2 = config_of(
    R"("architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 28,
       "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584)");

std::string gemma4(std::string_view keys, int count, int period) {
  std::string types;
  for (int i = 0; i < count; ++i)
    types += fmt::format("{}\"{}\"", i == 0 ? "" : ", ",
                         i % period == period - 1 ? "full_attention" : "sliding_attention");
  return config_of(fmt::format(
      R"("architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text",
         "num_hidden_layers": {}, "layer_types": [{}], {})",
      count, types, keys));
}

struct Options {
  std::optional<DType> kv_dtype = {};  // absent: the checkpoint's
  KVQuantMode mode = KVQuantMode::none;
  std::int64_t tp = 1, pp = 1, dcp = 1, num_spec = 0;
  std::int64_t max_model_len = 4096;
  MambaCacheMode states = MambaCacheMode::none;
  std::optional<AttentionBackend> backend = {};  // absent: the engine's choice
  std::optional<std::int64_t> block_size = {};
  std::int64_t max_num_batched_tokens = 8192;
  bool async_scheduling = true;
  std::string order = {};  // empty: the engine's choice
};

// Blocks, tokens, tokens per block of each size; with stages their numbers of layers. `config`: a
// config.json or a model file.
std::string plan_of(const std::string& config, const Options& given) {
  const auto model = config.starts_with(R"({"model_file")")
                         ? model_from_text(config, "model.json")
                         : model_from_hf_config(config, "config.json");
  if (!model) return model.error().message;
  PlanOptions options;
  options.max_model_len = given.max_model_len;
  options.max_num_batched_tokens = given.max_num_batched_tokens;
  options.async_scheduling = given.async_scheduling;
  options.block_size = given.block_size;
  options.mamba_cache_mode = given.states;
  options.overlays_groups = true;
  options.tp = given.tp;
  options.pp = given.pp;
  options.dcp = given.dcp;
  options.num_spec = given.num_spec;
  options.has_drafter = given.num_spec > 0;
  EXPECT_TRUE(take_checkpoint_format(*model, options));
  options.kv_dtype = given.kv_dtype.value_or(options.kv_dtype);
  if (given.mode != KVQuantMode::none) options.kv_quant_mode = given.mode;
  if (given.backend) {
    options.backend = *given.backend;
    if (const auto suits = check_backend(*model, options); !suits) return suits.error().message;
  }
  if (const auto taken = take_model(*model, options); !taken) return taken.error().message;
  const auto placed = place_served_model(*model, options, "vllm-0.33.0", given.order);
  if (!placed) return placed.error().message;
  const Placement& first = placed->stages.workers.front();
  std::string text = fmt::format("{} blocks, {} tokens, blocks of", first.num_blocks,
                                 capacity_of(first, placed->options)->tokens);
  std::set<std::int64_t> sizes;
  for (const KVCacheGroupSpec& group : first.groups) sizes.insert(group.spec.block_size);
  for (const std::int64_t size : sizes) text += fmt::format(" {}", size);
  if (given.pp == 1) return text;
  text += ", stages";
  for (const Placement& stage : placed->stages.workers) {
    std::size_t layers = 0;
    for (const KVCacheGroupSpec& group : stage.groups) layers += group.layer_names.size();
    text += fmt::format(" {}", layers);
  }
  return text;
}

TEST(ConfigOptions, LatentRowsInFp8AreThoseOfFlashMla) {
  EXPECT_EQ(plan_of(kKimiK2, {}), "38199 blocks, 611184 tokens, blocks of 16");
  EXPECT_EQ(plan_of(kKimiK2, {.kv_dtype = DType::fp8_e4m3}),
            "19099 blocks, 1222336 tokens, blocks of 64");
  EXPECT_EQ(plan_of(kDeepseekV32, {.kv_dtype = DType::fp8_e4m3}),
            "13961 blocks, 893504 tokens, blocks of 64");
  EXPECT_EQ(plan_of(kKimiLinear, {.kv_dtype = DType::fp8_e4m3}),
            "2774 blocks, 2272460 tokens, blocks of 3840 4096");
}

// vLLM builds a model for the dtype of its checkpoint; the file names the backends of that.
TEST(ConfigOptions, BackendsOfAModelFileThatHaveNoFp8AreChosenAgain) {
  const auto file = [](std::string_view sparse) {
    return fmt::format(
        R"({{"model_file": 1, "name": "m", "dtype": "bf16", "max_model_len": 131072,
             "layer_kinds": {{"mla": {{"kind": "mla", "head_size": 576, {}}}}},
             "layers": [{{"repeat": 61, "of": ["mla"]}}]}})",
        sparse);
  };
  const std::string dense = file(R"("backend": "flash_attn_mla")");
  EXPECT_EQ(plan_of(dense, {}), plan_of(kKimiK2, {}));
  for (const auto block_size : {std::optional<std::int64_t>(), std::optional<std::int64_t>(32)}) {
    const Options fp8{.kv_dtype = DType::fp8_e4m3, .block_size = block_size};
    EXPECT_EQ(plan_of(dense, fp8), plan_of(kKimiK2, fp8));
  }
  const std::string sparse = R"("index_topk": 2048, "backend": "flash)";
  EXPECT_EQ(
      plan_of(file(sparse + R"(_attn_mla_sparse")"),
              {.kv_dtype = DType::fp8_e4m3, .order = "BLNHC"}),
      plan_of(file(sparse + R"(mla_sparse")"), {.kv_dtype = DType::fp8_e4m3, .order = "BLNHC"}));
}

// mla/flashattn_mla_sparse.py, customize_spec(): blocks are whole rows of 1,152 bytes apart.
TEST(ConfigOptions, SparseAttentionInBf16AlignsItsBlocksToRows) {
  EXPECT_EQ(plan_of(kDeepseekV32, {.order = "BLNHC"}), "8566 blocks, 548224 tokens, blocks of 64");
}

TEST(ConfigOptions, LatentRowsInFp8InOtherBlocksAreThoseOfTritonMla) {
  EXPECT_EQ(plan_of(kKimiK2, {.kv_dtype = DType::fp8_e4m3, .block_size = 32}),
            "38199 blocks, 1222368 tokens, blocks of 32");
  EXPECT_EQ(plan_of(kKimiK2, {.kv_dtype = DType::fp8_e4m3, .block_size = 128}),
            "9549 blocks, 1222272 tokens, blocks of 128");
}

// A batch is scheduled while the stages compute earlier ones.
TEST(ConfigOptions, WindowsKeepTheBlocksOfTheBatchesInFlight) {
  const std::string gpt_oss = config_of(
      R"("architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 24,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
         "sliding_window": 128)");
  EXPECT_EQ(plan_of(gpt_oss, {.max_model_len = 131072}),
            "109226 blocks, 1551920 tokens, blocks of 16");
  EXPECT_EQ(plan_of(gpt_oss, {.max_model_len = 131072, .async_scheduling = false}),
            "109226 blocks, 1643116 tokens, blocks of 16");
  EXPECT_EQ(plan_of(gpt_oss, {.pp = 2, .max_model_len = 131072}),
            "218453 blocks, 2940646 tokens, blocks of 16, stages 12 12");
  const std::string gemma2 = config_of(
      R"("architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 42,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "hidden_size": 3584,
         "sliding_window": 4096)");
  EXPECT_EQ(plan_of(gemma2, {.max_model_len = 8192, .max_num_batched_tokens = 2048}),
            "15603 blocks, 124702 tokens, blocks of 16");
}

TEST(ConfigOptions, ACheckpointsFp8CacheHoldsForLatentRows) {
  const std::string scheme = R"(, "quantization_config": {"quant_method": "modelopt",
      "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"}}})";
  EXPECT_EQ(plan_of(kKimiK2.substr(0, kKimiK2.size() - 1) + scheme, {}),
            "19099 blocks, 1222336 tokens, blocks of 64");
}

TEST(ConfigOptions, ConvolutionsOfKdaAndLfm2KeepTheDrafts) {
  EXPECT_EQ(plan_of(kKimiLinear, {.num_spec = 2, .states = MambaCacheMode::align}),
            "2600 blocks, 760685 tokens, blocks of 2048");
  const std::string lfm2 = config_of(
      R"("architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048,
         "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16,
         "conv_L_cache": 3, "conv_dim": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14])");
  EXPECT_EQ(plan_of(lfm2, {.num_spec = 3}), "218453 blocks, 3389331 tokens, blocks of 16 4096");
  const std::string refusal = plan_of(lfm2, {.num_spec = 8});  // vLLM: an assertion
  EXPECT_NE(refusal.find("40960 bytes with its drafts"), std::string::npos) << refusal;
}

TEST(ConfigOptions, FalconKeepsTheModelsDtype) {
  const std::string config = config_of(
      R"("architectures": ["FalconForCausalLM"], "model_type": "falcon", "num_hidden_layers": 32,
         "num_attention_heads": 71, "hidden_size": 4544, "multi_query": true)");
  EXPECT_EQ(plan_of(config, {.kv_dtype = DType::fp8_e4m3, .max_model_len = 2048}),
            "327680 blocks, 5242880 tokens, blocks of 16");
}

TEST(ConfigOptions, NamedBackendsThatCannotServeTheModelAreRefused) {
  using enum AttentionBackend;
  const std::string phi = config_of(
      R"("architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32,
         "num_attention_heads": 32, "hidden_size": 3072)");
  const auto nvfp4 = [](std::optional<AttentionBackend> backend) {
    return Options{.kv_dtype = DType::uint8, .mode = KVQuantMode::nvfp4, .backend = backend};
  };
  for (const auto& [config, options, reason] : {
           std::tuple{kQwen2, Options{.backend = flashmla}, "non-MLA not supported"},
           std::tuple{kKimiK2, Options{.backend = triton_attn}, "`attn`: MLA not supported"},
           std::tuple{kDeepseekV32, Options{.backend = triton_mla}, "sparse not supported"},
           std::tuple{phi, Options{.backend = flashinfer}, "head_size not supported"},
           std::tuple{kQwen2, Options{.kv_dtype = DType::fp8_e5m2, .backend = flash_attn},
                      "kv_cache_dtype not supported"},
           std::tuple{kQwen2, nvfp4(triton_attn), "kv_cache_dtype not supported"},
           std::tuple{phi, nvfp4({}), "--kv-dtype nvfp4: no backend"},
       })
    EXPECT_NE(plan_of(config, options).find(reason), std::string::npos) << plan_of(config, options);
  EXPECT_NE(plan_of(kQwen2, nvfp4({})).find("tokens"), std::string::npos);
  EXPECT_NE(plan_of(kKimiK2, {.backend = flashmla}).find("tokens"), std::string::npos);
}

TEST(ConfigOptions, LatentRowsHaveNoOtherQuantizedFormat) {
  for (const Options& options :
       {Options{.kv_dtype = DType::fp8_e5m2},
        Options{.kv_dtype = DType::uint8, .mode = KVQuantMode::nvfp4},
        Options{.kv_dtype = DType::int8, .mode = KVQuantMode::int8_per_token_head}})
    EXPECT_NE(plan_of(kKimiK2, options).find("no backend keeps latent rows"), std::string::npos);
}

TEST(ConfigOptions, OnlyFlashAttentionReadsKAndVOfTwoSizes) {
  const std::string config = config_of(
      R"("architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash",
         "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 4,
         "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
         "swa_v_head_dim": 128, "hidden_size": 4096, "hybrid_layer_pattern": [0])");
  EXPECT_NE(plan_of(config, {.kv_dtype = DType::fp8_e4m3}).find("tokens"), std::string::npos);
  for (const Options& options :
       {Options{.kv_dtype = DType::fp8_e5m2},
        Options{.kv_dtype = DType::int8, .mode = KVQuantMode::int8_per_token_head}}) {
    const std::string refusal = plan_of(config, options);
    EXPECT_NE(refusal.find("of 192 and 128 elements"), std::string::npos) << refusal;
  }
}

// FlashAttention 4 reads 64 tokens at a time from heads of 512 in fp8.
TEST(ConfigOptions, HeadsOf512InFp8HaveBlocksOf64) {
  const std::string config = gemma4(
      R"("hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
         "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
         "attention_k_eq_v": true, "sliding_window": 1024, "num_kv_shared_layers": 0)",
      60, 6);
  EXPECT_EQ(plan_of(config, {.kv_dtype = DType::fp8_e4m3}),
            "8192 blocks, 93990 tokens, blocks of 64 128");
  // FlashAttention does not read e5m2.
  EXPECT_EQ(plan_of(config_of(R"("architectures": ["Gemma4ForCausalLM"],
                                 "model_type": "gemma4_text")"),
                    {.kv_dtype = DType::fp8_e5m2}),
            "131072 blocks, 595861 tokens, blocks of 16 32");
}

TEST(ConfigOptions, StagesAreRunsOfDecoderLayers) {
  EXPECT_EQ(plan_of(kLongcat, {.pp = 3}),
            "116508 blocks, 1864128 tokens, blocks of 16, stages 18 20 18");
  EXPECT_EQ(plan_of(kLongcat, {.pp = 8}),
            "291271 blocks, 4660336 tokens, blocks of 16, stages 6 6 6 8 8 8 8 6");
  EXPECT_EQ(plan_of(kNemotron, {.pp = 3}),
            "3996 blocks, 1487965 tokens, blocks of 1312 4096, stages 11 10 10");
}

TEST(ConfigOptions, StagesDoNotShareCaches) {
  const std::string config = gemma4(
      R"("hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
         "global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 20)",
      35, 5);
  const std::string refusal = plan_of(config, {.pp = 2});
  EXPECT_NE(refusal.find("--pp 2"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("layer 13 (num_kv_shared_layers)"), std::string::npos) << refusal;
}

TEST(ConfigOptions, RanksThatTheEngineRefusesAreRefused) {
  const std::string mamba =
      config_of(R"("architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "n_groups": 8)");
  const std::string windowed = config_of(
      R"("architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024,
         "use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 14)");
  const std::string smolvlm = config_of(  // its text class alone can be cut
      R"("architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm",
         "text_config": {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8,
         "hidden_size": 512})");
  const std::string bailing = config_of(
      R"("architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid",
         "group_norm_size": 4)");
  for (const auto& [config, options, reason] : {
           std::tuple{kQwen2, Options{.tp = 8},
                      "--tp 8: it does not divide num_attention_heads 28"},
           std::tuple{kQwen2, Options{.tp = 4, .dcp = 3}, "--dcp 3: it does not divide --tp 4"},
           std::tuple{kQwen2, Options{.tp = 4, .dcp = 2}, "--dcp 2: num_key_value_heads 4"},
           std::tuple{kQwen2, Options{.tp = 28, .dcp = 14}, "allow at most 7"},
           std::tuple{mamba, Options{.tp = 16}, "8 n_groups cannot be cut over tp 16"},
           std::tuple{bailing, Options{.tp = 8}, "4 norm groups (group_norm_size) cannot be cut"},
           std::tuple{mamba, Options{.pp = 2}, "no pipeline parallelism for this model"},
           std::tuple{smolvlm, Options{.pp = 2}, "no pipeline parallelism for this model"},
           std::tuple{kDeepseekV32, Options{.tp = 8, .dcp = 2}, "needs a cache in fp8"},
           std::tuple{windowed, Options{}, "with windows in all layers or in none"},
       }) {
    const std::string refusal = plan_of(config, options);
    EXPECT_NE(refusal.find(reason), std::string::npos) << refusal;
  }
  EXPECT_NE(plan_of(kQwen2, {.tp = 28, .dcp = 7}).find("tokens"), std::string::npos);
  EXPECT_NE(plan_of(kKimiK2, {.tp = 8, .dcp = 8}).find("tokens"), std::string::npos);
  EXPECT_NE(plan_of(bailing, {.tp = 4}).find("tokens"), std::string::npos);
}

TEST(ConfigOptions, DraftsAddTheMtpLayers) {
  const std::string config = config_of(
      R"("architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
         "num_hidden_layers": 61, "num_nextn_predict_layers": 1, )" +
      kLatent);
  EXPECT_EQ(plan_of(config, {.num_spec = 1}), "37583 blocks, 601328 tokens, blocks of 16");
}

}  // namespace
}  // namespace lockstep
