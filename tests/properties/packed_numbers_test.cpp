// Caches of 4-bit numbers in whole runs: written, kept through hits, preemption and copies, and
// attended to, in every order that has room for their scales.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda_backend/backends.h"
#include "properties/judge/judge.h"
#include "reference/plan/page_size.h"
#include "tests/properties/cache_kinds.h"

namespace lockstep {
namespace {

using enum CacheLayout;
using tests::CacheKindCase;

KVCacheSpec fp4(std::int64_t head_size, std::int64_t heads = 2) {
  KVCacheSpec spec = tests::rows_of_heads(heads);
  spec.head_size = head_size;
  spec.dtype = DType::uint8;
  spec.kv_quant_mode = KVQuantMode::nvfp4;
  return spec;
}

KVCacheSpec int4(std::int64_t head_size, std::int64_t heads = 2) {
  KVCacheSpec spec = fp4(head_size, heads);
  spec.kv_quant_mode = KVQuantMode::int4_per_token_head;
  return spec;
}

// Rows of sparse MLA in a layout of bytes.
KVCacheSpec latent(const std::string& cache_dtype, const std::string& model_version = "") {
  KVCacheSpec spec = tests::rows_of_heads(1);
  spec.kind = CacheKind::mla;
  spec.dtype = DType::uint8;
  spec.head_size = 512;
  spec.cache_dtype_str = cache_dtype;
  spec.model_version = model_version;
  return spec;
}
// With V4's rows, and pages that are rounded up.
KVCacheSpec latent_window() {
  KVCacheSpec spec = latent("fp8_ds_mla", "deepseek_v4");
  spec.kind = CacheKind::sliding_window_mla;
  spec.sliding_window = 7;
  spec.alignment = 576;
  return with_alignment_padding(spec);
}

KVCacheSpec in_window(KVCacheSpec spec) {
  spec.kind = CacheKind::sliding_window;
  spec.sliding_window = 6;
  return spec;
}

std::vector<CacheKindCase> packed_kinds() {
  const tests::Orders dense = {LBNHC, LBHNC, BLNHC, BLHNC};
  const tests::Orders every(std::begin(kOverlaidLayouts), std::end(kOverlaidLayouts));
  return {
      {"one group of 16", {tests::group_of(fp4(16), 0)}, dense},
      {"heads of 64", {tests::group_of(fp4(64, 3), 0)}, dense},
      {"one head of 48", {tests::group_of(fp4(48, 1), 0, 3)}, dense},
      {"windows and full",
       {tests::group_of(fp4(32), 0), tests::group_of(in_window(fp4(32)), 1)},
       dense},
      {"with bf16, padded",
       {tests::group_of(fp4(16), 0), tests::group_of(in_window(tests::rows_of_heads()), 1)},
       dense},
      {"int4 in heads of 8", {tests::group_of(int4(8), 0)}, every},
      {"int4 in heads of 64", {tests::group_of(int4(64, 3), 0)}, every},
      {"int4, windows and full",
       {tests::group_of(int4(24), 0), tests::group_of(in_window(int4(24)), 1)},
       every},
      {"rows of 656 bytes", {tests::group_of(latent("fp8_ds_mla"), 0, 1)}, every},
      {"rows of 584 bytes", {tests::group_of(latent("fp8_ds_mla", "deepseek_v4"), 0, 1)}, every},
      {"rows of 584 bytes in windows, padded", {tests::group_of(latent_window(), 0, 1)}, every},
      {"rows of 352 bytes", {tests::group_of(latent("nvfp4_ds_mla"), 0, 1)}, every},
  };
}

SavedCase by_numbers(const CacheKindCase& kind, CacheLayout order) {
  SavedCase saved = tests::case_in(kind, order);
  saved.numbers = Numbers::real;
  // Long rows: their single accesses are watched in one order.
  if (kind.name.starts_with("rows of") && order != LBNHC) saved.check = CheckMode::fast;
  return saved;
}

TEST(PackedNumbers, AreReplayedInTheOrdersWhoseBlocksAreDenseAndRefusedInOthers) {
  for (const CacheKindCase& kind : packed_kinds())
    for (const CacheLayout order : kOverlaidLayouts) {
      const Outcome outcome = judge(by_numbers(kind, order), make_simt_backend);
      const bool is_taken = kind.orders.contains(order);
      EXPECT_EQ(name_of(outcome.kind), is_taken ? "agreed" : "refused")
          << kind.name << " in " << name_of(order) << ": " << outcome.what;
      EXPECT_EQ(outcome.bytes_checked > 0, is_taken) << kind.name << " in " << name_of(order);
    }
}

TEST(PackedNumbers, AreTheSameUnderPreemption) {
  for (const CacheKindCase& kind : packed_kinds()) {
    SavedCase saved = by_numbers(kind, kind.name.size() % 2 == 0 ? LBHNC : BLNHC);
    saved.check = CheckMode::fast;
    const Outcome sound = judge(saved, make_simt_backend);
    saved.check = CheckMode::hunt;
    saved.seed = 5;
    const Outcome hunted = judge(saved, make_simt_backend);
    EXPECT_EQ(name_of(hunted.kind), "agreed") << kind.name << ": " << hunted.what;
    EXPECT_EQ(hunted.bytes_checked, sound.bytes_checked) << kind.name;
  }
}

TEST(PackedNumbers, AnotherPlaceOfScalesIsSeenInTheFirstPageThatIsWritten) {
  const CacheKindCase kind = packed_kinds()[1];
  for (const std::string mutant :
       {"scales-swizzled", "scales-behind-rows", "scale-of-other-head", "scale-of-other-layer"})
    for (const CacheLayout order : kind.orders) {
      SavedCase saved = by_numbers(kind, order);
      saved.check = CheckMode::fast;
      saved.mutants = {mutant};
      const Outcome outcome = judge(saved, make_simt_backend);
      EXPECT_EQ(outcome.check, "page_written") << mutant << " in " << name_of(order) << ": "
                                               << name_of(outcome.kind) << " " << outcome.what;
    }
}

TEST(PackedNumbers, AScaleThatIsLostOrAnotherHeadSIsSeenInInt4Too) {
  const CacheKindCase kind = packed_kinds()[6];
  for (const std::string mutant : {"scale-not-stored", "scale-of-other-head"})
    for (const CacheLayout order : kind.orders) {
      SavedCase saved = by_numbers(kind, order);
      saved.check = CheckMode::fast;
      saved.mutants = {mutant};
      const Outcome outcome = judge(saved, make_simt_backend);
      EXPECT_EQ(outcome.check, "page_written") << mutant << " in " << name_of(order) << ": "
                                               << name_of(outcome.kind) << " " << outcome.what;
    }
}

TEST(PackedNumbers, ScalesOfTilesThatAreLostOrInTheRowsAreSeen) {
  std::size_t latents = 0;
  for (const CacheKindCase& kind : packed_kinds()) {
    if (!kind.name.starts_with("rows of")) continue;
    ++latents;
    for (const std::string mutant : {"scale-not-stored", "scales-behind-rows"})
      for (const CacheLayout order : kind.orders) {
        SavedCase saved = by_numbers(kind, order);
        saved.check = CheckMode::fast;
        saved.mutants = {mutant};
        const Outcome outcome = judge(saved, make_simt_backend);
        const bool is_exposed =
            mutant == "scale-not-stored" || kind.name.find("584") != std::string::npos;
        EXPECT_EQ(outcome.check, is_exposed ? "page_written" : "")
            << mutant << ", " << kind.name << " in " << name_of(order) << ": "
            << name_of(outcome.kind) << " " << outcome.what;
      }
  }
  EXPECT_EQ(latents, 4u);
}

TEST(PackedNumbers, AreRefusedByAnEngineThatWritesThemForOtherKernels) {
  SavedCase saved = by_numbers(packed_kinds().front(), NHD);
  saved.engine.engine = "vllm-0.22.1";
  saved.engine.async_scheduling = false;
  const Outcome outcome = judge(saved, make_simt_backend);
  EXPECT_EQ(name_of(outcome.kind), "refused") << outcome.what;
}

}  // namespace
}  // namespace lockstep
