// The mutants of mutants.h as the backend's code sees them: at most one is on, chosen at creation.
// Defects of the layout are those of view_defects.h; the others are here. Host code branches on
// them where it builds launches; kernels get them as template arguments, so that the kernels of a
// healthy backend carry no trace of them.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/result.h"
#include "cuda_backend/views/view_defects.h"

namespace lockstep::cuda {

enum class Defect : std::uint8_t {
  none,
  wrong_stride,
  drop_slot,
  stale_table_entry,
  table_edit_lost,
  write_past_page,
  uninitialised_read,
  race,
  slot_wrong_block_size,
  slot_pad_rows,
  offset_int32,
  state_copy_lost,
  state_pads_included,
  kernel_block_unsplit,
  zero_lost,
  copy_unordered,
  layout_order_lost,
  hidden_flatten,
  hidden_chunk_save,
  hidden_slot_mapping,
  slot_past_row,
  table_width,
  table_async_upload,
  table_late_clear,
  state_update_race,
  state_draft_reuse,
  stale_nan,
  graph_stale_param,
  graph_too_small,
  graph_stale_pointer,
  scale_of_other_layer,
  tp_head_offset,
  tp_heads_not_replicated,
  pp_layer_offset,
  dp_idle_writes,
  // Of the kernels in launch/engine_kernels.h, which tests launch by themselves.
  scale_of_other_head,
  scale_not_stored,
  combine_unscaled,
  window_off_by_one,
  conv_offset_ignored,
  state_targets_last,
  chunk_carry_undecayed,
  state_shift_race,
  page_flattened,
  transfer_wrong_end,
  interleave_ignored,
  replicated_group_shared,
  slot_stale_tail,
  slot_pad_is_zero,
};

// Of real numbers (real_caches.h, real_states.h): nothing to show where rows and states are words.
constexpr bool is_of_numbers(Defect defect) {
  return defect == Defect::scale_of_other_layer || defect == Defect::scale_of_other_head ||
         defect == Defect::scale_not_stored || defect == Defect::combine_unscaled ||
         defect == Defect::window_off_by_one || defect == Defect::conv_offset_ignored ||
         defect == Defect::state_targets_last || defect == Defect::chunk_carry_undecayed;
}
// Of kernels that real numbers do not go through.
constexpr bool is_of_words(Defect defect) {
  return defect == Defect::offset_int32 || defect == Defect::race || defect == Defect::stale_nan ||
         defect == Defect::state_pads_included || defect == Defect::state_update_race ||
         defect == Defect::state_draft_reuse;
}
// Of graph_device.h: nothing to show where no graphs are captured.
constexpr bool is_of_graphs(Defect defect) {
  return defect == Defect::graph_stale_param || defect == Defect::graph_too_small ||
         defect == Defect::graph_stale_pointer;
}

struct Defects {
  Defect kernel = Defect::none;
  ViewDefect views = ViewDefect::none;
};

// The empty name plants nothing; an unknown one is an Error that lists the known ones.
Result<Defects> defects_from_name(std::string_view name);

}  // namespace lockstep::cuda
