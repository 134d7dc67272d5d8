#include "cuda_backend/defects/backend_mutants.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep {
namespace {

using cuda::in_kernel;
using cuda::in_views;
using cuda::KernelDefect;
using cuda::ViewDefect;

// Without which a defect has nothing to change.
enum class Needs : std::uint8_t { nothing, streams, graphs, numbers, words };

struct Entry {
  std::string_view id;
  cuda::MakeSeams make;
  Needs needs = Needs::nothing;
};

constexpr Entry kEntries[] = {
    {"wrong-stride", cuda::wrong_stride},
    {"drop-slot", cuda::drop_slot},
    {"stale-table-entry", cuda::stale_table_entry},
    {"table-edit-lost", cuda::table_edit_lost},
    {"write-past-page", cuda::write_past_page},
    {"uninitialised-read", cuda::uninitialised_read},
    {"race", cuda::race, Needs::words},
    {"slot-wrong-block-size", cuda::slot_wrong_block_size},
    {"slot-pad-rows", cuda::slot_pad_rows},
    {"slot-stale-tail", cuda::slot_stale_tail},
    {"slot-interleave-ignored", cuda::slot_interleave_ignored},
    {"offset-int32", in_kernel<KernelDefect::write_offset_int32>, Needs::words},
    {"state-copy-lost", cuda::state_copy_lost},
    {"state-pads-included", in_kernel<KernelDefect::state_pads_included>, Needs::words},
    {"kernel-block-unsplit", in_kernel<KernelDefect::table_unsplit>},
    {"zero-lost", cuda::zero_lost},
    {"copy-unordered", cuda::copy_unordered, Needs::streams},
    {"transfer-wrong-end", cuda::transfer_wrong_end},
    {"transfer-flatten", cuda::transfer_flatten},
    {"layout-order-lost", cuda::layout_order_lost},
    {"hidden-flatten", cuda::hidden_flatten},
    {"hidden-chunk-save", cuda::hidden_chunk_save},
    {"hidden-slot-mapping", cuda::hidden_slot_mapping},
    {"slot-past-row", cuda::slot_past_row},
    {"table-width", cuda::table_width},
    {"table-async-upload", cuda::table_async_upload},
    {"table-late-clear", cuda::table_late_clear},
    {"state-update-race", in_kernel<KernelDefect::state_update_race>, Needs::words},
    {"state-draft-reuse", cuda::state_draft_reuse, Needs::words},
    {"stale-nan", cuda::stale_nan, Needs::words},
    {"graph-stale-param", cuda::graph_stale_param, Needs::graphs},
    {"graph-too-small", cuda::graph_too_small, Needs::graphs},
    {"graph-stale-pointer", cuda::graph_stale_pointer, Needs::graphs},
    {"combine-unscaled", in_kernel<KernelDefect::combine_unscaled>, Needs::numbers},
    {"window-off-by-one", cuda::window_off_by_one, Needs::numbers},
    {"scale-of-other-layer", cuda::scale_of_other_layer, Needs::numbers},
    {"scale-of-other-head", cuda::scale_of_other_head, Needs::numbers},
    {"scale-not-stored", in_kernel<KernelDefect::scale_not_stored>, Needs::numbers},
    {"conv-offset-ignored", cuda::conv_offset_ignored, Needs::numbers},
    {"state-targets-last", cuda::state_targets_last, Needs::numbers},
    {"chunk-carry-undecayed", in_kernel<KernelDefect::chunk_carry_undecayed>, Needs::numbers},
    {"tp-head-offset", cuda::tp_head_offset},
    {"tp-heads-not-replicated", cuda::tp_heads_not_replicated},
    {"pp-layer-offset", cuda::pp_layer_offset},
    {"dp-idle-writes", cuda::dp_idle_writes},
    {"layout-two-blocks", in_views<ViewDefect::layout_two_blocks>},
    {"layout-not-updated", in_views<ViewDefect::layout_not_updated>},
    {"layout-restride-hidden", in_views<ViewDefect::layout_restride_hidden>},
    {"layout-equal-page", in_views<ViewDefect::layout_equal_page>},
    {"layout-two-heads", in_views<ViewDefect::layout_two_heads>},
    {"state-stride-unpadded", in_views<ViewDefect::state_stride_unpadded>},
    {"state-offset-wrong-itemsize", in_views<ViewDefect::state_offset_wrong_itemsize>},
    {"pack-stride", in_views<ViewDefect::pack_stride>},
    {"pack-offset", in_views<ViewDefect::pack_offset>},
};

// What `needs` misses in the configuration; empty: nothing.
std::string missing(const Entry& entry, const BackendConfig& config) {
  switch (entry.needs) {
    case Needs::streams:
      if (config.num_streams < 2)
        return "mutant: copy-unordered leaves out an order between streams, and there is one";
      break;
    case Needs::graphs:
      if (config.max_cudagraph_capture_size == 0)
        return fmt::format("mutant: {} is of captured graphs, and none are captured", entry.id);
      break;
    case Needs::numbers:
      if (config.numbers != Numbers::real)
        return fmt::format("mutant: {} is of real numbers, and rows are words", entry.id);
      break;
    case Needs::words:
      if (config.numbers == Numbers::real)
        return fmt::format("mutant: {} is in a kernel that real numbers do not go through",
                           entry.id);
      break;
    case Needs::nothing:
      break;
  }
  return {};
}

}  // namespace

std::vector<std::string_view> backend_defect_names() {
  std::vector<std::string_view> names;
  for (const Entry& entry : kEntries) names.push_back(entry.id);
  return names;
}

Result<cuda::Seams> cuda::planted_seams(const BackendConfig& config) {
  if (config.mutant.empty()) return Seams{};
  const auto entry = std::ranges::find(kEntries, config.mutant, &Entry::id);
  if (entry == std::end(kEntries))
    return fail(fmt::format("mutant: '{}' is not planted in this backend; known: {}", config.mutant,
                            fmt::join(backend_defect_names(), ", ")));
  if (std::string why = missing(*entry, config); !why.empty()) return fail(std::move(why));
  return entry->make(config);
}

}  // namespace lockstep
