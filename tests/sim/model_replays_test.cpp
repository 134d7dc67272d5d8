// Models whose layers keep rows for several tokens, windows of MLA rows, rings and a drafter's own
// cache, replayed from their model files in the memory that vLLM 0.33.0 plans for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cuda_backend/backends.h"
#include "reference/types/host_pages.h"
#include "sim/setup/replay_setup.h"
#include "tests/support/temporary_folder.h"

namespace lockstep {
namespace {

using ModelJson = nlohmann::json;

// A model of the catalogue with only these layers.
std::string model_with(const tests::TemporaryFolder& folder, const std::string& name,
                       const ModelJson& layers, const ModelJson& more = ModelJson::object()) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/traces/models/" + name + ".json");
  ModelJson model = ModelJson::parse(file);
  model["layers"] = layers;
  model.update(more);
  const auto path = folder.path("model.json");
  std::ofstream(path) << model.dump();
  return path;
}

// A prompt of 300 tokens that is resent once the first request has ended.
std::string trace_of(const tests::TemporaryFolder& folder, const ModelJson& more) {
  ModelJson config = {{"max_num_batched_tokens", 256}, {"max_model_len", 1024}};
  config.update(more);
  const auto path = folder.path("trace.jsonl");
  std::ofstream file(path);
  file << ModelJson{{"lockstep_trace", 1},
                    {"time", "ns"},
                    {"source", {{"kind", "by hand"}, {"name", "one"}}},
                    {"engine", {{"config", config}}}}
              .dump()
       << "\n";
  for (int i = 0; i < 2; ++i)
    file << ModelJson{{"id", "r" + std::to_string(i)},
                      {"t", i * 1'000'000'000'000},
                      {"prompt", {{1, 300}}},
                      {"output", {{"length", 6}}}}
                .dump()
         << "\n";
  file << ModelJson{{"end", true}, {"records", 2}}.dump() << "\n";
  return path;
}

struct ModelReplay {
  std::string ending;
  CacheLayout layout = CacheLayout::NHD;
  std::size_t layers = 0, drafters_groups = 0;
  std::int64_t cached_tokens = 0;
  std::int64_t draft_rows_read = 0, stale_draft_rows = 0;
  std::int64_t kept_below_windows = 0;
  std::int32_t looked_ahead = 0;
};

ModelReplay replay_of(const std::string& model, const std::string& trace,
                      std::int32_t cp_kv_cache_interleave_size = 1) {
  ReplayRequest request{.file = trace, .run = {}};
  request.run.set_text("model", model);
  request.run.set_text("engine", "vllm-0.33.0");
  request.run.spec.backend = "simt";
  request.run.add(run_field("backend"));
  request.run.spec.cp_kv_cache_interleave_size = cp_kv_cache_interleave_size;
  request.run.add(run_field("cp_kv_cache_interleave_size"));
  auto prepared = prepare_replay(std::move(request));
  if (!prepared) return {.ending = prepared.error().message};
  ModelReplay replay{.ending = {}, .layout = prepared->run.layout};
  for (const KVCacheGroupSpec& group : prepared->run.cache.groups) {
    replay.layers += group.layer_names.size();
    replay.drafters_groups += group.is_eagle_group ? 1 : 0;
    replay.kept_below_windows =
        std::max(replay.kept_below_windows, group.spec.extra_retained_tokens);
  }
  replay.looked_ahead = prepared->run.engine.num_prefill_lookahead_tokens;
  prepared->parts.backend = make_simt_backend;
  auto session = Session::open(prepared->config, std::move(prepared->parts));
  if (!session) return {.ending = session.error().message};
  const auto report = (*session)->run();
  if (!report) return {.ending = report.error().message};
  const RunSummary& summary = report->summary;
  replay.ending = summary.divergence ? summary.divergence->message : name_of(summary.verdict);
  replay.cached_tokens = summary.cached_tokens;
  replay.draft_rows_read = summary.draft_rows_read;
  replay.stale_draft_rows = summary.stale_draft_rows;
  return replay;
}

const ModelJson kTwoOfV4 = {{"c4", "swa", "c4_state", "c4_indexer", "c4_indexer_state"},
                            {"c128", "swa", "c128_state"},
                            "draft"};

TEST(ModelReplays, OfV4LieInPackedBlocksAndHitWholeBlocks) {
  const tests::TemporaryFolder folder;
  const ModelReplay replay = replay_of(model_with(folder, "deepseek-v4-flash", kTwoOfV4),
                                       trace_of(folder, ModelJson::object()));
  EXPECT_EQ(replay.ending, "agreed");
  EXPECT_EQ(replay.layout, CacheLayout::BLHNC);
  EXPECT_EQ(replay.layers, 8u);
  EXPECT_EQ(replay.drafters_groups, 0u);
  EXPECT_EQ(replay.cached_tokens, 256);
}

TEST(ModelReplays, OfV4WithDraftsHaveTheDraftersLayer) {
  const tests::TemporaryFolder folder;
  const ModelReplay replay =
      replay_of(model_with(folder, "deepseek-v4-flash", kTwoOfV4),
                trace_of(folder, {{"num_spec_tokens", 1}, {"spec_method", "eagle"}}));
  EXPECT_EQ(replay.ending, "agreed");
  EXPECT_EQ(replay.layers, 9u);
  EXPECT_EQ(replay.drafters_groups, 1u);
  EXPECT_GT(replay.cached_tokens, 0);
  EXPECT_GT(replay.draft_rows_read, 300);
  EXPECT_EQ(replay.stale_draft_rows, 0);
}

// Three modules read three tokens after a chunk, so windows keep two more tokens. A fourth draft is
// the last module's second.
TEST(ModelReplays, WithSeveralModulesOfMtpKeepTokensBelowTheirWindows) {
  const tests::TemporaryFolder folder;
  ModelJson layers = kTwoOfV4;
  for (int module = 1; module < 3; ++module) layers.push_back("draft");
  const std::string model = model_with(folder, "deepseek-v4-flash", layers, {{"mtp_modules", 3}});
  for (const int drafts : {1, 3, 4}) {
    const ModelReplay replay = replay_of(model, trace_of(folder, {{"num_spec_tokens", drafts},
                                                                  {"spec_method", "eagle"},
                                                                  {"async_scheduling", false}}));
    EXPECT_EQ(replay.ending, "agreed") << drafts;
    EXPECT_EQ(replay.layers, 11u);
    EXPECT_EQ(replay.kept_below_windows, drafts - 1);
    EXPECT_EQ(replay.looked_ahead, drafts);
    EXPECT_GT(replay.cached_tokens, 0);
    EXPECT_EQ(replay.draft_rows_read > 0, drafts <= 3) << drafts;  // as many as there are modules
  }
}

TEST(ModelReplays, OfV41KeepARingAndComputeWindowsAgain) {
  const tests::TemporaryFolder folder;
  const ModelJson layers = {{"c1", "swa", "c1_indexer"}, {"c2", "swa", "c2_state", "c2_indexer"}};
  const ModelReplay replay = replay_of(model_with(folder, "deepseek-v4.1-like", layers),
                                       trace_of(folder, ModelJson::object()));
  EXPECT_EQ(replay.ending, "agreed");
  EXPECT_EQ(replay.layout, CacheLayout::BLHNC);
  EXPECT_EQ(replay.layers, 7u);
  EXPECT_GT(replay.cached_tokens, 0);
}

// Rows of four tokens are sharded like those that they select from; each rank has the ring.
TEST(ModelReplays, OfGlmDealOutAnIndexersRowsAndKeepItsRingWhole) {
  const tests::TemporaryFolder folder;
  const std::string model =
      model_with(folder, "glm-5.3-flash-like", {{"attn", "indexer", "tail"}, {"attn", "indexer"}});
  const std::string trace = trace_of(folder, {{"dcp", 2}});
  for (const std::int32_t interleave : {4, 128}) {
    const ModelReplay replay = replay_of(model, trace, interleave);
    EXPECT_EQ(replay.ending, "agreed");
    EXPECT_EQ(replay.layout, CacheLayout::BLHNC);
    EXPECT_EQ(replay.layers, 5u);
    EXPECT_EQ(replay.cached_tokens, 256);
  }
  EXPECT_NE(replay_of(model, trace, 2).ending.find("an entry of 4 tokens is on one rank"),
            std::string::npos);
}

TEST(ModelReplays, KeepADraftersRowsWholeWhereItRunsAlone) {
  const tests::TemporaryFolder folder;
  const ModelJson kinds = {{"attn", {{"kind", "mla"}, {"head_size", 576}}},
                           {"draft",
                            {{"kind", "full"},
                             {"num_kv_heads", 2},
                             {"head_size", 64},
                             {"is_draft", true},
                             {"dcp_sharded", false}}}};
  const ModelReplay replay = replay_of(
      model_with(folder, "deepseek-v3", {"attn", "attn", "draft"}, {{"layer_kinds", kinds}}),
      trace_of(folder, {{"dcp", 2}, {"spec_method", "eagle"}, {"num_spec_tokens", 2}}));
  EXPECT_EQ(replay.ending, "agreed");
  EXPECT_EQ(replay.layout, CacheLayout::BLNHC);  // different pages, block-outer
  EXPECT_EQ(replay.drafters_groups, 1u);
  EXPECT_GT(replay.cached_tokens, 0);
}

// The second prompt hits what the host pool holds of the first. Its pool is that of a GiB in the
// plan, and what three requests need in the run.
TEST(ModelReplays, OfSparseAttentionWithAHostPoolHaveHiSparsesGroups) {
  const tests::TemporaryFolder folder;
  ModelJson layers = ModelJson::array();
  for (int i = 0; i < 3; ++i) layers.push_back({"attn", "indexer"});
  const std::string model = model_with(folder, "deepseek-v3.2", layers);
  const auto prepare = [&](std::vector<std::string> names) {
    ReplayRequest request{.file = trace_of(folder, ModelJson::object()), .run = {}};
    request.run.set_text("model", model);
    request.run.set_text("engine", "vllm-0.33.0");
    request.run.set_text("connector", "hisparse");
    request.run.spec.backend = "simt";
    request.run.spec.recipe.hisparse_host_gib = 1;
    request.run.spec.recipe.hisparse_device_buffer = 4160;
    names.emplace_back("backend");
    for (const std::string& name : names) request.run.add(run_field(name));
    return prepare_replay(std::move(request));
  };
  auto prepared = prepare({"hisparse_host_gib", "hisparse_device_buffer"});
  ASSERT_TRUE(prepared) << prepared.error().message;
  const KVCacheConfig& plan = prepared->run.cache;
  EXPECT_EQ(plan.groups.front().role, kPageSourceRole);
  EXPECT_EQ(plan.groups.back().spec.blocks_per_request, 65);
  EXPECT_EQ(prepared->run.engine.host_pool_num_blocks, (1 << 30) / (3 * 64 * 656));
  const std::int64_t num_host_blocks = 3 * (prepared->config.engine.max_model_len / 64 + 2);
  prepared->config.engine.host_pool_num_blocks = num_host_blocks;
  prepared->config.backend.num_host_blocks = num_host_blocks;
  prepared->parts.backend = make_simt_backend;
  auto session = Session::open(prepared->config, std::move(prepared->parts));
  ASSERT_TRUE(session) << session.error().message;
  const auto report = (*session)->run();
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(name_of(report->summary.verdict), "agreed");
  EXPECT_EQ(report->summary.cached_tokens, 256);
  EXPECT_GT(report->summary.host_blocks_checked, 0);
  const auto alone = prepare({"hisparse_device_buffer"});
  ASSERT_FALSE(alone);
  EXPECT_EQ(alone.error().message, "--hisparse-device-buffer needs --hisparse-host-gib");
}

// Of each group and spec one layer has pages: blocks, kinds of pages and decisions are the model's.
TEST(ModelReplays, OfFewerLayersPerGroupDecideTheSame) {
  const tests::TemporaryFolder folder;
  ModelJson pairs = ModelJson::array();
  for (int i = 0; i < 3; ++i) pairs.push_back({"attn", "indexer"});
  struct Run {
    std::vector<std::size_t> layers;  // by group
    std::int64_t num_blocks = 0;
    std::int64_t cached_tokens = 0;
    std::string decisions, ending;
  };
  const auto run = [&](const std::string& engine, const std::string& backend, int layers) {
    ReplayRequest request{.file = trace_of(folder, ModelJson::object()), .run = {}};
    request.run.set_text("model", model_with(folder, "deepseek-v3.2", pairs));
    request.run.set_text("engine", engine);
    request.run.spec.backend = backend;
    request.run.add(run_field("backend"));
    request.run.spec.recipe.layers_per_group = layers;
    if (layers > 0) request.run.add(run_field("layers_per_group"));
    auto prepared = prepare_replay(std::move(request));
    EXPECT_TRUE(prepared) << prepared.error().message;
    Run result;
    result.num_blocks = prepared->run.cache.num_blocks;
    for (const KVCacheGroupSpec& group : prepared->run.cache.groups)
      result.layers.push_back(group.layer_names.size());
    if (backend != "none") prepared->parts.backend = make_simt_backend;
    auto session = Session::open(prepared->config, std::move(prepared->parts));
    EXPECT_TRUE(session) << session.error().message;
    const auto report = (*session)->run();
    EXPECT_TRUE(report) << report.error().message;
    result.cached_tokens = report->summary.cached_tokens;
    result.decisions = to_hex(report->summary.state_hash);
    result.ending = name_of(report->summary.verdict);
    return result;
  };
  for (const std::string engine : {"vllm-0.22.1", "vllm-0.33.0"}) {
    const Run whole = run(engine, "none", 0), part = run(engine, "none", 1);
    EXPECT_EQ(whole.layers, std::vector<std::size_t>{6}) << engine;
    EXPECT_EQ(part.layers, std::vector<std::size_t>{2}) << engine;
    EXPECT_EQ(part.num_blocks, whole.num_blocks) << engine;
    EXPECT_EQ(part.decisions, whole.decisions) << engine;
    EXPECT_GT(part.cached_tokens, 0) << engine;
    EXPECT_EQ(run(engine, "simt", 1).ending, "agreed") << engine;
  }
}

}  // namespace
}  // namespace lockstep
