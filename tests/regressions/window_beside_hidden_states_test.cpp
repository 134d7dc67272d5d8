// Found by the layout prover in vLLM 0.22.1: K and V of a block are together in its page only where
// the model has states. FlashAttention's windows with hidden states also share tensors with whole
// pages, and their K of block b is in the first half of the tensor: in the hidden states of another
// block. The smallest case: one window layer, one full layer, one cache of hidden states, two
// blocks.
#include <gtest/gtest.h>

#include <numeric>

#include "reference/plan/layout.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "sim/check/plan_prover.h"

namespace lockstep {
namespace {

KVCacheConfig smallest_plan() {
  KVCacheSpec full;
  full.block_size = 0;
  full.num_kv_heads = 1;
  full.head_size = 16;
  KVCacheSpec window = full;
  window.kind = CacheKind::sliding_window;
  window.sliding_window = 8;
  PlanOptions options;
  options.max_model_len = 16;
  options.num_gpu_blocks_override = 20;
  const LayerSpecs layers{
      {"window", window}, {"full", full}, hidden_state_layer(1, 32, DType::bf16)};
  const auto plan = plan_memory(layers, options);
  EXPECT_TRUE(plan) << plan.error().message;
  return with_num_blocks(plan->workers.front(), 2);
}

PlanProof prove(AttentionBackend backend, LayoutRule rule) {
  const KVCacheConfig plan = smallest_plan();
  const auto layout = pool_layout(plan, backend, CacheLayout::NHD, rule);
  const auto views = pool_views(plan, backend, CacheLayout::NHD, rule);
  EXPECT_TRUE(layout && views);
  return prove_views(
      *layout, *views, [](const TensorView& view, std::span<const std::int64_t> index) {
        return (view.storage_offset + std::inner_product(index.begin(), index.end(),
                                                         view.stride.begin(), std::int64_t{0})) *
               itemsize_bytes(view.dtype);
      });
}

TEST(WindowBesideHiddenStates, TheEnginesRuleLetsTwoBlocksShareBytes) {
  const PlanProof proof = prove(AttentionBackend::flash_attn, LayoutRule::vllm_0_22_1);
  ASSERT_FALSE(proof.holds());
  EXPECT_NE(proof.findings.front().text.find("share bytes"), std::string::npos);
}

TEST(WindowBesideHiddenStates, IsolatedPagesHold) {
  EXPECT_TRUE(prove(AttentionBackend::flash_attn, LayoutRule::isolated).holds());
}

TEST(WindowBesideHiddenStates, BackendsThatPutBlocksFirstHoldUnderBothRules) {
  for (LayoutRule rule : {LayoutRule::isolated, LayoutRule::vllm_0_22_1})
    EXPECT_TRUE(prove(AttentionBackend::flashinfer, rule).holds());
}

}  // namespace
}  // namespace lockstep
