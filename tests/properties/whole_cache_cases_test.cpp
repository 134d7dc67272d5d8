// Generated cases over context parallel ranks that replicate some caches: what they reach, and that
// all ranks agree, in pages and with one device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "properties/judge/tally.h"
#include "properties/relations/backend_relations.h"
#include "properties/relations/relations.h"

namespace lockstep {
namespace {

GeneratorOptions with_whole_caches(std::string backend) {
  return {.engine = "vllm-0.33.0",
          .always = {Feature::whole_caches, Feature::prefix_caching, Feature::shared_prefixes},
          .never = {Feature::states, Feature::chunked_local, Feature::hidden_state,
                    Feature::two_block_pool, Feature::tensor_parallel, Feature::pipeline_parallel,
                    Feature::data_parallel, Feature::connector_peers, Feature::host_tier,
                    Feature::cross_attention, Feature::sinks, Feature::reference_windows,
                    Feature::drafter_cache, Feature::bounded_replay},
          .backend = std::move(backend),
          .check = "fast"};
}

TEST(WholeCacheCases, AgreeOnEveryRankAndReachHitsWindowsRingsAndCompressedRows) {
  Tally tally;
  int rings = 0, windows = 0, compressed = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const SavedCase saved = generate_case(seed, with_whole_caches("simt"));
    if (saved.engine.dcp == 1) continue;
    count_case(saved, tally);
    for (const KVCacheGroupSpec& group : saved.cache.groups) {
      rings += is_ring(group.spec);
      windows += is_sliding_window(group.spec.kind);
      compressed += shares_rows(group.spec.tokens_per_state) && is_dealt_out(group.spec);
    }
    const Outcome outcome = judge(saved, make_simt_backend);
    EXPECT_TRUE(outcome.kind == OutcomeKind::agreed ||
                known_finding(saved, outcome, make_simt_backend) != nullptr)
        << seed << ": " << outcome.what;
  }
  EXPECT_GE(tally[Reached::whole_cache], 40);
  EXPECT_GT(std::min({rings, windows, compressed}), 0);
}

TEST(WholeCacheCases, DecisionsAloneAgreeWithTheAudit) {
  int drawn = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const SavedCase saved = generate_case(seed, with_whole_caches("none"));
    drawn += saved.engine.dcp > 1;
    const Outcome outcome = judge(saved);
    EXPECT_TRUE(outcome.kind == OutcomeKind::agreed || known_finding(saved, outcome) != nullptr)
        << seed << ": " << outcome.what;
  }
  EXPECT_GT(drawn, 100);
}

// Of several groups the relation leaves all but the first whole.
TEST(WholeCacheCases, AnswersAndReadsAreThoseOfOneDevice) {
  const Relation& over_ranks =
      *std::ranges::find(relations(), std::string_view("context ranks"), &Relation::name);
  GeneratorOptions options = with_whole_caches("simt");
  options.always = {Feature::full_attention, Feature::sliding_window, Feature::several_groups};
  options.never.add(unrelated_features());
  int applied = 0, reads = 0;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const SavedCase saved = generate_case(seed, options);
    if (saved.cache.groups.size() < 2 || !why_not_read(saved).empty()) continue;
    const auto check = check_on_backend(saved, over_ranks, make_simt_backend);
    ASSERT_TRUE(check) << seed << ": " << check.error().message;
    if (!*check || !(*check)->refused.empty()) continue;
    ++applied;
    reads += static_cast<int>((*check)->compared);
    EXPECT_FALSE((*check)->breach) << seed << ": " << (*check)->breach->what;
  }
  EXPECT_GE(applied, 5);
  EXPECT_GT(reads, 500);
}

}  // namespace
}  // namespace lockstep
