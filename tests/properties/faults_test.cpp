// Faults that an engine must survive: each takes effect, the accounting stays right, and after them
// every request that fits ends. An empty plan changes nothing.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda_backend/backends.h"
#include "properties/fuzz/fuzz.h"
#include "properties/judge/known_findings.h"
#include "sim/engine/faults.h"
#include "tests/properties/busy_case.h"

namespace lockstep {
namespace {

struct SurvivedFaults {
  std::string_view faults;
  Reached reached;
  bool async_scheduling;
  std::int64_t num_ended;  // of four requests
};

class Fault : public testing::TestWithParam<std::tuple<SurvivedFaults, std::string_view>> {};

TEST_P(Fault, TakesEffectAndWhoeverIsLeftEnds) {
  const auto& [fault, engine] = GetParam();
  SavedCase saved = busy_case(fault.faults, fault.async_scheduling);
  saved.engine.engine = engine;
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.check << ": " << outcome.what;
  EXPECT_GT(outcome.tally[fault.reached], 0) << name_of(fault.reached);
  EXPECT_EQ(outcome.tally[Reached::length_end], fault.num_ended);
  saved.faults.clear();
  EXPECT_EQ(judge(saved).tally[Reached::length_end], 4);
}

constexpr SurvivedFaults kSurvived[] = {
    {"refuse_allocation@1+20", Reached::refused_allocation, false, 4},
    {"refuse_allocation@0+999", Reached::refused_allocation, true, 4},
    {"pinch_pool@2+12:9", Reached::preemption_storm, false, 4},
    {"pinch_pool@2+12:9", Reached::preemption_storm, true, 4},
    {"early_output@0+30", Reached::early_output, true, 4},
    {"late_output@1+6", Reached::late_output, true, 4},
    {"refuse_allocation@0,abort_waiting@1:2", Reached::abort_waiting, false, 3},
    {"abort_first_chunk@0:1", Reached::abort_first_chunk, false, 3},
    {"abort_mid_prefill@0", Reached::abort_mid_prefill, false, 3},
    {"abort_decode@0:3,abort_decode@5", Reached::abort_decode, false, 2},
    {"pinch_pool@2+12:9,abort_preempted@0", Reached::abort_preempted, false, 3},
    {"abort_in_flight@2", Reached::abort_running, false, 3},
    {"abort_in_flight@2", Reached::abort_with_step_in_flight, true, 3},
    {"abort_again@0", Reached::abort_again, false, 4},
    {"abort_decode@0,abort_again@0", Reached::abort_again, true, 3},
};

INSTANTIATE_TEST_SUITE_P(Each, Fault,
                         testing::Combine(testing::ValuesIn(kSurvived),
                                          testing::Values("vllm-0.22.1", "vllm-0.33.0")));

TEST(Faults, APinchedPoolLeavesOneRequestAndGivesTheOthersBack) {
  const Outcome outcome = judge(busy_case("pinch_pool@2+12:9"));
  const Outcome calm = judge(busy_case(""));
  EXPECT_EQ(calm.tally[Reached::preemption], 0);
  EXPECT_GE(outcome.tally[Reached::preemption], 3);
  EXPECT_GE(outcome.tally[Reached::resume], 3);
  EXPECT_GT(outcome.steps, calm.steps);
}

TEST(Faults, ThatLieBehindTheEndChangeNothing) {
  const Outcome calm = judge(busy_case(""));
  Outcome late = judge(busy_case("refuse_allocation@500+9,abort_decode@500,late_output@500+3"));
  EXPECT_EQ(late.state_hash, calm.state_hash);
  EXPECT_EQ(late.steps, calm.steps);
}

class MostInFlight final : public StepObserver {
 public:
  bool decided(const StepView& view) override {
    steps = std::max(steps, view.model().num_steps_in_flight());
    return true;
  }
  std::int32_t steps = 0;
};

// vLLM's batch queue holds two steps: however late an output is, the engine waits for it.
TEST(Faults, LateOutputsTakeTheirTimeAndPutNoThirdStepInFlight) {
  constexpr std::int64_t kLateNs = 200'000'000;
  for (const bool async_scheduling : {false, true}) {
    MostInFlight watched;
    RunSummary calm, late;
    JudgeOptions options;
    options.summary = &calm;
    judge(busy_case("", async_scheduling), options);
    options.summary = &late;
    options.observer = &watched;
    const Outcome outcome = judge(busy_case("late_output@1+6", async_scheduling), options);
    EXPECT_EQ(outcome.tally[Reached::late_output], 6);
    EXPECT_EQ(watched.steps, async_scheduling ? 2 : 1);
    EXPECT_EQ(late.steps, calm.steps);
    EXPECT_GT(late.simulated_ns, calm.simulated_ns + 5 * kLateNs);
    EXPECT_LT(late.simulated_ns, calm.simulated_ns + 6 * kLateNs);
  }
}

// A preemption leaks blocks; the storm causes one where the traffic caused none. With faults only
// it would appear as waiting forever.
TEST(Faults, WhoDoesNotRecoverFromAStormIsTold) {
  SavedCase saved = busy_case("");
  saved.mutants = {"free-preempted-lost"};
  EXPECT_EQ(judge(saved).kind, OutcomeKind::agreed);
  const SavedCase stormy = busy_case("pinch_pool@2+12:9");
  saved.faults = stormy.faults;
  EXPECT_TRUE(judge(saved).failed());
  EXPECT_EQ(judge(stormy).kind, OutcomeKind::agreed);
}

// The first time each request just fits the pool alone, the second time none does.
TEST(Faults, ThatAreOverExcuseNobodyWhoWaitsForEver) {
  SavedCase saved = busy_case("refuse_allocation@2+3");
  saved.cache = *plan_for_groups(saved.cache.groups, 9);
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  for (TraceRecord& record : saved.trace.records)
    std::get<TraceRequest>(record).output.length = std::get<TraceRequest>(record).spec.max_tokens =
        12;
  const Outcome stuck = judge(saved);
  EXPECT_EQ(stuck.kind, OutcomeKind::stuck);
  EXPECT_EQ(stuck.check, "liveness");
}

TEST(Faults, BesideRecordedStepsAreRefused) {
  SavedCase saved = busy_case("abort_decode@3");
  saved.recording.emplace();
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::refused);
  EXPECT_NE(outcome.what.find("recorded"), std::string::npos) << outcome.what;
  saved.recording.reset();
  saved.faults[0].kind = "explode";
  EXPECT_NE(judge(saved).what.find("explode"), std::string::npos);
}

class FaultyRuns : public testing::TestWithParam<std::string_view> {};

TEST_P(FaultyRuns, ThatAreMadeTwiceAreTheSameByteForByte) {
  FuzzOptions options;
  options.generator.always = {Feature::faults};
  options.generator.backend = GetParam();
  options.backend = make_simt_backend;
  options.runs = GetParam() == "none" ? 1'500 : 40;
  const std::string report = fuzz_report_to_json(fuzz(options));
  options.jobs = 2;
  EXPECT_EQ(fuzz_report_to_json(fuzz(options)), report);
}

INSTANTIATE_TEST_SUITE_P(With, FaultyRuns, testing::Values("none", "simt"),
                         [](const auto& backend) { return std::string(backend.param); });

}  // namespace
}  // namespace lockstep
