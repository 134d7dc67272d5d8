#include "cuda_backend/views/view_defects.h"

#include <array>
#include <utility>

namespace lockstep::cuda {
namespace {

constexpr std::array kNames = std::to_array<std::pair<ViewDefect, std::string_view>>({
    {ViewDefect::none, "none"},
    {ViewDefect::layout_two_blocks, "layout-two-blocks"},
    {ViewDefect::ambiguous_refused, "ambiguous-refused"},
    {ViewDefect::layout_not_updated, "layout-not-updated"},
    {ViewDefect::layout_restride_hidden, "layout-restride-hidden"},
    {ViewDefect::state_spec_unhandled, "state-spec-unhandled"},
    {ViewDefect::state_stride_unpadded, "state-stride-unpadded"},
    {ViewDefect::state_offset_wrong_itemsize, "state-offset-wrong-itemsize"},
    {ViewDefect::kernel_block_unsplit, "kernel-block-unsplit"},
    {ViewDefect::kernel_block_num_blocks, "kernel-block-num-blocks"},
    {ViewDefect::pack_stride, "pack-stride"},
    {ViewDefect::pack_offset, "pack-offset"},
    {ViewDefect::pack_num_blocks, "pack-num-blocks"},
    {ViewDefect::layout_equal_page, "layout-equal-page"},
    {ViewDefect::layout_two_heads, "layout-two-heads"},
    {ViewDefect::offset_int32, "offset-int32"},
    {kSecondRunner, "second-runner"},
});

}  // namespace

std::string_view name_of(ViewDefect defect) {
  for (const auto& [value, name] : kNames)
    if (value == defect) return name;
  return "several";
}

std::optional<ViewDefect> view_defect_from_name(std::string_view name) {
  for (const auto& [value, known] : kNames)
    if (known == name) return value;
  return std::nullopt;
}

}  // namespace lockstep::cuda
