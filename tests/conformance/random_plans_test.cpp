// Random small models under every backend, layout, cache mode and packing: whatever the planner
// accepts, the backend's views and the model's layout address the same bytes, and no two owners
// share one; what one side refuses to view, the other does too.
#include <gtest/gtest.h>

#include "cuda_backend/views/views.h"
#include "reference/plan/capacity.h"
#include "reference/plan/layout.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "reference/types/token_rows.h"
#include "sim/check/plan_prover.h"

namespace lockstep {
namespace {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(splitmix64(++state_ * 0x9E3779B97F4A7C15ull) %
                                     static_cast<std::uint64_t>(n));
  }
  bool once_in(std::int64_t n) { return below(n) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(std::ssize(values))];
  }

 private:
  std::uint64_t state_;
};

KVCacheSpec random_rows(Dice& dice, std::int64_t heads, std::int64_t head_size, DType dtype) {
  KVCacheSpec spec;
  spec.block_size = 0;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.dtype = dtype;
  switch (dice.below(6)) {
    case 0:
      spec.kind = CacheKind::sliding_window;
      spec.sliding_window = 1 + dice.below(60);
      break;
    case 1:
      spec.kind = CacheKind::chunked_local;
      spec.attention_chunk_size = 16 * (1 + dice.below(4));
      break;
    case 2:
      spec.kind = CacheKind::mla;
      spec.num_kv_heads = 1;
      spec.head_size = 2 * heads * head_size;
      break;
    default:
      break;
  }
  return spec;
}

KVCacheSpec random_states(Dice& dice) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.block_size = 0;
  spec.states = {{{1 + dice.below(4), 2 * (1 + dice.below(20))}, DType::bf16},
                 {{1 + dice.below(200), 4}, dice.one_of({DType::bf16, DType::fp32})}};
  return spec;
}

// Up to four kinds of layers, each a few times.
LayerSpecs random_layers(Dice& dice) {
  const std::int64_t heads = dice.one_of<std::int64_t>({1, 2, 3, 4});
  const std::int64_t head_size = dice.one_of<std::int64_t>({4, 8, 16});
  const DType dtype = dice.one_of({DType::bf16, DType::fp8_e4m3, DType::fp32});
  LayerSpecs layers;
  for (std::int64_t kind = 0; kind <= dice.below(4); ++kind) {
    const KVCacheSpec spec = dice.once_in(3)
                                 ? random_states(dice)
                                 : random_rows(dice, heads << dice.below(2), head_size, dtype);
    for (std::int64_t i = 0; i <= dice.below(4); ++i)
      layers.push_back({"l" + std::to_string(layers.size()), spec});
  }
  if (dice.once_in(3)) layers.push_back(hidden_state_layer(1 + dice.below(3), 24, DType::bf16));
  return layers;
}

struct Outcome {
  int proved = 0;
  int refused_plans = 0;
  int refused_views = 0;
};

void try_seed(std::uint64_t seed, Outcome& outcome) {
  Dice dice(seed);
  PlanOptions options;
  options.backend = dice.one_of({AttentionBackend::flash_attn, AttentionBackend::flashinfer,
                                 AttentionBackend::triton_attn, AttentionBackend::triton_mla});
  options.mamba_cache_mode =
      dice.one_of({MambaCacheMode::none, MambaCacheMode::align, MambaCacheMode::all});
  options.mamba_chunk_size = dice.one_of<std::int64_t>({16, 24, 64});
  options.attn_pack = dice.one_of<std::int64_t>({1, 1, 2, 3});
  options.max_model_len = 100;
  options.num_gpu_blocks_override = 500;
  const auto plan = plan_memory(random_layers(dice), options);
  if (!plan) {
    EXPECT_FALSE(plan.error().message.empty());
    ++outcome.refused_plans;
    return;
  }
  const KVCacheConfig pool = with_num_blocks(plan->workers.front(), 2 + dice.below(3));
  const CacheLayout layout = dice.one_of({CacheLayout::NHD, CacheLayout::HND});
  const auto oracle = pool_layout(pool, options.backend, layout);
  const auto closed = pool_views(pool, options.backend, layout);
  const auto views = cuda::derive_views(pool, {.backend = options.backend, .layout = layout});
  ASSERT_EQ(closed.has_value(), views.has_value())
      << "seed " << seed << ": " << (closed ? views.error().message : closed.error().message);
  if (!views) {
    ++outcome.refused_views;
    return;
  }
  EXPECT_TRUE(closed->groups == views->groups) << "seed " << seed;
  const PlanProof proof =
      prove_views(*oracle, *views, [](const TensorView& view, std::span<const std::int64_t> index) {
        return cuda::view_byte_offset(view, index);
      });
  EXPECT_TRUE(proof.holds()) << "seed " << seed << ": " << proof.findings.front().text;
  ++outcome.proved;
  const Capacity capacity = capacity_of(pool, options);
  for (const GroupCapacity& group : capacity.groups) EXPECT_GE(group.absent_layer_bytes, 0);
}

TEST(RandomPlans, AreRefusedByBothOrProved) {
  Outcome outcome;
  for (std::uint64_t seed = 1; seed <= 600; ++seed) try_seed(seed, outcome);
  EXPECT_GT(outcome.proved, 200);
  EXPECT_GT(outcome.refused_plans, 20);
}

}  // namespace
}  // namespace lockstep
