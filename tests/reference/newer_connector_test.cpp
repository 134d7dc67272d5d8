// What vLLM 0.33.0 decides with a KV connector and 0.22.1 does not, rule by rule. Blocks of 4
// tokens; the pool's first block is the null block.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "reference/profiles/policies.h"
#include "tests/reference/engine.h"

namespace lockstep {
namespace {

class NewerConnectors : public testing::Test {
 protected:
  static EngineConfig config() {
    EngineConfig config;
    config.engine = "vllm-0.33.0";
    config.max_num_seqs = 4;
    config.max_num_batched_tokens = 64;
    config.max_model_len = 64;
    config.block_size = 4;
    return config;
  }
  static EngineConfig async_config() {
    EngineConfig engine = config();
    engine.async_scheduling = true;
    return engine;
  }
  Engine engine_of(const EngineConfig& engine, std::vector<KVCacheGroupSpec> groups,
                   std::int64_t num_blocks,
                   KVLoadFailurePolicy policy = KVLoadFailurePolicy::recompute) {
    return Engine(engine, groups, num_blocks, {&connector, policy});
  }
  static std::vector<std::string> names(const Scheduler& scheduler,
                                        std::span<const RequestId> ids) {
    std::vector<std::string> names;
    for (const RequestId id : ids) names.emplace_back(scheduler.name(id));
    return names;
  }

  AnsweringConnector connector;
};

TEST_F(NewerConnectors, ARequestThatHoldsBlocksComesBeforeOneThatDoesNotFit) {
  const auto scheduled = [&](const char* description) {
    EngineConfig engine = config();
    engine.engine = description;
    connector.answers["large"] = {.num_tokens = std::nullopt};
    connector.answers["loaded"] = {.num_tokens = 4, .is_async = true};
    Engine vllm = engine_of(engine, {full(4)}, 5);
    vllm.add("large", prompt_of(1, 16));
    const RequestId loaded = vllm.add("loaded", prompt_of(2, 8));
    vllm.step();
    vllm.step({.finished_recving = {loaded}});
    connector.answers["large"] = {.num_tokens = 0};
    return tokens_of(vllm.scheduler(), vllm.step());
  };
  EXPECT_TRUE(scheduled("vllm-0.22.1").empty());
  EXPECT_EQ(scheduled("vllm-0.33.0"), (std::map<std::string, std::int32_t>{{"loaded", 4}}));
}

TEST_F(NewerConnectors, WhoIsPassedOverGoesBackToTheHeadOfTheQueue) {
  connector.answers["a"] = {.num_tokens = std::nullopt};
  connector.answers["b"] = {.num_tokens = 4, .is_async = true};
  Engine vllm = engine_of(config(), {full(4)}, 16);
  vllm.add("a", prompt_of(1, 8));
  vllm.add("b", prompt_of(2, 8));
  vllm.step();
  vllm.add("c", prompt_of(3, 8));
  const Scheduler& scheduler = vllm.scheduler();
  EXPECT_EQ(names(scheduler, scheduler.waiting()), (std::vector<std::string>{"a", "c"}));
  ASSERT_EQ(scheduler.skipped().size(), 1u);
  EXPECT_EQ(scheduler.name(scheduler.skipped()[0].id), "b");
  ASSERT_TRUE(scheduler.deferred());
  EXPECT_EQ(names(scheduler, *scheduler.deferred()), (std::vector<std::string>{"a", "b"}));
}

// Three blocks for the rest of the first load, of five that are free: two are left for the second.
TEST_F(NewerConnectors, ALoadLeavesRoomForThoseThatAreUnderWay) {
  const auto num_loading = [&](std::int64_t num_blocks) {
    connector.answers["a"] = {.num_tokens = 4, .is_async = true};
    connector.answers["b"] = {.num_tokens = 12, .is_async = true};
    Engine vllm = engine_of(config(), {full(4)}, num_blocks);
    vllm.add("a", prompt_of(1, 16));
    vllm.add("b", prompt_of(2, 16));
    vllm.step();
    return vllm.scheduler().skipped().size();
  };
  EXPECT_EQ(num_loading(7), 1u);
  EXPECT_EQ(num_loading(8), 2u);
}

TEST_F(NewerConnectors, ALoadLeavesRoomForTheSlotsOfDrafts) {
  EngineConfig drafting = config();
  drafting.spec_method = SpecMethod::ngram;
  drafting.num_spec_tokens = 3;
  const auto is_loading = [&](std::int64_t num_blocks) {
    connector.answers["a"] = {.num_tokens = 8, .is_async = true};
    Engine vllm = engine_of(drafting, {full(4)}, num_blocks);
    vllm.add("a", prompt_of(1, 9));
    vllm.step();
    return vllm.scheduler().skipped().size() == 1;
  };
  EXPECT_FALSE(is_loading(3));  // nor would the prompt fit
  EXPECT_TRUE(is_loading(4));
}

TEST_F(NewerConnectors, BlocksOfWhoHasLeftStayUntilTheStepInFlightIsOver) {
  Engine vllm = engine_of(async_config(), {full(4)}, 8);
  const RequestId a = vllm.add("a", prompt_of(1, 8));
  vllm.step();
  ASSERT_EQ(vllm.scheduler().num_steps_in_flight(), 1);
  vllm.scheduler().abort_request(a);
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 5);
  EXPECT_EQ(ids(vllm.scheduler().freed_late()), (std::vector<std::int32_t>{2, 1}));
  vllm.finish_all();
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 7);
  EXPECT_TRUE(vllm.scheduler().freed_late().empty());
}

TEST_F(NewerConnectors, OneThatOnlySendsDefersNoFrees) {
  connector.own_traits.is_kv_consumer = false;
  Engine vllm = engine_of(async_config(), {full(4)}, 8);
  const RequestId a = vllm.add("a", prompt_of(1, 8));
  vllm.step();
  vllm.scheduler().abort_request(a);
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 7);
}

// Its blocks would stay allocated, so its preemption would free nothing.
TEST_F(NewerConnectors, NobodyIsPreemptedWhoseBlocksAStepInFlightKeeps) {
  EngineConfig engine = async_config();
  engine.scheduler_reserve_full_isl = false;
  const auto num_preempted = [&](const char* description) {
    engine.engine = description;
    Engine vllm = engine_of(engine, {full(4)}, 5);
    vllm.add("a", prompt_of(1, 8), 8);
    vllm.add("b", prompt_of(2, 8), 8);
    vllm.step();
    return vllm.step().preempted.size();
  };
  EXPECT_EQ(num_preempted("vllm-0.33.0,waits_for_frees=no"), 2u);
  EXPECT_EQ(num_preempted("vllm-0.33.0"), 0u);
}

TEST_F(NewerConnectors, NobodyIsPreemptedWhileBlocksAreBeingSentThatSomebodyWaitsFor) {
  const auto num_preempted = [&](bool waits) {
    connector.own_traits.waits_for_sends = waits;
    connector.kept = {"sent"};
    Engine vllm = engine_of(config(), {full(4)}, 7);
    vllm.add("sent", prompt_of(3, 8), 1);
    vllm.step();
    vllm.add("a", prompt_of(1, 8), 8);
    vllm.add("b", prompt_of(2, 8), 8);
    vllm.step();
    return vllm.step().preempted.size();
  };
  EXPECT_EQ(num_preempted(false), 1u);
  EXPECT_EQ(num_preempted(true), 0u);
}

TEST_F(NewerConnectors, ALoadThatFailsAsAWholeIsLookedUpAnewInAllGroups) {
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  Engine vllm = engine_of(config(), {full(4), window(4, 9)}, 16);
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  vllm.step({.finished_recving = {RequestId{0}}, .failed_recving = {RequestId{0}}});
  connector.answers.clear();
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].id, a);
  EXPECT_EQ(output.scheduled[0].computed, 0);
  EXPECT_EQ(connector.asked.size(), 2u);
}

TEST_F(NewerConnectors, ALoadThatFailsAsAWholeEndsItsRequestWhereThePolicySaysSo) {
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  Engine vllm = engine_of(config(), {full(4), window(4, 9)}, 16, KVLoadFailurePolicy::fail);
  vllm.add("a", prompt_of(1, 10));
  vllm.step({.finished_recving = {RequestId{0}}, .failed_recving = {RequestId{0}}});
  ASSERT_EQ(vllm.stopped().size(), 1u);
  EXPECT_EQ(vllm.stopped()[0].reason, FinishReason::error);
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 15);
}

TEST_F(NewerConnectors, WhoDoesNotReadThePrefixCacheLoadsNothing) {
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  Engine vllm = engine_of(config(), {full(4)}, 16);
  RequestSpec spec;
  spec.name = "a";
  spec.prompt = prompt_of(1, 10);
  spec.skip_reading_prefix_cache = true;
  ASSERT_TRUE(vllm.scheduler().add_request(std::move(spec)));
  EXPECT_EQ(tokens_of(vllm.scheduler(), vllm.step()),
            (std::map<std::string, std::int32_t>{{"a", 10}}));
  EXPECT_EQ(connector.asked.size(), 1u);
}

TEST_F(NewerConnectors, WithEagleAHitIsABlockShorterThanWithoutAConnector) {
  EngineConfig drafting = config();
  drafting.spec_method = SpecMethod::eagle;
  drafting.num_spec_tokens = 1;
  const auto hit = [&](KVConnector* beside) {
    Engine vllm(drafting, {full(4)}, 16, {beside, KVLoadFailurePolicy::recompute});
    vllm.add("a", prompt_of(1, 12), 1);
    vllm.finish_all();
    vllm.add("b", prompt_of(1, 12), 1);
    return vllm.step().scheduled.at(0).computed;
  };
  EXPECT_EQ(hit(nullptr), 8);
  EXPECT_EQ(hit(&connector), 4);
}

// The state that is loaded takes the place of one that was evicted.
TEST_F(NewerConnectors, StatesAreLoadedWithTheTokensBeforeThem) {
  EngineConfig hybrid = config();
  hybrid.mamba_cache_mode = MambaCacheMode::align;
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  Engine vllm = engine_of(hybrid, {full(4), states(4, MambaCacheMode::align)}, 16);
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  vllm.step({.finished_recving = {a}});
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].computed, 8);
  const auto table = ids(vllm.scheduler().block_table(a, 1));
  ASSERT_EQ(table.size(), 3u);
  EXPECT_EQ(table[0], 0);
  EXPECT_NE(table[1], 0);
}

TEST_F(NewerConnectors, CheckpointsRingsAndReplaysAreRefusedBesideOne) {
  const auto refusal = [&](KVCacheGroupSpec group) {
    const auto made = Scheduler::create(config(), {full(4), std::move(group)}, 16, {&connector});
    return made ? std::string() : made.error().message;
  };
  KVCacheGroupSpec replayed = window(4, 8);
  replayed.spec.bounded_replay = true;
  EXPECT_NE(refusal(replayed).find("not modelled"), std::string::npos);
  EXPECT_NE(refusal(group_of(CacheKind::circular_buffer, 4)).find("not modelled"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep
