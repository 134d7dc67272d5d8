// The judge: runs are repeatable to the last hash, a planted defect is seen, and what cannot be run
// is refused.
#include "properties/judge/judge.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/failure.h"
#include "properties/judge/forwarding_backend.h"
#include "properties/judge/known_findings.h"
#include "reference/profiles/policies.h"

namespace lockstep {
namespace {

GeneratorOptions with_backend(std::string backend) {
  GeneratorOptions options;
  options.backend = std::move(backend);
  options.check = "fast";
  return options;
}

struct Chain {
  Outcome outcome;
  std::vector<StateHash> hashes;
};

Chain chain_of(const SavedCase& saved) {
  Chain chain;
  chain.outcome = judge(
      saved,
      JudgeOptions{.backend = make_simt_backend, .observer = nullptr, .hashes = &chain.hashes});
  return chain;
}

// The step in which two chains part; -1: nowhere.
std::int64_t first_other_part(const Chain& a, const Chain& b) {
  const auto [at_a, at_b] = std::ranges::mismatch(a.hashes, b.hashes);
  if (at_a == a.hashes.end() && at_b == b.hashes.end()) return -1;
  return at_a - a.hashes.begin();
}

// Reads back a wrong block table or a wrong slot from one step on.
class WrongReadback final : public ForwardingBackend {
 public:
  WrongReadback(std::unique_ptr<Backend> inner, std::int64_t step, bool in_table)
      : ForwardingBackend(std::move(inner)), step_(step), in_table_(in_table) {}
  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    LS_RETURN_IF_ERROR(inner_->execute(program, readback));
    if (program.step >= step_ && in_table_) ++readback.tables.front().front();
    if (program.step >= step_ && !in_table_) ++readback.slot_mappings.front().front();
    return {};
  }

 private:
  std::int64_t step_;
  bool in_table_;
};

// No repair of a decision repairs this backend, which fails by two checks in turn.
TEST(Judge, ARunWithALimitOfStepsEndsThereAndItsEndIsNotJudged) {
  const SavedCase saved = generate_case(std::uint64_t{1}, with_backend("none"));
  const Outcome whole = judge(saved), cut = judge(saved, JudgeOptions{.steps_max = 2});
  EXPECT_EQ(whole.kind, OutcomeKind::agreed) << whole.what;
  EXPECT_EQ(cut.kind, OutcomeKind::agreed) << cut.what;
  EXPECT_GT(whole.steps, 3);
  EXPECT_EQ(cut.steps, 2);
}

TEST(KnownFindings, ASearchBetweenTwoFailuresThatAlternateEnds) {
  GeneratorOptions options = with_backend("simt");
  options.engine = "vllm-0.22.1";
  options.always = {Feature::connector_peers};
  options.never = {Feature::data_parallel};
  const SavedCase saved = generate_case(3'863, options);
  const Outcome decided = judge(saved);
  ASSERT_EQ(decided.check, "audit.handed_out") << decided.what;
  std::int64_t runs = 0;
  const BackendFactory alternates =
      [&](const BackendConfig& config) -> Result<std::unique_ptr<Backend>> {
    if (++runs > 500) return fail("an endless search");
    LS_ASSIGN_OR_RETURN(auto backend, make_simt_backend(config));
    return std::make_unique<WrongReadback>(std::move(backend), decided.step, runs % 2 == 0);
  };
  const Outcome outcome = judge(saved, alternates);
  ASSERT_EQ(outcome.kind, OutcomeKind::divergence) << outcome.what;
  EXPECT_EQ(known_finding(saved, outcome, alternates), nullptr);
  EXPECT_LT(runs, 100);
}

TEST(Judge, ACaseThatIsRunTwiceGoesThroughTheSameStates) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const SavedCase saved = generate_case(seed, with_backend(seed % 4 == 0 ? "simt" : "none"));
    const Chain first = chain_of(saved);
    const Chain second = chain_of(saved);
    EXPECT_EQ(first_other_part(first, second), -1) << "seed " << seed;
    EXPECT_EQ(first.outcome, second.outcome) << "seed " << seed;
    EXPECT_FALSE(first.hashes.empty()) << "seed " << seed;
  }
}

TEST(Judge, TwoRunsThatPartAreToldApartInTheStepInWhichTheyDo) {
  GeneratorOptions options = with_backend("none");
  options.never.add(Feature::data_parallel);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SavedCase saved = generate_case(seed, options);
    saved.trace.records.clear();
    saved.faults.clear();
    saved.engine.max_model_len = std::max(saved.engine.max_model_len, 8);
    TraceRequest request;
    request.spec.name = "r";
    request.spec.prompt.append({TokenRun::Kind::seeded, 1, 0, 1});
    request.spec.max_tokens = request.output.length = 2;
    saved.trace.records.emplace_back(request);
    const Chain before = chain_of(saved);
    if (before.outcome.kind != OutcomeKind::agreed) continue;  // refused: the engine's options
    // One token a step, seen at once.
    if (saved.engine.async_scheduling || saved.engine.num_spec_tokens > 0) continue;
    std::get<TraceRequest>(saved.trace.records[0]).spec.max_tokens = 3;
    std::get<TraceRequest>(saved.trace.records[0]).output.length = 3;
    const std::int64_t part = first_other_part(before, chain_of(saved));
    EXPECT_EQ(part, 1) << "seed " << seed;
    return;
  }
  FAIL() << "every case was refused";
}

// If this canary lives, nothing that fuzzing says is worth anything.
TEST(Canary, APlantedDefectIsSeen) {
  SavedCase saved = generate_case(std::uint64_t{1}, with_backend("simt"));
  ASSERT_EQ(judge(saved, make_simt_backend).kind, OutcomeKind::agreed);
  saved.mutants = {"drop-slot"};
  const Outcome outcome = judge(saved, make_simt_backend);
  EXPECT_EQ(outcome.kind, OutcomeKind::divergence);
  EXPECT_EQ(outcome.check, "page_written");
  EXPECT_EQ(outcome.step, 0);
  EXPECT_FALSE(outcome.what.empty());
}

TEST(Judge, RefusesAMutantThatNobodyHasAndOneThatHasNoBackendToBeIn) {
  SavedCase saved = generate_case(std::uint64_t{1}, with_backend("simt"));
  saved.mutants = {"no-such-defect"};
  const Outcome unknown = judge(saved, make_simt_backend);
  EXPECT_EQ(unknown.kind, OutcomeKind::refused);
  EXPECT_NE(unknown.what.find("no-such-defect"), std::string::npos) << unknown.what;
  saved.mutants = {"drop-slot"};
  EXPECT_EQ(judge(saved).kind, OutcomeKind::refused);
  saved.mutants = {"drop-slot", "race"};
  EXPECT_EQ(judge(saved, make_simt_backend).kind, OutcomeKind::refused);
}

// Whatever the configuration and the check suggest, and even if the engine's defect has its part in
// it: what does not happen without the planted defect is the planted defect's doing.
TEST(KnownFindings, AreNotBlamedForWhatIsPlantedBesideThem) {
  GeneratorOptions options = with_backend("none");
  options.engine = "vllm-0.22.1";
  options.always = {Feature::several_groups, Feature::full_attention, Feature::mla,
                    Feature::sliding_window, Feature::prefix_caching, Feature::shared_prefixes};
  options.never = {Feature::two_block_pool, Feature::data_parallel};
  std::int64_t num_planted = 0, num_taken = 0;
  for (const char* const mutant : {"free-window-early", "hit-window-short"})
    for (std::uint64_t seed = 1; seed <= 400; ++seed) {
      SavedCase saved = generate_case(seed, options);
      if (judge(saved).failed()) continue;
      saved.mutants = {mutant};
      const Outcome outcome = judge(saved);
      if (!outcome.failed()) continue;
      bool could_be = false;
      for (const KnownFinding& finding : known_findings())
        could_be |= finding.can_happen(saved) &&
                    std::ranges::find(finding.checks, outcome.check) != finding.checks.end();
      num_planted += could_be ? 1 : 0;
      num_taken += known_finding(saved, outcome) != nullptr ? 1 : 0;
    }
  EXPECT_EQ(num_taken, 0);
  EXPECT_GT(num_planted, 20) << "of those that configuration and check would have confused";
}

TEST(KnownFindings, AreWhatACaseGetsPastOnceTheyAreRepaired) {
  GeneratorOptions options = with_backend("none");
  options.always = {Feature::several_groups, Feature::full_attention, Feature::mla,
                    Feature::prefix_caching, Feature::shared_prefixes};
  options.engine = "vllm-0.22.1";
  std::int64_t num_found = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SavedCase saved = generate_case(seed, options);
    const Outcome outcome = judge(saved);
    const KnownFinding* finding = known_finding(saved, outcome);
    EXPECT_EQ(finding != nullptr, outcome.failed()) << seed << ": " << outcome.what;
    if (finding == nullptr || finding->number != 2) continue;
    ++num_found;
    saved.engine.engine = profile_without("vllm-0.22.1", 2);
    EXPECT_FALSE(judge(saved).same_failure(outcome)) << seed;
  }
  EXPECT_GT(num_found, 5);
}

// An exception of an engine is not another one; the numbers in it may differ.
TEST(Judge, AnEnginesOwnFailureIsTheSameOnlyByItsCause) {
  const Failure first{
      .kind = "violation", .check = "engine.exception", .request = {}, .what = "KeyError: 'r1'"};
  Failure other = first;
  other.what = "KeyError: 'r22'";
  EXPECT_TRUE(other.same_as(first));
  EXPECT_EQ(expected_of(other).cause, expected_of(first).cause);
  other.what = "AssertionError: 4 blocks";
  EXPECT_FALSE(other.same_as(first));
  EXPECT_NE(expected_of(other).cause, expected_of(first).cause);
  other.check = "audit.queues";
  EXPECT_TRUE(expected_of(other).cause.empty());
}

// No engine starts with such a case; the ledger still follows each group by its own blocks.
TEST(Judge, StateGroupsOfTwoBlockSizesAreAuditedEachByItsOwn) {
  const auto saved = read_saved_case(
      LOCKSTEP_SOURCE_DIR "/tests/properties/state_groups_of_two_block_sizes.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const Outcome outcome = judge(*saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
}

}  // namespace
}  // namespace lockstep
