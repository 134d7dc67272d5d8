// What a run promises besides the verdict: the same chain twice, another chain when anything
// differs, a budget that is kept and counted, a verdict when nothing can ever run again, saved
// cases that come to the same end.
#include <gtest/gtest.h>

#include "sim/recording/recording_workload.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

LockstepConfig two_groups() {
  return make_world({make_group("a", 2, full_spec()), make_group("b", 1, sliding_spec(40))}, 30);
}

// The chain after every step: the first difference names the step.
class Steps final : public StepObserver {
 public:
  bool finished(const StepView& view) override {
    tokens.push_back(view.decision.total_num_scheduled_tokens);
    return true;
  }
  std::vector<std::int64_t> tokens;
};

TEST(Run, TwiceTheSameIsTheSameChainAndEveryCount) {
  const LockstepConfig config = two_groups();
  std::vector<RunSummary> runs;
  std::vector<std::vector<std::int64_t>> tokens;
  for (int i = 0; i < 2; ++i) {
    PlainBackend backend(config.backend);
    Steps steps;
    auto report = run_world(config, make_traffic(8, 50), &backend, &steps);
    ASSERT_TRUE(report);
    runs.push_back(report->summary);
    tokens.push_back(steps.tokens);
  }
  EXPECT_EQ(to_hex(runs[0].state_hash), to_hex(runs[1].state_hash));
  EXPECT_EQ(tokens[0], tokens[1]);
  EXPECT_EQ(runs[0].pages_checked, runs[1].pages_checked);
  EXPECT_EQ(runs[0].rows_read, runs[1].rows_read);
}

TEST(Run, AnotherTraceSeedOrStepTimeIsAnotherChain) {
  const LockstepConfig config = two_groups();
  const auto hash = [&](const Trace& trace, std::uint64_t seed, std::int64_t base_ns) {
    auto decisions = Scheduler::create(config.engine, config.backend.plan.groups, 30);
    const auto workload =
        make_trace_workload(trace, {.step_time = {.base_ns = base_ns}, .seed = seed});
    return to_hex(run_lockstep(config, {*decisions, *workload})->summary.state_hash);
  };
  const Trace trace = make_traffic(8, 50);
  const std::string first = hash(trace, 7, 10'000'000);
  EXPECT_EQ(first, hash(trace, 7, 10'000'000));
  EXPECT_NE(first, hash(trace, 7, 11'000'000));
  EXPECT_NE(first, hash(make_traffic(9, 50), 7, 10'000'000));
}

TEST(Run, AListedStopTokenEndsARequestAsEosDoes) {
  const auto hash = [](bool is_listed) {
    Trace trace = make_traffic(8, 5);
    for (TraceRecord& record : trace.records) {
      auto* request = std::get_if<TraceRequest>(&record);
      if (request == nullptr) continue;
      request->spec.max_tokens = request->output.length + 3;
      if (is_listed)
        request->spec.stop_token_ids = {50'000, 2};
      else
        request->spec.eos_token = 2;
    }
    return to_hex(run_world(two_groups(), trace, nullptr)->summary.state_hash);
  };
  EXPECT_EQ(hash(true), hash(false));
}

TEST(Run, DecisionsDoNotDependOnTheBackend) {
  const LockstepConfig config = two_groups();
  PlainBackend backend(config.backend);
  const auto with = run_world(config, make_traffic(8, 50), &backend);
  const auto without = run_world(config, make_traffic(8, 50), nullptr);
  ASSERT_TRUE(with && without);
  EXPECT_EQ(with->summary.steps, without->summary.steps);
  EXPECT_EQ(with->summary.scheduled_tokens, without->summary.scheduled_tokens);
  EXPECT_EQ(with->summary.evictions, without->summary.evictions);
}

TEST(Run, ASmallBudgetIsKeptCountedAndStillReadsEverythingOverTime) {
  LockstepConfig config = two_groups();
  const auto run = [&] {
    PlainBackend backend(config.backend);
    return run_world(config, make_traffic(8, 50), &backend)->summary;
  };
  config.budget = {.probe_rows = 1 << 30, .query_rows = 1 << 20, .untouched_pages = 1 << 20};
  const RunSummary all = run();
  ASSERT_EQ(all.not_checked.size(), 2u);
  EXPECT_NE(all.not_checked[1].find("pages as vllm-0.33.0 lays them out"), std::string::npos);
  EXPECT_NE(all.not_checked[0].find("the check mode is fast"), std::string::npos);
  config.budget = {.probe_rows = 200, .query_rows = 50, .untouched_pages = 2};
  const RunSummary few = run();
  EXPECT_EQ(few.verdict, Verdict::agreed);
  EXPECT_LT(few.rows_read, 200 * few.steps + 1000);
  EXPECT_GT(few.rows_read, 0);
  ASSERT_EQ(few.not_checked.size(), 3u);
  EXPECT_NE(few.not_checked[0].find("the budget is 200 per step"), std::string::npos)
      << few.not_checked[0];
  EXPECT_LT(few.pages_checked, all.pages_checked);
  // Tables, slots and written pages are not a matter of budget.
  EXPECT_EQ(few.table_entries_checked, all.table_entries_checked);
  EXPECT_EQ(few.slots_checked, all.slots_checked);
}

TEST(Run, ARequestThatCanNeverFitEndsTheRunAndIsNamedWithItsReason) {
  LockstepConfig config =
      make_world({make_group("a", 1, full_spec())}, 6);  // 5 blocks of 16 tokens
  config.engine.scheduler_reserve_full_isl = true;
  Trace trace = make_traffic(1, 1);
  auto& request = std::get<TraceRequest>(trace.records[0]);
  request.spec.prompt = {};
  request.spec.prompt.append({TokenRun::Kind::seeded, 5, 0, 100});  // 7 blocks
  request.abort.reset();
  const auto report = run_world(config, trace, nullptr);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->summary.verdict, Verdict::liveness);
  ASSERT_EQ(report->summary.stuck.size(), 1u);
  EXPECT_EQ(report->summary.stuck[0].name, "r0");
  EXPECT_NE(report->summary.stuck[0].why.find(
                "7 blocks for its 100 tokens; 5 of 5 are free: it can never fit"),
            std::string::npos)
      << report->summary.stuck[0].why;
}

TEST(Run, RequestsThatPreemptThemselvesForEverAreNoticed) {
  LockstepConfig config = make_world({make_group("a", 1, full_spec())}, 6);
  config.engine.scheduler_reserve_full_isl = false;
  Trace trace = make_traffic(1, 1);
  auto& request = std::get<TraceRequest>(trace.records[0]);
  request.spec.prompt = {};
  request.spec.prompt.append({TokenRun::Kind::seeded, 5, 0, 100});
  request.abort.reset();
  const auto report = run_world(config, trace, nullptr);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->summary.verdict, Verdict::liveness);
  EXPECT_EQ(report->summary.stuck_total, 1);
}

TEST(Run, ARequestWaitsForThoseBeforeItAndArrivesAfterItsDelay) {
  LockstepConfig config = make_world({make_group("a", 1, full_spec())}, 40);
  Trace trace = make_traffic(1, 3);
  for (TraceRecord& record : trace.records)
    if (auto* request = std::get_if<TraceRequest>(&record)) request->abort.reset();
  auto& second = std::get<TraceRequest>(trace.records[1]);
  second.after = {"r0"};
  second.delay_ns = 5'000'000'000;
  const auto report = run_world(config, trace, nullptr);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->summary.finished_requests, 3);
  EXPECT_GT(report->summary.simulated_ns, 5'000'000'000);
}

TEST(Run, ARecordingThatIdlesForEverIsReplayedToItsEnd) {
  const LockstepConfig config = make_world({make_group("a", 1, full_spec())}, 6);
  Recording recording;
  recording.steps.resize(5000);
  RecordedEvent add;
  add.request.name = "r0";
  add.request.prompt.append({TokenRun::Kind::seeded, 5, 0, 100});  // 7 blocks of 5
  recording.steps[0].before.push_back(add);
  for (std::size_t i = 0; i < recording.steps.size(); ++i)
    recording.steps[i].step = static_cast<std::int64_t>(i);
  EngineConfig engine = config.engine;
  engine.scheduler_reserve_full_isl = true;
  auto decisions = Scheduler::create(engine, config.backend.plan.groups, 6);
  const auto workload = make_recording_workload(std::make_shared<const Recording>(recording));
  const auto report = run_lockstep(config, {*decisions, *workload});
  ASSERT_TRUE(report);
  EXPECT_EQ(report->summary.steps, 5000);
}

TEST(Run, DraftsAreVerifiedAndTheirSlotsWrittenAgainWhenRejected) {
  for (const SpecMethod method : {SpecMethod::ngram, SpecMethod::eagle}) {
    LockstepConfig config = make_world({make_group("a", 2, full_spec())}, 24);
    config.engine.num_spec_tokens = 3;
    config.engine.spec_method = method;
    config.backend =
        make_backend_config(config.engine, config.backend.plan, AttentionBackend::triton_attn);
    PlainBackend backend(config.backend);
    const auto report = run_world(config, make_traffic(4, 50), &backend);
    ASSERT_TRUE(report);
    EXPECT_EQ(report->summary.verdict, Verdict::agreed)
        << (report->summary.divergence ? to_text(*report->summary.divergence) : "stuck");
    EXPECT_LT(report->summary.steps, run_world(make_world({make_group("a", 2, full_spec())}, 24),
                                               make_traffic(4, 50), nullptr)
                                         ->summary.steps);
  }
}

TEST(Run, DraftsAndStatesInModeAlign) {
  KVCacheSpec states = mamba_spec(MambaCacheMode::align);
  states.num_speculative_blocks = 3;
  LockstepConfig config =
      make_world({make_group("a", 1, full_spec()), make_group("m", 1, states)}, 40);
  config.engine.num_spec_tokens = 3;
  config.engine.spec_method = SpecMethod::eagle;
  config.backend =
      make_backend_config(config.engine, config.backend.plan, AttentionBackend::triton_attn);
  PlainBackend backend(config.backend);
  const auto report = run_world(config, make_traffic(4, 50), &backend);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->summary.verdict, Verdict::agreed)
      << (report->summary.divergence ? to_text(*report->summary.divergence) : "stuck");
}

TEST(Run, AsynchronousSchedulingOnABackend) {
  LockstepConfig config = two_groups();
  config.engine.async_scheduling = true;
  PlainBackend backend(config.backend);
  const auto report = run_world(config, make_traffic(4, 50), &backend);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->summary.verdict, Verdict::agreed)
      << (report->summary.divergence ? to_text(*report->summary.divergence) : "stuck");
}

// The engine decides before it has heard which drafts stand; where the tokens lie must not depend
// on that.
class DraftsInFlight : public ::testing::TestWithParam<const char*> {};

TEST_P(DraftsInFlight, ArePlacedWhereTheRequestStands) {
  KVCacheSpec window = full_spec();
  window.kind = CacheKind::sliding_window;
  window.sliding_window = 40;
  KVCacheSpec states = mamba_spec(MambaCacheMode::align);
  states.num_speculative_blocks = 3;
  std::vector<KVCacheGroupSpec> groups = {make_group("a", 1, full_spec())};
  if (GetParam() == std::string_view("window")) groups.push_back(make_group("w", 1, window));
  if (GetParam() == std::string_view("states")) groups.push_back(make_group("m", 1, states));
  LockstepConfig config = make_world(groups, 40);
  config.engine.engine = "vllm-0.33.0";
  config.engine.num_spec_tokens = 3;
  config.engine.spec_method = SpecMethod::eagle;
  config.engine.async_scheduling = true;
  config.backend =
      make_backend_config(config.engine, config.backend.plan, AttentionBackend::triton_attn);

  // Rows that start before the decision's position, and drafts that remain.
  class Corrected final : public PlainBackend {
   public:
    using PlainBackend::PlainBackend;
    Result<void> execute(const StepProgram& program, StepReadback& readback) override {
      for (const std::int32_t row : program.clear_rows) ends_.erase(row);
      for (const RowSlice& slice : program.rows) {
        std::int32_t& end = ends_[slice.row];
        num_corrected += slice.first_position < end ? 1 : 0;
        end = slice.first_position + slice.num_tokens;
      }
      return PlainBackend::execute(program, readback);
    }
    std::int64_t num_corrected = 0;

   private:
    std::map<std::int32_t, std::int32_t> ends_;
  };
  Corrected backend(config.backend);
  const auto report = run_world(config, make_traffic(4, 50), &backend);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->summary.verdict, Verdict::agreed)
      << (report->summary.divergence ? to_text(*report->summary.divergence) : "stuck");
  EXPECT_GT(backend.num_corrected, 20);

  config.engine.engine = "vllm-0.22.1";
  PlainBackend of_older(config.backend);
  const auto older = run_world(config, make_traffic(4, 50), &of_older);
  if (GetParam() == std::string_view("states")) {
    ASSERT_FALSE(older);
    EXPECT_NE(older.error().message.find("only the worker of vllm-0.22.1 has the position"),
              std::string::npos)
        << older.error().message;
  } else {
    ASSERT_TRUE(older) << older.error().message;
  }
}

INSTANTIATE_TEST_SUITE_P(Run, DraftsInFlight, testing::Values("alone", "window", "states"),
                         [](const auto& one) { return std::string(one.param); });

TEST(SavedRun, ASavedCaseComesToTheSameDivergence) {
  class Spoiler final : public PlainBackend {
   public:
    using PlainBackend::PlainBackend;
    Result<void> execute(const StepProgram& program, StepReadback& readback) override {
      auto done = PlainBackend::execute(program, readback);
      if (program.step == 20) tensor(0)[4000] ^= 1;
      return done;
    }
  };
  LockstepConfig config = two_groups();
  RunSpec run;
  run.engine = config.engine;
  run.cache = config.backend.plan;
  run.attention_backend = config.backend.attention_backend;
  run.layout = config.backend.layout;
  run.kernel_block_sizes = config.backend.kernel_block_sizes;
  run.queries_per_kv = config.backend.queries_per_kv;
  run.check = config.backend.check;
  run.budget = config.budget;
  run.seed = 7;
  config.backend.layout = config_of(run).backend.layout;
  config.backend.plan = config_of(run).backend.plan;
  Trace trace = make_traffic(8, 50);
  Spoiler first(config.backend);
  const auto report = run_world(config, trace, &first);
  ASSERT_TRUE(report && report->summary.divergence);
  keep_records(trace, report->records_consumed);
  EXPECT_LT(trace.records.size(), 50u);
  SavedCase saved = case_of("spoiled", run, report->summary);
  saved.trace = trace;
  ASSERT_TRUE(saved.expected.has_value());
  EXPECT_EQ(saved.expected->step, report->summary.divergence->step);

  const LockstepConfig again = config_of(saved);
  Spoiler second(again.backend);
  SessionParts parts = parts_of(saved);
  parts.borrowed = {&second};
  const auto replayed = run_session(again, std::move(parts));
  ASSERT_TRUE(replayed && replayed->summary.divergence);
  EXPECT_EQ(to_json(*replayed->summary.divergence), to_json(*report->summary.divergence));
}

}  // namespace
}  // namespace lockstep
