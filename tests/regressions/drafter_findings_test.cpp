// Findings 40 to 44 on pages: rows of a drafter that vLLM leaves stale, never writes, or finds with
// another request's continuation. The smallest requests that show each, and what makes it go away.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda_backend/backends.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

constexpr auto kFirstRunner = "vllm-0.22.1";
constexpr auto kSecondRunner = "vllm-0.33.0";

// One layer of the model's and one of each module, in blocks of 16 tokens.
SavedCase drafting(const std::string& engine, std::int32_t num_drafts, std::size_t num_modules) {
  SavedCase saved;
  saved.backend = "simt";
  saved.check = CheckMode::fast;
  saved.engine.engine = engine;
  saved.engine.block_size = 16;
  saved.engine.max_num_seqs = 4;
  saved.engine.max_num_batched_tokens = 64;
  saved.engine.max_model_len = 128;
  saved.engine.spec_method = SpecMethod::eagle;
  saved.engine.num_spec_tokens = num_drafts;
  if (num_modules > 1) saved.engine.num_prefill_lookahead_tokens = num_drafts;
  KVCacheGroupSpec group;
  group.layer_names = {"a"};
  group.spec.block_size = 16;
  group.spec.head_size = 8;
  std::vector<std::vector<std::string>> modules;
  for (std::size_t module = 0; module < num_modules; ++module)
    modules.push_back({fmt::format("draft.{}", module)});
  for (const auto& module : modules) group.layer_names.push_back(module.front());
  saved.cache = *plan_for_groups({group}, 41);
  saved.cache.draft_modules = modules;
  saved.kernel_block_sizes = {16};
  return saved;
}

// A prompt of runs of drawn tokens: source and length.
void add(SavedCase& saved, const std::vector<std::pair<std::uint32_t, std::uint32_t>>& runs,
         std::int32_t num_sampled) {
  TraceRequest request;
  const auto count = static_cast<std::int64_t>(saved.trace.records.size());
  request.spec.name = fmt::format("r{}", count);
  for (const auto& [source, length] : runs)
    request.spec.prompt.append({TokenRun::Kind::seeded, source, 0, length});
  request.spec.arrival_ns = count * 1'000'000'000'000;
  request.spec.max_tokens = request.output.length = num_sampled;
  saved.trace.records.emplace_back(request);
}

RunSummary summary_of(const SavedCase& saved) {
  SessionParts parts = parts_of(saved);
  parts.backend = make_simt_backend;
  auto session = Session::open(config_of(saved), std::move(parts));
  EXPECT_TRUE(session) << session.error().message;
  const auto report = (*session)->run();
  EXPECT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->summary.verdict, Verdict::agreed)
      << (report->summary.divergence ? report->summary.divergence->message : "");
  EXPECT_GT(report->summary.draft_rows_read, 0);
  return report->summary;
}

TEST(DrafterFindings, BehindEachChunkOfAPromptLiesARowOfItsLastToken) {
  for (const auto& [engine, stale] : {std::pair(kFirstRunner, 2), {kSecondRunner, 0}}) {
    SavedCase saved = drafting(engine, 2, 1);
    saved.engine.long_prefill_token_threshold = 16;
    add(saved, {{1, 40}}, 4);
    EXPECT_EQ(summary_of(saved).stale_draft_rows, stale) << engine;
  }
}

TEST(DrafterFindings, RowsOfDraftsThatWereNotVerifiedStay) {
  SavedCase saved = drafting(kSecondRunner, 3, 3);
  saved.draft_acceptance_percent = 0;
  add(saved, {{1, 20}}, 12);
  EXPECT_EQ(summary_of(saved).stale_draft_rows, 0);
  saved.short_drafts_percent = 100;  // a step is given fewer drafts than the modules made
  EXPECT_GT(summary_of(saved).stale_draft_rows, 0);
}

TEST(DrafterFindings, AHitTakesTheRowOfARequestThatWentOnOtherwise) {
  for (const auto& [engine, stale] : {std::pair(kFirstRunner, 1), {kSecondRunner, 0}}) {
    SavedCase saved = drafting(engine, 2, 1);
    add(saved, {{1, 32}, {2, 8}}, 2);   // continues with 2 after two blocks
    add(saved, {{1, 32}, {3, 24}}, 2);  // with 3, and computes the second block again
    add(saved, {{1, 32}, {3, 28}}, 2);  // hits the first request's second block
    EXPECT_EQ(summary_of(saved).stale_draft_rows, stale) << engine;
  }
}

TEST(DrafterFindings, OneRequestWithoutRoomForDraftsLeavesNoRowsOfOthers) {
  for (const auto& [engine, is_stale] : {std::pair(kFirstRunner, true), {kSecondRunner, false}}) {
    SavedCase saved = drafting(engine, 3, 1);
    saved.engine.max_model_len = 40;
    add(saved, {{1, 30}}, 10);
    add(saved, {{2, 8}}, 24);
    for (TraceRecord& record : saved.trace.records)
      std::get<TraceRequest>(record).spec.arrival_ns = 0;
    EXPECT_EQ(summary_of(saved).stale_draft_rows > 0, is_stale) << engine;
  }
}

}  // namespace
}  // namespace lockstep
