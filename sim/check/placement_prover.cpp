#include "sim/check/placement_prover.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace lockstep {
namespace {

// The sizes of a tensor of layers, as the closed forms need them.
struct TensorShape {
  std::int64_t layers, kernel_blocks, ratio, heads, rows, bytes;  // L, B, B a block, H, N, C
};

// First byte of row n, head h, kernel block b, layer l.
std::int64_t first_byte(CacheOrder order, const PlacedTensor& tensor, const TensorShape& s,
                        std::int64_t l, std::int64_t b, std::int64_t h, std::int64_t n) {
  const std::int64_t block = tensor.offset + b * (tensor.block_stride / s.ratio);
  const std::int64_t page = block + l * tensor.layer_stride;
  switch (order) {
    case CacheOrder::LBNHC:
    case CacheOrder::BLNHC:
      return page + (n * s.heads + h) * s.bytes;
    case CacheOrder::LBHNC:
    case CacheOrder::BLHNC:
      return page + (h * s.rows + n) * s.bytes;
    case CacheOrder::LHBNC:
      return page + (h * s.kernel_blocks * s.rows + n) * s.bytes;
    case CacheOrder::BHLNC:
      return page + (h * s.layers * s.rows + n) * s.bytes;
  }
  return 0;
}

struct PageExtent {
  std::int64_t begin = 0, end = 0;
  std::size_t layer = 0;  // in WorkerPages
  std::int64_t block = 0;
};

class OverlayProver {
 public:
  OverlayProver(const Placement& plan, const WorkerPages& pages) : plan_(plan), pages_(pages) {}

  PlacementProof run() {
    collect();
    std::ranges::sort(extents_, {}, &PageExtent::begin);
    check_overlaps();
    check_zeroing();
    for (const bool by_index : {true, false})
      for (const LostBytes& lost : lost_in_copies(pages_, by_index))
        found("copy", fmt::format("{} of {} bytes of a block stay behind in {} layers, first {}",
                                  lost.bytes, lost.of, lost.layers, lost.first));
    return std::move(proof_);
  }

 private:
  void found(std::string_view rule, std::string text) {
    if (std::ranges::find(proof_.findings, rule, &PlacementFinding::rule) == proof_.findings.end())
      proof_.findings.push_back({std::string(rule), std::move(text)});
  }

  std::string name_of_extent(const PageExtent& e) const {
    return fmt::format("block {} of {}", e.block, pages_.layers[e.layer].name);
  }

  // Every row in closed form; runs that touch are one extent.
  void collect() {
    std::size_t at = 0;
    for (const PlacedTensor& tensor : plan_.tensors) {
      if (!has_layer_views(tensor.spec.type)) continue;
      for (std::size_t l = 0; l < tensor.layers.size(); ++l, ++at)
        if (!tensor.host_resident) collect_layer(tensor, l, at);
    }
  }

  void collect_layer(const PlacedTensor& tensor, std::size_t l, std::size_t at) {
    const CachePage& page = pages_.layers[at].page;
    const TensorShape shape{static_cast<std::int64_t>(tensor.layers.size()),
                            page.blocks,
                            page.blocks / pages_.num_blocks,
                            page.heads,
                            page.rows,
                            page.content_bytes};
    const std::size_t first = extents_.size();
    for (std::int64_t b = 0; b < page.blocks; ++b)
      for (std::int64_t h = 0; h < page.heads; ++h)
        for (std::int64_t n = 0; n < page.rows; ++n) {
          const std::int64_t byte =
              first_byte(plan_.order, tensor, shape, static_cast<std::int64_t>(l), b, h, n);
          const std::int64_t strided =
              page.offset + b * page.block_stride + h * page.head_stride + n * page.row_stride;
          if (byte != strided)
            found("closed form", fmt::format("{}: kernel block {}, head {}, row {} at {} and {}",
                                             pages_.layers[at].name, b, h, n, byte, strided));
          extents_.push_back({byte, byte + page.content_bytes, at, b / shape.ratio});
        }
    std::ranges::sort(extents_.begin() + static_cast<std::ptrdiff_t>(first), extents_.end(), {},
                      &PageExtent::begin);
    std::size_t last = first;
    for (std::size_t i = first + 1; i < extents_.size(); ++i) {
      PageExtent& open = extents_[last];
      if (extents_[i].begin < open.end)
        found("overlap", fmt::format("{}: two rows at byte {}", name_of_extent(open), open.end));
      if (extents_[i].begin <= open.end && extents_[i].block == open.block)
        open.end = std::max(open.end, extents_[i].end);
      else
        extents_[++last] = extents_[i];
    }
    extents_.resize(last + 1);
    for (std::size_t i = first; i <= last; ++i)
      if (extents_[i].begin < 0 || extents_[i].end > pages_.device_bytes)
        found("bounds", fmt::format("{} ends at {} of {}", name_of_extent(extents_[i]),
                                    extents_[i].end, pages_.device_bytes));
  }

  void check_overlaps() {
    std::vector<const PageExtent*> open;
    std::int64_t covered_to = 0;
    for (const PageExtent& e : extents_) {
      std::erase_if(open, [&](const PageExtent* other) { return other->end <= e.begin; });
      for (const PageExtent* other : open) {
        if (pages_.layers[e.layer].group == pages_.layers[other->layer].group)
          found("overlap", fmt::format("{} and {} share byte {}", name_of_extent(*other),
                                       name_of_extent(e), e.begin));
        else if (e.block != other->block)
          found("overlay", fmt::format("{} and {} share byte {}", name_of_extent(*other),
                                       name_of_extent(e), e.begin));
      }
      open.push_back(&e);
      proof_.owned_bytes += std::max<std::int64_t>(0, e.end - std::max(e.begin, covered_to));
      covered_to = std::max(covered_to, e.end);
    }
    proof_.padding_bytes = pages_.device_bytes - proof_.owned_bytes;
  }

  void check_zeroing() {
    const auto segments = zero_segments(pages_);
    if (!segments) return found("zeroing", segments.error().message);
    std::vector<PageExtent> cleared;
    for (const ZeroSegment& segment : *segments)
      for (std::int64_t b = 0; b < pages_.num_blocks; ++b) {
        const std::int64_t begin = segment.address + b * segment.block_stride;
        cleared.push_back({begin, begin + segment.bytes, 0, b});
      }
    std::ranges::sort(cleared, {}, &PageExtent::begin);
    std::vector<const PageExtent*> open;
    std::size_t next = 0;
    for (const PageExtent& e : extents_) {
      while (next < cleared.size() && cleared[next].begin < e.end) open.push_back(&cleared[next++]);
      std::erase_if(open, [&](const PageExtent* z) { return z->end <= e.begin; });
      std::int64_t done = e.begin;
      for (const PageExtent* z : open) {
        if (z->begin >= e.end) continue;
        if (z->block != e.block)
          found("zeroing", fmt::format("zeroing block {} clears byte {} of {}", z->block,
                                       std::max(z->begin, e.begin), name_of_extent(e)));
        else if (z->begin <= done)
          done = std::max(done, z->end);
      }
      if (is_attention(pages_.layers[e.layer].spec.type) && done < e.end)
        found("zeroing", fmt::format("byte {} of {} is not cleared", done, name_of_extent(e)));
    }
  }

  const Placement& plan_;
  const WorkerPages& pages_;
  std::vector<PageExtent> extents_;
  PlacementProof proof_;
};

}  // namespace

PlacementProof prove_placement(const Placement& plan, const WorkerPages& pages) {
  return OverlayProver(plan, pages).run();
}

}  // namespace lockstep
