#include "cuda_backend/mutants.h"

#include <fmt/format.h>

#include "cuda_backend/defect.h"

namespace lockstep {
namespace {

using cuda::Defect;
using cuda::ViewDefect;

struct Entry {
  std::string_view id;
  cuda::Defects defects;
};

constexpr Entry in_kernels(std::string_view id, Defect defect) {
  return {id, {defect, ViewDefect::none}};
}
constexpr Entry in_views(std::string_view id, ViewDefect defect) {
  return {id, {Defect::none, defect}};
}

constexpr Entry kEntries[] = {
    in_kernels("wrong-stride", Defect::wrong_stride),
    in_kernels("drop-slot", Defect::drop_slot),
    in_kernels("stale-table-entry", Defect::stale_table_entry),
    in_kernels("table-edit-lost", Defect::table_edit_lost),
    in_kernels("write-past-page", Defect::write_past_page),
    in_kernels("uninitialised-read", Defect::uninitialised_read),
    in_kernels("race", Defect::race),
    in_kernels("slot-wrong-block-size", Defect::slot_wrong_block_size),
    in_kernels("slot-pad-rows", Defect::slot_pad_rows),
    in_kernels("slot-stale-tail", Defect::slot_stale_tail),
    in_kernels("slot-interleave-ignored", Defect::interleave_ignored),
    in_kernels("offset-int32", Defect::offset_int32),
    in_kernels("state-copy-lost", Defect::state_copy_lost),
    in_kernels("state-pads-included", Defect::state_pads_included),
    in_kernels("kernel-block-unsplit", Defect::kernel_block_unsplit),
    in_kernels("zero-lost", Defect::zero_lost),
    in_kernels("copy-unordered", Defect::copy_unordered),
    in_kernels("transfer-wrong-end", Defect::transfer_wrong_end),
    in_kernels("transfer-flatten", Defect::page_flattened),
    in_kernels("layout-order-lost", Defect::layout_order_lost),
    in_kernels("hidden-flatten", Defect::hidden_flatten),
    in_kernels("hidden-chunk-save", Defect::hidden_chunk_save),
    in_kernels("hidden-slot-mapping", Defect::hidden_slot_mapping),
    in_kernels("slot-past-row", Defect::slot_past_row),
    in_kernels("table-width", Defect::table_width),
    in_kernels("table-async-upload", Defect::table_async_upload),
    in_kernels("table-late-clear", Defect::table_late_clear),
    in_kernels("state-update-race", Defect::state_update_race),
    in_kernels("state-draft-reuse", Defect::state_draft_reuse),
    in_kernels("stale-nan", Defect::stale_nan),
    in_kernels("graph-stale-param", Defect::graph_stale_param),
    in_kernels("graph-too-small", Defect::graph_too_small),
    in_kernels("graph-stale-pointer", Defect::graph_stale_pointer),
    in_kernels("combine-unscaled", Defect::combine_unscaled),
    in_kernels("window-off-by-one", Defect::window_off_by_one),
    in_kernels("scale-of-other-layer", Defect::scale_of_other_layer),
    in_kernels("scale-of-other-head", Defect::scale_of_other_head),
    in_kernels("scale-not-stored", Defect::scale_not_stored),
    in_kernels("conv-offset-ignored", Defect::conv_offset_ignored),
    in_kernels("state-targets-last", Defect::state_targets_last),
    in_kernels("chunk-carry-undecayed", Defect::chunk_carry_undecayed),
    in_kernels("tp-head-offset", Defect::tp_head_offset),
    in_kernels("tp-heads-not-replicated", Defect::tp_heads_not_replicated),
    in_kernels("pp-layer-offset", Defect::pp_layer_offset),
    in_kernels("dp-idle-writes", Defect::dp_idle_writes),
    in_views("layout-two-blocks", ViewDefect::layout_two_blocks),
    in_views("layout-not-updated", ViewDefect::layout_not_updated),
    in_views("layout-restride-hidden", ViewDefect::layout_restride_hidden),
    in_views("layout-equal-page", ViewDefect::layout_equal_page),
    in_views("layout-two-heads", ViewDefect::layout_two_heads),
    in_views("state-stride-unpadded", ViewDefect::state_stride_unpadded),
    in_views("state-offset-wrong-itemsize", ViewDefect::state_offset_wrong_itemsize),
    in_views("pack-stride", ViewDefect::pack_stride),
    in_views("pack-offset", ViewDefect::pack_offset),
};

}  // namespace

std::vector<std::string_view> backend_defect_names() {
  std::vector<std::string_view> names;
  for (const Entry& entry : kEntries) names.push_back(entry.id);
  return names;
}

Result<cuda::Defects> cuda::defects_from_name(std::string_view name) {
  if (name.empty()) return Defects{};
  for (const Entry& entry : kEntries)
    if (entry.id == name) return entry.defects;
  return fail(fmt::format("mutant: '{}' is not planted in this backend; known: {}", name,
                          fmt::join(backend_defect_names(), ", ")));
}

}  // namespace lockstep
