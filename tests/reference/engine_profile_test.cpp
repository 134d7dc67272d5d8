// Profiles are found by name, and a scheduler refuses what its engine refuses, and what is not
// modelled.
#include "reference/profiles/engine_profile.h"
#include "reference/plan/block_sizes.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/reference/engine.h"

namespace lockstep {
namespace {

constexpr const char* kOlder = "vllm-0.22.1";
constexpr const char* kNewer = "vllm-0.33.0";

std::string refusal(EngineConfig config, const std::vector<KVCacheGroupSpec>& groups) {
  const Result<Scheduler> made = Scheduler::create(config, groups, 100);
  return made ? std::string() : made.error().message;
}

EngineConfig config_of_profile(std::string engine, std::int32_t block_size = 16) {
  EngineConfig config;
  config.engine = std::move(engine);
  config.block_size = block_size;
  return config;
}

TEST(EngineProfile, IsFoundByItsNameOnly) {
  for (const EngineProfile& profile : engine_profiles())
    EXPECT_EQ(find_engine_profile(profile.name), &profile);
  EXPECT_EQ(find_engine_profile("vllm-0.33"), nullptr);
  EXPECT_EQ(find_engine_profile(""), nullptr);
}

// A profile's value of every policy, in every release, is one of the table's words.
TEST(EngineProfile, FollowsFromTheTableOfPolicies) {
  std::set<std::string_view> names;
  for (const Policy& policy : policies()) {
    EXPECT_TRUE(names.insert(policy.name).second) << policy.name;
    EXPECT_GE(policy.values.size(), 2u) << policy.name;
    std::int64_t value = policy.history.front().value;
    for (const EngineProfile& profile : engine_profiles()) {
      for (const PolicyChange& change : policy.history)
        if (change.release == profile.name) value = change.value;
      EXPECT_EQ(policy.get(profile), value) << policy.name << " of " << profile.name;
      EXPECT_FALSE(policy.word(value).empty());
    }
    for (std::size_t i = 1; i < policy.history.size(); ++i)
      EXPECT_NE(policy.history[i].value, policy.history[i - 1].value) << policy.name;
  }
}

TEST(EngineProfile, DescriptionNamesAReleaseAndWhatDiffersFromIt) {
  const EngineProfile& release = engine_profile("vllm-0.28.0");
  const EngineProfile& fork = engine_profile("vllm-0.28.0,freed_blocks=append");
  ASSERT_EQ(differences(release, fork).size(), 1u);
  EXPECT_EQ(differences(release, fork)[0]->name, "freed_blocks");
  EXPECT_EQ(fork.freed_blocks, FreedBlocks::append);
  EXPECT_EQ(fork.release, release.release);
  // The name has the table's order, and says nothing twice.
  EXPECT_EQ(engine_profile("vllm-0.28.0,tags_extra_keys=yes,tags_extra_keys=no,"
                           "retire_basis=scheduled,freed_blocks=append")
                .name,
            "vllm-0.28.0,freed_blocks=append,retire_basis=scheduled");
  const auto refusal_of = [](std::string_view description) {
    const auto profile = parse_engine(description);
    return profile ? std::string() : profile.error().message;
  };
  EXPECT_NE(refusal_of("vllm-0.28.0,freed=append").find("unknown policy freed"), std::string::npos);
  EXPECT_NE(refusal_of("vllm-0.28.0,freed_blocks=back").find("expected append, unhashed_"),
            std::string::npos);
  EXPECT_NE(refusal_of("vllm-0.28.0,freed_blocks").find("freed_blocks=: expected"),
            std::string::npos);
  EXPECT_NE(refusal_of("vllm-0.28.0,without=99").find("finding"), std::string::npos);
  EXPECT_NE(refusal_of("fork-1.0").find("vllm-0.22.1"), std::string::npos);
}

TEST(EngineProfile, RepairsOfFindingsArePolicies) {
  EXPECT_EQ(profile_without("vllm-0.22.1", 2), "vllm-0.22.1,cuts_every_full_group=yes");
  EXPECT_EQ(profile_without("vllm-0.33.0", 2), "");  // it has been repaired
  EXPECT_EQ(profile_without("vllm-0.22.1", 6), "");  // no policy does
  const EngineProfile& all = engine_profile(profile_without("vllm-0.22.1", 0));
  for (const FindingPolicies& finding : finding_policies())
    if (!finding.repairs.empty()) {
      EXPECT_FALSE(can_show(all, finding)) << finding.finding;
    }
}

// The smallest cases of 1 fail in 0.26.0, of states alone, and no longer in 0.27.1.
TEST(EngineProfile, FindingsEndWithTheReleaseThatRepairsThem) {
  const auto shows = [](const char* engine, int number) {
    const auto finding = std::ranges::find(finding_policies(), number, &FindingPolicies::finding);
    return can_show(engine_profile(engine), *finding);
  };
  EXPECT_TRUE(shows("vllm-0.26.0", 1));
  EXPECT_FALSE(shows("vllm-0.27.1", 1));
  EXPECT_TRUE(shows("vllm-0.28.0", 2));
  EXPECT_FALSE(shows("vllm-0.29.0", 2));
  EXPECT_TRUE(shows("vllm-0.29.0", 20));
  EXPECT_FALSE(shows("vllm-0.30.0", 20));
}

TEST(EngineProfile, VersionsWithoutAProfileHaveANearestRelease) {
  EXPECT_EQ(nearest_release("0.33.1").name, "vllm-0.33.0");
  EXPECT_EQ(nearest_release("0.28.1rc1.dev3+g12ab").name, "vllm-0.28.0");
  EXPECT_EQ(nearest_release("0.26.3").name, "vllm-0.26.0");
  EXPECT_EQ(&engine_profile("vllm-0.27.0"), &engine_profile("vllm-0.27.1"));  // the same decisions
  EXPECT_EQ(nearest_release("1.0").name, "vllm-0.33.0");
  EXPECT_EQ(nearest_release("0.11.0").name, "vllm-0.20.2");
  EXPECT_EQ(nearest_release("dev").name, "vllm-0.33.0");
}

TEST(EngineProfile, DefaultIsTheNewest) {
  EXPECT_EQ(EngineConfig{}.engine, engine_profiles().back().name);
}

TEST(EngineProfile, UnknownNamesAreRefusedWithTheKnownOnes) {
  const std::string message = refusal(config_of_profile("vllm-9.9.9"), {full(16)});
  EXPECT_NE(message.find("vllm-9.9.9"), std::string::npos) << message;
  EXPECT_NE(message.find("vllm-0.22.1, vllm-0.23.0"), std::string::npos) << message;
}

TEST(EngineProfile, StatesAreCachedInModeAllBy0221Only) {
  const std::vector groups{full(16), states(16, MambaCacheMode::all)};
  EXPECT_EQ(refusal(config_of_profile(kOlder), groups), "");
  EXPECT_NE(refusal(config_of_profile(kNewer), groups).find("mode align"), std::string::npos);
  EngineConfig uncached = config_of_profile(kNewer);
  uncached.enable_prefix_caching = false;
  EXPECT_EQ(refusal(uncached, groups), "");
}

TEST(EngineProfile, TheEngineCoreOf0330TakesTheBlockSizeOfASingleGroup) {
  EngineConfig config = config_of_profile(kOlder);
  config.enable_prefix_caching = false;
  const std::vector groups{states(128, MambaCacheMode::none)};
  EXPECT_EQ(resolve_block_sizes(config, groups)->scheduler_block_size, 16);
  config.engine = kNewer;
  EXPECT_EQ(resolve_block_sizes(config, groups)->scheduler_block_size, 128);
  EXPECT_EQ(refusal(config, groups), "");
}

TEST(EngineProfile, KeysOf0330AreRefusedFor0221) {
  KVCacheGroupSpec exports = states(16, MambaCacheMode::align);
  exports.spec.num_prefill_checkpoint_blocks = 1;
  KVCacheGroupSpec retains = window(16, 20);
  retains.spec.extra_retained_tokens = 2;
  KVCacheGroupSpec ring = full(8);
  ring.spec.kind = CacheKind::circular_buffer;
  for (const KVCacheGroupSpec& group : {exports, retains, ring}) {
    EngineConfig config = config_of_profile(kOlder);
    if (group.spec.kind == CacheKind::mamba) config.mamba_cache_mode = MambaCacheMode::align;
    EXPECT_NE(refusal(config, {full(16), group}).find("vllm-0.22.1 has none"), std::string::npos);
    config.engine = kNewer;
    EXPECT_EQ(refusal(config, {full(16), group}), "");
  }
  EngineConfig config = config_of_profile(kOlder);
  config.prefix_match_unit = 8;
  for (const char* older : {kOlder, "vllm-0.32.0"}) {
    config.engine = older;
    EXPECT_NE(refusal(config, {full(16)}).find("has none that is modelled"), std::string::npos);
  }
}

TEST(EngineProfile, GroupsOfOneSpecShareAPrefixCacheIn0330Only) {
  const std::vector groups{full(16), full(16)};
  EXPECT_NE(refusal(config_of_profile(kOlder), groups).find("one spec"), std::string::npos);
  EXPECT_EQ(refusal(config_of_profile(kNewer), groups), "");
}

TEST(EngineProfile, DecodeContextParallelismTakesSeveralGroupsIn0330Only) {
  EngineConfig config = config_of_profile(kOlder);
  config.dcp = 2;
  const std::vector groups{full(16), group_of(CacheKind::hidden_state, 16)};
  EXPECT_NE(refusal(config, groups).find("single group"), std::string::npos);
  config.engine = kNewer;
  EXPECT_EQ(refusal(config, groups), "");
  EXPECT_NE(refusal(config, {full(16), window(16, 20)}).find("windows"), std::string::npos);
}

TEST(EngineProfile, HitsEndInsideBlocksWhereHashesAreFinerThanStates) {
  EngineConfig config = config_of_profile(kNewer);
  config.mamba_cache_mode = MambaCacheMode::align;
  const auto alignment = [&](const std::vector<KVCacheGroupSpec>& groups) {
    const auto sizes = resolve_block_sizes(config, groups);
    return sizes ? sizes->cache_hit_alignment_tokens() : 0;
  };
  EXPECT_EQ(alignment({full(16), states(64, MambaCacheMode::align)}), 16);
  // A window that looks up whole blocks turns them off; one that is not cached does not.
  KVCacheGroupSpec slides = window(32, 20);
  EXPECT_EQ(alignment({full(16), states(64, MambaCacheMode::align), slides}), 64);
  slides.spec.kind = CacheKind::sliding_window_mla;
  slides.spec.bounded_replay = true;
  EXPECT_EQ(alignment({full(16), states(64, MambaCacheMode::align), slides}), 16);
  config.prefix_match_unit = 8;
  EXPECT_EQ(alignment({full(64), states(64, MambaCacheMode::align)}), 8);
  config.prefix_match_unit = 24;
  EXPECT_EQ(alignment({full(64), states(64, MambaCacheMode::align)}), 0);
  config.engine = kOlder;
  config.prefix_match_unit = 0;
  config.block_size = 64;
  EXPECT_EQ(alignment({full(16), states(64, MambaCacheMode::align)}), 64);
}

TEST(EngineProfile, HashesLookAheadWhereAnEagleDrafterReadsThePrefixCacheOf0330) {
  const auto lookahead = [](const char* engine, SpecMethod method, bool caches) {
    EngineConfig config = config_of_profile(engine);
    config.spec_method = method;
    config.enable_prefix_caching = caches;
    return hash_lookahead_of(config, engine_profile(config.engine));
  };
  EXPECT_EQ(lookahead(kNewer, SpecMethod::eagle, true), 1);
  EXPECT_EQ(lookahead(kNewer, SpecMethod::eagle, false), 0);
  EXPECT_EQ(lookahead(kNewer, SpecMethod::draft_model, true), 0);
  EXPECT_EQ(lookahead(kOlder, SpecMethod::eagle, true), 0);
}

TEST(EngineProfile, AStatedHashLookaheadMustBeTheEngines) {
  EngineConfig config = config_of_profile(kNewer);
  config.spec_method = SpecMethod::eagle;
  config.num_spec_tokens = 2;
  const auto stated = [&](std::int32_t num_tokens) {
    config.num_hash_lookahead_tokens = num_tokens;
    return refusal(config, {full(16)});
  };
  EXPECT_EQ(stated(kEngineHashLookahead), "");
  EXPECT_EQ(stated(1), "");
  EXPECT_EQ(stated(0), "");  // it drops a block of a hit
  EXPECT_NE(stated(3).find("expected -1 to 1"), std::string::npos) << stated(3);
  config.num_prefill_lookahead_tokens = 3;
  EXPECT_EQ(stated(3), "");
  EXPECT_NE(stated(1).find("expected 3"), std::string::npos) << stated(1);
  config.num_prefill_lookahead_tokens = 1;
  config.engine = kOlder;
  EXPECT_EQ(stated(0), "");
  EXPECT_NE(stated(1).find("expected 0"), std::string::npos) << stated(1);
  config.enable_prefix_caching = false;  // nothing is hashed
  EXPECT_EQ(stated(1), "");
}

TEST(EngineProfile, RetentionIsAnOptionOf0330) {
  EngineConfig config = config_of_profile(kOlder);
  config.prefix_cache_retention_interval = 0;
  EXPECT_NE(refusal(config, {full(16)}).find("keeps every"), std::string::npos);
  config.engine = kNewer;
  EXPECT_EQ(refusal(config, {full(16)}), "");
  config.prefix_cache_retention_interval = 32;
  EXPECT_NE(refusal(config, {full(16)}).find("no group"), std::string::npos);
  EXPECT_EQ(refusal(config, {window(16, 20)}), "");
  config.prefix_cache_retention_interval = 24;
  EXPECT_NE(refusal(config, {window(16, 20)}).find("multiple"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
