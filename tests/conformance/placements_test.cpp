// The planner of overlaid allocations agrees with the engine in every recorded plan, a recording
// that is changed in one stage disagrees there, and the prover names the plans that are unsound.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "sim/check/plan_prover.h"
#include "sim/conform/conform_layouts.h"
#include "tests/support/temporary_folder.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

std::string overlaid_sample() {
  return (find_samples_dir().value() / "recordings/vllm-0.33.0/layouts.jsonl").string();
}

void expect_overlaid_agreement(const std::string& path, std::int64_t plans) {
  const auto result = conform_layouts(path);
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_GE(result->plans, plans);
  for (const LayoutMismatch& at : result->mismatches)
    ADD_FAILURE() << "line " << at.mismatch.step << ", " << at.model << ": " << at.mismatch.what
                  << "\n  recorded " << at.mismatch.recorded << "\n  model    "
                  << at.mismatch.model;
  EXPECT_EQ(result->agreed, result->plans);
}

TEST(OverlaidPlans, BundledPlansAgree) { expect_overlaid_agreement(overlaid_sample(), 28); }

TEST(OverlaidPlans, All498PlansAgree) {
  const auto data = find_data_dir();
  const auto path = data ? *data / "recordings_more/vllm-0.33.0/layouts.jsonl" : "";
  if (!data || !std::filesystem::exists(path)) GTEST_SKIP() << data_dir_hint();
  expect_overlaid_agreement(path.string(), 498);
}

TEST(OverlaidPlans, AChangeInOneStageIsFoundThere) {
  std::ifstream lines(overlaid_sample());
  std::string text;
  nlohmann::json plan;
  while (std::getline(lines, text)) {
    plan = nlohmann::json::parse(text);
    if (plan["options"]["model"] == "qwen3.5-0.8b") break;
  }
  ASSERT_EQ(plan["options"]["model"], "qwen3.5-0.8b");
  const tests::TemporaryFolder folder;
  for (const char* place :
       {"/aligned/block_size", "/specs/0/page_size_bytes", "/specs/1/hnc/2", "/layout/chosen",
        "/plan/num_blocks", "/plan/groups/1/layers/0", "/plan/tensors/0/block_stride",
        "/capacity/tokens", "/block_sizes/hash", "/needs_zeroing",
        "/pools/2/tensors/1/layer_stride", "/pools/3/first_runner/kernel_block_sizes/0",
        "/pools/7/first_runner/views/layers.3.attn/page/stride/0",
        "/pools/2/first_runner/zero/sha256"}) {
    const nlohmann::json::json_pointer pointer(place);
    nlohmann::json changed = plan;
    ASSERT_TRUE(changed.contains(pointer)) << place;
    changed[pointer] = "another";
    const auto path = folder.path("layouts.jsonl");
    std::ofstream(path) << changed.dump() << "\n";
    const auto result = conform_layouts(path);
    if (!result) {
      ADD_FAILURE() << place << ": " << result.error().message;
      continue;
    }
    ASSERT_EQ(result->mismatches.size(), 1u) << place;
    const std::string stage = std::string(place).substr(1, std::string(place).find('/', 1) - 1);
    EXPECT_TRUE(result->mismatches[0].mismatch.what.starts_with(stage))
        << place << ": " << result->mismatches[0].mismatch.what;
  }
}

// Line to the rules that its plan breaks in a pool of three, in every order that the plan takes.
std::map<std::int64_t, std::string> broken_plans(const std::string& path) {
  std::map<std::int64_t, std::string> broken;
  const auto recordings = read_plan_recordings(path);
  if (!recordings) return broken;
  for (const PlanRecording& recording : *recordings) {
    const auto& inputs = std::get<OverlaidPlanInputs>(recording.inputs);
    const PlacementStages memory = plan_of(inputs);
    if (memory.workers.empty() || memory.workers[0].groups.empty()) continue;
    const Placement& plan = memory.workers[0];
    const auto small = place_blocks(plan.groups, plan.order, 3, inputs.options);
    if (!small) continue;
    const auto pages = worker_pages(*small, memory.layers, inputs.options);
    if (!pages || pages->device_bytes > (128 << 20)) continue;
    const PlanProof proof = prove_pages(*small, *pages);
    for (const PlanFinding& finding : proof.findings)
      broken[recording.line] += finding.rule + " (" + finding.text + ") ";
  }
  return broken;
}

TEST(OverlaidPlans, TheProverNamesThePlansThatLoseBytesAndNoOthers) {
  const auto data = find_data_dir();
  const auto full = data ? *data / "recordings_more/vllm-0.33.0/layouts.jsonl" : "";
  const std::string path =
      data && std::filesystem::exists(full) ? full.string() : overlaid_sample();
  const auto broken = broken_plans(path);
  const auto recordings = read_plan_recordings(path);
  ASSERT_TRUE(recordings);
  std::int64_t overlaid = 0;
  for (const PlanRecording& recording : *recordings) {
    const auto recorded = nlohmann::json::parse(recording.json);
    const auto at = broken.find(recording.line);
    const bool loses = recorded.contains("defects") &&
                       recorded["defects"].dump().find("copy") != std::string::npos;
    const std::string text = at == broken.end() ? "" : at->second;
    EXPECT_EQ(text.find("copy") != std::string::npos, loses) << recording.line << ": " << text;
    // Two strides between blocks, layers outermost: the zeroing kernel refuses it too.
    overlaid += text.find("overlay") != std::string::npos ? 1 : 0;
    for (const char* rule : {"overlap", "bounds", "derivation"})
      EXPECT_EQ(text.find(rule), std::string::npos) << recording.line << ": " << text;
  }
  EXPECT_EQ(overlaid, 1);
}

// What a connector that keeps blocks on the host loses of a plan in a pool of three, by its rule.
std::map<std::string, std::string> lost_by_connectors(const PlanRecording& recording) {
  std::map<std::string, std::string> lost;
  const auto& inputs = std::get<OverlaidPlanInputs>(recording.inputs);
  const PlacementStages memory = plan_of(inputs);
  if (memory.workers.empty() || memory.workers[0].groups.empty()) return lost;
  const Placement& plan = memory.workers[0];
  const auto small = place_blocks(plan.groups, plan.order, 3, inputs.options);
  if (!small) return lost;
  const auto pages = worker_pages(*small, memory.layers, inputs.options);
  if (!pages || pages->device_bytes > (128 << 20)) return lost;
  for (const PlanFinding& finding : prove_pages(*small, *pages).with_connectors)
    lost[finding.rule] = std::string(name_of(plan.order)) + ": " + finding.text;
  return lost;
}

// By rule and layout. Both lose the plan whose groups have two strides between blocks; the
// offloading connector also loses separate heads, and states without attention in a block-outer
// layout.
TEST(OverlaidPlans, TheOffloadingConnectorLosesWhatDoesNotLieAPageApart) {
  const auto data = find_data_dir();
  const auto full = data ? *data / "recordings_more/vllm-0.33.0/layouts.jsonl" : "";
  const bool is_full = data && std::filesystem::exists(full);
  const auto recordings = read_plan_recordings(is_full ? full.string() : overlaid_sample());
  ASSERT_TRUE(recordings);
  std::map<std::string, int> plans;
  for (const PlanRecording& recording : *recordings)
    for (const auto& [rule, text] : lost_by_connectors(recording))
      ++plans[rule + " " + text.substr(0, text.find(':'))];
  const std::map<std::string, int> expected = {{"offloading LHBNC", 4},
                                               {"offloading BLHNC", 1},
                                               {"offloading LBNHC", 1},
                                               {"simple offload LBNHC", 1}};
  if (is_full) {
    EXPECT_EQ(plans, expected);
  }
  for (const auto& [key, count] : plans) EXPECT_TRUE(expected.contains(key)) << key;
}

// The smallest plan: one layer of two heads. Rows of K and V of a head have 256 bytes, a block of a
// head 4,096, so that of three blocks the second head begins at byte 12,288.
TEST(OverlaidPlans, Finding34AHeadOfOneLayerIsKept) {
  KVCacheSpec spec;
  spec.num_kv_heads = 2;
  spec.head_size = spec.head_size_v = 64;
  spec.dcp_sharded = false;
  std::vector<KVCacheGroupSpec> groups(1);
  groups[0].layer_names = {"a"};
  groups[0].spec = spec;
  const std::vector<PlacementLayer> layers = {{.name = "a", .spec = spec, .backend = "flash_attn"}};
  for (const CacheLayout order : {CacheLayout::LHBNC, CacheLayout::LBNHC, CacheLayout::LBHNC}) {
    const auto plan = place_blocks(groups, order, 3, {});
    ASSERT_TRUE(plan) << plan.error().message;
    const auto pages = worker_pages(*plan, layers, {});
    ASSERT_TRUE(pages) << pages.error().message;
    const PlanProof proof = prove_pages(*plan, *pages);
    EXPECT_TRUE(proof.holds());
    if (order != CacheLayout::LHBNC) {
      EXPECT_TRUE(proof.with_connectors.empty());
      continue;
    }
    ASSERT_EQ(proof.with_connectors.size(), 1u);
    EXPECT_EQ(proof.with_connectors[0].rule, "offloading");
    EXPECT_NE(proof.with_connectors[0].text.find("byte 12288 of "), std::string::npos)
        << proof.with_connectors[0].text;
  }
}

struct SmallPlan {
  Placement plan;
  WorkerPages pages;
};

// A recorded plan of several groups with blocks outermost, in a pool of three.
SmallPlan hybrid_plan() {
  const auto recordings = read_plan_recordings(overlaid_sample());
  if (!recordings) return {};
  for (const PlanRecording& recording : *recordings) {
    if (recording.model != "qwen3.5-0.8b") continue;
    const auto& inputs = std::get<OverlaidPlanInputs>(recording.inputs);
    const PlacementStages memory = plan_of(inputs);
    const Placement& plan = memory.workers.at(0);
    SmallPlan small{*place_blocks(plan.groups, plan.order, 3, inputs.options), {}};
    small.pages = *worker_pages(small.plan, memory.layers, inputs.options);
    return small;
  }
  return {};
}

bool is_found(const SmallPlan& small, std::string_view rule) {
  for (const PlanFinding& finding : prove_pages(small.plan, small.pages).findings)
    if (finding.rule == rule) return true;
  return false;
}

TEST(OverlaidPlans, TheProverFindsWhatIsMoved) {
  const SmallPlan sound = hybrid_plan();
  ASSERT_GT(sound.plan.groups.size(), 1u);
  EXPECT_TRUE(prove_pages(sound.plan, sound.pages).holds());
  SmallPlan moved = sound;
  moved.pages.layers.back().page.row_stride += 4;
  EXPECT_TRUE(is_found(moved, "derivation"));
  moved = sound;
  moved.pages.device_bytes -= 1;
  EXPECT_TRUE(is_found(moved, "bounds"));
  moved = sound;
  moved.plan.tensors[0].layer_stride = moved.plan.tensors[0].block_stride;
  EXPECT_TRUE(is_found(moved, "overlap"));
  moved = sound;
  moved.plan.tensors[0].offset += moved.plan.tensors[0].block_stride;
  EXPECT_TRUE(is_found(moved, "overlay"));
  moved = sound;
  moved.pages.layers.back().page.offset -= moved.plan.tensors.back().block_stride;
  EXPECT_TRUE(is_found(moved, "zeroing"));
  moved = sound;
  // Its blocks span the allocation and are copied whole. When they do not, the first view at an
  // address is copied alone: a state.
  moved.pages.device_bytes += 4096;
  moved.pages.layers.front().page.content_bytes /= 2;
  EXPECT_TRUE(is_found(moved, "copy"));
  moved = sound;
  EXPECT_TRUE(prove_pages(moved.plan, moved.pages).with_connectors.empty());
  for (PlacedTensor& tensor : moved.plan.tensors) tensor.block_stride -= 64;
  EXPECT_EQ(prove_pages(moved.plan, moved.pages).with_connectors.size(), 2u);
}

}  // namespace
}  // namespace lockstep
