// Generated cases with a drafter's own cache: its passes agree on pages of both releases, and what
// can become of its rows does.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "sim/session/session.h"
#include "tests/properties/planted_defects.h"

namespace lockstep {
namespace {

using enum Feature;

GeneratorOptions drafting(const std::string& engine) {
  return {.engine = engine,
          .always = {full_attention, drafts, drafter_cache, prefix_caching, tight_pool,
                     shared_prefixes},
          .never = {states, context_parallel, two_block_pool, connector_peers, host_tier,
                    tensor_parallel, pipeline_parallel, data_parallel, scaled_rows, uniform_type,
                    packed_pages, faults},
          .backend = "simt",
          .check = "fast",
          .requests_max = 6};
}

// Two drafts at least, half of which are accepted, and requests that come to their end.
SavedCase drafting_case(std::uint64_t seed, const std::string& engine) {
  SavedCase saved = generate_case(seed, drafting(engine));
  saved.draft_acceptance_percent = 50;
  if (seed % 2 == 0)
    for (TraceRecord& record : saved.trace.records)
      if (auto* request = std::get_if<TraceRequest>(&record))
        request->spec.max_tokens = request->output.length = saved.engine.max_model_len;
  return saved;
}

struct DrafterRun {
  RunCounts counts;
  std::string ending;
};
DrafterRun run_of(const SavedCase& saved, LockstepConfig config) {
  SessionParts parts = parts_of(saved);
  parts.backend = make_simt_backend;
  auto session = Session::open(config, std::move(parts));
  if (!session) return {.counts = {}, .ending = session.error().message};
  const auto report = (*session)->run();
  if (!report) return {.counts = {}, .ending = report.error().message};
  const RunSummary& summary = report->summary;
  return {.counts = summary,
          .ending = summary.divergence ? summary.divergence->message
                                       : std::string(name_of(summary.verdict))};
}

class DrafterCases : public testing::TestWithParam<std::string> {};

TEST_P(DrafterCases, AgreeAndComeToEverythingThatCanBecomeOfARow) {
  RunCounts sum;
  std::int64_t of_modules = 0, standalone = 0, preemptions = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const SavedCase saved = drafting_case(seed, GetParam());
    const LockstepConfig config = config_of(saved);
    if (config.backend.drafter.shape == DraftShape::none) continue;
    const DrafterRun run = run_of(saved, config);
    if (run.ending != "agreed" && run.ending != "liveness") {
      const Outcome outcome = judge(saved, make_simt_backend);
      EXPECT_NE(known_finding(saved, outcome, make_simt_backend), nullptr)
          << "seed " << seed << ": " << run.ending;
      continue;
    }
    of_modules += config.backend.drafter.shape == DraftShape::modules ? 1 : 0;
    standalone += config.backend.drafter.shape == DraftShape::standalone ? 1 : 0;
    preemptions += run.counts.draft_rows_replaced > 0 ? run.counts.preemptions : 0;
    for (const RunCounter& counter : kRunCounters) sum.*counter.count += run.counts.*counter.count;
  }
  const bool is_second = GetParam() == "vllm-0.33.0";
  EXPECT_GT(standalone, 0);
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(sum.draft_rows_written, 0);
  EXPECT_GT(sum.draft_rows_replaced, 0);
  EXPECT_GT(sum.draft_rows_next_block, 0);
  EXPECT_GT(sum.draft_rows_hit, 0);
  EXPECT_GT(sum.draft_rows_read, sum.draft_rows_hit);
  EXPECT_EQ(of_modules > 0, is_second);
  EXPECT_EQ(sum.draft_rows_again > 0, is_second);
  EXPECT_EQ(sum.draft_rows_at_end > 0, is_second);
  EXPECT_GT(sum.stale_draft_rows, 0);  // findings 40 to 43
}

INSTANTIATE_TEST_SUITE_P(Engines, DrafterCases, testing::Values("vllm-0.22.1", "vllm-0.33.0"),
                         name_of_engine);

// The row after a hit was made of a token that the hit's block does not cover: found in the cache's
// content, before any decision depends on it.
TEST(DrafterCache, AHitThatKeepsItsLastBlockIsSeenInTheRowThatItEndsWith) {
  std::int64_t seen = 0;
  for (std::uint64_t seed = 0; seed < 200 && seen == 0; ++seed) {
    SavedCase saved = drafting_case(seed, "vllm-0.33.0");
    saved.engine.spec_method = SpecMethod::eagle;
    LockstepConfig config = config_of(saved);
    if (config.backend.drafter.shape == DraftShape::none ||
        run_of(saved, config).ending != "agreed")
      continue;
    config.scheduler_defect = SchedulerDefect::hash_next_token;
    const DrafterRun run = run_of(saved, config);
    if (run.ending == "agreed" || run.ending == "liveness") continue;
    EXPECT_NE(run.ending.find("which holds a row made of other tokens"), std::string::npos)
        << run.ending;
    ++seen;
  }
  EXPECT_GT(seen, 0);
}

}  // namespace
}  // namespace lockstep
