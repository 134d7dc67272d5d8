// A plan of either planner as table, map, picture, graph and JSON: for small models each shows the
// plan.
#include "sim/report/plan_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json_reader.h"
#include "sim/report/memory_diff.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

constexpr std::string_view kHybrid = R"({"model_file": 1, "name": "<tiny>", "layer_kinds": {
  "linear": {"kind": "mamba", "states": "mamba1", "intermediate_size": 512, "state_size": 16,
             "conv_kernel": 4, "ssm_dtype": "fp32"},
  "attn": {"kind": "full", "num_kv_heads": 2, "head_size": 16}},
  "layers": [{"repeat": 3, "of": ["linear", "linear", "attn"]}]})";

constexpr std::string_view kPlain = R"({"model_file": 1, "name": "plain", "layer_kinds": {
  "attn": {"kind": "full", "num_kv_heads": 4, "head_size": 16}},
  "layers": [{"repeat": 6, "of": ["attn"]}]})";
constexpr std::string_view kUnlike = R"({"model_file": 1, "name": "unlike", "layer_kinds": {
  "attn": {"kind": "full", "num_kv_heads": 4, "head_size": 16},
  "near": {"kind": "sliding_window", "num_kv_heads": 2, "head_size": 16, "sliding_window": 64}},
  "layers": [{"repeat": 3, "of": ["near", "attn"]}]})";

const TensorDetails& tensors_of(const PlanReport& report) {
  return std::get<TensorDetails>(report.details);
}

PlanReport report_of(PlanOptions options, CacheLayout layout = CacheLayout::NHD) {
  const auto model = model_from_text(kHybrid, "tiny.json");
  EXPECT_TRUE(model) << model.error().message;
  options.max_model_len = 1024;
  options.num_gpu_blocks_override = 100;
  auto report = make_plan_report(*model, options, "vllm-0.22.1", std::string(name_of(layout)));
  EXPECT_TRUE(report) << report.error().message;
  return std::move(*report);
}

Result<PlanReport> placed_report(std::string_view model, CacheLayout order,
                                 std::int64_t stages = 1) {
  PlanOptions options;
  options.max_model_len = 1024;
  options.num_gpu_blocks_override = 200;
  options.pp = stages;
  return make_plan_report(*model_from_text(model, "model.json"), options, "vllm-0.33.0",
                          std::string(name_of(order)));
}

std::ptrdiff_t count(const std::string& text, std::string_view what) {
  std::ptrdiff_t found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1))
    ++found;
  return found;
}

TEST(PlanReport, TheTableNamesGroupsTensorsAndCapacity) {
  const PlanReport report = report_of({});
  const std::string table = plan_table(report);
  EXPECT_NE(table.find(" in 3 tensors"), std::string::npos) << table;
  EXPECT_NE(table.find("tensor 0: "), std::string::npos) << table;
  EXPECT_NE(table.find("no byte has two owners"), std::string::npos) << table;
  EXPECT_NE(table.find("layers.2.attn"), std::string::npos);
  EXPECT_NE(table.find(std::to_string(tensors_of(report).capacity[0].blocks_per_request)),
            std::string::npos);
}

TEST(PlanReport, TheMapDrawsEachWayToFillAPageAndTheEmptyPlaceOfThePack) {
  PlanOptions options;
  options.attn_pack = 2;
  const std::string map = plan_map(report_of(options));
  EXPECT_EQ(count(map, "a block of groups"), 3) << map;  // states, a full pack, a pack with a gap
  EXPECT_NE(map.find("empty position of the pack"), std::string::npos);
  EXPECT_NE(map.find("layers: a layers.2.attn b layers.5.attn"), std::string::npos) << map;
  for (std::size_t at = map.find('|'); at != std::string::npos;) {
    const std::size_t end = map.find('|', at + 1);
    EXPECT_EQ(end - at - 1, 96u);
    at = map.find('|', end + 1);
  }
}

TEST(PlanReport, ThePictureEscapesNamesAndClosesWhatItOpens) {
  const std::string svg = plan_svg(report_of({}));
  EXPECT_NE(svg.find("&lt;tiny&gt;"), std::string::npos);
  EXPECT_EQ(count(svg, "<rect"), count(svg, "</rect>"));
  EXPECT_GT(count(svg, "<rect"), 2);
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
}

TEST(PlanReport, TheGraphHasAnEdgeFromEachGroupToItsLayersAndFromEachLayerToItsTensor) {
  const PlanReport report = report_of({});
  const std::string dot = plan_dot(report);
  EXPECT_EQ(count(dot, "->"), 2 * 9);
  EXPECT_EQ(count(dot, "shape=box"), 3);
  EXPECT_EQ(count(dot, "shape=cylinder"), 3);
  EXPECT_TRUE(dot.starts_with("digraph"));
}

TEST(PlanReport, TheJsonHoldsThePlanTheLayoutsAndTheCapacity) {
  const PlanReport report = report_of({}, CacheLayout::HND);
  const std::string json = plan_to_json(report);
  JsonReader reader("plan.json");
  ASSERT_TRUE(reader.parse(json)) << reader.error().message;
  JsonObject object = reader.root().object();
  EXPECT_EQ(object.required("options").object().required("layout").string(), "HND");
  JsonObject worker = (*object.required("workers").array().begin()).object();
  EXPECT_EQ(worker.required("plan").object().required("num_blocks").integer(), 100);
  JsonObject capacity = worker.required("capacity").object();
  EXPECT_EQ(capacity.required("capacity_tokens").integer(),
            tensors_of(report).capacity[0].capacity_tokens);
  EXPECT_EQ(capacity.required("max_concurrency").binary64(),
            tensors_of(report).capacity[0].max_concurrency);
  JsonObject layer = worker.required("layers").object().required("layers.2.attn").object();
  EXPECT_EQ(layer.required("layout").object().required("token_stride_bytes").integer(),
            tensors_of(report).pools[0].layers.back().parts[0].row_stride);
  EXPECT_TRUE(reader.ok()) << reader.error().message;
}

TEST(PlanReport, EveryModelOfTheCatalogueIsDrawnInBothLayoutsOrNeedsALaterRelease) {
  int later = 0;
  for (const std::string& name : model_names())
    for (CacheLayout layout : {CacheLayout::NHD, CacheLayout::HND}) {
      const auto model = find_model(name);
      PlanOptions options;
      options.max_model_len = 4096;
      options.mamba_chunk_size = model->mamba_chunk_size;
      const auto report =
          make_plan_report(*model, options, "vllm-0.22.1", std::string(name_of(layout)));
      if (name == "deepseek-v4.1-like" || name == "glm-5.3-flash-like") {
        EXPECT_NE(report.error().message.find("overlaid memory"), std::string::npos);
        ++later;
        continue;
      }
      ASSERT_TRUE(report) << name << ": " << report.error().message;
      EXPECT_GT(plan_map(*report).size(), 100u) << name;
      EXPECT_GT(plan_svg(*report).size(), 100u) << name;
      EXPECT_GT(plan_to_json(*report).size(), 100u) << name;
    }
  EXPECT_EQ(later, 4);
}

// Runs are disjoint, inside the block, and cover exactly what the group's layers keep.
void expect_sound_runs(const Placement& plan, const MemoryPlan& memory) {
  const std::int64_t bytes = bytes_per_block(plan.groups, plan.order);
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    std::int64_t end = 0, drawn = 0, kept = 0;
    for (const BlockRun& run : row_runs(memory, g, 0)) {
      EXPECT_GE(run.begin, end) << run.layer;
      end = run.end;
      drawn += run.end - run.begin;
    }
    for (std::size_t i = 0; i < plan.groups[g].layer_names.size(); ++i)
      kept += unpadded_page_bytes(plan.groups[g].layer_spec(i));
    EXPECT_LE(end, bytes);
    EXPECT_EQ(drawn, kept) << "group " << g << " in " << name_of(plan.order);
  }
}

TEST(PlanReport, IsDrawnInEveryOrderThatTheEngineTakes) {
  int taken = 0;
  for (const std::string_view model : {kHybrid, kPlain, kUnlike})
    for (const CacheLayout order : kOverlaidLayouts) {
      const auto report = placed_report(model, order);
      if (!report) {
        EXPECT_FALSE(is_block_compact(order)) << report.error().message;
        EXPECT_NE(report.error().message.find("engine core (layout)"), std::string::npos);
        continue;
      }
      ++taken;
      expect_sound_runs(std::get<ModelPlacement>(report->details).stages.workers.front(),
                        report->workers.front().memory);
      const std::string svg = plan_svg(*report);
      EXPECT_EQ(count(svg, "<rect"), count(svg, "</rect>"));
      EXPECT_TRUE(svg.ends_with("</svg>\n"));
      EXPECT_EQ(svg.find("<tiny>"), std::string::npos);
      const std::string map = plan_map(*report);
      for (std::size_t at = map.find('|'); at != std::string::npos;) {
        const std::size_t end = map.find('|', at + 1);
        EXPECT_EQ(end - at - 1, 96u);
        at = map.find('|', end + 1);
      }
    }
  EXPECT_EQ(taken, 4 + 6 + 4);
}

// In order BHLNC the layers of a block lie head by head, in all others layer by layer.
TEST(PlanReport, TheRunsOfABlockLieAsTheOrderSays) {
  const auto first_layers = [](CacheLayout order) {
    const auto report = placed_report(kPlain, order);
    const auto runs = row_runs(report->workers.front().memory, 0, 0);
    return std::pair{runs.size(), runs[0].layer == runs[1].layer};
  };
  EXPECT_EQ(first_layers(CacheLayout::BLNHC), (std::pair{std::size_t{6}, false}));
  EXPECT_EQ(first_layers(CacheLayout::BHLNC), (std::pair{std::size_t{24}, false}));
  EXPECT_EQ(first_layers(CacheLayout::LHBNC), (std::pair{std::size_t{24}, true}));
}

TEST(PlanReport, TheGraphAndTheJsonHoldEveryStage) {
  const auto report = placed_report(kHybrid, CacheLayout::BLNHC, 3);
  ASSERT_TRUE(report) << report.error().message;
  const std::string dot = plan_dot(*report);
  EXPECT_EQ(count(dot, "->"), 2 * 9) << dot;
  EXPECT_NE(dot.find("stage 2, group 0"), std::string::npos);
  EXPECT_NE(plan_table(*report).find("stage 1 of 3"), std::string::npos);
  const auto json = nlohmann::json::parse(plan_to_json(*report));
  EXPECT_EQ(json.at("order").at("chosen"), "BLNHC");
  ASSERT_EQ(json.at("workers").size(), 3u);
  std::size_t layers = 0;
  for (std::size_t w = 0; w < 3; ++w) {
    const auto& worker = json.at("workers")[w];
    EXPECT_EQ(worker.at("num_blocks"), 200);
    EXPECT_EQ(worker.at("capacity").at("capacity_tokens"), report->workers[w].capacity_tokens);
    layers += worker.at("layers").size();
  }
  EXPECT_EQ(layers, 9u);
}

TEST(PlanReport, EveryModelOfTheCatalogueIsDrawnOverlaid) {
  for (const std::string& name : model_names()) {
    PlanOptions options;
    options.max_model_len = 4096;
    const auto report = make_plan_report(*find_model(name), options, "vllm-0.33.0", "");
    ASSERT_TRUE(report) << name << ": " << report.error().message;
    EXPECT_GT(plan_map(*report).size(), 100u) << name;
    EXPECT_TRUE(nlohmann::json::accept(plan_to_json(*report))) << name;
  }
}

TEST(MemoryDiff, TellsWhatAReleaseChangesAndWhatItRefuses) {
  const auto model = model_from_text(kHybrid, "tiny.json");
  PlanOptions options;
  options.max_model_len = 1024;
  options.memory_bytes = std::int64_t{64} << 20;
  const std::vector<std::string> engines = {"vllm-0.22.1", "vllm-0.28.0", "vllm-0.33.0"};
  const auto releases = memory_of_releases(*model, options, false, EngineConfig{}, engines);
  ASSERT_TRUE(releases) << releases.error().message;
  ASSERT_EQ(releases->size(), 3u);
  // Mamba keeps a state a block in the oldest, and one at boundaries in the newest.
  EXPECT_EQ((*releases)[0].states, MambaCacheMode::all);
  EXPECT_EQ((*releases)[2].states, MambaCacheMode::align);
  EXPECT_TRUE((*releases)[1].by_older_planner);
  EXPECT_EQ((*releases)[2].order, "LBNHC");
  EXPECT_NE((*releases)[0].capacity_tokens, (*releases)[2].capacity_tokens);
  const std::string table = memory_table(*model, options, *releases);
  EXPECT_EQ(count(table, "vllm-0."), 3) << table;
  options.mamba_cache_mode = MambaCacheMode::all;
  const auto refused = memory_of_releases(*model, options, true, EngineConfig{}, engines);
  ASSERT_TRUE(refused);
  EXPECT_NE((*refused)[2].refused.find("mamba_cache_mode all"), std::string::npos);
  const auto unknown =
      memory_of_releases(*model, options, true, EngineConfig{}, std::vector<std::string>{"vllm-9"});
  EXPECT_FALSE(unknown);
}

}  // namespace
}  // namespace lockstep
