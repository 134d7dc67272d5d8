// Data parallel engines under the judge: audit, invariants and faults are there for each of them,
// and what fails names the engine in which it does.
#include <gtest/gtest.h>

#include <string>

#include "properties/explain/explain.h"
#include "properties/explain/explain_text.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "tests/properties/busy_case.h"

namespace lockstep {
namespace {

// All arrive at once and go round: the first and the third to rank 0, the others to rank 1.
SavedCase on_two_engines(std::string_view faults, bool async_scheduling = false) {
  SavedCase saved = busy_case(faults, async_scheduling);
  for (TraceRecord& record : saved.trace.records)
    std::get<TraceRequest>(record).spec.arrival_ns = 0;
  saved.data_parallel_size = 2;
  return saved;
}

// Those of rank 0 made so short that they have one block each.
SavedCase with_short_requests_on_rank_0(SavedCase saved) {
  for (const std::size_t i : {0, 2}) {
    auto& request = std::get<TraceRequest>(saved.trace.records[i]);
    request.spec.prompt = {};
    request.spec.prompt.append({TokenRun::Kind::seeded, 1 + i, 0, 2});
    request.spec.max_tokens = request.output.length = 1;
  }
  return saved;
}

TEST(Engines, WithoutADefectAllAgreeAndEveryRequestEnds) {
  const Outcome outcome = judge(on_two_engines(""));
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  EXPECT_EQ(outcome.tally[Reached::length_end], 4);
  EXPECT_EQ(outcome.tally[Reached::full_attention], 1) << "a case is counted once";
}

// Blocks of one request that has several are freed in the wrong order: only rank 1 has such.
TEST(Engines, AnInvariantThatOneEngineBreaksNamesIt) {
  SavedCase saved = with_short_requests_on_rank_0(on_two_engines(""));
  EXPECT_EQ(judge(saved).kind, OutcomeKind::agreed);
  saved.mutants = {"free-forward-order"};
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::violation);
  EXPECT_EQ(outcome.check, "invariant.free_order") << outcome.what;
  EXPECT_EQ(outcome.dp_rank, 1);
  EXPECT_EQ(outcome.what.find("data parallel rank 1: "), 0u) << outcome.what;
}

TEST(Engines, TheAuditFollowsEachOfThem) {
  GeneratorOptions options{.engine = "vllm-0.33.0",
                           .always = {Feature::salts, Feature::shared_prefixes,
                                      Feature::prefix_caching, Feature::data_parallel},
                           .never = {Feature::faults},
                           .backend = "none",
                           .check = "fast"};
  std::int64_t found[3] = {};
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    SavedCase saved = generate_case(seed, options);
    saved.mutants = {"hash-extra-keys"};
    const Outcome outcome = judge(saved);
    if (!outcome.failed() || outcome.check.find("audit.") != 0) continue;
    ASSERT_GE(outcome.dp_rank, 0);
    ++found[outcome.dp_rank];
  }
  EXPECT_GT(found[0], 0);
  EXPECT_GT(found[1], 0);
}

TEST(Engines, TheExplanationIsThatOfTheEngineThatFails) {
  SavedCase saved = with_short_requests_on_rank_0(on_two_engines(""));
  saved.mutants = {"free-forward-order"};
  const Explanation explanation = explain(saved, {});
  EXPECT_EQ(explanation.dp_rank, 1);
  ASSERT_FALSE(explanation.steps.empty());
  for (const ExplainedStep& step : explanation.steps)
    for (const RecordedScheduled& scheduled : step.recorded.scheduled)
      EXPECT_TRUE(scheduled.id == "r1" || scheduled.id == "r3") << scheduled.id;
  const std::string text = to_text(saved, explanation);
  EXPECT_NE(text.find("2 data parallel ranks share the requests"), std::string::npos) << text;
}

struct Survived {
  std::string_view faults;
  Reached reached;
  std::int64_t times_min;  // over both engines
  std::int64_t num_ended;
};
class FaultOfEngines : public testing::TestWithParam<Survived> {};

TEST_P(FaultOfEngines, MeetsEachOfThemAndWhoeverIsLeftEnds) {
  const Survived& fault = GetParam();
  const bool async_scheduling = fault.reached == Reached::early_output;
  const Outcome outcome = judge(on_two_engines(fault.faults, async_scheduling));
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.check << ": " << outcome.what;
  EXPECT_GE(outcome.tally[fault.reached], fault.times_min);
  EXPECT_EQ(outcome.tally[Reached::length_end], fault.num_ended);
}

INSTANTIATE_TEST_SUITE_P(
    Each, FaultOfEngines,
    testing::Values(Survived{"refuse_allocation@1+20", Reached::refused_allocation, 2, 4},
                    Survived{"refuse_allocation@0+99", Reached::refused_allocation, 2, 4},
                    Survived{"pinch_pool@2+12:9", Reached::preemption, 2, 4},
                    Survived{"early_output@0+30", Reached::early_output, 8, 4},
                    Survived{"late_output@1+6", Reached::late_output, 12, 4},
                    Survived{"abort_decode@0", Reached::abort_decode, 2, 2},
                    Survived{"abort_in_flight@2", Reached::abort_running, 2, 2},
                    Survived{"abort_decode@0,abort_again@0", Reached::abort_again, 2, 2}));

TEST(Engines, OneWhoseRequestsWaitForEverIsNamed) {
  SavedCase saved = with_short_requests_on_rank_0(on_two_engines("refuse_allocation@2+3"));
  saved.cache = *plan_for_groups(saved.cache.groups, 4);
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::stuck) << outcome.what;
  EXPECT_EQ(outcome.dp_rank, 1);
}

}  // namespace
}  // namespace lockstep
