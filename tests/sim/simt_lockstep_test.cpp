// Both sides together: the memory model and the kernels on the SIMT executor, which share no
// arithmetic, agree on every kind of cache in every layout and element type, with blocks split for
// the kernel, padded pages, packed pages and rows that are not whole words.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <span>

#include "cuda_backend/backends.h"
#include "reference/plan/page_size.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

struct Cache {
  const char* title;
  std::vector<KVCacheGroupSpec> groups;
  std::int64_t num_blocks;
};

KVCacheSpec with(KVCacheSpec spec, CacheKind kind, std::int64_t heads, std::int64_t head_size) {
  spec.kind = kind;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  return spec;
}

std::vector<Cache> caches() {
  const auto full = CacheKind::full_attention;
  KVCacheSpec window = sliding_spec(40);
  window.dtype = DType::fp32;
  return {
      {"bf16", {make_group("a", 2, full_spec())}, 24},
      {"fp16", {make_group("a", 1, full_spec(16, DType::fp16))}, 24},
      {"fp8, 3 heads of 24",
       {make_group("a", 2, with(full_spec(16, DType::fp8_e4m3), full, 3, 24))},
       24},
      {"fp8, 3 heads of 5",
       {make_group("a", 2, with(full_spec(16, DType::fp8_e5m2), full, 3, 5))},
       24},
      {"fp32 and a sliding window",
       {make_group("a", 1, full_spec(16, DType::fp32)), make_group("b", 2, window)},
       30},
      {"a block of 96 tokens", {make_group("a", 2, full_spec(96))}, 8},
      {"states in mode align",
       {make_group("a", 1, full_spec()), make_group("m", 2, mamba_spec(MambaCacheMode::align))},
       30},
      {"states in mode none",
       {make_group("a", 1, full_spec()), make_group("m", 2, mamba_spec(MambaCacheMode::none, 256))},
       22},
      {"hidden states",
       {make_group("a", 1, full_spec()),
        make_group("h", 1, with(full_spec(), CacheKind::hidden_state, 1, 20))},
       44},
      {"MLA", {make_group("a", 2, with(full_spec(), CacheKind::mla, 1, 24))}, 24},
  };
}

constexpr AttentionBackend kBackends[] = {
    AttentionBackend::flash_attn, AttentionBackend::flashinfer, AttentionBackend::triton_attn};

void expect_agreement(const LockstepConfig& config, const std::string& title) {
  auto backend = make_simt_backend(config.backend);
  ASSERT_TRUE(backend) << title << ": " << backend.error().message;
  const auto run = run_world(config, make_traffic(3, 30), backend->get());
  ASSERT_TRUE(run) << title << ": " << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed)
      << title << ": " << (run->summary.divergence ? to_text(*run->summary.divergence) : "stuck");
  EXPECT_GT(run->summary.pages_checked, 1000) << title;
}

LockstepConfig world_of(const Cache& cache,
                        AttentionBackend attention = AttentionBackend::flash_attn) {
  LockstepConfig config = make_world(cache.groups, cache.num_blocks);
  config.backend = make_backend_config(config.engine, config.backend.plan, attention);
  return config;
}

void expect_agreement_in_every_layout(Numbers numbers) {
  for (const CacheLayout layout : {CacheLayout::NHD, CacheLayout::HND})
    for (const AttentionBackend attention : kBackends)
      for (const Cache& cache : caches()) {
        LockstepConfig config = world_of(cache, attention);
        config.backend.layout = layout;
        config.backend.queries_per_kv = 2;
        config.backend.numbers = numbers;
        expect_agreement(config, std::string(cache.title) + ", " + std::string(name_of(attention)) +
                                     ", " + std::string(name_of(layout)));
      }
}

TEST(SimtLockstep, EveryKindOfCacheInEveryLayout) {
  expect_agreement_in_every_layout(Numbers::words);
}

TEST(SimtLockstep, EveryKindOfCacheWithEveryAccessWatched) {
  for (const Cache& cache : caches()) {
    LockstepConfig config = world_of(cache);
    config.backend.check = CheckMode::check;
    expect_agreement(config, cache.title);
  }
}

// Operations say what they touch, run as late as that allows, and touch nothing else.
TEST(SimtLockstep, EveryKindOfCacheOverThreeStreams) {
  for (const Cache& cache : caches()) {
    LockstepConfig config = world_of(cache);
    config.backend.check = CheckMode::check;
    config.backend.num_streams = 3;
    config.backend.delay_streams = true;
    config.backend.seed = 5;
    expect_agreement(config, cache.title);
  }
}

// An engine's kernels write the rows and attend to them; states in the same case stay words.
TEST(SimtLockstep, EveryKindOfCacheWithRealNumbers) {
  expect_agreement_in_every_layout(Numbers::real);
}

struct Quantised {
  DType dtype;
  KVQuantMode mode = KVQuantMode::none;
};
constexpr Quantised kQuantised[] = {
    {DType::fp8_e4m3},
    {DType::fp8_e5m2},
    {DType::int8},
    {DType::int8, KVQuantMode::int8_per_token_head},
    {DType::fp8_e4m3, KVQuantMode::fp8_per_token_head},
};
std::string title_of(const Quantised& quantised) {
  return fmt::format("{} {}", name_of(quantised.dtype), name_of(quantised.mode));
}

// Watched, over streams, and from captured graphs: a page and an output are the same numbers.
TEST(SimtLockstep, QuantisedCachesWithEveryAccessWatched) {
  for (const Quantised& quantised : kQuantised)
    for (const int num_streams : {1, 3}) {
      KVCacheSpec full = full_spec(16, quantised.dtype), window = sliding_spec(40);
      window.dtype = quantised.dtype;
      full.kv_quant_mode = window.kv_quant_mode = quantised.mode;
      LockstepConfig config =
          make_world({make_group("a", 1, full), make_group("b", 3, window)}, 40);
      config.backend =
          make_backend_config(config.engine, config.backend.plan, AttentionBackend::flash_attn);
      config.backend.numbers = Numbers::real;
      config.backend.check = CheckMode::check;
      config.backend.num_streams = num_streams;
      config.backend.delay_streams = num_streams > 1;
      config.backend.max_cudagraph_capture_size = num_streams > 1 ? 32 : 0;
      expect_agreement(config, title_of(quantised));
    }
}

// A scale follows each row wherever rows are: in two regions, in pages, token or head first.
TEST(SimtLockstep, ScalesOfEachTokenAndHeadInEveryLayout) {
  for (const Quantised& quantised : std::span(kQuantised).last(2))
    for (const AttentionBackend attention : kBackends)
      for (const CacheLayout layout : {CacheLayout::NHD, CacheLayout::HND})
        for (const std::int64_t head_size : {8, 20}) {
          KVCacheSpec spec = full_spec(96, quantised.dtype);
          spec.kv_quant_mode = quantised.mode;
          spec.head_size = head_size;
          LockstepConfig config = make_world({make_group("a", 2, spec)}, 12);
          config.backend = make_backend_config(config.engine, config.backend.plan, attention);
          config.backend.layout = layout;
          config.backend.numbers = Numbers::real;
          config.backend.queries_per_kv = 2;
          expect_agreement(config, title_of(quantised));
        }
}

TEST(SimtLockstep, EveryKindOfCacheFromCapturedGraphs) {
  for (const Cache& cache : caches()) {
    LockstepConfig config = world_of(cache, AttentionBackend::flashinfer);
    config.backend.max_cudagraph_capture_size = 64;
    expect_agreement(config, cache.title);
  }
}

// Three attention layers, two a page, share their pages with states.
TEST(SimtLockstep, PackedPages) {
  for (const AttentionBackend attention : kBackends) {
    LockstepConfig config = make_world({make_group("a", 1, full_spec())}, 30);
    config.engine.enable_prefix_caching = false;
    KVCacheGroupSpec packed = make_group("a", 3, full_spec());
    packed.layers_per_page = 2;
    const std::int64_t page = 2 * page_size_bytes(packed.spec);
    KVCacheGroupSpec states = make_group("m", 2, mamba_spec(MambaCacheMode::none, 256));
    states.spec.page_size_padded = page;
    KVCacheConfig plan;
    plan.num_blocks = 30;
    plan.groups = {packed, states};
    plan.tensors = {{page * 30, {"a.0", "a.1", "m.0"}}, {page * 30, {"a.2", "m.1"}}};
    config.backend = make_backend_config(config.engine, plan, attention);
    expect_agreement(config, std::string(name_of(attention)));
  }
}

}  // namespace
}  // namespace lockstep
