// The memory of releases whose groups overlay one allocation, in all six orders: every kind of
// cache is replayed with kernels on pages, and defects of addresses are seen in every order.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "cuda_backend/simt_backend.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "reference/memory/placed_layout.h"
#include "sim/session/session.h"
#include "sim/step/backend_config.h"
#include "tests/properties/busy_case.h"

namespace lockstep {
namespace {

using Orders = std::set<CacheLayout>;
using enum CacheLayout;

const Orders kAll(kOverlaidLayouts.begin(), kOverlaidLayouts.end());
// A block's page of a layer is one run of bytes.
const Orders kCompact = {LBNHC, LBHNC, BLNHC, BLHNC};

constexpr auto kWithRing = "compressed rows, a window that is computed again, a ring";

struct CacheKindCase {
  std::string name;
  std::vector<KVCacheGroupSpec> groups;
  Orders orders;  // that the engine takes; all others are refused
  AttentionBackend backend = AttentionBackend::any_size;
  std::int64_t num_blocks = 41;
};

KVCacheGroupSpec group_of(KVCacheSpec spec, int number, int layers = 2) {
  KVCacheGroupSpec group;
  for (int i = 0; i < layers; ++i) group.layer_names.push_back(fmt::format("g{}.{}", number, i));
  group.spec = std::move(spec);
  return group;
}

KVCacheSpec rows(std::int64_t heads = 2, std::int64_t block_size = 4) {
  KVCacheSpec spec;
  spec.block_size = block_size;
  spec.num_kv_heads = heads;
  spec.head_size = 8;
  return spec;
}
KVCacheSpec scaled(KVQuantMode mode, DType dtype, std::int64_t head_size) {
  KVCacheSpec spec = rows();
  spec.kv_quant_mode = mode;
  spec.dtype = dtype;
  spec.head_size = head_size;
  return spec;
}
KVCacheSpec of_kind(CacheKind kind, KVCacheSpec spec) {
  spec.kind = kind;
  if (kind == CacheKind::sliding_window) spec.sliding_window = 7;
  if (kind == CacheKind::chunked_local) spec.attention_chunk_size = 8;
  return spec;
}
KVCacheSpec compressed(std::int64_t tokens_per_row) {
  KVCacheSpec spec = rows(1);
  spec.kind = CacheKind::mla;
  spec.compress_ratio = tokens_per_row;
  return spec;
}
KVCacheSpec computed_again() {
  KVCacheSpec spec = of_kind(CacheKind::sliding_window, rows(1));
  spec.mla_rows = spec.bounded_replay = true;
  return spec;
}
// Of half a chunk's tokens.
KVCacheSpec ring() {
  KVCacheSpec spec = rows(1);
  spec.kind = CacheKind::circular_buffer;
  spec.mla_rows = true;
  return spec;
}
KVCacheSpec states(std::vector<StateTensorSpec> tensors) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.block_size = 4;
  spec.mamba_cache_mode = MambaCacheMode::align;
  spec.states = std::move(tensors);
  return spec;
}

std::vector<CacheKindCase> cache_kinds() {
  KVCacheGroupSpec uniform = group_of(rows(), 0, 3);
  uniform.layer_specs = {rows(1), rows(3), rows(1)};
  uniform.spec = uniform.layer_specs.front();
  const KVCacheSpec mamba2 = states({{{3, 4}, DType::bf16}, {{2, 4, 2}, DType::fp32}});
  const KVCacheSpec short_conv = states({{{2, 12}, DType::bf16}});
  const KVCacheSpec gated_delta = states({{{3, 4}, DType::bf16}, {{2, 4, 4}, DType::fp32}});
  const auto with_states = [](const KVCacheSpec& spec) {
    return std::vector{group_of(rows(), 0), group_of(spec, 1, 3), group_of(spec, 2, 3)};
  };
  return {
      {"full attention", {group_of(rows(), 0, 3)}, kAll},
      {"one head", {group_of(rows(1), 0)}, kAll},
      {"fp8 with scales",
       {group_of(scaled(KVQuantMode::fp8_per_token_head, DType::fp8_e4m3, 8), 0)},
       kAll},
      {"rows of no whole words",
       {group_of(scaled(KVQuantMode::none, DType::fp8_e5m2, 5), 0)},
       kAll},
      {"nvfp4", {group_of(scaled(KVQuantMode::nvfp4, DType::uint8, 16), 0)}, kAll},
      {"mla", {group_of(of_kind(CacheKind::mla, rows(1)), 0)}, kAll},
      {"compressed rows", {group_of(compressed(2), 0)}, kAll},
      {kWithRing,
       {group_of(compressed(2), 0), group_of(computed_again(), 1), group_of(ring(), 2, 1)},
       kAll},
      {"windows and chunks",
       {group_of(rows(), 0), group_of(of_kind(CacheKind::sliding_window, rows()), 1),
        group_of(of_kind(CacheKind::chunked_local, rows()), 2, 1)},
       kAll},
      {"windows in longer blocks",
       {group_of(rows(2, 4), 0), group_of(of_kind(CacheKind::sliding_window, rows(1, 8)), 1)},
       kCompact},
      {"mamba2", with_states(mamba2), kCompact},
      {"short convolutions", with_states(short_conv), kCompact},
      {"gated delta", with_states(gated_delta), kCompact},
      {"states alone", {group_of(gated_delta, 0)}, kAll},
      {"hidden states in padded pages",
       {group_of(rows(), 0), group_of(of_kind(CacheKind::hidden_state, rows(1)), 1, 1)},
       kCompact},
      {"layers of two page sizes", {uniform}, kCompact},
      {"split into kernel blocks",
       {group_of(rows(2, 48), 0)},
       {LBNHC, LBHNC},
       AttentionBackend::flashinfer},
      {"one layer, split",
       {group_of(rows(2, 48), 0, 1)},
       {LBNHC, LBHNC, BLNHC, BLHNC},
       AttentionBackend::flashinfer},
      {"two blocks", {group_of(rows(2, 64), 0)}, kAll, AttentionBackend::any_size, 2},
  };
}

SavedCase case_in(const CacheKindCase& kind, CacheLayout order) {
  SavedCase saved = busy_case("");
  saved.backend = "simt";
  saved.check = CheckMode::check;
  saved.attention_backend = kind.backend;
  saved.layout = order;
  saved.queries_per_kv = 2;
  saved.cache = *plan_for_groups(kind.groups, kind.num_blocks);
  if (kind.groups.front().is_uniform_type()) {
    saved.cache.tensors.clear();
    KVCacheGroupSpec& group = saved.cache.groups.front();
    for (KVCacheSpec& spec : group.layer_specs) spec.page_size_padded.reset();
    group.spec = group.layer_specs.front();
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      saved.cache.tensors.push_back(
          {group.layer_specs[i].num_kv_heads * 4 * 32 * kind.num_blocks, {group.layer_names[i]}});
  }
  // A prompt that is there already, once all others have left.
  TraceRequest again;
  again.spec.name = "again";
  again.spec.prompt.append({TokenRun::Kind::seeded, 1, 0, 30});
  again.spec.arrival_ns = std::int64_t{1} << 40;
  again.spec.max_tokens = again.output.length = 6;
  if (kind.groups.back().spec.kind == CacheKind::circular_buffer)
    saved.trace.records.emplace_back(again);
  saved.engine.block_size = static_cast<std::int32_t>(kind.groups.front().spec.block_size);
  saved.engine.mamba_cache_mode = MambaCacheMode::align;
  saved.kernel_block_sizes.clear();
  return saved;
}

TEST(OverlaidOrders, every_kind_of_cache_is_replayed_in_every_order_that_it_takes) {
  for (const CacheKindCase& kind : cache_kinds())
    for (const CacheLayout order : kOverlaidLayouts) {
      const Outcome outcome = judge(case_in(kind, order), make_simt_backend);
      const bool is_taken = kind.orders.contains(order);
      EXPECT_EQ(name_of(outcome.kind), is_taken ? "agreed" : "refused")
          << kind.name << " in " << name_of(order) << ": " << outcome.what;
      EXPECT_EQ(outcome.bytes_checked > 0, is_taken) << kind.name << " in " << name_of(order);
    }
}

TEST(OverlaidOrders, the_same_requests_are_decided_alike_in_all_orders_and_in_older_memory) {
  const CacheKindCase kind = cache_kinds().front();
  std::set<std::int64_t> steps;
  for (const CacheLayout order : kOverlaidLayouts)
    steps.insert(judge(case_in(kind, order), make_simt_backend).steps);
  SavedCase older = case_in(kind, NHD);
  older.engine.engine = "vllm-0.22.1";
  older.engine.async_scheduling = false;
  steps.insert(judge(older, make_simt_backend).steps);
  EXPECT_EQ(steps.size(), 1u);
}

TEST(OverlaidOrders, of_its_own_the_engine_takes_layers_outermost_and_tokens_before_heads) {
  const CacheKindCase kind = cache_kinds().front();
  EXPECT_EQ(config_of(case_in(kind, NHD)).backend.layout, LBNHC);
  EXPECT_EQ(config_of(case_in(kind, HND)).backend.layout, LBHNC);
}

TEST(OverlaidOrders, an_engine_without_such_orders_refuses_one) {
  SavedCase saved = case_in(cache_kinds().front(), BLNHC);
  saved.engine.engine = "vllm-0.22.1";
  const Outcome outcome = judge(saved, make_simt_backend);
  EXPECT_EQ(outcome.kind, OutcomeKind::refused);
  EXPECT_NE(outcome.what.find("no such orders"), std::string::npos) << outcome.what;
}

TEST(OverlaidOrders, blocks_outermost_are_one_tensor_and_head_slots_apart_are_many) {
  const KVCacheConfig plan = *plan_for_groups({group_of(rows(2), 0, 3)}, 10);
  const auto tensors = [&](CacheLayout order) {
    return placed_layout(plan, AttentionBackend::any_size, order)->tensor_size_bytes;
  };
  // Pages of 4 tokens, 2 heads, K and V of 16 bytes.
  EXPECT_EQ(tensors(LBNHC), std::vector<std::int64_t>(3, 2560));
  EXPECT_EQ(tensors(BLHNC), std::vector<std::int64_t>(1, 7680));
  EXPECT_EQ(tensors(LHBNC), std::vector<std::int64_t>(6, 1280));
}

struct PlantedCase {
  std::string mutant;
  std::string kind;
  std::set<std::string> checks;
  Orders spared;  // orders in which the defect changes nothing
};

TEST(OverlaidOrders, a_defect_of_addresses_is_seen_in_every_order) {
  const std::vector<PlantedCase> planted = {
      {"layout-order-lost", "full attention", {"page_written"}, {}},
      {"order-layer-stride", "full attention", {"page_written"}, {}},
      {"order-head-stride", "full attention", {"page_written", "memory_check"}, {}},
      {"wrong-stride", "full attention", {"page_written", "memory_check"}, {}},
      {"write-past-page", "full attention", {"page_written", "memory_check"}, {}},
      {"order-layer-stride", "mla", {"page_written"}, {}},
      {"zero-stride", "mamba2", {"page_written", "memory_check"}, {}},
      {"zero-lost", "mamba2", {"page_written"}, {}},
      {"state-copy-lost", "gated delta", {"page_written"}, {}},
      {"state-stride-unpadded", "mamba2", {"page_written", "memory_check"}, {}},
      {"state-offset-wrong-itemsize", "mamba2", {"page_written", "memory_check"}, {}},
      {"compressed-other-ratio", "compressed rows", {"page_written"}, {}},
      {"compressed-open-row", "compressed rows", {"attention_digest"}, {}},
      {"replay-overwrites-hit", kWithRing, {"slot_mapping"}, {}},
      {"replay-window-kept", kWithRing, {"slot_mapping"}, {}},
      {"replay-reads-before", kWithRing, {"attention_digest", "memory_check"}, {}},
      {"ring-not-clipped", kWithRing, {"slot_mapping", "memory_check"}, {}},
      {"ring-taken-for-table", kWithRing, {"slot_mapping", "memory_check"}, {}},
      {"ring-read-shifted", kWithRing, {"attention_digest"}, {}},
  };
  const std::vector<CacheKindCase> kinds = cache_kinds();
  for (const PlantedCase& one : planted) {
    const auto kind = std::ranges::find(kinds, one.kind, &CacheKindCase::name);
    ASSERT_NE(kind, kinds.end());
    for (const CacheLayout order : kind->orders) {
      if (one.spared.contains(order)) continue;
      SavedCase saved = case_in(*kind, order);
      saved.mutants = {one.mutant};
      const Outcome outcome = judge(saved, make_simt_backend);
      EXPECT_TRUE(one.checks.contains(outcome.check))
          << one.mutant << " in " << name_of(order) << ": " << name_of(outcome.kind) << " "
          << outcome.check << ": " << outcome.what;
    }
  }
}

// Of two views at one address the shorter one is copied (vllm 55112): with blocks outermost a block
// is copied as a whole.
TEST(OverlaidOrders, a_copy_of_the_first_view_alone_loses_the_tail_of_an_attention_block) {
  GeneratorOptions options{
      .engine = "vllm-0.33.0",
      .always = {Feature::full_attention, Feature::states, Feature::several_groups,
                 Feature::prefix_caching, Feature::long_prompts, Feature::shared_prefixes,
                 Feature::sessions, Feature::hits_inside_blocks},
      .never = {Feature::two_block_pool, Feature::drafts, Feature::sliding_window,
                Feature::chunked_local, Feature::hidden_state, Feature::async_scheduling},
      .backend = "simt",
      .check = "fast"};
  std::set<CacheLayout> seen;
  for (std::uint64_t seed = 1; seed <= 60 && seen.size() < 2; ++seed)
    for (const CacheLayout order : {LBNHC, LBHNC}) {
      SavedCase saved = generate_case(seed, options);
      saved.layout = order;
      saved.mutants = {"copy-first-view"};
      const Outcome outcome = judge(saved, make_simt_backend);
      if (!outcome.failed()) continue;
      EXPECT_EQ(outcome.check, "page_written") << outcome.what;
      seen.insert(order);
    }
  EXPECT_EQ(seen.size(), 2u);
}

TEST(OverlaidOrders, generated_cases_reach_every_order) {
  std::set<CacheLayout> drawn;
  for (std::uint64_t seed = 1; seed <= 200; ++seed)
    drawn.insert(generate_case(seed, {.engine = "vllm-0.33.0"}).layout);
  for (const CacheLayout order : kOverlaidLayouts)
    EXPECT_TRUE(drawn.contains(order)) << name_of(order);
}

}  // namespace
}  // namespace lockstep
