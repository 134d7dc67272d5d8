// Generated cases with KV connectors: every check observes them, the engine's own defects are found
// again from seeds and shrunk, and none is left once they are repaired.
#include <gtest/gtest.h>

#include <optional>
#include <set>

#include "cuda_backend/backends.h"
#include "properties/fuzz/fuzz.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrinker.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

GeneratorOptions beside(FeatureSet always, std::string backend = "none") {
  GeneratorOptions options;
  options.engine = "vllm-0.22.1";
  options.always = always;
  options.never = {Feature::states, Feature::async_scheduling};
  options.backend = std::move(backend);
  options.check = "fast";
  return options;
}

// Peers where the case has no host tier.
GeneratorOptions beside_any(std::string backend = "none") {
  return beside({Feature::connector_peers}, std::move(backend));
}

TEST(ConnectorCases, HavePeersAndHostTiersAndEveryPolicy) {
  std::set<std::pair<ConnectorKind, KVLoadFailurePolicy>> seen;
  std::set<std::size_t> num_parts;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const SavedCase saved = generate_case(seed, beside_any());
    const ConnectorConfig connector = config_of(saved).connector;
    ASSERT_FALSE(connector.parts.empty()) << seed;
    for (const ConnectorKind kind : connector.parts)
      seen.emplace(kind, connector.load_failure_policy);
    num_parts.insert(connector.parts.size());
    EXPECT_TRUE(check_setup(config_of(saved))) << seed;
  }
  EXPECT_EQ(seen.size(), 6u);
  EXPECT_EQ(num_parts, (std::set<std::size_t>{1, 2, 3}));
}

TEST(ConnectorCases, AreNotDrawnWhereTheEngineTakesNoConnector) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    GeneratorOptions options;
    options.backend = "none";
    options.always = {Feature::connector_peers, Feature::host_tier};
    const SavedCase saved = generate_case(seed, options);
    if (!has_connector(saved)) continue;
    EXPECT_TRUE(engine_profile(saved.engine.engine).release->models_connectors) << seed;
    if (saved.engine.async_scheduling) {
      EXPECT_FALSE(saved.connector.has(ConnectorKind::host)) << seed;
    }
    EXPECT_NE(judge(saved).kind, OutcomeKind::refused) << seed;
  }
}

// The rest of a case is the same with and without a connector, except for features generated after
// connectors, and a larger pool for a step in flight.
TEST(ConnectorCases, AreDrawnLastSoThatTheRestOfACaseStays) {
  GeneratorOptions without;
  without.backend = "none";
  GeneratorOptions with = without;
  with.never = {Feature::short_drafts,  Feature::rising_priorities,  Feature::bounded_replay,
                Feature::rings,         Feature::compressed_rows,    Feature::equal_requests,
                Feature::mapped_tables, Feature::engine_hashes,      Feature::whole_caches,
                Feature::same_instant,  Feature::hits_inside_blocks, Feature::stop_tokens,
                Feature::running_resets, Feature::pauses};
  with.never.add(kBesideTokens);
  without.never = with.never;
  without.never.add({Feature::connector_peers, Feature::host_tier});
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    const SavedCase plain = generate_case(seed, without);
    SavedCase connected = generate_case(seed, with);
    connected.connector = {};
    if (connected.engine.async_scheduling != plain.engine.async_scheduling) {  // drawn behind them
      connected.engine.async_scheduling = plain.engine.async_scheduling;
      EXPECT_GE(connected.cache.num_blocks, plain.cache.num_blocks) << seed;
      connected.cache = plain.cache;
    }
    std::erase_if(connected.faults,
                  [](const Fault& fault) { return fault.kind == "abort_loading"; });
    EXPECT_EQ(connected, plain) << seed;
  }
}

TEST(ConnectorCases, AgreeOrRunIntoAKnownFinding) {
  FuzzOptions options;
  options.generator = beside_any();
  options.runs = 4'000;
  const FuzzReport report = fuzz(options);
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  for (const FuzzFailure& failure : report.failures)
    ADD_FAILURE() << "seed " << failure.seed << ", " << failure.check << " in step " << failure.step
                  << ": " << failure.what;
  for (const Reached reached : classes_of_connectors())
    EXPECT_GT(report.tally[reached], 0) << name_of(reached);
}

TEST(ConnectorCases, AgreeByteForByteWithTheKernels) {
  FuzzOptions options;
  options.generator = beside_any("simt");
  options.backend = make_simt_backend;
  options.runs = 60;
  const FuzzReport report = fuzz(options);
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  for (const FuzzFailure& failure : report.failures)
    ADD_FAILURE() << "seed " << failure.seed << ", " << failure.check << " in step " << failure.step
                  << ": " << failure.what;
}

// docs/findings.md, 7, 8, 9 and 12 and older ones: with all of them repaired no request waits
// forever and no read is wrong. No rule repairs 15: a case that shows it agrees without lost
// blocks.
TEST(ConnectorCases, AllAgreeOnceTheFindingsAreRepaired) {
  FuzzOptions options;
  options.generator = beside_any();
  options.generator.engine = profile_without("vllm-0.22.1", 0);
  options.generator.never.add({Feature::same_instant, Feature::running_resets});  // 11, 22: no rule
  options.runs = 3'000;
  const FuzzReport report = fuzz(options);
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  for (const Reached reached : classes_of_connectors())
    EXPECT_GT(report.tally[reached], 0) << name_of(reached);
  for (const auto& [finding, known] : report.known)
    EXPECT_TRUE(finding.starts_with("15. ")) << finding << ": " << known.cases;
  for (const FuzzFailure& failure : report.failures)
    ADD_FAILURE() << "seed " << failure.seed << ", " << failure.check << " in step " << failure.step
                  << ": " << failure.what;
}

struct Found {
  SavedCase saved;
  Outcome outcome;
};

// The first case that fails this check by this finding.
std::optional<Found> search(std::string_view check, int number) {
  // One engine with one connector is what the smallest case comes to.
  GeneratorOptions options = beside_any();
  options.never.add(
      {Feature::data_parallel, Feature::several_connectors, Feature::rising_priorities});
  for (std::uint64_t seed = 1; seed <= 3'000; ++seed) {
    SavedCase saved = generate_case(seed, options);
    Outcome outcome = judge(saved);
    if (outcome.check != check) continue;
    const KnownFinding* const finding = known_finding(saved, outcome);
    if (finding != nullptr && finding->number == number)
      return Found{std::move(saved), std::move(outcome)};
  }
  return std::nullopt;
}

struct Sought {
  std::string_view check;
  int finding;
};

class Deadlock : public testing::TestWithParam<Sought> {};

// connectors/connector_async/0014 and connectors/connector_failures_fail/0000 show them in
// recordings; here nothing is known but seeds.
TEST_P(Deadlock, IsFoundFromSeedsAloneAndMadeSmall) {
  const auto found = search(GetParam().check, GetParam().finding);
  ASSERT_TRUE(found);
  const auto result = shrink(
      found->saved, [&](const SavedCase& saved, std::int64_t) -> std::optional<std::int64_t> {
        const Outcome outcome = judge(saved);
        return outcome.same_failure(found->outcome) ? std::optional(outcome.steps) : std::nullopt;
      });
  ASSERT_TRUE(result);
  EXPECT_TRUE(result->is_minimal);
  const CaseSize size = size_of(result->smallest);
  EXPECT_LE(size.requests, 3) << saved_case_to_text(result->smallest);
  RecordProperty("requests", static_cast<int>(size.requests));
  RecordProperty("steps", static_cast<int>(result->steps));
  EXPECT_EQ(judge(result->smallest).check, GetParam().check);
}

INSTANTIATE_TEST_SUITE_P(Each, Deadlock,
                         testing::Values(Sought{"liveness.head_of_line", 7},
                                         Sought{"liveness.partial_load", 8}),
                         [](const auto& sought) {
                           return "finding_" + std::to_string(sought.param.finding);
                         });

// Wrong accounting is found with a connector, too.
TEST(ConnectorCases, DoNotHideAPlantedDefectFromTheInvariants) {
  const GeneratorOptions options =
      beside({Feature::connector_peers, Feature::tight_pool, Feature::shared_prefixes});
  for (const char* const mutant : {"free-by-id", "free-forward-order", "free-preempted-lost"}) {
    bool caught = false;
    for (std::uint64_t seed = 1; seed <= 300 && !caught; ++seed) {
      SavedCase saved = generate_case(seed, options);
      if (judge(saved).failed()) continue;
      saved.mutants = {mutant};
      caught = judge(saved).check.starts_with("invariant.");
    }
    EXPECT_TRUE(caught) << mutant;
  }
}

}  // namespace
}  // namespace lockstep
