// Several stored rows per token (tokens_per_state "1/n"): files, plans of the engine, recordings,
// and generated cases whose every byte is compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "cuda_backend/backends.h"
#include "properties/fuzz/fuzz.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "properties/judge/tally.h"
#include "reference/memory/memory_model.h"
#include "reference/plan/page_size.h"
#include "reference/types/token_rows.h"
#include "sim/conform/conform.h"
#include "sim/conform/conform_layouts.h"
#include "tests/properties/audit/audited.h"
#include "tests/support/temporary_folder.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

// Four layers of vLLM 0.33.0's own planner (python/tests/plans/record_plans.py).
constexpr std::string_view kPlan = R"(
{"layout_recording":2,"engine":{"name":"vllm","version":"0.33.0"},"specs_of_first_runner":"same",
"specs":[{"type":"full","block_size":528,"num_kv_heads":2,"head_size":80,"dtype":"float32",
"head_size_v":80,"tokens_per_state":"1/4","page_size_bytes":2703360,"hnc":[2,2112,640]}],
"layers":[["layers.0.x",0,"triton_attn"],["layers.1.x",0,"triton_attn"],["layers.2.x",0,
"triton_attn"],["layers.3.x",0,"triton_attn"]],"layout":{"supported":["LBNHC","LBHNC","BLNHC",
"BLHNC","BHLNC","LHBNC"],"declared":{"triton_attn":null},"chosen":"LBNHC","by":"default"},
"plan":{"num_blocks":99,"groups":[{"layers":["layers.0.x","layers.1.x","layers.2.x","layers.3.x"],
"spec":0}],"tensors":[{"size":1070530560,"layers":["layers.0.x","layers.1.x","layers.2.x",
"layers.3.x"],"layer_stride":267632640,"block_stride":2703360,"offset":0}],"kv_tp_replicas":1},
"needs_zeroing":false,"pools":{"2":{"tensors":[{"size":21626880,"layer_stride":5406720,
"block_stride":2703360,"offset":0}],"second_runner":"same",
"first_runner":{"kernel_block_sizes":[528],"allocation_bytes":[21626880],
"views":{"layers.0.x":{"page":{"shape":[2,2,2112,160],"stride":[675840,160,320,1],"offset":0,
"dtype":"float32","bytes":[0,5406720]}},"layers.1.x":{"page":{"shape":[2,2,2112,160],
"stride":[675840,160,320,1],"offset":1351680,"dtype":"float32","bytes":[5406720,10813440]}},
"layers.2.x":{"page":{"shape":[2,2,2112,160],"stride":[675840,160,320,1],"offset":2703360,
"dtype":"float32","bytes":[10813440,16220160]}},"layers.3.x":{"page":{"shape":[2,2,2112,160],
"stride":[675840,160,320,1],"offset":4055040,"dtype":"float32","bytes":[16220160,21626880]}}},
"zero":{"segments":4,"first":[[0,2703360,2703360],[5406720,2703360,2703360],[10813440,2703360,
2703360],[16220160,2703360,2703360]],"last":[16220160,2703360,2703360],
"sha256":"d309f7cd23224332df464613c5a59f93"}}}},"capacity":{"max_concurrency":1.5714285714285714,
"tokens":51492},"block_sizes":{"cache_config":528,"scheduler":528,"hash":528,"hit_alignment":528},
"options":{"model":"synthetic","kv_dtype":"auto","backend":"by layer","block_size":16,
"memory_bytes":1073741824,"max_num_seqs":256,"tp":1,"max_model_len":32768,
"mamba_cache_mode":"align","disable_hybrid":true},"aligned":{"block_size":16,
"mamba_block_size":32768,"mamba_page_size_padded":null,"skip_page_size_padded":null}}
)";

std::string on_one_line(std::string_view text) {
  std::string line(text);
  std::erase(line, '\n');
  return line + '\n';
}

std::string written(const std::string& name, const std::string& text) {
  const std::string path = tests::fresh_path(name);
  std::ofstream(path) << text;
  return path;
}

TEST(SeveralRows, ARowIsOneOfItsTokensAndNoTwoHaveTheSameContent) {
  constexpr TokensPerState per_row{.tokens = 1, .rows = 4};
  EXPECT_EQ(rows_in(per_row, 3), 12);
  EXPECT_EQ(tokens_in(per_row, 9), 3);  // the third token in part
  for (std::int64_t token = 0; token < 5; ++token) {
    const RowRange rows = rows_of_token(per_row, token);
    EXPECT_EQ(rows.last - rows.first, 4);
    for (std::int64_t row = rows.first; row < rows.last; ++row) {
      EXPECT_EQ(token_of_row(per_row, row), token);
      for (std::int64_t other = rows.first; other < row; ++other)
        EXPECT_NE(row_content(per_row, 77, row), row_content(per_row, 77, other));
    }
    EXPECT_EQ(row_content(per_row, 77, rows.first), 77u);
  }
}

TEST(SeveralRows, TheNumberIsAFractionInFiles) {
  for (const std::string json : {"\"1/4\"", "4", "1"}) {
    const auto read = tokens_per_state_from_json(json);
    ASSERT_TRUE(read) << json;
    EXPECT_EQ(json_of(*read), json);
  }
  for (const std::string json : {"0", "\"4\"", "\"2/4\"", "\"1/1\"", "\"1/0\"", "\"1/4097\"",
                                 "\"1/4", "\"1/x\"", "\"1/\"", "0.25", "null"})
    EXPECT_FALSE(tokens_per_state_from_json(json)) << json;
}

TEST(SeveralRows, APageHoldsThemAndOtherKindsAreRefused) {
  KVCacheSpec spec;
  const std::int64_t page = page_size_bytes(spec);
  spec.tokens_per_state = {.tokens = 1, .rows = 4};
  EXPECT_EQ(page_size_bytes(spec), 4 * page);
  EXPECT_EQ(why_no_rows(spec), "");
  spec.kind = CacheKind::mla;
  EXPECT_EQ(why_no_rows(spec), "4 stored rows per token in a cache of kind mla");
  spec.kind = CacheKind::sink_full;
  spec.sink_len = spec.block_size;
  EXPECT_EQ(why_no_rows(spec), "4 stored rows per token in a cache of kind full");
}

TEST(SeveralRows, ThePlanIsTheEnginesOwn) {
  const std::string line = on_one_line(kPlan);
  const auto agreed = conform_layouts(written("plan.jsonl", line));
  ASSERT_TRUE(agreed) << agreed.error().message;
  for (const LayoutMismatch& at : agreed->mismatches)
    ADD_FAILURE() << at.mismatch.what << ": " << at.mismatch.recorded << ", " << at.mismatch.model;
  EXPECT_EQ(agreed->agreed, 1);
  std::string other = line;
  other.replace(other.find("\"1/4\""), 5, "\"1/2\"");
  const auto differs = conform_layouts(written("other_plan.jsonl", other));
  ASSERT_TRUE(differs) << differs.error().message;
  EXPECT_EQ(differs->agreed, 0);
}

// The engine's scheduler counts tokens: what it decided for one row per token, it decides for four.
Recording recording_with_rows() {
  auto read =
      read_recording(LOCKSTEP_SOURCE_DIR
                     "/traces/samples/recordings/vllm-0.33.0/full_and_sliding_window/0013.jsonl");
  EXPECT_TRUE(read) << read.error().message;
  for (KVCacheGroupSpec& group : read->header.groups)
    group.spec.tokens_per_state = {.tokens = 1, .rows = 4};
  return *read;
}

TEST(SeveralRows, ARecordingIsReadAuditedAndFollowed) {
  const Recording recording = recording_with_rows();
  EXPECT_TRUE(audit(recording, AuditScope::whole_recording).empty());
  const std::string path = tests::fresh_path("rows.jsonl");
  {
    auto writer = RecordingWriter::create(path, recording.header);
    ASSERT_TRUE(writer) << writer.error().message;
    for (const RecordedStep& step : recording.steps) ASSERT_TRUE(writer->write(step));
    ASSERT_TRUE(writer->close(recording.end));
  }
  const auto again = read_recording(path);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->header.groups, recording.header.groups);
  const auto conform = conform_recording(path);
  ASSERT_TRUE(conform) << conform.error().message;
  EXPECT_FALSE(conform->mismatch);
}

FuzzOptions with_rows(std::int64_t runs, FeatureSet more = {}) {
  FuzzOptions options;
  options.generator.engine = "vllm-0.33.0";
  options.generator.always = {Feature::several_rows, Feature::prefix_caching,
                              Feature::shared_prefixes};
  options.generator.always.add(more);
  options.generator.check = "fast";
  options.backend = make_simt_backend;
  options.runs = runs;
  return options;
}

void expect_agreement(const FuzzOptions& options, std::int64_t cases_with_rows) {
  const FuzzReport report = fuzz(options);
  for (const FuzzFailure& failure : report.failures)
    ADD_FAILURE() << "seed " << failure.seed << ": " << failure.check << ": " << failure.what;
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  EXPECT_GE(report.tally[Reached::several_rows], cases_with_rows);
  EXPECT_GT(report.tally[Reached::hit_several_rows], 0);
}

TEST(SeveralRows, EveryByteOfGeneratedCasesAgrees) { expect_agreement(with_rows(60), 30); }

TEST(SeveralRows, RowsOfNumbersAgree) {
  FuzzOptions options = with_rows(40, {Feature::real_numbers, Feature::full_attention});
  options.generator.never = {Feature::mla, Feature::compressed_rows, Feature::cross_attention};
  options.first_seed = 1000;
  expect_agreement(options, 15);
}

TEST(SeveralRows, TheExecutorFindsNoRaceAndNoStrayAccess) {
  FuzzOptions options = with_rows(12);
  options.generator.check = "hunt";
  options.first_seed = 2000;
  expect_agreement(options, 4);
}

// The two planted defects show with several rows per token, and only then.
TEST(SeveralRows, CountsInTokensAreFoundWhereRowsAreSeveral) {
  for (const auto& [mutant, check] : {std::pair{"rows-counted-as-tokens", "page_written"},
                                      std::pair{"length-in-tokens", "attention_digest"}}) {
    FuzzOptions options = with_rows(6, {Feature::full_attention});
    options.generator.never = {Feature::two_block_pool, Feature::pipeline_parallel};
    options.mutant = mutant;
    const FuzzReport found = fuzz(options);
    ASSERT_FALSE(found.failures.empty()) << mutant;
    for (const FuzzFailure& failure : found.failures) EXPECT_EQ(failure.check, check) << mutant;
    options.generator.never.add({Feature::several_rows});
    EXPECT_TRUE(fuzz(options).failures.empty()) << mutant;
  }
}

}  // namespace
}  // namespace lockstep
