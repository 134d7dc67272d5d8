// The memory of releases whose groups overlay one allocation, in all six orders: every kind of
// cache is replayed with kernels on pages, and defects of addresses are seen in every order.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cuda_backend/backends.h"
#include "cuda_backend/views/views.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "reference/memory/model_placement.h"
#include "sim/check/plan_prover.h"
#include "sim/session/session.h"
#include "sim/step/backend_config.h"
#include "tests/properties/cache_kinds.h"

namespace lockstep {
namespace {

using enum CacheLayout;
using tests::cache_kinds;
using tests::CacheKindCase;
using tests::case_in;
using tests::kMapped;
using tests::kWithRing;
using tests::Orders;

TEST(OverlaidOrders, EveryKindOfCacheIsReplayedInEveryOrderThatItTakes) {
  for (const CacheKindCase& kind : cache_kinds())
    for (const CacheLayout order : kOverlaidLayouts) {
      const Outcome outcome = judge(case_in(kind, order), make_simt_backend);
      const bool is_taken = kind.orders.contains(order);
      EXPECT_EQ(name_of(outcome.kind), is_taken ? "agreed" : "refused")
          << kind.name << " in " << name_of(order) << ": " << outcome.what;
      EXPECT_EQ(outcome.bytes_checked > 0, is_taken) << kind.name << " in " << name_of(order);
    }
}

TEST(OverlaidOrders, ThePlanThatReplaysRunOnIsProvedInEveryOrder) {
  for (const CacheKindCase& kind : cache_kinds())
    for (const CacheLayout order : kind.orders) {
      const BackendConfig backend = config_of(case_in(kind, order)).backend;
      const auto plan = placed_layout(backend.plan, backend.attention_backend, order);
      ASSERT_TRUE(plan) << kind.name << ": " << plan.error().message;
      const PlanProof proof = prove_rows(*plan);
      EXPECT_TRUE(proof.holds()) << kind.name << " in " << name_of(order) << ": "
                                 << proof.findings.front().text;
      EXPECT_GT(proof.rows, 0) << kind.name;
    }
}

TEST(OverlaidOrders, TheSameRequestsAreDecidedAlikeInAllOrdersAndInOlderMemory) {
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

TEST(OverlaidOrders, OfItsOwnTheEngineTakesLayersOutermostAndTokensBeforeHeads) {
  const CacheKindCase kind = cache_kinds().front();
  EXPECT_EQ(config_of(case_in(kind, NHD)).backend.layout, LBNHC);
  EXPECT_EQ(config_of(case_in(kind, HND)).backend.layout, LBHNC);
}

TEST(OverlaidOrders, AnEngineWithoutSuchOrdersRefusesOne) {
  SavedCase saved = case_in(cache_kinds().front(), BLNHC);
  saved.engine.engine = "vllm-0.22.1";
  const Outcome outcome = judge(saved, make_simt_backend);
  EXPECT_EQ(outcome.kind, OutcomeKind::refused);
  EXPECT_NE(outcome.what.find("no such layout"), std::string::npos) << outcome.what;
}

TEST(OverlaidOrders, BlocksOutermostAreOneTensorAndHeadSlotsApartAreMany) {
  const KVCacheConfig plan = *plan_for_groups({tests::group_of(tests::rows_of_heads(2), 0, 3)}, 10);
  const auto tensors = [&](CacheLayout order) {
    return placed_layout(plan, AttentionBackend::any_size, order)->tensor_size_bytes;
  };
  // Pages of 4 tokens, 2 heads, K and V of 16 bytes.
  EXPECT_EQ(tensors(LBNHC), std::vector<std::int64_t>(3, 2560));
  EXPECT_EQ(tensors(BLHNC), std::vector<std::int64_t>(1, 7680));
  EXPECT_EQ(tensors(LHBNC), std::vector<std::int64_t>(6, 1280));
}

// As the engine binds them (recorded in layouts.jsonl): rows of MLA with an indexer whose kernels
// take 256 of 512 tokens, in a pool of two blocks.
TEST(OverlaidOrders, RowsInPartsOfAPackedBlockAreViewedAsTheEngineBindsThem) {
  KVCacheSpec rows, indexer;
  rows.kind = indexer.kind = CacheKind::mla;
  rows.block_size = indexer.block_size = 512;
  rows.head_size = 576;
  indexer.head_size = 132;
  indexer.dtype = DType::uint8;
  indexer.tokens_per_state = {4};
  indexer.block_stride_alignment = 8448;  // 64 rows
  KVCacheGroupSpec group = tests::group_of(rows, 0);
  group.layer_specs = {rows, indexer};
  KVCacheConfig plan{.num_blocks = 2, .tensors = {}, .groups = {group}};
  const AttentionBackend backend = AttentionBackend::triton_mla;
  const auto mapped = mapped_kernel_blocks(plan, backend);
  EXPECT_EQ(mapped, (std::map<std::string, std::int64_t>{{"g0.1", 256}}));
  plan = with_placed_tensors(plan, *placed_layout(plan, backend, BLHNC));
  EXPECT_EQ(plan.tensors.front().size_bytes, 1'216'512);
  const auto views = cuda::derive_views(
      plan, {.backend = backend, .layout = BLHNC, .mapped_kernel_blocks = mapped});
  ASSERT_TRUE(views) << views.error().message;
  const LayerViews& bound = views->groups[0][1];
  EXPECT_EQ(bound.kernel_block_stride, 72);
  EXPECT_EQ(bound.tensors[0].shape, (std::vector<std::int64_t>{74, 1, 64, 132}));
  EXPECT_EQ(bound.tensors[0].stride, (std::vector<std::int64_t>{8448, 16896, 132, 1}));
  EXPECT_EQ(bound.tensors[0].storage_offset, 589'824);
  const auto layout = placed_layout(plan, backend, BLHNC);
  const auto proof =
      prove_views(*layout, *views, [](const TensorView& view, std::span<const std::int64_t> index) {
        return cuda::view_byte_offset(view, index);
      });
  EXPECT_TRUE(proof.holds()) << proof.findings.front().text;
}

TEST(OverlaidOrders, DrawnCasesReachTablesThatAreMapped) {
  GeneratorOptions options{.engine = "vllm-0.33.0",
                           .always = {Feature::mla, Feature::rings, Feature::compressed_rows,
                                      Feature::mapped_tables, Feature::long_prompts},
                           .never = {Feature::two_block_pool},
                           .backend = "simt",
                           .check = "fast"};
  int mapped = 0, second_parts = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const SavedCase saved = generate_case(seed, options);
    if (config_of(saved).backend.mapped_kernel_blocks.empty()) continue;
    ++mapped;
    second_parts += std::ranges::any_of(saved.trace.records, [](const TraceRecord& record) {
      const auto* request = std::get_if<TraceRequest>(&record);
      return request != nullptr && request->spec.prompt.size() > 64;
    });
    const Outcome outcome = judge(saved, make_simt_backend);
    EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << seed << ": " << outcome.what;
  }
  EXPECT_GE(mapped, 5);
  EXPECT_GE(second_parts, 2);
}

struct PlantedCase {
  std::string mutant;
  std::string kind;
  std::set<std::string> checks;
  Orders spared;  // orders in which the defect changes nothing
};

TEST(OverlaidOrders, ADefectOfAddressesIsSeenInEveryOrder) {
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
      {"mapped-dense", kMapped, {"page_written", "memory_check"}, {}},
      {"cross-slots-of-another", tests::kWithEncoder, {"slot_mapping", "memory_check"}, {}},
      {"cross-reads-causally", tests::kWithEncoder, {"attention_digest"}, {}},
      {"cross-row-lost", tests::kWithEncoder, {"page_written"}, {}},
      {"sink-block-shifted", tests::kWithSinks, {"page_written"}, {}},
      {"sinks-not-read", tests::kWithSinks, {"attention_digest", "memory_check"}, {}},
      {"rswa-gap-read", tests::kWithReferenceWindow, {"attention_output"}, {}},
      {"whole-dealt-out", tests::kWithWholeCaches, {"slot_mapping"}, {}},
      {"dealt-out-whole", tests::kWithWholeCaches, {"slot_mapping", "memory_check"}, {}},
      {"whole-block-of-all", tests::kWithWholeCaches, {"slot_mapping"}, {}},
      {"whole-read-in-part", tests::kWithWholeCaches, {"attention_digest"}, {}},
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
TEST(OverlaidOrders, ACopyOfTheFirstViewAloneLosesTheTailOfAnAttentionBlock) {
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

TEST(OverlaidOrders, GeneratedCasesReachEveryOrder) {
  std::set<CacheLayout> drawn;
  for (std::uint64_t seed = 1; seed <= 200; ++seed)
    drawn.insert(generate_case(seed, {.engine = "vllm-0.33.0"}).layout);
  for (const CacheLayout order : kOverlaidLayouts)
    EXPECT_TRUE(drawn.contains(order)) << name_of(order);
}

}  // namespace
}  // namespace lockstep
