// The rules of the scheduler that differ between the profiles, each by itself: the same requests
// under both. That everything else agrees with the engines is what the recordings show
// (tests/conformance).
#include "reference/schedule/scheduler.h"

#include <gtest/gtest.h>

#include "tests/reference/engine.h"

namespace lockstep {
namespace {

EngineConfig small_engine(std::string engine) {
  EngineConfig config;
  config.engine = std::move(engine);
  config.max_num_seqs = 4;
  config.max_num_batched_tokens = 64;
  config.max_model_len = 256;
  return config;
}
EngineConfig old_engine() { return small_engine("vllm-0.22.1"); }
EngineConfig new_engine() { return small_engine("vllm-0.33.0"); }

// Blocks of a second request, after a first one of three blocks (two full, one begun) has ended.
std::vector<std::int32_t> blocks_after_a_request(EngineConfig config) {
  Engine engine(config, {full(16)}, 20);
  engine.add("first", prompt_of(1, 40), 1);
  engine.finish_all();
  const RequestId second = engine.add("second", prompt_of(2, 60), 1);
  engine.scheduler().schedule();
  return ids(engine.scheduler().block_table(second, 0));
}

TEST(Scheduler, ReusesFreedBlocksWithoutContentFirstIn0330) {
  EXPECT_EQ(blocks_after_a_request(old_engine()), (std::vector{4, 5, 6, 7}));
  EXPECT_EQ(blocks_after_a_request(new_engine()), (std::vector{3, 4, 5, 6}));
}

TEST(Scheduler, ReusesAllFreedBlocksFirstWithoutAPrefixCacheIn0330) {
  EngineConfig config = old_engine();
  config.enable_prefix_caching = false;
  EXPECT_EQ(blocks_after_a_request(config), (std::vector{4, 5, 6, 7}));
  config.engine = "vllm-0.33.0";
  EXPECT_EQ(blocks_after_a_request(config), (std::vector{3, 2, 1, 4}));  // the tail first
}

TEST(Scheduler, RefusesAStepThatTheSlotsOfADraftModelFillUntil0280) {
  for (const auto& [engine, starts] :
       {std::pair{"vllm-0.22.1", false}, {"vllm-0.27.1", false}, {"vllm-0.28.0", true}}) {
    EngineConfig config = small_engine(engine);
    config.max_num_batched_tokens = config.max_num_seqs;
    config.spec_method = SpecMethod::draft_model;
    config.num_spec_tokens = 1;
    const auto scheduler = Scheduler::create(config, {full(16)}, 20);
    EXPECT_EQ(scheduler.has_value(), starts) << engine;
    if (!starts && !scheduler)
      EXPECT_EQ(scheduler.error().message,
                "max_num_batched_tokens: 4; the draft model takes 4 of them, max_num_seqs");
    ++config.max_num_batched_tokens;
    EXPECT_TRUE(Scheduler::create(config, {full(16)}, 20)) << engine;
  }
}

TEST(Scheduler, BindsARequestThatIsAloneToTheLongPrefillThresholdIn0221Only) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    const bool is_new = config.engine == "vllm-0.33.0";
    config.long_prefill_token_threshold = 8;
    Engine engine(config, {full(16)}, 20);
    engine.add("a", prompt_of(1, 30));
    EXPECT_EQ(tokens_of(engine.scheduler(), engine.step())["a"], is_new ? 30 : 8);
    engine.add("b", prompt_of(2, 30));
    EXPECT_EQ(tokens_of(engine.scheduler(), engine.step())["b"], 8) << config.engine;
  }
}

TEST(Scheduler, GivesLookaheadSlotsInTheFirstStepIn0330) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    config.spec_method = SpecMethod::eagle;
    config.num_spec_tokens = 2;
    Engine engine(config, {full(16)}, 20);
    const RequestId a = engine.add("a", prompt_of(1, 16));
    engine.step();
    const std::size_t expected = config.engine == "vllm-0.33.0" ? 2 : 1;
    EXPECT_EQ(engine.scheduler().block_table(a, 0).size(), expected);
  }
}

TEST(Scheduler, PadsARequestThatEntersAsADecodeWithPlaceholderDraftsIn0330) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    const bool is_new = config.engine == "vllm-0.33.0";
    config.spec_method = SpecMethod::ngram;
    config.num_spec_tokens = 3;
    Engine engine(config, {full(16)}, 20);
    engine.add("running", prompt_of(1, 20));
    engine.step();
    engine.add("short", prompt_of(2, 1));
    const SchedulerOutput& output = engine.step();
    EXPECT_EQ(tokens_of(engine.scheduler(), output)["short"], is_new ? 4 : 1);
    EXPECT_EQ(output.scheduled.back().num_spec, is_new ? 3 : 0);
    if (is_new) {
      EXPECT_EQ(output.spec_tokens, (std::vector{8, 8, 8, -1, -1, -1}));
    }
  }
}

TEST(Scheduler, PadsNoDecodeBesideAPrefillThatGoesOn) {
  EngineConfig config = new_engine();
  config.spec_method = SpecMethod::ngram;
  config.num_spec_tokens = 3;
  Engine engine(config, {full(16)}, 20);
  engine.add("long", prompt_of(1, 70));
  engine.step();
  engine.add("short", prompt_of(2, 1));
  EXPECT_EQ(tokens_of(engine.scheduler(), engine.step())["short"], 1);
}

// Which groups' new blocks the first step zeroes, of full attention, states and hidden states.
std::vector<std::int32_t> zeroed(EngineConfig config) {
  config.enable_prefix_caching = false;
  Engine engine(
      config, {full(16), states(256, MambaCacheMode::none), group_of(CacheKind::hidden_state, 16)},
      20);
  engine.add("a", prompt_of(1, 20));
  return ids(engine.scheduler().schedule().zero);
}

TEST(Scheduler, ZeroesBlocksOfEveryAttentionLikeGroupIn0330) {
  EXPECT_EQ(zeroed(old_engine()), (std::vector{1, 2}));
  EXPECT_EQ(zeroed(new_engine()), (std::vector{1, 2, 4, 5}));
}

TEST(Scheduler, ZeroesCachesOfTwoPrecisionsIn0330AlsoWithoutStates) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    KVCacheGroupSpec fp8 = window(16, 20);
    fp8.spec.dtype = DType::fp8_e4m3;
    Engine engine(config, {full(16), fp8}, 20);
    engine.add("a", prompt_of(1, 20));
    const std::vector<std::int32_t> blocks = ids(engine.scheduler().schedule().zero);
    EXPECT_EQ(blocks, config.engine == "vllm-0.33.0" ? (std::vector{1, 2, 3, 4})
                                                     : std::vector<std::int32_t>{});
  }
}

// Tokens of each prefill step of one request with states in mode align.
std::vector<std::int32_t> chunks(EngineConfig config, std::uint32_t num_prompt_tokens) {
  config.mamba_cache_mode = MambaCacheMode::align;
  Engine engine(config, {full(16), states(16, MambaCacheMode::align, config.num_spec_tokens)}, 60);
  engine.add("a", prompt_of(1, num_prompt_tokens));
  std::vector<std::int32_t> out;
  for (std::int32_t done = 0; done < static_cast<std::int32_t>(num_prompt_tokens);) {
    out.push_back(engine.step().scheduled.at(0).num_tokens);
    done += out.back();
  }
  return out;
}

TEST(Scheduler, EndsChunksOfStatesAtTheLastStateThatCanBeHit) {
  EXPECT_EQ(chunks(old_engine(), 40), (std::vector{32, 8}));
  EXPECT_EQ(chunks(new_engine(), 40), (std::vector{32, 8}));
  // A prompt of whole blocks: its last token is never hit, so the state before the last block
  // counts.
  EXPECT_EQ(chunks(old_engine(), 48), (std::vector{48}));
  EXPECT_EQ(chunks(new_engine(), 48), (std::vector{32, 16}));
}

TEST(Scheduler, SavesTheLastStateAlsoWithEagleIn0330) {
  EngineConfig config = old_engine();
  config.spec_method = SpecMethod::eagle;
  config.num_spec_tokens = 2;
  EXPECT_EQ(chunks(config, 28), (std::vector{28}));  // a hit would drop the block again
  config.engine = "vllm-0.33.0";
  EXPECT_EQ(chunks(config, 28), (std::vector{16, 12}));
}

TEST(Scheduler, EndsAChunkWhereAPrefixEndsThatOthersShareIn0330) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    config.mamba_cache_mode = MambaCacheMode::align;
    config.max_num_batched_tokens = 128;
    Engine engine(config, {full(16), states(16, MambaCacheMode::align)}, 60);
    engine.add("first", prompt_of(1, 96, 2, 20),
               1);  // saves the state of its block boundaries' end only
    engine.finish_all();
    engine.add("second", prompt_of(1, 64, 3, 40), 1);
    const std::int32_t chunk = engine.step().scheduled.at(0).num_tokens;
    EXPECT_EQ(chunk, config.engine == "vllm-0.33.0" ? 64 : 96);
  }
}

// Tokens hit by a second request whose prompt differs after 32 shared tokens.
std::int32_t eagle_hit(EngineConfig config, bool same_next_token) {
  config.spec_method = SpecMethod::eagle;
  config.num_spec_tokens = 1;
  Engine engine(config, {full(16)}, 20);
  engine.add("first", prompt_of(1, 40), 1);
  engine.finish_all();
  engine.add("second", same_next_token ? prompt_of(1, 40) : prompt_of(1, 32, 9, 8), 1);
  return engine.scheduler().schedule().scheduled.at(0).computed;
}

TEST(Scheduler, DropsABlockOfAnEagleHitIn0221AndProvesTheNextTokenIn0330) {
  EXPECT_EQ(eagle_hit(old_engine(), true), 16);
  EXPECT_EQ(eagle_hit(old_engine(), false), 16);
  EngineConfig config = new_engine();
  EXPECT_EQ(eagle_hit(config, true), 32);
  EXPECT_EQ(eagle_hit(config, false), 16);
  config.num_hash_lookahead_tokens = 1;  // stated, as recordings do
  EXPECT_EQ(eagle_hit(config, true), 32);
  EXPECT_EQ(eagle_hit(config, false), 16);
}

// A prompt of two whole blocks: the token behind the second is sampled.
TEST(Scheduler, PublishesABlockWhenTheTokenBehindItIsKnownWithEagleIn0330) {
  for (const SpecMethod method : {SpecMethod::ngram, SpecMethod::eagle}) {
    EngineConfig config = new_engine();
    config.spec_method = method;
    config.num_spec_tokens = 1;
    Engine engine(config, {full(16)}, 20);
    const RequestId a = engine.add("a", prompt_of(1, 32), 4);
    Scheduler& scheduler = engine.scheduler();
    const bool looks_ahead = method == SpecMethod::eagle;
    scheduler.schedule();  // computes both
    EXPECT_EQ(scheduler.take_cache_counters().stored, looks_ahead ? 1 : 2);
    EXPECT_TRUE(scheduler.is_cached(scheduler.block_table(a, 0)[0]));
    EXPECT_EQ(scheduler.is_cached(scheduler.block_table(a, 0)[1]), !looks_ahead);
    ModelOutput output;
    output.tokens = {7};
    output.token_ends = {1};
    output.draft_tokens = {8};
    output.draft_ends = {1};
    scheduler.update_from_output(output);
    EXPECT_EQ(scheduler.take_cache_counters().stored, looks_ahead ? 1 : 0);
    EXPECT_TRUE(scheduler.is_cached(scheduler.block_table(a, 0)[1]));
  }
}

// The second request continues with a token other than the first sampled one (7).
TEST(Scheduler, KeepsBlocksOfEqualTokensAndUnlikeNextTokensApartWithEagleIn0330) {
  const auto sequel = [](std::int32_t next) {
    Prompt prompt = prompt_of(1, 32);
    prompt.tokens = {next, 3};
    prompt.append({TokenRun::Kind::literal, 0, 0, 2});
    return prompt;
  };
  for (const std::int32_t next : {7, 9}) {
    EngineConfig config = new_engine();
    config.spec_method = SpecMethod::eagle;
    config.num_spec_tokens = 1;
    Engine engine(config, {full(16), window(16, 40)}, 30);
    engine.add("first", prompt_of(1, 32), 3);
    engine.finish_all();
    engine.add("second", sequel(next), 3);
    EXPECT_EQ(engine.step().scheduled.at(0).computed, next == 7 ? 32 : 16);
    engine.finish_all();
    // Both exist now, one per next token.
    engine.add("third", sequel(next), 1);
    EXPECT_EQ(engine.step().scheduled.at(0).computed, 32);
    engine.finish_all();
    engine.add("fourth", sequel(7), 1);
    EXPECT_EQ(engine.step().scheduled.at(0).computed, 32);
  }
}

// Two blocks. "low" runs first and fills its block; at its next token it finds none and is its own
// victim.
TEST(Scheduler, GoesOnAfterARequestPreemptedItselfIn0330) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    config.policy = SchedulingPolicy::priority;
    config.scheduler_reserve_full_isl = false;
    config.enable_prefix_caching = false;
    Engine engine(config, {full(16)}, 3);
    const RequestId low = engine.add("low", prompt_of(1, 15), 20, 5);
    engine.step();
    engine.add("high", prompt_of(2, 14), 20, 0);
    engine.step();
    const SchedulerOutput& third = engine.step();
    EXPECT_EQ(third.preempted, (std::vector{low}));
    EXPECT_EQ(third.scheduled.size(), config.engine == "vllm-0.33.0" ? 1u : 0u);
  }
}

TEST(Scheduler, PublishesBlocksThatAcceptedDraftsFillWithTheOutputIn0330) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    config.spec_method = SpecMethod::ngram;
    config.num_spec_tokens = 2;
    Engine engine(config, {full(16)}, 20);
    engine.add("a", prompt_of(1, 13));
    engine.step();  // 13 tokens computed, one sampled, two drafts
    Scheduler& scheduler = engine.scheduler();
    const SchedulerOutput& output = scheduler.schedule();
    ASSERT_EQ(output.scheduled.at(0).num_tokens, 3);
    scheduler.update_from_output({{8, 8, 7}, {3}, {}, {}});  // both accepted: 16 tokens computed
    EXPECT_EQ(scheduler.take_cache_counters().stored, config.engine == "vllm-0.33.0" ? 1 : 0);
    scheduler.schedule();
    scheduler.update_from_output({{7}, {1}, {}, {}});
    EXPECT_EQ(scheduler.take_cache_counters().stored, config.engine == "vllm-0.33.0" ? 0 : 1);
  }
}

// Two requests of one block each, one block left: the second is preempted while a step of it is in
// flight. Its token is still delivered, and until then it does not resume.
TEST(Scheduler, DeliversTheStaleOutputOfAPreemptedRequest) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    config.async_scheduling = true;
    config.scheduler_reserve_full_isl = false;
    config.enable_prefix_caching = false;
    Engine engine(config, {full(16)}, 4);
    const RequestId a = engine.add("a", prompt_of(1, 16));
    const RequestId b = engine.add("b", prompt_of(2, 16));
    engine.step();
    const SchedulerOutput& second = engine.step();
    ASSERT_EQ(second.preempted, (std::vector{b})) << config.engine;
    EXPECT_EQ(engine.scheduler().num_tokens(a), 17);
    EXPECT_EQ(engine.scheduler().num_tokens(b), 17);
    EXPECT_EQ(engine.scheduler().num_computed_tokens(b), 0);
    EXPECT_EQ(ids(engine.scheduler().block_table(b, 0)), (std::vector<std::int32_t>{}));
  }
}

TEST(Scheduler, ReportsCommonPrefixBlocksIn0221Only) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    Engine engine(config, {full(16)}, 20);
    engine.add("a", prompt_of(1, 40));
    const std::vector<std::int32_t> common = engine.step().common_prefix_blocks;
    if (config.engine == "vllm-0.33.0")
      EXPECT_TRUE(common.empty());
    else
      EXPECT_EQ(common, (std::vector{3}));
  }
}

TEST(Scheduler, SpansABlockOverPrefillContextParallelRanksIn0221Only) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    config.dcp = 2;
    config.pcp = 2;
    Engine engine(config, {full(16)}, 20);
    EXPECT_EQ(engine.scheduler().scheduler_block_size(), config.engine == "vllm-0.33.0" ? 32 : 64);
  }
}

TEST(Scheduler, TakesDraftModelSlotsOffTheBudgetPerRequestIn0330) {
  for (EngineConfig config : {old_engine(), new_engine()}) {
    config.spec_method = SpecMethod::draft_model;
    config.num_spec_tokens = 2;
    Engine engine(config, {full(16)}, 40);
    engine.add("a", prompt_of(1, 200));
    EXPECT_EQ(engine.step().scheduled.at(0).num_tokens,
              config.engine == "vllm-0.33.0" ? 64 - 1 : 64 - 4);
  }
}

TEST(Scheduler, SchedulesNobodyNewOrNobodyWhileItIsPaused) {
  for (const EngineConfig& config : {old_engine(), new_engine()}) {
    Engine engine(config, {full(16)}, 40);
    const auto pause = [&](PauseState state) { engine.scheduler().set_pause_state(state); };
    const RequestId a = engine.add("a", prompt_of(1, 20));
    engine.step();
    pause(PauseState::paused_new);
    engine.add("b", prompt_of(2, 20));
    ASSERT_EQ(engine.step().scheduled.size(), 1u);
    EXPECT_EQ(engine.step().scheduled.at(0).id, a);
    pause(PauseState::paused_all);
    EXPECT_TRUE(engine.step().scheduled.empty());
    pause(PauseState::unpaused);
    EXPECT_EQ(engine.step().scheduled.size(), 2u);
  }
}

// Of a request whose every token is 7: the step whose output ends it.
TEST(Scheduler, EndsARequestThatRepeatsItselfWhenMinTokensAreThere) {
  const auto ends_after = [](const EngineConfig& config, std::int32_t min_tokens,
                             RepetitionDetection detection, std::int32_t eos = 99) {
    Engine engine(config, {full(16)}, 40);
    RequestSpec spec;
    spec.name = "a";
    spec.prompt = prompt_of(1, 20);
    spec.max_tokens = 12;
    spec.eos_token = eos;
    spec.min_tokens = min_tokens;
    spec.repetition_detection = detection;
    EXPECT_TRUE(engine.scheduler().add_request(std::move(spec)));
    std::int32_t step = 0;
    while (engine.scheduler().has_unfinished_requests()) {
      engine.step();
      ++step;
    }
    return step;
  };
  for (const EngineConfig& config : {old_engine(), new_engine()}) {
    const bool holds_every_end = config.engine == "vllm-0.22.1";
    EXPECT_EQ(ends_after(config, 0, {}), 12);
    EXPECT_EQ(ends_after(config, 0, {.max_pattern_size = 2, .min_count = 3}), 3);
    EXPECT_EQ(ends_after(config, 0, {2, 2, 3}), 6);   // patterns of two tokens
    EXPECT_EQ(ends_after(config, 0, {2, 2, 1}), 12);  // once is no repetition
    EXPECT_EQ(ends_after(config, 5, {2, 0, 3}), 5);
    EXPECT_EQ(ends_after(config, 5, {}, 7), holds_every_end ? 5 : 1);
  }
}

TEST(Scheduler, KeepsStatesAndWindowsWherePromptsEndWithRetention0) {
  EngineConfig config = new_engine();
  config.max_num_batched_tokens = 256;
  for (const std::int32_t interval : {kDenseRetention, 0, 64}) {
    config.prefix_cache_retention_interval = interval;
    Engine engine(config, {full(16), window(16, 20)}, 60);
    engine.add("a", prompt_of(1, 150), 1);
    engine.step();
    const std::int64_t stored = engine.scheduler().take_cache_counters().stored;
    // Nine full blocks of full attention; of the window all nine, or two at 144 and two at 64 and
    // 128.
    EXPECT_EQ(stored - 9, interval == kDenseRetention ? 9 : interval == 0 ? 2 : 6 - 1);
  }
}

}  // namespace
}  // namespace lockstep
