// The planner agrees with vLLM 0.22.1 in every recorded plan: aligned sizes, groups, tensors,
// blocks, concurrency to the last bit, capacity, kernel block sizes, every stride and offset, the
// refusals; by the model's closed form and by the backend's own steps. The mutants that copy model
// runner V2 go wrong exactly where it did.
#include "sim/conform/conform_layouts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "cuda_backend/defects/planted_views.h"
#include "reference/plan/layout.h"
#include "reference/plan/planner.h"
#include "sim/check/plan_prover.h"
#include "tests/support/temporary_folder.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

Result<PoolViews> engine_views(const KVCacheConfig& plan, AttentionBackend backend,
                               CacheLayout layout, cuda::ViewDefects defects = {}) {
  return cuda::planted_views(plan, {backend, layout, LayoutRule::vllm_0_22_1}, defects);
}

void expect_conformance(const std::string& path, std::int64_t plans_min) {
  const auto result =
      conform_layouts(path, [](const KVCacheConfig& plan, AttentionBackend backend,
                               CacheLayout layout) { return engine_views(plan, backend, layout); });
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_GE(result->plans, plans_min);
  for (const LayoutMismatch& at : result->mismatches)
    ADD_FAILURE() << "line " << at.mismatch.step << ", " << at.model << ": " << at.mismatch.what
                  << "\n  recorded " << at.mismatch.recorded << "\n  model    "
                  << at.mismatch.model;
  EXPECT_EQ(result->agreed, result->plans);
}

std::string sample_path() {
  return (find_samples_dir().value() / "recordings/vllm-0.22.1/layouts.jsonl").string();
}

std::optional<std::string> full_path() {
  const auto data = find_data_dir();
  if (!data) return std::nullopt;
  const auto path = *data / "recordings/vllm-0.22.1/layouts.jsonl";
  return std::filesystem::exists(path) ? std::optional(path.string()) : std::nullopt;
}

TEST(Layouts, BundledPlansAgree) {
  ASSERT_TRUE(find_samples_dir());
  expect_conformance(sample_path(), 16);
}

TEST(Layouts, All264PlansAgree) {
  if (!full_path()) GTEST_SKIP() << data_dir_hint();
  expect_conformance(*full_path(), 264);
}

// Plans of the recordings as the model makes them; refusals left out.
struct PlannedRecording {
  std::string model;
  TensorPlanInputs inputs;
  nlohmann::json recorded;
  KVCacheConfig plan;
};

std::vector<PlannedRecording> planned_recordings() {
  std::vector<PlannedRecording> planned;
  const auto recordings = read_plan_recordings(full_path().value_or(sample_path()));
  if (!recordings) return planned;
  for (const PlanRecording& recording : *recordings) {
    const auto& inputs = std::get<TensorPlanInputs>(recording.inputs);
    auto recorded = nlohmann::json::parse(recording.json);
    if (recorded.contains("refused")) continue;
    auto plan = plan_memory(unaligned_layers(inputs), inputs.options);
    if (plan)
      planned.push_back({recording.model, inputs, std::move(recorded), plan->workers.front()});
  }
  return planned;
}

TEST(Layouts, TheSecondRunnerIsReproducedWhereItRefusesAndWhereItBuildsWrongly) {
  std::map<std::string, int> count;
  for (const PlannedRecording& planned : planned_recordings()) {
    const auto model =
        pools_record(planned.plan, planned.inputs.options.backend, planned.recorded,
                     [](const KVCacheConfig& pool, AttentionBackend backend, CacheLayout layout) {
                       return engine_views(pool, backend, layout, cuda::kSecondRunner);
                     });
    for (const auto& [key, pool] : planned.recorded.at("views").items()) {
      const std::string where = planned.model + " " + key;
      const nlohmann::json& second = pool.at("second_runner");
      if (second.is_object() && second.contains("refused")) {
        EXPECT_TRUE(model.at(key).contains("refused")) << where;
        ++count["refused"];
      } else if (second.is_object()) {
        EXPECT_EQ(model.at(key).at("views"), second) << where;
        EXPECT_NE(model.at(key).at("views"), pool.at("views")) << where;
        ++count["wrong"];
      } else {
        EXPECT_EQ(model.at(key).at("views"), pool.at("views")) << where;
        ++count["same"];
      }
    }
  }
  EXPECT_GT(count["refused"], 0);
  EXPECT_GT(count["wrong"], 0);
  if (full_path()) {
    EXPECT_EQ(count["refused"], 136);
    EXPECT_EQ(count["wrong"], 20);
  }
}

// The bundled recording with one value changed.
TEST(Layouts, AChangeInOneResultIsFoundThere) {
  std::ifstream lines(sample_path());
  std::string text;
  ASSERT_TRUE(std::getline(lines, text));
  const auto plan = nlohmann::ordered_json::parse(text);  // keeps the order of layers
  const tests::TemporaryFolder folder;
  const auto path = folder.path("layouts.jsonl");
  for (const char* place :
       {"/aligned/block_size", "/plan/num_blocks", "/plan/groups/0/layers/0",
        "/plan/groups/0/spec/block_size", "/plan/groups/0/spec/page_size_bytes",
        "/plan/tensors/0/size", "/plan/tensors/0/shared_by/0", "/max_concurrency",
        "/capacity_tokens", "/views/NHD~12/kernel_block_sizes/0",
        "/views/NHD~12/views/layers.3.attn/stride/0"}) {
    const nlohmann::ordered_json::json_pointer pointer(place);
    nlohmann::ordered_json changed = plan;
    ASSERT_TRUE(changed.contains(pointer)) << place;
    changed[pointer] = "another";
    std::ofstream(path) << changed.dump() << "\n";
    const auto result = conform_layouts(path);
    ASSERT_TRUE(result) << place << ": " << result.error().message;
    ASSERT_EQ(result->mismatches.size(), 1u) << place;
    const std::string stage = std::string(place).substr(1, std::string(place).find('/', 1) - 1);
    EXPECT_TRUE(result->mismatches[0].mismatch.what.starts_with(stage))
        << place << ": " << result->mismatches[0].mismatch.what;
  }
}

PlanProof prove(const KVCacheConfig& pool, AttentionBackend backend, CacheLayout layout,
                LayoutRule rule) {
  const auto oracle = pool_layout(pool, backend, layout, rule);
  const auto views = cuda::derive_views(pool, {backend, layout, rule});
  PlanProof proof;
  if (!oracle || !views) {
    proof.findings.push_back({"refused", oracle ? views.error().message : oracle.error().message});
    return proof;
  }
  const auto offset = [](const TensorView& view, std::span<const std::int64_t> index) {
    return cuda::view_byte_offset(view, index);
  };
  return prove_views(*oracle, *views, offset, {.blocks = {}, .tensors = {0}});
}

// One plan of each model, mode and backend; `all`: every plan.
void expect_pools_of_two(bool all) {
  std::map<std::string, int> seen;
  for (const PlannedRecording& planned : planned_recordings()) {
    const PlanOptions& options = planned.inputs.options;
    const bool hidden = planned.plan.groups.back().spec.kind == CacheKind::hidden_state;
    const std::string key =
        planned.model + std::to_string(int(options.backend)) + std::to_string(int(hidden));
    if (!all && seen[key]++ > 0) continue;
    const KVCacheConfig pool = with_num_blocks(planned.plan, 2);
    for (CacheLayout layout : {CacheLayout::NHD, CacheLayout::HND}) {
      const PlanProof proof = prove(pool, options.backend, layout, LayoutRule::isolated);
      EXPECT_TRUE(proof.holds()) << planned.model << " " << name_of(options.backend) << " "
                                 << name_of(layout) << ": " << proof.findings.front().text;
      EXPECT_GT(proof.rows, 0);
    }
  }
}

TEST(Layouts, APoolOfTwoBlocksIsRightForEveryModelBackendAndLayout) { expect_pools_of_two(false); }
TEST(LayoutsSlow, APoolOfTwoBlocksIsRightForEveryPlan) { expect_pools_of_two(true); }

// A finding of this harness: vLLM 0.22.1 keeps K and V of a block together only where the model has
// states. Windows or chunks with hidden states also share tensors with whole pages.
TEST(Layouts, TheRuleOf0221LetsWindowsReachHiddenStatesOfAnotherBlock) {
  int broken = 0;
  for (const PlannedRecording& planned : planned_recordings()) {
    const auto& groups = planned.plan.groups;
    if (groups.back().spec.kind != CacheKind::hidden_state || groups.size() == 1) continue;
    if (has_states(groups)) continue;
    ++broken;
    const PlanProof proof = prove(with_num_blocks(planned.plan, 2), AttentionBackend::flash_attn,
                                  CacheLayout::NHD, LayoutRule::vllm_0_22_1);
    ASSERT_FALSE(proof.holds()) << planned.model;
    EXPECT_NE(proof.findings.front().text.find("share bytes"), std::string::npos)
        << proof.findings.front().text;
  }
  if (full_path()) {
    EXPECT_EQ(broken, 3);
  }
}

TEST(Layouts, TheCatalogueHasTheRecordedModels) {
  int compared = 0;
  for (const PlannedRecording& planned : planned_recordings()) {
    const auto model = find_model(planned.model);
    ASSERT_TRUE(model) << model.error().message;
    LayerSpecs recorded = unaligned_layers(planned.inputs);
    std::erase_if(recorded, [](const NamedSpec& layer) {
      return layer.spec.kind == CacheKind::hidden_state;
    });
    const PlanOptions& options = planned.inputs.options;
    auto layers = layer_specs(*model, options);
    ASSERT_TRUE(layers) << layers.error().message;
    const bool hybrid = is_hybrid(*layers);
    if (!hybrid) *layers = with_aligned_sizes(*layers, *aligned_sizes(*layers, options), options);
    ASSERT_EQ(layers->size(), recorded.size()) << planned.model;
    for (std::size_t i = 0; i < recorded.size(); ++i)
      EXPECT_TRUE((*layers)[i].spec == recorded[i].spec) << planned.model << " layer " << i;
    ++compared;
  }
  EXPECT_GE(compared, 15);
}

}  // namespace
}  // namespace lockstep
