#include "sim/check/placement_prover.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "base/check.h"

namespace lockstep {
namespace {

// The sizes of a tensor of layers, as the closed forms need them.
struct TensorShape {
  std::int64_t layers, kernel_blocks, ratio, heads, rows, bytes;  // L, B, B a block, H, N, C
};

// First byte of row n, head h, kernel block b, layer l.
std::int64_t first_byte(CacheLayout order, const PlacedTensor& tensor, const TensorShape& s,
                        std::int64_t l, std::int64_t b, std::int64_t h, std::int64_t n) {
  const std::int64_t block = tensor.offset + b * (tensor.block_stride / s.ratio);
  const std::int64_t page = block + l * tensor.layer_stride;
  switch (order) {
    case CacheLayout::LBNHC:
    case CacheLayout::BLNHC:
      return page + (n * s.heads + h) * s.bytes;
    case CacheLayout::LBHNC:
    case CacheLayout::BLHNC:
      return page + (h * s.rows + n) * s.bytes;
    case CacheLayout::LHBNC:
      return page + (h * s.kernel_blocks * s.rows + n) * s.bytes;
    case CacheLayout::BHLNC:
      return page + (h * s.layers * s.rows + n) * s.bytes;
    case CacheLayout::NHD:
    case CacheLayout::HND:
      break;
  }
  LS_CHECK(false, "{} is no order of an overlaid cache", name_of(order));
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
    check_offload();
    for (const bool by_index : {true, false})
      for (const LostBytes& lost : lost_in_copies(pages_, by_index))
        found("copy", fmt::format("{} of {} bytes of a block stay behind in {} layers, first {}",
                                  lost.bytes, lost.of, lost.layers, lost.first));
    return std::move(proof_);
  }

 private:
  void found(std::string_view rule, std::string text) { add(proof_.findings, rule, text); }
  static void add(std::vector<PlacementFinding>& findings, std::string_view rule,
                  const std::string& text) {
    if (std::ranges::find(findings, rule, &PlacementFinding::rule) == findings.end())
      findings.push_back({std::string(rule), text});
  }

  std::string name_of_extent(const PageExtent& e) const {
    return fmt::format("block {} of {}", e.block, pages_.layers[e.layer].name);
  }

  // Every row in closed form; runs that touch are one extent.
  void collect() {
    std::size_t at = 0;
    for (const PlacedTensor& tensor : plan_.tensors) {
      if (!has_layer_views(tensor.spec.kind)) continue;
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
    const Cover cover = covered_by(cleared, [&](const PageExtent& e) {
      return is_attention(pages_.layers[e.layer].spec.kind);
    });
    if (cover.foreign)
      found("zeroing", fmt::format("zeroing block {} clears byte {} of {}", cover.foreign->block,
                                   cover.foreign_byte, name_of_extent(*cover.foreign_owner)));
    if (cover.missed)
      found("zeroing", fmt::format("byte {} of {} is not cleared", cover.missed_byte,
                                   name_of_extent(*cover.missed)));
  }

  void check_offload() {
    check_regions("simple offload", simple_offload_regions(plan_),
                  [](const PageExtent&) { return true; });
    check_regions("offloading", offloading_regions(plan_, pages_), [&](const PageExtent& e) {
      return is_offloaded(plan_.groups[pages_.layers[e.layer].group]);
    });
  }

  void check_regions(std::string_view rule, const std::vector<OffloadRegion>& regions,
                     const std::function<bool(const PageExtent&)>& is_moved) {
    std::vector<PageExtent> kept;
    for (const OffloadRegion& region : regions)
      for (std::int64_t b = 0; b < pages_.num_blocks; ++b) {
        const std::int64_t begin = region.address + b * region.block_stride;
        kept.push_back({begin, begin + region.bytes, 0, b});
        if (kept.back().end > pages_.device_bytes)
          add(proof_.with_connectors, rule,
              fmt::format("block {} of the region of {} ends at {} of {}", b, region.first,
                          kept.back().end, pages_.device_bytes));
      }
    const Cover cover = covered_by(kept, is_moved);
    if (cover.missed)
      add(proof_.with_connectors, rule,
          fmt::format("byte {} of {} is not kept", cover.missed_byte,
                      name_of_extent(*cover.missed)));
    if (cover.foreign)
      add(proof_.with_connectors, rule,
          fmt::format("loading block {} writes byte {} of {}", cover.foreign->block,
                      cover.foreign_byte, name_of_extent(*cover.foreign_owner)));
  }

  // What ranges of bytes that belong to blocks are to the pages: the first that lies in another
  // block's page, and the first page of those it concerns that it does not cover.
  struct Cover {
    std::optional<PageExtent> foreign, foreign_owner, missed;
    std::int64_t foreign_byte = 0, missed_byte = 0;
  };
  Cover covered_by(std::vector<PageExtent>& ranges,
                   const std::function<bool(const PageExtent&)>& is_concerned) const {
    Cover cover;
    std::ranges::sort(ranges, {}, &PageExtent::begin);
    std::vector<const PageExtent*> open;
    std::size_t next = 0;
    for (const PageExtent& e : extents_) {
      while (next < ranges.size() && ranges[next].begin < e.end) open.push_back(&ranges[next++]);
      std::erase_if(open, [&](const PageExtent* range) { return range->end <= e.begin; });
      std::int64_t done = e.begin;
      for (const PageExtent* range : open) {
        if (range->begin >= e.end) continue;
        if (range->block != e.block && !cover.foreign) {
          cover.foreign = *range;
          cover.foreign_owner = e;
          cover.foreign_byte = std::max(range->begin, e.begin);
        } else if (range->block == e.block && range->begin <= done) {
          done = std::max(done, range->end);
        }
      }
      if (is_concerned(e) && done < e.end && !cover.missed) {
        cover.missed = e;
        cover.missed_byte = done;
      }
    }
    return cover;
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
