#include "reference/plan/page_segments.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {
namespace {

constexpr BlockId kAnyBlock{0};

// Where a byte of the tensor lies in the block's extents laid end to end.
std::int64_t place_in_block(const std::vector<ByteExtent>& extents, std::int64_t offset) {
  std::int64_t before = 0;
  for (const ByteExtent& extent : extents) {
    if (offset >= extent.begin && offset < extent.end) return before + offset - extent.begin;
    before += extent.end - extent.begin;
  }
  LS_CHECK(false, "byte {} is not the block's", offset);
  return 0;
}

// Rows form runs without gaps: K or V of a whole kernel block, or (packed, HND) of one of its
// heads.
void add_rows(const LayerLayout& layer, std::int32_t index, std::vector<PageSegment>& segments) {
  const auto extents = block_extents(layer, kAnyBlock);
  const std::int64_t row = layer.head_size * layer.element_size_bytes;
  const std::int64_t tokens = layer.kernel_block_size;
  const std::int64_t heads = layer.num_kv_heads;
  const bool token_by_token =
      layer.token_stride_bytes == heads * row && layer.head_stride_bytes == row;
  const bool head_by_head =
      layer.token_stride_bytes == row && layer.head_stride_bytes == tokens * row;
  const bool whole = token_by_token || head_by_head;
  LS_CHECK(whole || layer.token_stride_bytes == row, "token stride {} bytes, row {}",
           layer.token_stride_bytes, row);
  const std::int64_t runs = whole ? 1 : heads;
  const std::int64_t run_bytes = tokens * heads * row / runs;
  for (std::int64_t slot = 0; slot < layer.block_size; slot += tokens)
    for (std::int64_t kv = 0; kv < layer.num_kv; ++kv) {
      const SegmentKind kind = layer.num_kv == 1 ? SegmentKind::row
                               : kv == 0         ? SegmentKind::k
                                                 : SegmentKind::v;
      for (std::int64_t run = 0; run < runs; ++run) {
        const std::int64_t at =
            place_in_block(extents, byte_offset(layer, kAnyBlock, kv, slot, run, 0));
        segments.push_back({at, at + run_bytes, kind, 0, index});
      }
    }
}

void add_states(const LayerLayout& layer, std::int32_t index, std::vector<PageSegment>& segments) {
  for (std::size_t s = 0; s < layer.states.size(); ++s) {
    const StateLayout& state = layer.states[s];
    segments.push_back({state.offset_bytes,
                        state.offset_bytes + state.num_elements * state.itemsize_bytes,
                        SegmentKind::state, static_cast<std::int32_t>(s), index});
  }
}

}  // namespace

std::vector<PageSegment> page_segments(const KVCacheConfig& config, const PoolLayout& layout,
                                       std::size_t group, std::int32_t tensor) {
  std::vector<PageSegment> used;
  std::int64_t block_bytes = 0;
  std::int64_t layers = 0;
  for (std::size_t i = 0; i < layout.groups[group].size(); ++i) {
    const LayerLayout& layer = layout.groups[group][i];
    if (layer.tensor_index != tensor) continue;
    ++layers;
    block_bytes = layer.page_size_bytes;
    if (layer.num_kv == 0)
      add_states(layer, static_cast<std::int32_t>(i), used);
    else
      add_rows(layer, static_cast<std::int32_t>(i), used);
  }
  if (layers == 0) return {};
  std::ranges::sort(used, {}, &PageSegment::begin);

  const SegmentKind gap = layers < config.groups[group].layers_per_page ? SegmentKind::empty_place
                                                                        : SegmentKind::padding;
  std::vector<PageSegment> segments;
  std::int64_t reached = 0;
  for (const PageSegment& segment : used) {
    LS_CHECK(segment.begin >= reached, "bytes {} to {} lie twice", segment.begin, reached);
    if (segment.begin > reached) segments.push_back({reached, segment.begin, gap, 0, -1});
    PageSegment* last = segments.empty() ? nullptr : &segments.back();
    const bool continues = last != nullptr && last->kind == segment.kind &&
                           last->layer == segment.layer && last->part == segment.part;
    if (continues)
      last->end = segment.end;
    else
      segments.push_back(segment);
    reached = segment.end;
  }
  if (reached < block_bytes) segments.push_back({reached, block_bytes, gap, 0, -1});
  return segments;
}

}  // namespace lockstep
