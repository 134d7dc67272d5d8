// The bundled model files under vLLM 0.33.0: their plans are those that the engine made of the same
// models, as far as a model file and the command line can say what was asked for.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "reference/memory/model_placement.h"
#include "traces/formats/plan_recording.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using PlanJson = nlohmann::json;

// Recorded with half of DeepSeek-V4-Flash's layers.
constexpr auto kV4 = "deepseek-v4-like";
constexpr std::int64_t kLayersOfV4 = 21;

const OverlaidPlanInputs& inputs_of(const PlanRecording& recording) {
  return std::get<OverlaidPlanInputs>(recording.inputs);
}

// The bundled model of the recorded one's family.
std::string bundled_name(const std::string& recorded) {
  static const std::map<std::string, std::string> others = {{kV4, "deepseek-v4-flash"},
                                                            {"whisper-like", "whisper-large-v3"},
                                                            {"sink-model", "pangu-sink-like"},
                                                            {"rswa-model", "unlimited-ocr-like"}};
  const auto found = others.find(recorded);
  return found == others.end() ? recorded : found->second;
}

// With as many layers as were recorded, and their figures.
void resize(const PlanJson& recorded, ModelSpec& model) {
  const PlanJson& spec = recorded.at("specs").at(0);
  const std::size_t times = recorded.at("layers").size() / model.kinds.size();
  model.layers.clear();
  for (std::size_t i = 0; i < times; ++i)
    for (std::size_t kind = 0; kind < model.kinds.size(); ++kind)
      model.layers.push_back({static_cast<std::int64_t>(i), kind});
  for (LayerKind& kind : model.kinds) {
    kind.spec.num_kv_heads = spec.at("num_kv_heads");
    if (kind.spec.rswa_window > 0) kind.spec.rswa_window = spec.at("rswa_window");
  }
}

// The bundled model; a recorded draft model instead of its own, except for the MTP layer with an
// indexer.
Result<ModelSpec> model_of(const PlanRecording& recording, const PlanJson& recorded) {
  const bool is_v4 = recording.model == kV4;
  LS_ASSIGN_OR_RETURN(auto model, find_model(bundled_name(recording.model)));
  if (bundled_name(recording.model) != recording.model && !is_v4) resize(recorded, model);
  if (recording.model == "deepseek-v3.2") return model;
  std::erase_if(model.layers, [&](const ModelSpec::Layer& layer) {
    return model.kinds[layer.kind].is_draft || (is_v4 && layer.index >= kLayersOfV4);
  });
  if (!recorded.contains("layers")) return model;
  for (const PlanJson& layer : recorded.at("layers")) {
    if (!layer.at(0).get<std::string>().ends_with(".draft")) continue;
    const PlanJson& spec = recorded.at("specs").at(layer.at(1).get<std::size_t>());
    const std::string type = spec.at("type");
    LayerKind draft;
    draft.name = "draft";
    draft.is_draft = true;
    draft.spec.kind = type == "mla"              ? CacheKind::mla
                      : type == "sliding_window" ? CacheKind::sliding_window
                                                 : CacheKind::full_attention;
    draft.spec.head_size = spec.at("head_size");
    draft.spec.num_kv_heads = spec.at("num_kv_heads").get<std::int64_t>();
    if (type != "mla") draft.spec.num_kv_heads *= inputs_of(recording).options.tp;
    draft.spec.sliding_window = spec.value("sliding_window", std::int64_t{0});
    draft.spec.cache_dtype_str =
        spec.value("cache_dtype_str", "") == "fp8_ds_mla" ? "fp8_ds_mla" : "";
    draft.has_own_dtype = !draft.spec.cache_dtype_str.empty();
    if (draft.has_own_dtype) draft.spec.dtype = DType::uint8;
    model.kinds.push_back(draft);
    model.layers.push_back({model.layers.back().index + 1, model.kinds.size() - 1});
  }
  return model;
}

// Nothing: asked for with options that a model file and PlanOptions do not have.
std::optional<PlanOptions> options_of(const PlanRecording& recording, const PlanJson& asked) {
  // Not pp: the recorded stages have memories of their own.
  static const std::set<std::string> known = {"model",
                                              "tp",
                                              "kv_dtype",
                                              "backend",
                                              "memory_bytes",
                                              "max_model_len",
                                              "max_num_seqs",
                                              "ssm_dtype",
                                              "layout",
                                              "block_size",
                                              "dcp",
                                              "disable_hybrid",
                                              "prefix_caching",
                                              "mamba_cache_mode",
                                              "num_spec",
                                              "spec_method",
                                              "drafter_layers",
                                              "drafter",
                                              "drafter_backend",
                                              "device",
                                              "num_gpu_blocks_override"};
  for (const auto& [key, value] : asked.items())
    if (!known.contains(key)) return std::nullopt;
  const PlacementOptions& given = inputs_of(recording).options;
  PlanOptions options;
  const std::string dtype = asked.at("kv_dtype");
  const bool is_v4 = recording.model == kV4;
  const bool is_v41 = recording.model == "deepseek-v4.1-like";
  const bool has_own_rows = recording.model == "deepseek-v3.2" || is_v4 || is_v41;
  if ((is_v41 || asked.contains("device")) && given.device != DeviceFamily::sm90)
    return std::nullopt;
  if (dtype != (has_own_rows ? "fp8_ds_mla" : "auto") && dtype != "fp8") return std::nullopt;
  if (dtype == "fp8") options.kv_dtype = DType::fp8_e4m3;
  const std::string backend = asked.at("backend");
  if (const auto name = from_name<AttentionBackend>(backend))
    options.backend = *name;
  else if (!has_own_rows || backend != (is_v4 || is_v41 ? "v4_flashmla" : "flashmla_sparse"))
    return std::nullopt;
  // Of drafts without a method the engine reserves no blocks, and DFlash has no EAGLE groups.
  if (given.num_spec > 0 && given.spec_method != "mtp" && given.spec_method != "eagle3")
    return std::nullopt;
  options.num_spec = given.num_spec;
  options.has_drafter = asked.contains("drafter_layers");
  options.ssm_dtype = asked.value("ssm_dtype", "") == "fp32" ? DType::fp32 : DType::bf16;
  options.tp = given.tp;
  options.dcp = given.dcp;
  options.mamba_cache_mode = given.mamba_cache_mode;
  options.max_model_len = given.max_model_len;
  options.max_num_batched_tokens = given.max_num_batched_tokens;
  options.memory_bytes = given.memory_bytes;
  options.block_size = given.block_size;
  options.num_gpu_blocks_override = given.num_gpu_blocks_override;
  options.disable_hybrid_kv_cache_manager = given.disable_hybrid_kv_cache_manager;
  return options;
}

// What the plan says, without the names of layers.
std::string text_of(const PlanJson& recorded) {
  const PlanJson& plan = recorded.at("plan");
  std::string text = recorded.at("layout").at("chosen").get<std::string>() + " " +
                     plan.at("num_blocks").dump() + " blocks";
  for (const PlanJson& group : plan.at("groups")) {
    const PlanJson& spec = group.at("spec").is_number()
                               ? recorded.at("specs").at(group.at("spec").get<std::size_t>())
                               : group.at("spec");
    text += ", " + std::to_string(group.at("layers").size()) + " of " +
            spec.at("block_size").dump() + " tokens";
    if (group.value("is_eagle_group", false)) text += " (drafter)";
  }
  for (const PlanJson& tensor : plan.at("tensors"))
    text += ", " + tensor.at("offset").dump() + "+" + tensor.at("layer_stride").dump() + "+" +
            tensor.at("block_stride").dump();
  return text + ", " + recorded.at("capacity").at("tokens").dump();
}

std::string text_of(const ModelPlacement& placed) {
  const Placement& plan = placed.stages.workers.front();
  std::string text =
      std::string(name_of(plan.order)) + " " + std::to_string(plan.num_blocks) + " blocks";
  for (const KVCacheGroupSpec& group : plan.groups)
    text += ", " + std::to_string(group.layer_names.size()) + " of " +
            std::to_string(group.spec.block_size) + " tokens" +
            (group.is_eagle_group ? " (drafter)" : "");
  for (const PlacedTensor& tensor : plan.tensors)
    text += ", " + std::to_string(tensor.offset) + "+" + std::to_string(tensor.layer_stride) + "+" +
            std::to_string(tensor.block_stride);
  return text + ", " + std::to_string(capacity_of(plan, placed.options)->tokens);
}

TEST(ModelPlans, OfBundledModelsAreThoseThatTheEngineMade) {
  const auto data = find_data_dir();
  const auto path = data ? *data / "recordings_more/vllm-0.33.0/layouts.jsonl" : "";
  if (!data || !std::filesystem::exists(path)) GTEST_SKIP() << data_dir_hint();
  const auto recordings = read_plan_recordings(path.string());
  ASSERT_TRUE(recordings) << recordings.error().message;
  const auto names = model_names();
  std::map<std::string, int> compared;
  int refused = 0, with_drafter = 0;
  for (const PlanRecording& recording : *recordings) {
    if (std::ranges::find(names, bundled_name(recording.model)) == names.end())
      continue;  // or bare layers
    const PlanJson recorded = PlanJson::parse(recording.json);
    const auto options = options_of(recording, recorded.at("options"));
    if (!options) continue;
    const auto model = model_of(recording, recorded);
    ASSERT_TRUE(model) << model.error().message;
    auto layers = layer_specs(*model, *options);
    if (!layers) continue;  // heads that tp does not cut
    // Recorded with both states in bf16; by itself the engine keeps the recurrent one in fp32.
    if (recording.model == "kimi-linear-48b-a3b")
      for (NamedSpec& layer : *layers)
        for (StateTensorSpec& state : layer.spec.states) state.dtype = DType::bf16;
    // Recorded with drafters that are on one rank by themselves.
    for (NamedSpec& layer : *layers)
      if (layer.is_draft && options->dcp > 1) layer.spec.dcp_sharded = false;
    const std::string where = recording.model + ", line " + std::to_string(recording.line);
    const auto placed = place_model(*layers, model->dtype, *options,
                                    inputs_of(recording).options.order.value_or(""));
    if (!recorded.contains("plan") || !recorded.contains("capacity")) {
      EXPECT_FALSE(placed) << where;
      ++refused;
      continue;
    }
    if (!placed) {
      // The core took it: a worker refuses it.
      EXPECT_NE(placed.error().message.find("the worker"), std::string::npos)
          << where << ": " << placed.error().message;
      ++refused;
      continue;
    }
    EXPECT_EQ(text_of(*placed), text_of(recorded)) << where;
    ++compared[recording.model];
    with_drafter += options->has_drafter ? 1 : 0;
  }
  for (const auto& [name, plans] : compared) RecordProperty(name, plans);
  EXPECT_EQ(compared.size(), 23u);
  EXPECT_GE(with_drafter, 20);
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace lockstep
