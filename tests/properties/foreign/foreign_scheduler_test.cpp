// Decisions through a pipe: the model's own are the same as in the process, in every field of a
// recording; a small engine's are audited, and each way of failing is reported.
#include "sim/foreign/foreign_engine.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "properties/fuzz/fuzz.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "sim/conform/conform.h"

namespace lockstep {
namespace {

std::shared_ptr<ForeignEngines> engines(const std::string& command, int seconds = 60) {
  const auto limit = std::chrono::seconds(seconds);
  auto opened = ForeignEngines::open(
      {.command = command, .time_limit = limit, .start_limit = std::chrono::seconds(60)});
  EXPECT_TRUE(opened) << opened.error().message;
  return opened ? *opened : nullptr;
}

std::string paged(const std::string& bug = {}) {
  const std::string command = "python3 " LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py";
  return bug.empty() ? command : command + " --bug " + bug;
}

// What only the model has been given to do, or only its ranks.
GeneratorOptions cases_of(std::string engine) {
  GeneratorOptions options;
  options.engine = std::move(engine);
  options.backend = "none";
  options.never = {Feature::faults,
                   Feature::host_tier,
                   Feature::several_connectors,
                   Feature::tensor_parallel,
                   Feature::data_parallel,
                   Feature::pipeline_parallel,
                   Feature::replicated_heads,
                   Feature::uniform_type,
                   Feature::bounded_replay,
                   Feature::rings,
                   Feature::compressed_rows};
  options.never.add(kBesideTokens);
  // Neither the small engine takes a connector, nor does the model's process decide as 0.33.0.
  if (options.engine != "vllm-0.22.1") options.never.add(Feature::connector_peers);
  return options;
}

struct Judged {
  Outcome outcome;
  Recording recording;
};

Judged run(const SavedCase& saved, DecisionsFactory decisions, bool conforms = false) {
  Judged run;
  JudgeOptions options;
  options.decisions = std::move(decisions);
  options.recording = &run.recording;
  options.invariants = false;
  options.conforms = conforms;
  run.outcome = judge(saved, options);
  return run;
}

// Compares decisions of the model in its own process with those in this one. Returns the coverage.
Tally compare_with_model(const GeneratorOptions& options, std::uint64_t seeds,
                         std::int64_t tables_every) {
  Tally reached;
  const auto model = engines(LOCKSTEP_BINARY_DIR "/model_engine");
  for (std::uint64_t seed = 1; model != nullptr && seed <= seeds; ++seed) {
    const SavedCase saved = generate_case(seed, options);
    Judged here = run(saved, {});
    Judged there = run(saved, decisions_of(model, tables_every));
    EXPECT_EQ(there.outcome.kind, here.outcome.kind) << seed << ": " << there.outcome.what;
    EXPECT_EQ(there.outcome.steps, here.outcome.steps) << seed;
    // Peers of another engine store fewer blocks: what it has computed is not reported.
    const std::vector<ConnectorKind>& parts = saved.connector.parts;
    if (std::ranges::count(parts, ConnectorKind::host) == std::ssize(parts)) {
      for (const Reached moved : {Reached::host_load, Reached::host_store, Reached::host_eviction})
        EXPECT_EQ(there.outcome.tally[moved], here.outcome.tally[moved])
            << seed << ": " << name_of(moved);
    }
    EXPECT_EQ(there.recording.steps.size(), here.recording.steps.size()) << seed;
    if (testing::Test::HasFailure()) break;
    for (std::size_t i = 0; i < here.recording.steps.size(); ++i) {
      RecordedStep &one = here.recording.steps[i], &other = there.recording.steps[i];
      // The model shows them in steps of its own.
      one.tables.reset();
      other.tables.reset();
      // ... and it is not asked for these.
      one.held_drafts = other.held_drafts;
      one.events = other.events;
      EXPECT_EQ(recording_step_line(other), recording_step_line(one)) << seed << ", step " << i;
    }
    reached += there.outcome.tally;
  }
  return reached;
}

TEST(ForeignScheduler, TheModelInAnotherProcessDecidesAsHere) {
  const Tally reached = compare_with_model(cases_of("vllm-0.22.1"), 400, 8);
  for (const Reached what :
       {Reached::async_drafts, Reached::preemption, Reached::prefix_hit, Reached::mamba_align,
        Reached::longer_load, Reached::lost_blocks, Reached::delayed_free, Reached::abort_loading,
        Reached::reset_done, Reached::stop_token, Reached::resume_with_hit,
        Reached::hit_sliding_window, Reached::chunked_prefill, Reached::abort_preempted})
    EXPECT_GT(reached[what], 0) << name_of(what);
}

// The tier finds blocks by the tokens that Lockstep knows, whatever the engine's hashes.
TEST(ForeignScheduler, AHostTierStoresAndLoadsBlocksOfAnotherEngine) {
  GeneratorOptions options = cases_of("vllm-0.22.1");
  options.never.remove({Feature::host_tier, Feature::several_connectors});
  options.always = {Feature::host_tier, Feature::prefix_caching, Feature::shared_prefixes};
  const Tally reached = compare_with_model(options, 200, 1);
  for (const Reached what :
       {Reached::host_tier, Reached::host_load, Reached::host_store, Reached::host_eviction,
        Reached::lost_blocks, Reached::delayed_free, Reached::multi_connector})
    EXPECT_GT(reached[what], 0) << name_of(what);
}

// A live run and its recording report the same difference; without one the run has its usual
// result. Returns the number of differing cases.
int compare_live_and_after(const std::string& profile, std::uint64_t seeds) {
  const auto model = engines(LOCKSTEP_BINARY_DIR "/model_engine");
  int differ = 0;
  for (std::uint64_t seed = 1; model != nullptr && seed <= seeds; ++seed) {
    const SavedCase saved = generate_case(seed, cases_of(profile));
    const Judged live = run(saved, decisions_of(model), true);
    const Judged whole = run(saved, decisions_of(model));
    if (whole.outcome.kind == OutcomeKind::refused) continue;
    if (!live.outcome.check.starts_with("conform.")) {
      EXPECT_TRUE(live.outcome == whole.outcome) << seed << ": " << live.outcome.what;
      continue;
    }
    ++differ;
    const auto after =
        conform_recording("whole", std::make_shared<Recording>(whole.recording), profile);
    const bool differs_too = after && after->mismatch;
    EXPECT_TRUE(differs_too) << seed << ": " << live.outcome.what;
    if (!differs_too) continue;
    EXPECT_EQ(live.outcome.step, after->mismatch->step) << seed;
    EXPECT_TRUE(live.outcome.what.starts_with(after->mismatch->what + ": "))
        << seed << ": " << live.outcome.what << "; " << after->mismatch->what;
    // One in the header (step -1) is seen before the first step.
    EXPECT_EQ(live.outcome.steps, std::max<std::int64_t>(live.outcome.step, 0) + 1) << seed;
  }
  return differ;
}

TEST(ForeignScheduler, TheFirstDifferenceFromAModelEndsTheRunInItsStep) {
  EXPECT_GT(compare_live_and_after("vllm-0.33.0", 60), 5);
}

// Where several requests have been sent at once their blocks come free in the order of a Python
// set, which this engine does not follow.
TEST(ForeignScheduler, HeldAgainstItsOwnModelDiffersInNothingButTheOrderOfASet) {
  EXPECT_LE(compare_live_and_after("vllm-0.22.1", 400), 2);
}

FuzzReport fuzz_paged(const std::string& bug, std::int64_t runs, int seconds = 60) {
  const auto engine = engines(paged(bug), seconds);
  FuzzOptions options;
  options.generator = cases_of("vllm-0.33.0");
  options.generator.never.add(
      {Feature::prefix_caching, Feature::several_groups, Feature::states, Feature::sliding_window,
       Feature::chunked_local, Feature::hidden_state, Feature::drafts, Feature::async_scheduling,
       Feature::priority_policy, Feature::priorities, Feature::salts, Feature::resets,
       Feature::no_chunked_prefill, Feature::served, Feature::connector_peers,
       Feature::context_parallel, Feature::whole_caches, Feature::pauses});
  options.generator.always = {Feature::full_attention};
  options.runs = runs;
  options.decisions = decisions_of(engine);
  options.decided_by = engine->hello().engine.text();
  return fuzz(options);
}

TEST(ForeignScheduler, ASmallEngineIsAuditedAndAgrees) {
  const FuzzReport report = fuzz_paged("", 300);
  EXPECT_TRUE(report.failures.empty()) << report.failures.front().what;
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  EXPECT_EQ(report.agreed, report.cases);
  EXPECT_EQ(report.decided_by, "paged-1.0");
  EXPECT_GT(report.tally[Reached::preemption], 0);
  EXPECT_GT(report.tally[Reached::chunked_prefill], 0);
  EXPECT_GT(report.tally[Reached::abort_running], 0);
}

// Of what goes wrong in an engine, this is seen first in some case.
class BrokenEngine : public testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(BrokenEngine, IsToldByItsCheck) {
  const auto& [bug, check] = GetParam();
  const FuzzReport report = fuzz_paged(bug, 60, 2);
  ASSERT_FALSE(report.failures.empty());
  const bool is_told = std::ranges::any_of(
      report.failures, [&](const FuzzFailure& failure) { return failure.check == check; });
  EXPECT_TRUE(is_told) << report.failures.front().check;
  EXPECT_TRUE(report.known.empty());
}

INSTANTIATE_TEST_SUITE_P(All, BrokenEngine,
                         testing::Values(std::pair{"shared", "audit.conservation"},
                                         std::pair{"lost", "audit.conservation"},
                                         std::pair{"raise", "engine.exception"},
                                         std::pair{"reply", "engine.reply"}),
                         [](const auto& one) { return std::string(one.param.first); });

TEST(ForeignScheduler, AnEngineThatHangsIsKilledAndTheNextCaseHasAnother) {
  const auto engine = engines(paged("hang"), 1);
  GeneratorOptions options = cases_of("vllm-0.33.0");
  options.engine = "vllm-0.33.0";
  int hangs = 0, others = 0;
  for (std::uint64_t seed = 1; seed <= 40 && hangs < 2; ++seed) {
    SavedCase saved = generate_case(seed, options);
    const Judged found = run(saved, decisions_of(engine));
    (found.outcome.check == "engine.hang" ? hangs : others) += 1;
  }
  EXPECT_EQ(hangs, 2);
  EXPECT_GT(others, 0);
}

TEST(ForeignScheduler, ACommandThatEndsIsRefusedWithItsLastWords) {
  const auto opened = ForeignEngines::open({.command = "echo no such engine >&2; exit 3"});
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message.find("exit status 3"), std::string::npos)
      << opened.error().message;
  EXPECT_NE(opened.error().message.find("no such engine"), std::string::npos);
}

TEST(ForeignScheduler, AGroupNeedsTheWordOfItsType) {
  EngineHello hello{.engine = {}, .features = {"sliding_window"}};
  RecordingHeader header;
  KVCacheSpec& spec = header.groups.emplace_back().spec;
  spec.kind = CacheKind::sliding_window_mla;
  EXPECT_EQ(missing_feature(hello, header), "sliding_window_mla");
  hello.features.emplace_back("sliding_window_mla");
  EXPECT_EQ(missing_feature(hello, header), "");
  spec.bounded_replay = true;
  EXPECT_EQ(missing_feature(hello, header), "bounded_replay");
}

TEST(ForeignScheduler, WhatAnEngineLacksIsNamed) {
  const auto engine = engines(paged());
  GeneratorOptions options = cases_of("vllm-0.33.0");
  options.always = {Feature::priority_policy, Feature::full_attention};
  options.never.add({Feature::several_groups, Feature::states, Feature::sliding_window,
                     Feature::chunked_local, Feature::hidden_state, Feature::drafts,
                     Feature::async_scheduling, Feature::served, Feature::connector_peers});
  const Judged found = run(generate_case(3, options), decisions_of(engine));
  EXPECT_EQ(found.outcome.kind, OutcomeKind::refused);
  EXPECT_EQ(found.outcome.what, "paged-1.0: the engine does not support priority");
}

}  // namespace
}  // namespace lockstep
