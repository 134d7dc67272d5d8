// Metamorphic relations hold over generated cases, and each of them breaks where a defect of the
// scheduler makes it break.
#include "properties/relations/relations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "base/child_process.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "reference/defects/scheduler_defect.h"
#include "reference/plan/page_size.h"
#include "reference/profiles/policies.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kSeeds = 120;
constexpr std::uint64_t kDefectSeeds = 60;

// Under `priority` a request can be preempted in its own step (docs/findings.md, 3), and what it
// would have computed is hit: the relations break there, as a test below shows.
GeneratorOptions plain_options() {
  GeneratorOptions options;
  options.engine = "vllm-0.33.0";
  options.never = unrelated_features();
  options.backend = "none";
  return options;
}

// Without findings 7 to 9 and 12 to 14, which break relations as well, and without a step in
// flight, which brings 15. A host tier finds blocks by their hashes.
GeneratorOptions connected_options() {
  GeneratorOptions options = plain_options();
  options.engine = profile_without("vllm-0.22.1", 0);
  options.always = {Feature::connector_peers, Feature::prefix_caching, Feature::shared_prefixes};
  options.never.add(Feature::states);
  options.never.add({Feature::async_scheduling, Feature::async_connectors});
  return options;
}

SavedCase case_for(const Relation& relation, std::uint64_t seed) {
  return generate_case(seed, relation.of_connectors ? connected_options() : plain_options());
}

SavedCase regression(const std::string& name) {
  auto recording = read_recording(LOCKSTEP_SOURCE_DIR "/tests/regressions/" + name + ".jsonl");
  EXPECT_TRUE(recording) << recording.error().message;
  auto saved = case_of(name, std::move(*recording));
  EXPECT_TRUE(saved) << saved.error().message;
  auto timed = on_a_clock(*saved);
  EXPECT_TRUE(timed) << timed.error().message;
  return *timed;
}

const Relation& named(std::string_view name) {
  return *std::ranges::find(relations(), name, &Relation::name);
}

class RelationProperty : public testing::TestWithParam<Relation> {};

// What docs/findings.md tells of the engine breaks relations too.
bool is_known(const SavedCase& saved) { return known_finding_of_run(saved, {}) != nullptr; }

void expect_holds(const Relation& relation, std::uint64_t seeds) {
  std::int64_t applied = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const SavedCase saved = case_for(relation, seed);
    if (!why_not_answered(saved).empty()) continue;
    if (relation.change(saved)) ++applied;
    const auto breach = check_relation(saved, relation);
    ASSERT_TRUE(breach) << "seed " << seed << ": " << breach.error().message;
    if (*breach && (is_known(saved) || is_known(*relation.change(saved)))) continue;
    ASSERT_FALSE(*breach) << "seed " << seed << ": " << (*breach)->what << "\n"
                          << saved_case_to_text(saved);
  }
  EXPECT_GT(applied, 5) << "a relation that is never applied says nothing";
}

TEST_P(RelationProperty, HoldsOverGeneratedCases) { expect_holds(GetParam(), kSeeds); }

std::string test_name(const testing::TestParamInfo<Relation>& relation) {
  std::string name(relation.param.name);
  std::ranges::replace(name, ' ', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Each, RelationProperty,
                         testing::ValuesIn(relations().begin(), relations().end()), test_name);

// The relations that break in one generated case with a defect planted, one a line. In a child: a
// defect may run into a check of the pool's own.
std::string broken_under(SchedulerDefect defect, std::uint64_t seed) {
  const auto answer = run_in_child(
      [&] {
        std::string broken;
        for (const Relation& relation : relations()) {
          SavedCase saved = case_for(relation, seed);
          saved.mutants = {std::string(name_of(defect))};
          if (!why_not_answered(saved).empty()) continue;
          const auto breach = check_relation(saved, relation);
          if (breach && *breach) broken += std::string(relation.name) + "\n";
        }
        return broken;
      },
      std::chrono::seconds(60));
  return answer ? answer->text : "";
}

// Which defects break a relation, and which relations a defect breaks: neither may be nothing for a
// relation, or it could not fail.
TEST(Relations, EachBreaksUnderDefectsOfTheScheduler) {
  std::map<std::string, std::set<std::string>> defects_of;
  for (const SchedulerDefect defect : kAllDefects<SchedulerDefect>)
    for (std::uint64_t seed = 1; seed <= kDefectSeeds; ++seed) {
      std::istringstream broken(broken_under(defect, seed));
      for (std::string relation; std::getline(broken, relation);)
        defects_of[relation].insert(std::string(name_of(defect)));
    }
  for (const Relation& relation : relations()) {
    const std::set<std::string>& defects = defects_of[std::string(relation.name)];
    std::printf("%s:", std::string(relation.name).c_str());
    for (const std::string& defect : defects) std::printf(" %s", defect.c_str());
    std::printf("\n");
    EXPECT_FALSE(defects.empty()) << relation.name;
  }
}

TEST(ShuffledBlocks, AreDecidedAboutAlike) {
  for (const std::string engine : {"vllm-0.22.1", "vllm-0.33.0"}) {
    GeneratorOptions options = plain_options();
    options.engine = engine;
    options.never.remove(Feature::priority_policy);
    for (std::uint64_t seed = 1; seed <= 4 * kSeeds; ++seed) {
      const auto breach = check_shuffled_blocks(generate_case(seed, options));
      ASSERT_TRUE(breach) << "seed " << seed << ": " << breach.error().message;
      ASSERT_FALSE(*breach) << engine << ", seed " << seed << ": " << (*breach)->what;
    }
  }
}

TEST(ShuffledBlocks, AreNotWhereBlocksAreFreedByTheirIds) {
  std::int64_t broken = 0;
  for (std::uint64_t seed = 1; seed <= kDefectSeeds; ++seed) {
    SavedCase saved = generate_case(seed, plain_options());
    saved.mutants = {"free-by-id"};
    const auto breach = check_shuffled_blocks(saved);
    ASSERT_TRUE(breach);
    broken += *breach ? 1 : 0;
  }
  EXPECT_GT(broken, 0);
}

// What the audit found in the engines by looking at decisions is seen here in the answers.
TEST(Relations, BreakOnWhatTheAuditFoundInTheEngines) {
  const SavedCase preempted = regression("vllm_0_33_0_preempted_in_its_own_step");
  const auto in_a_larger_pool = check_relation(preempted, named("larger pool"));
  ASSERT_TRUE(in_a_larger_pool);
  ASSERT_TRUE(*in_a_larger_pool);
  EXPECT_EQ((*in_a_larger_pool)->request, "low");
  const SavedCase longer_hit = regression("vllm_0_22_1_state_hit_longer");
  const auto without_eagle = check_relation(longer_hit, named("no drafts"));
  ASSERT_TRUE(without_eagle);
  ASSERT_TRUE(*without_eagle);
  EXPECT_EQ((*without_eagle)->request, "reader");
}

// The case with as many blocks as all of its requests could ever take together: from here on more
// memory changes no decision.
SavedCase with_memory_for_all(const SavedCase& saved) {
  SavedCase other = saved;
  std::int64_t blocks = 1;
  for (const RequestSpec* request : requests_of(saved))
    for (const KVCacheGroupSpec& group : saved.cache.groups)
      blocks += cdiv(request->prompt.size() + request->max_tokens + saved.engine.num_spec_tokens,
                     group.spec.block_size) +
                2 + group.spec.num_speculative_blocks;
  set_num_blocks(other, std::max(blocks, saved.cache.num_blocks));
  return other;
}

// A request that ends in a later step, or not at all, when the pool has `more` blocks more.
struct LaterWithMore {
  std::string request;
  std::int64_t step = 0;           // with the pool as it is
  std::int64_t step_more = 0;      // with more; -1: never
  std::int64_t finished = 0;       // requests that ended by `step`
  std::int64_t finished_more = 0;  // fewer of them by then
};

std::int64_t ended_by(const Answers& answers, std::int64_t step) {
  return std::ranges::count_if(answers.ended_in,
                               [&](const auto& ended) { return ended.second <= step; });
}

// Whether fewer requests have ended by some step when there is more memory.
Result<std::optional<LaterWithMore>> more_memory_finishes_later(const SavedCase& saved,
                                                                std::int64_t more) {
  SavedCase larger = saved;
  set_num_blocks(larger, saved.cache.num_blocks + more);
  LS_ASSIGN_OR_RETURN(const auto less, answers_of(saved));
  LS_ASSIGN_OR_RETURN(const auto with_more, answers_of(larger));
  for (const auto& [name, step] : less.ended_in) {
    const std::int64_t finished = ended_by(less, step);
    const std::int64_t finished_more = ended_by(with_more, step);
    if (finished_more >= finished) continue;
    const auto later = with_more.ended_in.find(name);
    return LaterWithMore{.request = name,
                         .step = step,
                         .step_more = later == with_more.ended_in.end() ? -1 : later->second,
                         .finished = finished,
                         .finished_more = finished_more};
  }
  return std::optional<LaterWithMore>();
}

// All requests arrive at the start and none is aborted: the scheduler decides when a request ends.
SavedCase all_at_once(std::uint64_t seed) {
  SavedCase saved = generate_case(seed, plain_options());
  std::erase_if(saved.trace.records, [](const TraceRecord& record) {
    return std::holds_alternative<TraceControl>(record);
  });
  for (TraceRequest* request : trace_requests_of(saved)) {
    request->abort.reset();
    request->after.clear();
    request->delay_ns = 0;
    request->spec.arrival_ns = 0;
  }
  return saved;
}

TEST(Memory, ThatNobodyCanNeedChangesNothingAboutWhenRequestsEnd) {
  std::int64_t compared = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SavedCase saved = with_memory_for_all(all_at_once(seed));
    if (!why_not_answered(saved).empty()) continue;
    const auto enough = answers_of(saved);
    ASSERT_TRUE(set_num_blocks(saved, saved.cache.num_blocks + 17));
    const auto more = answers_of(saved);
    ASSERT_TRUE(enough && more);
    EXPECT_EQ(enough->ended_in, more->ended_in) << "seed " << seed;
    EXPECT_EQ(enough->steps, more->steps) << "seed " << seed;
    ++compared;
  }
  EXPECT_GT(compared, 60);
}

// With one more block no request is preempted, so the second request keeps a copy of a block that
// it would share after a preemption, and the third does not fit until it ends.
TEST(Memory, OneBlockMoreCanMakeARequestFinishLater) {
  const auto saved = read_saved_case(LOCKSTEP_SOURCE_DIR
                                     "/tests/regressions/more_memory_finishes_later.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const auto later = more_memory_finishes_later(*saved, 1);
  ASSERT_TRUE(later) << later.error().message;
  ASSERT_TRUE(*later);
  EXPECT_EQ((*later)->request, "r2");
  EXPECT_EQ((*later)->step, 3);
  EXPECT_EQ((*later)->step_more, 5);
  EXPECT_EQ((*later)->finished, 2);
  EXPECT_EQ((*later)->finished_more, 1);
  const auto enough = more_memory_finishes_later(with_memory_for_all(*saved), 1);
  ASSERT_TRUE(enough);
  EXPECT_FALSE(*enough);
}

class RelationPropertySlow : public testing::TestWithParam<Relation> {};

TEST_P(RelationPropertySlow, HoldsOverThousandsOfGeneratedCases) { expect_holds(GetParam(), 5000); }

INSTANTIATE_TEST_SUITE_P(Each, RelationPropertySlow,
                         testing::ValuesIn(relations().begin(), relations().end()), test_name);

}  // namespace
}  // namespace lockstep
