#include "sim/check/plan_prover.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "reference/placement/worker_pages.h"
#include "reference/plan/memory_plan.h"
#include "reference/types/view_types.h"

namespace lockstep {
namespace {

// What a second derivation says against a row that begins at `begin`; nothing: it agrees.
using RowCheck = std::function<std::optional<std::string>(
    const LayerMemory& layer, const PartRows& part, const RowIndex& at, std::int64_t begin)>;

struct Extent {
  std::int64_t begin = 0, end = 0;
  const LayerMemory* layer = nullptr;
  std::int64_t block = 0;
};

void add(std::vector<PlanFinding>& findings, std::string_view rule, std::string text) {
  if (!text.empty() && std::ranges::find(findings, rule, &PlanFinding::rule) == findings.end())
    findings.push_back({std::string(rule), std::move(text)});
}

// The region in each of `blocks`.
void append_blocks(const BlockRegion& region, const std::vector<std::int64_t>& blocks,
                   const LayerMemory* layer, std::vector<Extent>& extents) {
  for (const std::int64_t b : blocks) {
    const std::int64_t begin = region.begin + b * region.block_stride;
    extents.push_back({begin, begin + region.bytes, layer, b});
  }
}

std::string name_of_extent(const Extent& e) {
  return fmt::format("block {} of {}", e.block, e.layer->name);
}

// How findings name a write of regions: "zeroing", "clears", "cleared".
struct WriteWords {
  std::string_view doing, writes, done;
};
// The first row of another block that regions of a block touch, and the first row that they
// concern and do not cover; empty: none.
struct Cover {
  std::string foreign, missed;
};

class Prover {
 public:
  Prover(const MemoryPlan& plan, const RowCheck& check, const ProofOptions& options) {
    for (const BlockId block : options.blocks) blocks_.push_back(index_of(block));
    for (std::int64_t b = 0; options.blocks.empty() && b < plan.num_blocks; ++b)
      blocks_.push_back(b);
    const auto& wanted = options.tensors;
    std::vector<Extent> regions;
    for (const LayerMemory& layer : plan.layers) {
      if (!wanted.empty() && std::ranges::find(wanted, layer.tensor) == wanted.end()) continue;
      collect_rows(layer, check);
      for (const BlockRegion& region : layer.regions)
        append_blocks(region, blocks_, &layer, regions);
    }
    find_shared(regions, false);
    find_shared(rows_, true);
  }

  PlanProof& proof() { return proof_; }

  // Compares regions that are written in every block with the rows.
  Cover covered_by(const std::vector<BlockRegion>& regions, const WriteWords& words,
                   const std::function<bool(const LayerMemory&)>& is_concerned) const {
    Cover cover;
    std::vector<Extent> ranges;
    for (const BlockRegion& region : regions) append_blocks(region, blocks_, nullptr, ranges);
    std::ranges::sort(ranges, {}, &Extent::begin);
    std::vector<const Extent*> open;
    std::size_t next = 0;
    for (const Extent& e : rows_) {
      while (next < ranges.size() && ranges[next].begin < e.end) open.push_back(&ranges[next++]);
      std::erase_if(open, [&](const Extent* range) { return range->end <= e.begin; });
      std::int64_t done = e.begin;
      for (const Extent* range : open) {
        if (range->begin >= e.end) continue;
        if (range->block != e.block && cover.foreign.empty())
          cover.foreign =
              fmt::format("{} block {} {} byte {} of {}", words.doing, range->block, words.writes,
                          std::max(range->begin, e.begin), name_of_extent(e));
        else if (range->block == e.block && range->begin <= done)
          done = std::max(done, range->end);
      }
      if (is_concerned(*e.layer) && done < e.end && cover.missed.empty())
        cover.missed = fmt::format("byte {} of {} is not {}", done, name_of_extent(e), words.done);
    }
    return cover;
  }

 private:
  void found(std::string_view rule, std::string text) {
    add(proof_.findings, rule, std::move(text));
  }

  void collect_rows(const LayerMemory& layer, const RowCheck& check) {
    for (const PartRows& part : layer.parts)
      for (const std::int64_t b : blocks_) {
        std::vector<Extent> extents;
        for (std::int64_t k = 0; k < part.kernel_blocks; ++k)
          for (std::int64_t h = 0; h < part.heads; ++h)
            for (std::int64_t n = 0; n < part.rows; ++n) {
              const RowIndex at{b, k, h, n};
              const std::int64_t begin = byte_of(part, at);
              if (const auto problem = check ? check(layer, part, at, begin) : std::nullopt)
                found("derivation",
                      fmt::format("{}, block {}, kernel block {}, head {}, row {}: {}", layer.name,
                                  b, k, h, n, *problem));
              extents.push_back({begin, begin + part.row_bytes, &layer, b});
            }
        proof_.rows += std::ssize(extents);
        add_merged(layer, b, extents);
      }
  }

  // Rows that touch become one extent.
  void add_merged(const LayerMemory& layer, std::int64_t block, std::vector<Extent>& extents) {
    std::ranges::sort(extents, {}, &Extent::begin);
    const std::size_t first = rows_.size();
    for (const Extent& e : extents) {
      if (rows_.size() > first && e.begin < rows_.back().end)
        found("overlap", fmt::format("{}: two rows at byte {}", name_of_extent(e), e.begin));
      if (rows_.size() > first && e.begin <= rows_.back().end)
        rows_.back().end = std::max(rows_.back().end, e.end);
      else
        rows_.push_back(e);
    }
    for (std::size_t i = first; i < rows_.size(); ++i) check_bounds(layer, block, rows_[i]);
  }

  void check_bounds(const LayerMemory& layer, std::int64_t block, const Extent& e) {
    if (e.begin < 0 || e.end > layer.end)
      found("bounds", fmt::format("{} ends at {} of {}", name_of_extent(e), e.end, layer.end));
    // Regions may touch: heads that are apart in equal regions, K before V.
    std::int64_t reached = e.begin;
    for (bool is_more = true; is_more && reached < e.end;) {
      is_more = false;
      for (const BlockRegion& region : layer.regions) {
        const std::int64_t begin = region.begin + block * region.block_stride;
        if (begin > reached || begin + region.bytes <= reached) continue;
        reached = begin + region.bytes;
        is_more = true;
      }
    }
    if (reached < e.end)
      found("bounds", fmt::format("{}: bytes [{}, {}) are not the block's own", name_of_extent(e),
                                  reached, e.end));
  }

  // `within_block`: two layers of a group may not share bytes of one block.
  void find_shared(std::vector<Extent>& extents, bool within_block) {
    std::ranges::sort(extents, {}, &Extent::begin);
    std::vector<const Extent*> open;
    for (const Extent& e : extents) {
      std::erase_if(open, [&](const Extent* other) { return other->end <= e.begin; });
      for (const Extent* other : open) {
        const bool is_group = e.layer->group == other->layer->group;
        if (e.block == other->block && !(is_group && within_block)) continue;
        found(is_group ? "overlap" : "overlay",
              fmt::format("{} and {} share bytes [{}, {})", name_of_extent(*other),
                          name_of_extent(e), e.begin, std::min(e.end, other->end)));
      }
      open.push_back(&e);
    }
  }

  std::vector<std::int64_t> blocks_;
  std::vector<Extent> rows_;  // by their first byte
  PlanProof proof_;
};

// Rows through a view, element by element where they are not dense.
class ViewCheck {
 public:
  ViewCheck(const PoolViews& views, const ViewOffset& offset)
      : views_(views), offset_(offset), begins_(tensor_begins(views.tensor_size_bytes)) {}

  std::optional<std::string> operator()(const LayerMemory& layer, const PartRows& part,
                                        const RowIndex& at, std::int64_t begin) const {
    const LayerViews& views = views_.groups[layer.group][layer.layer];
    const bool is_state = part.kind == PartKind::state;
    const TensorView& view = views.tensors[is_state ? static_cast<std::size_t>(part.part) : 0];
    std::vector<std::int64_t> index(view.shape.size(), 0);
    set_index(views, view.shape, part, at, index);
    const std::int64_t itemsize = itemsize_bytes(view.dtype);
    const std::int64_t elements = part.row_bytes / itemsize;
    for (std::size_t dim = 0; dim < index.size(); ++dim)
      if (index[dim] >= view.shape[dim] || elements > view.shape.back())
        return fmt::format("index [{}] is outside the view [{}]", fmt::join(index, ", "),
                           fmt::join(view.shape, ", "));
    const bool is_dense = view.stride.back() == 1;
    for (std::int64_t element = 0; element < (is_dense ? 1 : elements); ++element) {
      index.back() = element;
      const std::int64_t byte = begins_[layer.tensor] + offset_(view, index);
      if (byte != begin + element * itemsize)
        return fmt::format("the view has byte {}, the plan {}", byte, begin + element * itemsize);
    }
    return std::nullopt;
  }

 private:
  static void set_index(const LayerViews& views, const std::vector<std::int64_t>& shape,
                        const PartRows& part, const RowIndex& at,
                        std::vector<std::int64_t>& index) {
    const auto set = [&](std::int32_t dim, std::int64_t value) {
      if (dim >= 0) index[static_cast<std::size_t>(dim)] = value;
    };
    if (part.kind == PartKind::state) {
      set(0, at.block);
      std::int64_t rest = at.row;
      for (std::size_t dim = shape.size() - 1; dim-- > 1; rest /= shape[dim])
        index[dim] = rest % shape[dim];
      return;
    }
    // The view may have other kernel blocks than the plan.
    const std::int64_t slot = at.kernel_block * part.rows + at.row;
    set(views.block_dim, at.block * kernel_block_stride(views) + slot / views.kernel_block_size);
    set(views.token_dim, slot % views.kernel_block_size);
    set(views.kv_dim, part.kind == PartKind::v ? 1 : 0);
    set(views.head_dim, at.head);
  }

  const PoolViews& views_;
  const ViewOffset& offset_;
  const std::vector<std::int64_t> begins_;
};

void check_zeroing(const WorkerPages& pages, Prover& prover) {
  const auto segments = zero_segments(pages);
  auto& findings = prover.proof().findings;
  if (!segments) return add(findings, "zeroing", segments.error().message);
  const Cover cover = prover.covered_by(
      *segments, {"zeroing", "clears", "cleared"},
      [&](const LayerMemory& layer) { return is_attention(pages.layers[layer.layer].spec.kind); });
  add(findings, "zeroing", cover.foreign);
  add(findings, "zeroing", cover.missed);
}

void check_regions(std::string_view rule, const std::vector<OffloadRegion>& regions,
                   const WorkerPages& pages,
                   const std::function<bool(const LayerMemory&)>& is_moved, Prover& prover) {
  auto& findings = prover.proof().with_connectors;
  for (const OffloadRegion& region : regions)
    for (std::int64_t b = 0; b < pages.num_blocks; ++b)
      if (const std::int64_t end = region.begin + b * region.block_stride + region.bytes;
          end > pages.device_bytes)
        add(findings, rule,
            fmt::format("block {} of the region of {} ends at {} of {}", b, region.first, end,
                        pages.device_bytes));
  const Cover cover =
      prover.covered_by({regions.begin(), regions.end()}, {"loading", "writes", "kept"}, is_moved);
  add(findings, rule, cover.missed);
  add(findings, rule, cover.foreign);
}

}  // namespace

PlanProof prove_views(const MemoryPlan& plan, const PoolViews& views, const ViewOffset& offset,
                      const ProofOptions& options) {
  LS_CHECK(views.groups.size() == plan.layers_per_page.size() &&
               views.tensor_size_bytes.size() == plan.tensor_size_bytes.size(),
           "{} groups of views, {} of layouts", views.groups.size(), plan.layers_per_page.size());
  return std::move(Prover(plan, ViewCheck(views, offset), options).proof());
}

PlanProof prove_rows(const MemoryPlan& plan) { return std::move(Prover(plan, {}, {}).proof()); }

PlanProof prove_pages(const Placement& placed, const WorkerPages& pages) {
  const MemoryPlan plan = memory_plan(placed, pages);
  const auto check = [&](const LayerMemory& layer, const PartRows& part, const RowIndex& at,
                         std::int64_t begin) -> std::optional<std::string> {
    const CachePage& page = pages.layers[layer.layer].page;
    const std::int64_t in_page = part.offset - layer.parts.front().offset;  // of a later state
    const std::int64_t kernel_block = at.block * part.kernel_blocks + at.kernel_block;
    const std::int64_t byte = page.offset + kernel_block * page.block_stride +
                              at.head * page.head_stride + at.row * page.row_stride + in_page;
    if (byte == begin) return std::nullopt;
    return fmt::format("the page has byte {}, the plan {}", byte, begin);
  };
  Prover prover(plan, check, {});
  check_zeroing(pages, prover);
  check_regions(
      "simple offload", simple_offload_regions(placed), pages,
      [](const LayerMemory&) { return true; }, prover);
  check_regions(
      "offloading", offloading_regions(placed, pages), pages,
      [&](const LayerMemory& layer) { return is_offloaded(placed.groups[layer.group]); }, prover);
  for (const bool by_index : {true, false})
    for (const LostBytes& lost : lost_in_copies(pages, by_index))
      add(prover.proof().findings, "copy",
          fmt::format("{} of {} bytes of a block are not copied in {} layers, first {}", lost.bytes,
                      lost.of, lost.layers, lost.first));
  return std::move(prover.proof());
}

}  // namespace lockstep
