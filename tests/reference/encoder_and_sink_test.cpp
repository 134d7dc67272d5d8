// Blocks of cross attention, sinks and reference windows, and what an encoder computes when.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "reference/schedule/scheduler.h"
#include "reference/schedule/scheduler_parts.h"

namespace lockstep::encoders_and_sinks {
namespace {

KVCacheGroupSpec group(const char* name, CacheKind kind) {
  KVCacheGroupSpec group;
  group.layer_names = {name};
  group.spec.kind = kind;
  group.spec.block_size = 4;
  return group;
}

EngineConfig small_engine() {
  EngineConfig engine;
  engine.max_num_seqs = 4;
  engine.max_num_batched_tokens = engine.max_model_len = 64;
  engine.block_size = 4;
  engine.enable_prefix_caching = engine.enable_chunked_prefill = false;
  engine.encoder_compute_budget = engine.encoder_cache_size = 20;
  return engine;
}

RequestSpec request(const char* name, std::uint32_t num_tokens, std::vector<std::int32_t> rows) {
  RequestSpec spec;
  spec.name = name;
  spec.prompt.append({TokenRun::Kind::seeded, 1, 0, num_tokens});
  spec.max_tokens = 40;
  for (const std::int32_t count : rows)
    spec.keys.mm.push_back({.identifier = std::string(name) + "." + std::to_string(count),
                            .count = count,
                            .kind = "audio"});
  return spec;
}

const std::vector<KVCacheGroupSpec> kBesideEncoder = {group("a", CacheKind::full_attention),
                                                      group("x", CacheKind::cross_attention)};

Scheduler scheduler_of(const EngineConfig& engine, std::int64_t num_blocks,
                       const std::vector<KVCacheGroupSpec>& groups) {
  auto scheduler = Scheduler::create(engine, groups, num_blocks);
  EXPECT_TRUE(scheduler) << (scheduler ? "" : scheduler.error().message);
  return std::move(*scheduler);
}

std::string refusal(const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups) {
  const auto scheduler = Scheduler::create(engine, groups, 20);
  return scheduler ? "" : scheduler.error().message;
}

void answer(Scheduler& scheduler, const SchedulerOutput& decision) {
  ModelOutput output;
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    output.tokens.push_back(7);
    output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
  }
  scheduler.update_from_output(output);
}

std::int64_t num_blocks(const Scheduler& scheduler, RequestId id, std::int32_t group) {
  return std::ssize(scheduler.block_table(id, group));
}

TEST(CrossAttention, ARequestHasBlocksForAllRowsOfItsEncoderFromItsFirstStepOn) {
  Scheduler scheduler = scheduler_of(small_engine(), 20, kBesideEncoder);
  const RequestId id = *scheduler.add_request(request("r", 3, {9}));
  const SchedulerOutput& first = scheduler.schedule();
  ASSERT_EQ(first.scheduled.size(), 1u);
  EXPECT_EQ(first.encode, std::vector<std::int32_t>{0});
  EXPECT_EQ(first.scheduled[0].num_encoder_rows, 9);
  EXPECT_EQ(num_blocks(scheduler, id, 0), 1);
  EXPECT_EQ(num_blocks(scheduler, id, 1), 3);
  answer(scheduler, first);
  for (int i = 0; i < 6; ++i) {
    const SchedulerOutput& next = scheduler.schedule();
    EXPECT_TRUE(next.encode.empty());
    answer(scheduler, next);
  }
  EXPECT_EQ(num_blocks(scheduler, id, 0), 3);
  EXPECT_EQ(num_blocks(scheduler, id, 1), 3);
}

TEST(CrossAttention, AnEncoderComputesSoManyRowsAStepAndTheNextRequestMayGoFirst) {
  const auto scheduled = [](const std::string& release) {
    EngineConfig engine = small_engine();
    engine.engine = release;
    Scheduler scheduler = scheduler_of(engine, 40, kBesideEncoder);
    for (const auto& [name, rows] : {std::pair{"a", 12}, {"b", 9}, {"c", 8}})
      EXPECT_TRUE(scheduler.add_request(request(name, 3, {rows})));
    std::string names;
    for (const ScheduledRequest& row : scheduler.schedule().scheduled)
      names += scheduler.name(row.id);
    return names;
  };
  EXPECT_EQ(scheduled("vllm-0.22.1"), "a");
  EXPECT_EQ(scheduled("vllm-0.33.0"), "ac");
}

TEST(CrossAttention, RowsAreGivenBackWithEveryOutputUntilTheCacheLimitsNothing) {
  Scheduler scheduler = scheduler_of(small_engine(), 20, kBesideEncoder);
  ASSERT_TRUE(scheduler.add_request(request("r", 3, {9})));
  std::vector<std::int32_t> slots;
  std::vector<std::string> dropped;
  for (int i = 0; i < 3; ++i) {
    const SchedulerOutput& decision = scheduler.schedule();
    slots.push_back(*decision.encoder_slots);
    dropped.insert(dropped.end(), decision.free_encoder.begin(), decision.free_encoder.end());
    answer(scheduler, decision);
  }
  EXPECT_EQ(slots, (std::vector<std::int32_t>{11, 20, 29}));
  EXPECT_EQ(dropped, std::vector<std::string>{"r.9"});
}

TEST(CrossAttention, OfAnItemWhoseRowsStandBehindTheTokensOfTheStepNoneIsComputed) {
  EncoderInputs encoder(small_engine());
  encoder.begin_step();
  RequestSpec spec = request("r", 3, {9});
  spec.keys.mm[0].embeds = {{.first = 5, .count = 4}};
  Request late(spec, 2);
  std::vector<std::int32_t> items;
  EXPECT_TRUE(encoder.ask(late, 3, items));
  EXPECT_TRUE(items.empty());
  EXPECT_TRUE(encoder.ask(late, 6, items));
  EXPECT_EQ(items.size(), 1u);
  EXPECT_EQ(late.num_encoder_rows, 4);
}

TEST(CrossAttention, NoPrefixesAreCachedBesideItAndNoPromptIsCut) {
  EngineConfig engine = small_engine();
  engine.enable_prefix_caching = true;
  EXPECT_NE(refusal(engine, kBesideEncoder).find("--no-prefix-caching"), std::string::npos);
  engine.enable_prefix_caching = false;
  engine.enable_chunked_prefill = true;
  EXPECT_NE(refusal(engine, kBesideEncoder).find("--no-chunked-prefill"), std::string::npos);
  engine.enable_chunked_prefill = false;
  engine.engine = "vllm-0.28.0";
  EXPECT_NE(refusal(engine, kBesideEncoder).find("vllm-0.22.1"), std::string::npos);
}

std::vector<KVCacheGroupSpec> behind_sinks(std::int64_t sink_len) {
  std::vector<KVCacheGroupSpec> groups = {group("a", CacheKind::full_attention)};
  groups[0].spec.sink_len = sink_len;
  groups[0].spec.kind = CacheKind::sink_full;
  return groups;
}

TEST(Sinks, TheFirstBlocksAreKeptForThemFromTheStart) {
  EngineConfig engine = small_engine();
  engine.engine = "vllm-0.22.1";
  Scheduler scheduler = scheduler_of(engine, 20, behind_sinks(8));
  EXPECT_EQ(scheduler.num_free_blocks(), 17);
  const RequestId id = *scheduler.add_request(request("r", 5, {}));
  scheduler.schedule();
  EXPECT_EQ(index_of(scheduler.block_table(id, 0)[0]), 3);
  EXPECT_FALSE(scheduler.reset_prefix_cache());
}

TEST(Sinks, AnEngineThatDoesNotStartWithThemRefusesThemAndSaysHowItIsRepaired) {
  EngineConfig engine = small_engine();
  EXPECT_NE(refusal(engine, behind_sinks(8)).find("without=38"), std::string::npos);
  engine.engine += ",without=38";
  EXPECT_EQ(refusal(engine, behind_sinks(8)), "");
  EXPECT_NE(refusal(engine, behind_sinks(6)).find("whole blocks of 4"), std::string::npos);
}

TEST(ReferenceWindow, BlocksBetweenThePromptAndTheWindowGoAndNoOthers) {
  std::vector<KVCacheGroupSpec> groups = {group("a", CacheKind::rswa)};
  groups[0].spec.rswa_window = 5;
  Scheduler scheduler = scheduler_of(small_engine(), 40, groups);
  const RequestId id = *scheduler.add_request(request("r", 6, {}));
  for (int i = 0; i < 21; ++i) answer(scheduler, scheduler.schedule());
  scheduler.schedule();  // 27 tokens; 26 were computed before, and the window has left 21 of them
  const auto table = scheduler.block_table(id, 0);
  std::vector<bool> is_there;
  for (const BlockId block : table) is_there.push_back(block != kNullBlock);
  EXPECT_EQ(is_there, (std::vector<bool>{true, true, false, false, false, true, true}));
}

TEST(ReferenceWindow, OlderReleasesHaveNone) {
  std::vector<KVCacheGroupSpec> groups = {group("a", CacheKind::rswa)};
  groups[0].spec.rswa_window = 5;
  EngineConfig engine = small_engine();
  engine.engine = "vllm-0.22.1";
  EXPECT_EQ(refusal(engine, groups),
            "reference windows (rswa_window): vllm-0.22.1 has none that is modelled");
}

}  // namespace
}  // namespace lockstep::encoders_and_sinks
