// What the scheduler decides with a KV connector, rule by rule. Blocks of 4 tokens; the pool's
// first block is the null block.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/reference/engine.h"

namespace lockstep {
namespace {

class KVConnectors : public testing::Test {
 protected:
  static EngineConfig config() {
    EngineConfig config;
    config.engine = "vllm-0.22.1";
    config.max_num_seqs = 4;
    config.max_num_batched_tokens = 64;
    config.max_model_len = 64;
    config.block_size = 4;
    return config;
  }
  Engine engine(std::int64_t num_blocks,
                KVLoadFailurePolicy policy = KVLoadFailurePolicy::recompute) {
    return Engine(config(), {full(4)}, num_blocks, {&connector, policy});
  }
  static KVConnectorOutput received(RequestId id) { return {{id}, {}, {}}; }
  static KVConnectorOutput sent(RequestId id) { return {{}, {id}, {}}; }
  static KVConnectorOutput invalid(std::int32_t block) { return {{}, {}, {BlockId{block}}}; }

  AnsweringConnector connector;
};

TEST_F(KVConnectors, ALoadWithinTheStepCountsAsComputedAndIsPublished) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = false};
  vllm.add("a", prompt_of(1, 10));
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].computed, 8);
  EXPECT_EQ(output.scheduled[0].num_tokens, 2);
  EXPECT_EQ(ids(output.blocks(0, 0)), (std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(vllm.scheduler().take_cache_counters().stored, 2);
}

TEST_F(KVConnectors, AnUndeterminedAnswerPassesTheRequestOverAndItIsAskedAgain) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = std::nullopt, .is_async = false};
  vllm.add("a", prompt_of(1, 10));
  vllm.add("b", prompt_of(2, 10));
  EXPECT_EQ(tokens_of(vllm.scheduler(), vllm.step()),
            (std::map<std::string, std::int32_t>{{"b", 10}}));
  ASSERT_EQ(vllm.scheduler().skipped().size(), 1u);
  EXPECT_EQ(vllm.scheduler().skipped()[0].status, RequestStatus::waiting);
  connector.answers["a"] = {};
  EXPECT_EQ(tokens_of(vllm.scheduler(), vllm.step()),
            (std::map<std::string, std::int32_t>{{"a", 10}, {"b", 1}}));
}

TEST_F(KVConnectors, ALongerLoadTakesBlocksAndWaitsUntilItIsReceived) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  EXPECT_TRUE(vllm.step().scheduled.empty());
  ASSERT_EQ(vllm.scheduler().skipped().size(), 1u);
  EXPECT_EQ(vllm.scheduler().skipped()[0].status, RequestStatus::waiting_for_remote_kvs);
  EXPECT_TRUE(vllm.scheduler().skipped()[0].is_loading);
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 13);  // two for the load, none for the rest
  EXPECT_EQ(vllm.scheduler().take_cache_counters().stored, 0);
  EXPECT_TRUE(vllm.step(received(a)).scheduled.empty());
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].computed, 8);
  EXPECT_EQ(vllm.scheduler().take_cache_counters().stored, 2);
  EXPECT_EQ(connector.asked.size(), 1u);
}

TEST_F(KVConnectors, TheLastTokenOfAWhollyLoadedPromptIsComputedAgain) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  const RequestId a = vllm.add("a", prompt_of(1, 8));
  vllm.step(received(a));
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].computed, 7);
  EXPECT_EQ(output.scheduled[0].num_tokens, 1);
}

TEST_F(KVConnectors, ThosePassedOverComeBeforeThoseThatArrive) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = std::nullopt, .is_async = false};
  connector.answers["b"] = {.num_tokens = std::nullopt, .is_async = false};
  vllm.add("a", prompt_of(1, 4));
  vllm.add("b", prompt_of(2, 4));
  vllm.step();
  connector.answers.clear();
  vllm.add("c", prompt_of(3, 4));
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 3u);
  EXPECT_EQ(vllm.scheduler().name(output.scheduled[0].id), "a");
  EXPECT_EQ(vllm.scheduler().name(output.scheduled[1].id), "b");
  EXPECT_EQ(vllm.scheduler().name(output.scheduled[2].id), "c");
}

TEST_F(KVConnectors, AFailedLongerLoadGoesOnFromTheFirstInvalidBlock) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  vllm.step(invalid(2));
  vllm.step(received(a));
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].computed, 4);
  EXPECT_EQ(ids(output.blocks(0, 0)), (std::vector<std::int32_t>{1, 2, 3}));
}

TEST_F(KVConnectors, ALongerLoadOfWhichNothingArrivedGivesItsBlocksBackAndAsksAgain) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  KVConnectorOutput report = received(a);
  report.invalid_block_ids = {BlockId{1}};
  vllm.step(report);
  connector.answers["a"] = {};
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].computed, 0);
  EXPECT_EQ(connector.asked.size(), 2u);
}

TEST_F(KVConnectors, AFailedLoadWithinTheStepVoidsItsOutputAndIsComputed) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = false};
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  vllm.step(invalid(2));
  EXPECT_EQ(vllm.scheduler().num_tokens(a), 10);  // the sampled token does not count
  EXPECT_EQ(vllm.scheduler().num_computed_tokens(a), 4);
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled[0].num_tokens, 6);
  EXPECT_EQ(vllm.scheduler().take_cache_counters().evicted, 0);
}

TEST_F(KVConnectors, ABlockThatTwoShareIsComputedByTheFirstOfThem) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = false};
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  const RequestId b = vllm.add("b", prompt_of(1, 9));  // hits both blocks in the same step
  vllm.step(invalid(2));
  EXPECT_EQ(vllm.scheduler().num_computed_tokens(a), 4);
  EXPECT_EQ(vllm.scheduler().num_computed_tokens(b), 8);
  EXPECT_EQ(vllm.scheduler().num_tokens(b), 9);
}

TEST_F(KVConnectors, WithPolicyFailTheRequestEndsAndItsBlocksCannotBeHit) {
  Engine vllm = engine(16, KVLoadFailurePolicy::fail);
  connector.answers["a"] = {.num_tokens = 8, .is_async = false};
  vllm.add("a", prompt_of(1, 10));
  vllm.step(invalid(2));
  ASSERT_EQ(vllm.stopped().size(), 1u);
  EXPECT_EQ(vllm.stopped()[0].reason, FinishReason::error);
  EXPECT_FALSE(vllm.scheduler().has_unfinished_requests());
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 15);
  EXPECT_TRUE(vllm.scheduler().is_cached(BlockId{1}));
  EXPECT_FALSE(vllm.scheduler().is_cached(BlockId{2}));
}

TEST_F(KVConnectors, WithPolicyFailALoadingRequestKeepsItsBlocksUntilReceived) {
  Engine vllm = engine(16, KVLoadFailurePolicy::fail);
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  vllm.step(invalid(1));
  ASSERT_EQ(vllm.stopped().size(), 1u);
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 13);
  vllm.step(received(a));
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 15);
}

TEST_F(KVConnectors, BlocksThatAreSentAreFreeOnceTheyAreSent) {
  Engine vllm = engine(16);
  connector.kept = {"a"};
  const RequestId a = vllm.add("a", prompt_of(1, 6), 1);
  vllm.step();
  EXPECT_FALSE(vllm.scheduler().has_unfinished_requests());
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 13);
  EXPECT_EQ(vllm.step().finished.size(), 1u);
  ASSERT_EQ(vllm.scheduler().held().size(), 1u);
  EXPECT_FALSE(vllm.scheduler().held()[0].is_loading);
  EXPECT_EQ(index_of(vllm.add("b", prompt_of(2, 6), 1)), index_of(a) + 1);  // the id is in use
  vllm.step(sent(a));
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 15);
  EXPECT_TRUE(vllm.scheduler().held().empty());
}

TEST_F(KVConnectors, AnAbortedLoadKeepsItsBlocksUntilItIsOver) {
  Engine vllm = engine(16);
  connector.answers["a"] = {.num_tokens = 8, .is_async = true};
  const RequestId a = vllm.add("a", prompt_of(1, 10));
  vllm.step();
  vllm.scheduler().abort_request(a);
  ASSERT_EQ(vllm.scheduler().held().size(), 1u);
  EXPECT_TRUE(vllm.scheduler().held()[0].is_loading);
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 13);
  vllm.step(received(a));
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 15);
}

TEST_F(KVConnectors, ARequestThatHasLoadedAndDoesNotFitKeepsAllBehindItWaiting) {
  Engine vllm = engine(6);  // five blocks
  connector.answers["a"] = {.num_tokens = 4, .is_async = true};
  connector.answers["b"] = {.num_tokens = 8, .is_async = true};
  const RequestId a = vllm.add("a", prompt_of(1, 20));
  const RequestId b = vllm.add("b", prompt_of(2, 16));
  vllm.step();
  vllm.step({{a, b}, {}, {}});
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(vllm.step().scheduled.empty());
    EXPECT_EQ(vllm.scheduler().num_free_blocks(), 2);
  }
  ASSERT_EQ(vllm.scheduler().skipped().size(), 2u);
  EXPECT_EQ(vllm.scheduler().skipped()[0].status, RequestStatus::waiting);
  // Its load has completed, and the queue has not reached it.
  EXPECT_EQ(vllm.scheduler().skipped()[1].status, RequestStatus::waiting_for_remote_kvs);
  EXPECT_FALSE(vllm.scheduler().skipped()[1].is_loading);
}

TEST_F(KVConnectors, APreemptedRequestThatLoadsComesBackAsResumed) {
  EngineConfig uncached = config();
  uncached.enable_prefix_caching = false;
  Engine vllm(uncached, {full(4)}, 6, {&connector, KVLoadFailurePolicy::recompute});
  const RequestId a = vllm.add("a", prompt_of(1, 8), 16);
  vllm.add("b", prompt_of(2, 8), 3);
  while (vllm.step().preempted.empty())
    if (!vllm.scheduler().has_unfinished_requests()) FAIL() << "no request was preempted";
  connector.answers["b"] = {.num_tokens = 4, .is_async = true};
  vllm.scheduler().abort_request(a);
  vllm.step();
  ASSERT_EQ(vllm.scheduler().skipped().size(), 1u);
  const SchedulerOutput& loading = vllm.step(received(vllm.scheduler().skipped()[0].id));
  EXPECT_TRUE(loading.scheduled.empty());
  const SchedulerOutput& output = vllm.step();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_TRUE(output.scheduled[0].is_resumed);
}

TEST_F(KVConnectors, BlocksBeforeTheWindowAreLetGoBeforeTheRestIsSent) {
  Engine vllm(config(), {window(4, 5)}, 16, {&connector, KVLoadFailurePolicy::recompute});
  connector.kept = {"a"};
  vllm.add("a", prompt_of(1, 16), 1);
  vllm.step();
  EXPECT_EQ(vllm.scheduler().num_free_blocks(), 14);  // of four blocks one is still in the window
}

// The step that starts the load is empty, and still in flight.
TEST_F(KVConnectors, AreHeardInOrderWithAsynchronousScheduling) {
  EngineConfig async = config();
  async.async_scheduling = true;
  connector.answers["b"] = {.num_tokens = 8, .is_async = true};
  auto scheduler = Scheduler::create(async, {full(4)}, 16, {&connector});
  ASSERT_TRUE(scheduler);
  ASSERT_TRUE(scheduler->add_request({.name = "a", .prompt = prompt_of(1, 4), .max_tokens = 1}));
  EXPECT_EQ(scheduler->schedule().scheduled.size(), 1u);
  const auto b = scheduler->add_request({.name = "b", .prompt = prompt_of(2, 8)});
  ASSERT_TRUE(b);
  EXPECT_TRUE(scheduler->schedule().scheduled.empty());
  EXPECT_EQ(scheduler->num_steps_in_flight(), 2);
  ModelOutput of_first;
  of_first.tokens = {7};
  of_first.token_ends = {1};
  EXPECT_EQ(scheduler->update_from_output(of_first).size(), 1u);
  EXPECT_TRUE(scheduler->schedule().scheduled.empty());
  ModelOutput of_second;
  of_second.kv_connector_output = received(*b);
  scheduler->update_from_output(of_second);
  EXPECT_EQ(scheduler->num_steps_in_flight(), 1);
  EXPECT_EQ(tokens_of(*scheduler, scheduler->schedule()),
            (std::map<std::string, std::int32_t>{{"b", 1}}));
}

// vLLM continues after what was lost (docs/findings.md, 15).
TEST_F(KVConnectors, AVoidRowLeavesItsPlaceholderBehindWithAsynchronousScheduling) {
  EngineConfig async = config();
  async.async_scheduling = true;
  connector.answers["a"] = {.num_tokens = 4, .is_async = false};
  Engine vllm(async, {full(4)}, 16, {&connector});
  const RequestId a = vllm.add("a", prompt_of(1, 5));
  vllm.step(invalid(1));
  vllm.step();  // the report arrives after it
  EXPECT_EQ(vllm.scheduler().num_tokens(a), 5);
  EXPECT_EQ(vllm.scheduler().num_computed_tokens(a), 0);
  EXPECT_EQ(tokens_of(vllm.scheduler(), vllm.step()),
            (std::map<std::string, std::int32_t>{{"a", 7}}));
  EXPECT_EQ(vllm.scheduler().num_tokens(a), 6);
}

TEST_F(KVConnectors, AreRefusedWhereTheyAreNotModelled) {
  const KVTransfer transfer{&connector, KVLoadFailurePolicy::recompute};
  EngineConfig later = config();
  later.engine = "vllm-0.32.0";
  EXPECT_FALSE(Scheduler::create(later, {full(4)}, 16, transfer));
  EXPECT_FALSE(
      Scheduler::create(config(), {full(4), states(4, MambaCacheMode::none)}, 16, transfer));
}

}  // namespace
}  // namespace lockstep
