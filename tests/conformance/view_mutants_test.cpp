// Every planted defect of views and addresses is caught by bytes: what is written through the view
// is not what the layout finds. Each has a plan that exposes it; the same plan holds when nothing
// is planted.
#include <gtest/gtest.h>

#include "cuda_backend/defects/planted_views.h"
#include "reference/plan/layout.h"
#include "reference/plan/planner.h"
#include "sim/check/plan_prover.h"

namespace lockstep {
namespace {

using cuda::ViewDefect;

KVCacheSpec pair_spec(std::int64_t heads, std::int64_t head_size, CacheKind kind,
                      std::int64_t block_size = 0) {
  KVCacheSpec spec;
  spec.kind = kind;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.block_size = block_size;
  if (kind == CacheKind::sliding_window) spec.sliding_window = 64;
  return spec;
}

// conv in bf16, ssm in fp32: `ssm_elements` sets how long an aligned block becomes.
KVCacheSpec state_spec(std::int64_t ssm_elements) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.block_size = 0;
  spec.states = {{{3, 20}, DType::bf16}, {{ssm_elements / 8, 8}, DType::fp32}};
  return spec;
}

// `attention` layers of two heads of 16, and states.
LayerSpecs hybrid(int attention, int states, std::int64_t ssm_elements) {
  LayerSpecs layers;
  for (int i = 0; i < states; ++i)
    layers.push_back({"s" + std::to_string(i), state_spec(ssm_elements)});
  for (int i = 0; i < attention; ++i)
    layers.push_back({"a" + std::to_string(i), pair_spec(2, 16, CacheKind::full_attention)});
  return layers;
}

KVCacheConfig plan(const LayerSpecs& layers, PlanOptions options, std::int64_t num_blocks) {
  options.max_model_len = 64;
  options.num_gpu_blocks_override = 200;
  const auto planned = plan_memory(layers, options);
  EXPECT_TRUE(planned) << planned.error().message;
  return with_num_blocks(planned->workers.front(), num_blocks);
}

struct Exposure {
  std::string name;
  ViewDefect defect;
  AttentionBackend backend;
  CacheLayout layout;
  LayerSpecs layers;
  std::int64_t attn_pack;
  std::int64_t num_blocks;
};

void PrintTo(const Exposure& exposure, std::ostream* out) { *out << exposure.name; }

// The proof of a plan, or the refusal as its finding.
PlanProof prove(const Exposure& exposure, ViewDefect defect, ProofOptions options = {}) {
  PlanOptions plan_options;
  plan_options.backend = exposure.backend;
  plan_options.attn_pack = exposure.attn_pack;
  const KVCacheConfig pool = plan(exposure.layers, plan_options, exposure.num_blocks);
  const auto layout = pool_layout(pool, exposure.backend, exposure.layout);
  EXPECT_TRUE(layout) << layout.error().message;
  const auto views = cuda::planted_views(
      pool, {exposure.backend, exposure.layout, LayoutRule::isolated}, {defect});
  if (!views) {
    PlanProof refused;
    refused.findings = {{"refused", views.error().message}};
    return refused;
  }
  return prove_views(
      *layout, *views,
      [&](const TensorView& view, std::span<const std::int64_t> index) {
        return cuda::planted_byte_offset(view, index, {defect});
      },
      options);
}

class ViewMutants : public testing::TestWithParam<Exposure> {};

TEST_P(ViewMutants, IsCaughtAndTheHealthyViewHolds) {
  const Exposure& exposure = GetParam();
  const PlanProof healthy = prove(exposure, ViewDefect::none);
  EXPECT_TRUE(healthy.holds()) << healthy.findings.front().text;
  EXPECT_GT(healthy.rows, 0);
  const PlanProof mutant = prove(exposure, exposure.defect);
  ASSERT_FALSE(mutant.holds());
  // Only a defect that leaves states without a view may show as a refusal; the others must show in
  // bytes.
  const bool refused = mutant.findings.front().rule == "refused";
  EXPECT_EQ(refused, exposure.defect == ViewDefect::state_spec_unhandled)
      << mutant.findings.front().text;
}

LayerSpecs with_hidden(LayerSpecs layers) {
  layers.push_back(hidden_state_layer(3, 16, DType::bf16));
  return layers;
}

// Equal pages, different block sizes: 4 heads by 16 tokens, 2 heads by 32.
LayerSpecs equal_pages() {
  return {{"f", pair_spec(2, 16, CacheKind::full_attention, 32)},
          {"w", pair_spec(4, 16, CacheKind::sliding_window, 16)}};
}

std::vector<Exposure> exposures() {
  constexpr auto FA = AttentionBackend::flash_attn;
  constexpr auto FI = AttentionBackend::flashinfer;
  constexpr auto TR = AttentionBackend::triton_attn;
  constexpr auto NHD = CacheLayout::NHD;
  constexpr auto HND = CacheLayout::HND;
  // 400 elements of ssm make blocks of 16 tokens (one kernel block), 2,400 blocks of 80 (five).
  const LayerSpecs small = hybrid(1, 3, 400);
  const LayerSpecs large = hybrid(1, 3, 2400);
  const LayerSpecs packed = hybrid(7, 8, 9600);
  return {
      {"TwoBlocksFlashInfer", ViewDefect::layout_two_blocks, FI, NHD, small, 1, 2},
      {"TwoBlocksTritonHnd", ViewDefect::layout_two_blocks, TR, HND, small, 1, 2},
      {"NotUpdated", ViewDefect::layout_not_updated, FA, NHD, large, 1, 2},
      {"NotUpdatedHnd", ViewDefect::layout_not_updated, FA, HND, large, 1, 5},
      {"RestrideHidden", ViewDefect::layout_restride_hidden, FA, NHD, with_hidden(large), 1, 2},
      {"StateUnhandled", ViewDefect::state_spec_unhandled, FA, NHD, small, 1, 3},
      {"StateUnpadded", ViewDefect::state_stride_unpadded, TR, NHD, small, 1, 3},
      {"StateOffset", ViewDefect::state_offset_wrong_itemsize, TR, NHD, small, 1, 3},
      {"UnsplitFlash", ViewDefect::kernel_block_unsplit, FA, NHD, large, 1, 3},
      {"UnsplitFlashInferHnd", ViewDefect::kernel_block_unsplit, FI, HND, large, 1, 3},
      {"NumBlocks", ViewDefect::kernel_block_num_blocks, FA, NHD, large, 1, 3},
      {"PackStride", ViewDefect::pack_stride, FA, NHD, packed, 4, 3},
      {"PackStrideHnd", ViewDefect::pack_stride, FA, HND, packed, 4, 3},
      {"PackOffset", ViewDefect::pack_offset, FI, NHD, packed, 4, 3},
      {"PackNumBlocks", ViewDefect::pack_num_blocks, TR, NHD, packed, 4, 3},
      {"EqualPage", ViewDefect::layout_equal_page, TR, NHD, equal_pages(), 1, 3},
      {"TwoHeads", ViewDefect::layout_two_heads, FI, NHD, small, 1, 3},
  };
}

INSTANTIATE_TEST_SUITE_P(All, ViewMutants, testing::ValuesIn(exposures()),
                         [](const auto& one) { return one.param.name; });

TEST(ViewMutants, EveryDefectHasANameThatFindsIt) {
  for (const ViewDefect defect : kAllDefects<ViewDefect>)
    EXPECT_EQ(defect_from_name<ViewDefect>(name_of(defect)), defect);
  EXPECT_FALSE(defect_from_name<ViewDefect>("layout-two-block"));
}

// A tensor of 6 GB of which the first and the last block are looked at.
TEST(ViewMutants, Offsets32BitsWideLoseBlocksAbove2GiB) {
  constexpr std::int32_t kBlocks = 3'000'000;
  const Exposure exposure{"",
                          ViewDefect::offset_int32,
                          AttentionBackend::flash_attn,
                          CacheLayout::NHD,
                          hybrid(1, 3, 400),
                          1,
                          kBlocks};
  const ProofOptions ends{.blocks = {BlockId{0}, BlockId{kBlocks - 1}}, .tensors = {}};
  const PlanProof healthy = prove(exposure, ViewDefect::none, ends);
  EXPECT_TRUE(healthy.holds()) << healthy.findings.front().text;
  const PlanProof mutant = prove(exposure, ViewDefect::offset_int32, ends);
  ASSERT_FALSE(mutant.holds());
  const ProofOptions start{.blocks = {BlockId{0}, BlockId{1}}, .tensors = {}};
  EXPECT_TRUE(prove(exposure, ViewDefect::offset_int32, start).holds());
}

}  // namespace
}  // namespace lockstep
