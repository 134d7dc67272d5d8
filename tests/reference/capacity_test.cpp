// Capacity: what a pool holds, to the last bit, and the older figures that understated it. The
// numbers of vLLM pull request 40384 as far as one formula leads to them.
#include "reference/plan/capacity.h"

#include <gtest/gtest.h>

#include "reference/plan/planner.h"

namespace lockstep {
namespace {

// One attention group and `states` state groups of equal block size, `num_blocks` in the pool.
KVCacheConfig hybrid(int states, std::int64_t block_size, std::int64_t num_blocks,
                     MambaCacheMode mode, std::int64_t drafts = 0) {
  KVCacheConfig config;
  config.num_blocks = num_blocks;
  KVCacheTensor& tensor = config.tensors.emplace_back();
  const auto add = [&](KVCacheSpec spec, std::string name) {
    spec.block_size = block_size;
    spec.page_size_padded = 4 * block_size;
    tensor.shared_by.push_back(name);
    config.groups.push_back({{std::move(name)}, std::move(spec), {}, 1});
  };
  for (int i = 0; i < states; ++i) {
    KVCacheSpec spec;
    spec.kind = CacheKind::mamba;
    spec.states = {{{16}, DType::bf16}};
    spec.mamba_cache_mode = mode;
    spec.num_speculative_blocks = drafts;
    add(spec, "s" + std::to_string(i));
  }
  KVCacheSpec attention;
  attention.num_kv_heads = 1;
  attention.head_size = 1;
  add(attention, "a");
  tensor.size_bytes = 4 * block_size * num_blocks;
  return config;
}

TEST(Capacity, StateGroupsOfFixedCostDoNotDivideIt) {
  PlanOptions options;
  // 35B-A3B on two 24 GB cards: 1 attention and 3 state groups, blocks of 1,056 tokens. Both
  // figures come from a pool of 1,096 blocks, the older one without the null block.
  EXPECT_EQ(tokens_of_groups(hybrid(3, 1056, 1096, MambaCacheMode::none), options, true),
            1'157'376);
  EXPECT_EQ(tokens_of_groups(hybrid(3, 1056, 1095, MambaCacheMode::none), options, false), 288'288);
  // 1 attention and 1 state group, blocks of 2,736 tokens.
  EXPECT_EQ(tokens_of_groups(hybrid(1, 2736, 346, MambaCacheMode::align), options, false), 473'328);
  EXPECT_EQ(tokens_of_groups(hybrid(1, 2736, 346, MambaCacheMode::align), options, true), 946'656);
  // 35B-A3B with fp8 K/V: blocks of 2,096 tokens.
  EXPECT_EQ(tokens_of_groups(hybrid(3, 2096, 173, MambaCacheMode::none), options, true), 362'608);
}

TEST(Capacity, FiveAndALittleRequestsOf163840Fit) {
  PlanOptions options;
  options.max_model_len = 163'840;
  options.mamba_cache_mode = MambaCacheMode::align;
  // 60 attention blocks; a running state, the previous one, five drafts.
  const Capacity capacity = capacity_of(hybrid(1, 2736, 347, MambaCacheMode::align, 5), options);
  EXPECT_EQ(capacity.blocks_per_request, 67);
  EXPECT_EQ(static_cast<int>(capacity.max_concurrency * 100 + 0.5), 518);
}

TEST(Capacity, ModeAllDividesIt) {
  PlanOptions options;
  options.mamba_cache_mode = MambaCacheMode::all;
  options.max_model_len = 16 * 100;
  const KVCacheConfig config = hybrid(3, 16, 400, MambaCacheMode::all);
  EXPECT_EQ(capacity_of(config, options).blocks_per_request, 400);
  EXPECT_EQ(tokens_of_groups(config, options, true), tokens_of_groups(config, options, false));
}

TEST(Capacity, WhenNoGroupGrowsAllCount) {
  PlanOptions options;
  KVCacheConfig config = hybrid(3, 16, 400, MambaCacheMode::none);
  config.groups.pop_back();
  config.tensors.front().shared_by.pop_back();
  EXPECT_EQ(tokens_of_groups(config, options, true), tokens_of_groups(config, options, false));
}

TEST(Capacity, IsOneDivisionToTheLastBit) {
  PlanOptions options;
  options.max_model_len = 48;
  const Capacity capacity = capacity_of(hybrid(0, 16, 100, MambaCacheMode::none), options);
  EXPECT_EQ(capacity.max_concurrency, 100.0 / 3.0);
  EXPECT_EQ(capacity.capacity_tokens, 1600);
}

TEST(Capacity, SlotsReachPastTheCapacity) {
  PlanOptions options;
  options.max_model_len = 160;
  const Capacity capacity = capacity_of(hybrid(3, 16, 100, MambaCacheMode::none), options);
  EXPECT_EQ(capacity.slot_address_space, 1600);
  EXPECT_LT(capacity.capacity_tokens, capacity.slot_address_space);
}

TEST(Capacity, EveryByteOfAPoolBlockIsUsedPaddedOrEmpty) {
  PlanOptions options;
  const KVCacheConfig config = hybrid(2, 16, 100, MambaCacheMode::none);
  const Capacity capacity = capacity_of(config, options);
  for (const GroupCapacity& group : capacity.groups)
    EXPECT_EQ(
        group.used_bytes + group.padding_bytes + group.pack_waste_bytes + group.absent_layer_bytes,
        pool_bytes_per_block(config.groups));
  EXPECT_EQ(capacity.groups.front().padding_bytes, 64 - 32);
}

TEST(Capacity, ALongerRequestTakesTheBytesATokenThatAreReported) {
  PlanOptions options;
  options.max_model_len = 1600;
  const KVCacheConfig config = hybrid(3, 16, 1000, MambaCacheMode::none);
  const Capacity capacity = capacity_of(config, options);
  const std::int64_t shorter = request_bytes(config.groups, options);
  options.max_model_len = 3200;
  const std::int64_t longer = request_bytes(config.groups, options);
  EXPECT_EQ(static_cast<double>(longer - shorter), 1600 * capacity.bytes_per_token);
  EXPECT_EQ(shorter - static_cast<std::int64_t>(1600 * capacity.bytes_per_token),
            capacity.fixed_bytes_per_request);
}

TEST(Capacity, AResendHitsWholeBlocksOfEveryGroupAndNeverTheLastToken) {
  PlanOptions options;
  const auto of = [&](MambaCacheMode mode) {
    return capacity_of(hybrid(3, 1056, 100, mode), options);
  };
  EXPECT_EQ(resend_hit_tokens(of(MambaCacheMode::align).hit_step_tokens, 1'056), 0);
  EXPECT_EQ(resend_hit_tokens(of(MambaCacheMode::align).hit_step_tokens, 1'057), 1'056);
  EXPECT_EQ(resend_hit_tokens(of(MambaCacheMode::all).hit_step_tokens, 3'000), 2'112);
  EXPECT_EQ(resend_hit_tokens(of(MambaCacheMode::none).hit_step_tokens, 3'000), 0)
      << "states that no cache keeps";
  KVCacheConfig two_sizes = hybrid(1, 16, 100, MambaCacheMode::align);
  two_sizes.groups.back().spec.block_size = 12;
  EXPECT_EQ(capacity_of(two_sizes, options).hit_step_tokens, 48);
}

}  // namespace
}  // namespace lockstep
