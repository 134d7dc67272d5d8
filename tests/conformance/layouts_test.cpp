// The planner agrees with vLLM 0.22.1 in every recorded plan: aligned sizes, groups, tensors,
// blocks, concurrency to the last bit, capacity, kernel block sizes, every stride and offset, the
// refusals; by the model's closed form and by the backend's own steps. The mutants that copy model
// runner V2 go wrong exactly where it did.
#include "sim/conform/conform_layouts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "cuda_backend/defects/planted_views.h"
#include "reference/plan/layout.h"
#include "reference/plan/planner.h"
#include "sim/check/layout_prover.h"
#include "traces/models/data_dir.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using cuda::ViewDefect;

Result<PoolViews> engine_views(const KVCacheConfig& plan, AttentionBackend backend,
                               CacheLayout layout, ViewDefect defect = ViewDefect::none) {
  return cuda::planted_views(plan, {backend, layout, LayoutRule::vllm_0_22_1}, defect);
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
  LayoutRecording recording;
  KVCacheConfig plan;
};

std::vector<PlannedRecording> planned_recordings() {
  std::vector<PlannedRecording> planned;
  const auto recordings = read_layout_recordings(full_path().value_or(sample_path()));
  if (!recordings) return planned;
  for (const LayoutRecording& recording : *recordings) {
    if (!recording.refused.empty()) continue;
    auto plan = plan_memory(unaligned_layers(recording), recording.options);
    if (plan) planned.push_back({recording, std::move(plan->workers.front())});
  }
  return planned;
}

// The views of `layers` as an engine with `defect` makes them; nothing when it refuses.
std::optional<NamedViews> named_views(const PlannedRecording& planned,
                                      const RecordedViews& recorded, const NamedViews& layers,
                                      ViewDefect defect) {
  const KVCacheConfig pool = with_num_blocks(planned.plan, recorded.num_blocks);
  const auto views = engine_views(pool, planned.recording.options.backend, recorded.layout, defect);
  if (!views) return std::nullopt;
  NamedViews named;
  for (const auto& [name, tensors] : layers)
    for (std::size_t g = 0; g < pool.groups.size(); ++g) {
      const auto& names = pool.groups[g].layer_names;
      const auto at = std::ranges::find(names, name);
      if (at != names.end())
        named.emplace_back(name,
                           views->groups[g][static_cast<std::size_t>(at - names.begin())].tensors);
    }
  return named;
}

TEST(Layouts, TheSecondRunnerIsReproducedWhereItRefusesAndWhereItBuildsWrongly) {
  std::map<std::string, int> count;
  for (const PlannedRecording& planned : planned_recordings())
    for (const RecordedViews& recorded : planned.recording.views) {
      const auto model = named_views(planned, recorded, recorded.views, cuda::kSecondRunner);
      const std::string where = planned.recording.model + " " + recorded.name;
      if (!recorded.second_runner_refused.empty()) {
        EXPECT_FALSE(model) << where;
        ++count["refused"];
      } else if (recorded.second_runner) {
        ASSERT_TRUE(model) << where;
        EXPECT_EQ(*model, *recorded.second_runner) << where;
        EXPECT_NE(*model, recorded.views) << where;
        ++count["wrong"];
      } else {
        ASSERT_TRUE(model) << where;
        EXPECT_EQ(*model, recorded.views) << where;
        ++count["same"];
      }
    }
  EXPECT_GT(count["refused"], 0);
  EXPECT_GT(count["wrong"], 0);
  if (full_path()) {
    EXPECT_EQ(count["refused"], 136);
    EXPECT_EQ(count["wrong"], 20);
  }
}

LayoutProof prove(const KVCacheConfig& pool, AttentionBackend backend, CacheLayout layout,
                  LayoutRule rule) {
  const auto oracle = pool_layout(pool, backend, layout, rule);
  const auto views = cuda::derive_views(pool, {backend, layout, rule});
  LayoutProof proof;
  if (!oracle || !views) {
    proof.findings.push_back(oracle ? views.error().message : oracle.error().message);
    return proof;
  }
  const auto offset = [](const TensorView& view, std::span<const std::int64_t> index) {
    return cuda::view_byte_offset(view, index);
  };
  return prove_layout(pool, *oracle, *views, offset, {.blocks = {}, .tensors = {0}});
}

// One plan of each model, mode and backend; `all`: every plan.
void expect_pools_of_two(bool all) {
  std::map<std::string, int> seen;
  for (const PlannedRecording& planned : planned_recordings()) {
    const PlanOptions& options = planned.recording.options;
    const bool hidden = planned.plan.groups.back().spec.kind == CacheKind::hidden_state;
    const std::string key = planned.recording.model + std::to_string(int(options.backend)) +
                            std::to_string(int(hidden));
    if (!all && seen[key]++ > 0) continue;
    const KVCacheConfig pool = with_num_blocks(planned.plan, 2);
    for (CacheLayout layout : {CacheLayout::NHD, CacheLayout::HND}) {
      const LayoutProof proof = prove(pool, options.backend, layout, LayoutRule::isolated);
      EXPECT_TRUE(proof.holds()) << planned.recording.model << " " << name_of(options.backend)
                                 << " " << name_of(layout) << ": " << proof.findings.front();
      EXPECT_GT(proof.elements, 0);
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
    const auto has_states = [](const auto& group) { return group.spec.kind == CacheKind::mamba; };
    if (std::ranges::any_of(groups, has_states)) continue;
    ++broken;
    const LayoutProof proof = prove(with_num_blocks(planned.plan, 2), AttentionBackend::flash_attn,
                                    CacheLayout::NHD, LayoutRule::vllm_0_22_1);
    ASSERT_FALSE(proof.holds()) << planned.recording.model;
    EXPECT_NE(proof.findings.front().find("share bytes"), std::string::npos)
        << proof.findings.front();
  }
  if (full_path()) {
    EXPECT_EQ(broken, 3);
  }
}

TEST(Layouts, TheCatalogueHasTheRecordedModels) {
  int compared = 0;
  for (const PlannedRecording& planned : planned_recordings()) {
    const LayoutRecording& recording = planned.recording;
    const auto model = find_model(recording.model);
    ASSERT_TRUE(model) << model.error().message;
    LayerSpecs recorded = unaligned_layers(recording);
    std::erase_if(recorded, [](const NamedSpec& layer) {
      return layer.spec.kind == CacheKind::hidden_state;
    });
    PlanOptions options = recording.options;
    auto layers = layer_specs(*model, options);
    ASSERT_TRUE(layers) << layers.error().message;
    const bool hybrid = is_hybrid(*layers);
    if (!hybrid) *layers = with_aligned_sizes(*layers, recording.aligned, options);
    ASSERT_EQ(layers->size(), recorded.size()) << recording.model;
    for (std::size_t i = 0; i < recorded.size(); ++i)
      EXPECT_TRUE((*layers)[i].spec == recorded[i].spec) << recording.model << " layer " << i;
    ++compared;
  }
  EXPECT_GE(compared, 15);
}

}  // namespace
}  // namespace lockstep
