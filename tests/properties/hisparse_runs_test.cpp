// Generated runs with HiSparse's groups: every row is followed, the engine's own defects are
// reported as findings, and a run's recording can be read and decided again.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/output_file.h"
#include "cuda_backend/backends.h"
#include "properties/fuzz/fuzz.h"
#include "properties/judge/known_findings.h"
#include "reference/plan/page_groups.h"
#include "sim/conform/conform.h"

namespace lockstep {
namespace {

GeneratorOptions with_pages(FeatureSet always = {}) {
  always.add({Feature::hisparse, Feature::shared_prefixes, Feature::long_prompts});
  return {
      .engine = "vllm-0.33.0", .always = always, .never = {}, .backend = "none", .check = "fast"};
}

TEST(HiSparseRuns, AgreeAndReachAllThatCanBecomeOfAPage) {
  FuzzOptions options;
  options.generator = with_pages();
  options.runs = 1200;
  const FuzzReport report = fuzz(options);
  EXPECT_TRUE(report.failures.empty()) << report.failures.front().seed;
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  using enum Reached;
  for (const Reached reached :
       {hisparse, hisparse_peers, hisparse_async, hisparse_drafts, page_spill, page_restore,
        lost_page, row_mirror, host_read, hot_region, adopted_page, end_with_copies, full_host_pool,
        preemption, abort_running, abort_loading, prefix_hit})
    EXPECT_GT(report.tally[reached], 0) << name_of(reached);
}

TEST(HiSparseRuns, AreInTheShapeThatTheEngineGivesItsGroups) {
  std::set<std::size_t> num_groups;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const SavedCase saved = generate_case(seed, with_pages());
    ASSERT_TRUE(has_host_pages(saved.cache.groups)) << seed;
    EXPECT_TRUE(check_page_groups(saved.cache.groups)) << seed;
    num_groups.insert(saved.cache.groups.size());
  }
  EXPECT_EQ(num_groups, (std::set<std::size_t>{4, 6}));
}

// ... and every byte of host pool, resident pages and hot regions is what it should be.
TEST(HiSparseRuns, AgreeOnTheExecutor) {
  FuzzOptions options;
  options.generator = with_pages();
  options.generator.backend = "simt";
  options.backend = make_simt_backend;
  options.runs = 120;
  const FuzzReport report = fuzz(options);
  EXPECT_TRUE(report.failures.empty()) << report.failures.front().seed;
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  using enum Reached;
  for (const Reached reached : {with_backend, hisparse_peers, hisparse_async, hisparse_drafts,
                                page_restore, lost_page, host_read, hot_region, adopted_page})
    EXPECT_GT(report.tally[reached], 0) << name_of(reached);
}

// Streams as late as their order allows, every access watched, and graphs.
TEST(HiSparseRuns, AgreeHoweverLateOperationsRun) {
  for (const std::string check : {"check", "hunt"}) {
    FuzzOptions options;
    options.generator = with_pages();
    options.generator.backend = "simt";
    options.generator.check = check;
    options.generator.device_modes = true;
    options.backend = make_simt_backend;
    options.runs = 12;
    const FuzzReport report = fuzz(options);
    EXPECT_TRUE(report.failures.empty()) << check << " " << report.failures.front().seed;
    EXPECT_GT(report.tally[Reached::host_read], 0) << check;
  }
}

// Findings 45 and 46, out of seeds alone.
TEST(HiSparseRuns, ThatStumbleOverTheEngineItselfAreToldByTheFinding) {
  std::map<int, int> told;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    SavedCase saved = generate_case(seed, with_pages({Feature::connector_peers}));
    saved.engine.engine = "vllm-0.33.0";
    const Outcome outcome = judge(saved);
    if (!outcome.failed()) continue;
    const KnownFinding* const finding = known_finding(saved, outcome);
    ASSERT_NE(finding, nullptr) << seed << ": " << outcome.check << ", " << outcome.what;
    ++told[finding->number];
  }
  EXPECT_GT(told[46], 20);
  // A host pool that holds one request of the longest.
  for (std::uint64_t seed = 0; told[45] == 0 && seed < 20000; ++seed) {
    SavedCase saved = generate_case(
        seed, with_pages({Feature::connector_peers, Feature::bursts, Feature::same_instant}));
    saved.engine.host_pool_num_blocks =
        2 + (saved.engine.max_model_len + saved.engine.block_size - 1) / saved.engine.block_size;
    const Outcome outcome = judge(saved);
    if (outcome.kind != OutcomeKind::stuck) continue;
    const KnownFinding* const finding = known_finding(saved, outcome);
    ASSERT_NE(finding, nullptr) << seed << ": " << outcome.what;
    ++told[finding->number];
  }
  EXPECT_GT(told[45], 0);
}

TEST(HiSparseRuns, AreTheSameAgainFromTheirFile) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const SavedCase saved = generate_case(seed, with_pages());
    const auto read = saved_case_from_text("case", saved_case_to_text(saved));
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(read->engine, saved.engine) << seed;
    EXPECT_EQ(read->connector, saved.connector) << seed;
    EXPECT_EQ(judge(*read).state_hash, judge(saved).state_hash) << seed;
  }
}

// What is written down of them is an engine's recording, which conform follows.
TEST(HiSparseRuns, AreDecidedAgainFromTheirRecording) {
  std::int64_t num_copies = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SavedCase saved = generate_case(seed, with_pages());
    saved.faults.clear();
    Recording recording;
    JudgeOptions options;
    options.recording = &recording;
    if (judge(saved, options).kind != OutcomeKind::agreed) continue;
    for (const RecordedStep& step : recording.steps)
      num_copies += step.pages ? std::ssize(step.pages->transfers) : 0;
    const std::string path = testing::TempDir() + "hisparse_run.jsonl";
    std::string text = recording_header_line(recording.header);
    for (const RecordedStep& step : recording.steps) text += recording_step_line(step);
    ASSERT_TRUE(write_output(path, text + recording_end_line(recording.end)));
    const auto conformed = conform_recording(path);
    ASSERT_TRUE(conformed) << seed << ": " << conformed.error().message;
    EXPECT_FALSE(conformed->mismatch) << seed << ": " << conformed->mismatch->what;
  }
  EXPECT_GT(num_copies, 100);
}

}  // namespace
}  // namespace lockstep
