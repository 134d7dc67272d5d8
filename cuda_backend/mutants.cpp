#include "cuda_backend/mutants.h"

#include <fmt/format.h>

#include "cuda_backend/defect.h"

namespace lockstep {
namespace {

using cuda::Defect;
using cuda::ViewDefect;

struct Entry {
  cuda::Defects defects;
  MutantInfo info;
};

constexpr Entry in_kernels(Defect defect, MutantInfo info) {
  return {{defect, ViewDefect::none}, info};
}
constexpr Entry in_views(ViewDefect defect, MutantInfo info) {
  return {{Defect::none, defect}, info};
}

constexpr Entry kEntries[] = {
    in_kernels(Defect::wrong_stride,
               {"wrong-stride", "the block stride of the attention views is one token row short",
                "any block but the null block"}),
    in_kernels(Defect::drop_slot,
               {"drop-slot", "the K/V write leaves out the last scheduled token of every step",
                "any step"}),
    in_kernels(
        Defect::stale_table_entry,
        {"stale-table-entry", "a row keeps the entries of freed blocks when it is used again",
         "a row that is used again by a shorter table"}),
    in_kernels(Defect::table_edit_lost,
               {"table-edit-lost", "a retired block is not replaced by the null block in its row",
                "sliding window or chunked local attention past the window"}),
    in_kernels(Defect::write_past_page,
               {"write-past-page",
                "the last part of a row starts one token late, so a block ends past its page",
                "a full block"}),
    in_kernels(Defect::uninitialised_read,
               {"uninitialised-read", "the K/V rows of a step's last token are never computed",
                "any step"}),
    in_kernels(Defect::race,
               {"race", "a second CTA writes the first token's row, with the last token's content",
                "any step in check mode; two tokens or more in fast mode"}),
    in_kernels(Defect::slot_wrong_block_size,
               {"slot-wrong-block-size", "slots are computed with the block size of another group",
                "a token past the smaller of the two block sizes"}),
    in_kernels(
        Defect::slot_pad_rows,
        {"slot-pad-rows", "padded rows get slot 0 instead of PAD_SLOT_ID", "a padded batch"}),
    in_kernels(Defect::offset_int32, {"offset-int32", "block id times block stride in 32 bits",
                                      "a tensor of more than 2 GiB"}),
    in_kernels(Defect::state_copy_lost,
               {"state-copy-lost", "states are not copied from block to block",
                "prefix hits in mode align"}),
    in_kernels(Defect::state_pads_included,
               {"state-pads-included", "a state advances over its last token twice, as over a pad",
                "any state update"}),
    in_kernels(Defect::kernel_block_unsplit,
               {"kernel-block-unsplit", "the kernel's block table holds manager block ids",
                "kernel_block_size smaller than block_size"}),
    in_kernels(Defect::zero_lost,
               {"zero-lost", "blocks are not zeroed before use", "a step that zeroes blocks"}),
    in_kernels(Defect::copy_unordered,
               {"copy-unordered", "what reads a copied block does not wait for the copy",
                "several streams; copies from block to block"}),
    in_views(ViewDefect::layout_two_blocks,
             {"layout-two-blocks", "the block dimension is guessed from shape[0] == 2",
              "attention and states in one model"}),
    in_views(ViewDefect::layout_not_updated,
             {"layout-not-updated", "attention views keep K and V apart although pages are shared",
              "attention and states in one model, pair-first backend"}),
    in_views(ViewDefect::layout_restride_hidden,
             {"layout-restride-hidden", "hidden-state caches are re-strided as if they were pairs",
              "hidden states in a pool of two blocks"}),
    in_views(ViewDefect::layout_equal_page,
             {"layout-equal-page", "layers of one tensor are all shaped like its first one",
              "equal pages with different block sizes"}),
    in_views(
        ViewDefect::layout_two_heads,
        {"layout-two-heads", "the pair is looked for by its size, from the right", "two KV heads"}),
    in_views(ViewDefect::state_stride_unpadded,
             {"state-stride-unpadded", "states are strided by the real page, not the padded page",
              "state layers in padded pages"}),
    in_views(
        ViewDefect::state_offset_wrong_itemsize,
        {"state-offset-wrong-itemsize", "a state's offset is counted in items of another state",
         "states of different dtype"}),
    in_views(ViewDefect::pack_stride,
             {"pack-stride", "strides of (num_blocks, 2) on a (2, num_blocks) view",
              "packed attention, pair-first backend"}),
    in_views(ViewDefect::pack_offset,
             {"pack-offset", "every layer of a pack at offset 0", "packed attention"}),
};

}  // namespace

std::vector<MutantInfo> backend_mutants() {
  std::vector<MutantInfo> mutants;
  for (const Entry& entry : kEntries) mutants.push_back(entry.info);
  return mutants;
}

Result<cuda::Defects> cuda::defects_from_name(std::string_view name) {
  if (name.empty()) return Defects{};
  std::string known;
  for (const Entry& entry : kEntries) {
    if (entry.info.id == name) return entry.defects;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.info.id);
  }
  return fail(fmt::format("mutant: '{}' is not planted in this backend; known: {}", name, known));
}

}  // namespace lockstep
