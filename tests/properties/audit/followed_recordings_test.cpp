// Runs that are written down and followed on a backend: transfers, host pages and sessions are
// executed as recorded, and every page compares equal. The pages show a load that is missing.
#include <gtest/gtest.h>

#include <optional>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "properties/shrink/case_parts.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

struct Followed {
  RunSummary model;
  SavedCase saved;  // with the recording
};

// Nothing: the model's run is refused, or fails.
std::optional<Followed> followed(std::uint64_t seed, FeatureSet always, FeatureSet never) {
  never.add({Feature::faults, Feature::tensor_parallel, Feature::pipeline_parallel,
             Feature::data_parallel, Feature::drafter_cache, Feature::states});
  SavedCase saved = generate_case(seed, {.engine = "vllm-0.33.0",
                                         .always = always,
                                         .never = never,
                                         .backend = "simt",
                                         .check = "fast"});
  Followed found;
  Recording recording;
  JudgeOptions options;
  options.backend = make_simt_backend;
  options.recording = &recording;
  options.summary = &found.model;
  if (judge(saved, options).kind != OutcomeKind::agreed) return std::nullopt;
  saved.connector.parts.clear();
  saved.trace = {};
  saved.recording = std::move(recording);
  saved.decide = Decides::recording;
  found.saved = std::move(saved);
  return found;
}

Result<RunSummary> run_of(const SavedCase& saved) {
  SessionParts parts = parts_of(saved);
  parts.backend = make_simt_backend;
  const auto session = Session::open(config_of(saved), std::move(parts));
  if (!session) return tl::unexpected(session.error());
  auto report = (*session)->run();
  if (!report) return tl::unexpected(report.error());
  return std::move(report->summary);
}

void expect_equal(std::uint64_t seed, const Followed& run) {
  const auto summary = run_of(run.saved);
  ASSERT_TRUE(summary) << seed << ": " << summary.error().message;
  EXPECT_EQ(summary->verdict, Verdict::agreed)
      << seed << ": " << (summary->divergence ? summary->divergence->message : "");
  EXPECT_EQ(summary->blocks_loaded, run.model.blocks_loaded) << seed;
  EXPECT_EQ(summary->blocks_lost, run.model.blocks_lost) << seed;
  EXPECT_EQ(summary->frees_delayed, run.model.frees_delayed) << seed;
  EXPECT_EQ(summary->scheduled_tokens, run.model.scheduled_tokens) << seed;
}

TEST(FollowedRecordings, MoveWhatTheRecordedConnectorMoved) {
  std::int64_t loaded = 0, stored = 0, lost = 0, missed = 0, of_loads = 0;
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    auto run = followed(seed, {Feature::connector_peers}, {Feature::host_tier});
    if (!run) continue;
    expect_equal(seed, *run);
    loaded += run->model.blocks_loaded;
    stored += run->model.blocks_stored;
    lost += run->model.blocks_lost;
    if (run->model.blocks_loaded == 0) continue;
    ++of_loads;
    for (RecordedStep& step : run->saved.recording->steps) step.connector.reset();
    const auto without = run_of(run->saved);
    missed += without && without->divergence ? 1 : 0;
  }
  EXPECT_GT(loaded, 100);
  EXPECT_GT(stored, 20);
  EXPECT_GT(lost, 0);
  EXPECT_GT(of_loads, 10);
  EXPECT_GT(missed, of_loads / 2);
}

TEST(FollowedRecordings, MoveHostPagesAsRecorded) {
  std::int64_t num_runs = 0, num_copies = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const auto run =
        followed(seed, {Feature::hisparse, Feature::shared_prefixes, Feature::long_prompts}, {});
    if (!run) continue;
    ++num_runs;
    expect_equal(seed, *run);
    for (const RecordedStep& step : run->saved.recording->steps)
      num_copies += step.pages ? std::ssize(step.pages->transfers) : 0;
  }
  EXPECT_GT(num_runs, 10);
  EXPECT_GT(num_copies, 50);
}

// Recorded with vLLM 0.33.0: six chunks of input, one of which begins inside a block.
TEST(FollowedRecordings, ContinueASessionInItsBlocks) {
  auto recording = read_recording(LOCKSTEP_SOURCE_DIR "/tests/properties/streaming_session.jsonl");
  ASSERT_TRUE(recording) << recording.error().message;
  auto saved = case_of("session", *std::move(recording), Decides::recording);
  ASSERT_TRUE(saved) << saved.error().message;
  saved->backend = "simt";
  const Outcome outcome = judge(*saved, make_simt_backend);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  std::int64_t continued = 0;
  for (RecordedStep& step : saved->recording->steps)
    for (RecordedScheduled& row : step.scheduled) {
      if (!row.is_new || row.resumed || row.computed % 16 == 0 || row.tokens < 2) continue;
      if (++continued > 1) continue;
      ++row.computed;  // of a token that nothing has computed
      --row.tokens;
    }
  EXPECT_GT(continued, 1);
  const auto without = run_of(*saved);
  ASSERT_TRUE(without) << without.error().message;
  EXPECT_EQ(without->verdict, Verdict::divergence);
}

// The first row after the prompt: no draft is in flight that a worker could subtract.
TEST(FollowedRecordings, SkipNoTokenWithDraftsInFlight) {
  auto recording = read_recording(LOCKSTEP_SOURCE_DIR
                                  "/tests/regressions/vllm_0_33_0_window_freed_by_drafts.jsonl");
  ASSERT_TRUE(recording) << recording.error().message;
  RecordedScheduled& row = recording->steps[1].scheduled[0];
  ++row.computed;
  --row.tokens;
  row.spec.pop_back();
  auto saved = case_of("skips", *std::move(recording), Decides::recording);
  ASSERT_TRUE(saved) << saved.error().message;
  saved->backend = "simt";
  saved->attention_backend = AttentionBackend::any_size;
  const auto summary = run_of(*saved);
  ASSERT_TRUE(summary) << summary.error().message;
  EXPECT_EQ(summary->verdict, Verdict::divergence);
}

}  // namespace
}  // namespace lockstep
