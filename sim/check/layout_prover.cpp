#include "sim/check/layout_prover.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/sparse_bytes.h"
#include "reference/types/token_run.h"

namespace lockstep {
namespace {

// Elements that lie side by side: a row of a token, or the innermost dimension of a state.
struct Row {
  std::int64_t kv = 0;    // or the state tensor
  std::int64_t slot = 0;  // or the row of the state, C order
  std::int64_t head = 0;
  std::int64_t elements = 0;
  std::int64_t itemsize = 0;
};

struct Sharer {
  std::size_t group = 0;
  std::size_t layer = 0;
};

class Prover {
 public:
  Prover(const KVCacheConfig& config, const PoolLayout& layout, const PoolViews& views,
         const ViewOffset& offset, const ProofOptions& options)
      : config_(config), layout_(layout), views_(views), offset_(offset), options_(options) {
    blocks_ = options.blocks;
    for (std::int32_t b = 0; options.blocks.empty() && b < layout.num_blocks; ++b)
      blocks_.push_back(BlockId{b});
  }

  LayoutProof run() {
    for (std::size_t t = 0; t < layout_.tensor_size_bytes.size(); ++t) {
      const auto& wanted = options_.tensors;
      if (!wanted.empty() &&
          std::ranges::find(wanted, static_cast<std::int32_t>(t)) == wanted.end())
        continue;
      prove_tensor(t);
    }
    return std::move(proof_);
  }

 private:
  const LayerLayout& layout_of(Sharer s) const { return layout_.groups[s.group][s.layer]; }
  const LayerViews& views_of(Sharer s) const { return views_.groups[s.group][s.layer]; }
  const std::string& name_of(Sharer s) const {
    return config_.groups[s.group].layer_names[s.layer];
  }

  void find(std::string finding) {
    if (proof_.findings.size() < options_.findings_max)
      proof_.findings.push_back(std::move(finding));
  }

  void find_at(Sharer s, BlockId block, const Row& row, std::string_view what) {
    const bool state = layout_of(s).num_kv == 0;
    find(fmt::format("{}, block {}, {} {}, {} {}, head {}: {}", name_of(s), index_of(block),
                     state ? "state" : "kv", row.kv, state ? "row" : "slot", row.slot, row.head,
                     what));
  }

  std::vector<Sharer> sharers(std::size_t tensor) const {
    std::vector<Sharer> all;
    for (std::size_t g = 0; g < layout_.groups.size(); ++g)
      for (std::size_t i = 0; i < layout_.groups[g].size(); ++i)
        if (layout_.groups[g][i].tensor_index == static_cast<std::int32_t>(tensor))
          all.push_back({g, i});
    return all;
  }

  void prove_tensor(std::size_t tensor) {
    const std::vector<Sharer> all = sharers(tensor);
    prove_extents(all);
    std::vector<std::size_t> groups;
    for (const Sharer& s : all)
      if (groups.empty() || groups.back() != s.group) groups.push_back(s.group);
    // Turn r gives block b to the group (b + r) mod n, so that every group has every block once and
    // its neighbours belong to others.
    for (std::size_t turn = 0; turn < groups.size(); ++turn) {
      SparseBytes bytes(views_.tensor_size_bytes[tensor]);
      for (const bool writing : {true, false})
        for (BlockId block : blocks_) {
          const std::size_t owner =
              groups[(static_cast<std::size_t>(index_of(block)) + turn) % groups.size()];
          for (const Sharer& s : all)
            if (s.group == owner) visit_block(s, block, writing, bytes);
        }
      proof_.bytes_kept += bytes.for_each_overwritten([&](std::int64_t offset) {
        find(fmt::format("tensor {}, byte {}: belongs to no element and was overwritten", tensor,
                         offset));
      });
    }
  }

  // Blocks that different layers may own at the same time have no byte in common.
  void prove_extents(const std::vector<Sharer>& all) {
    for (const Sharer& a : all)
      for (const Sharer& b : all) {
        if (a.group == b.group) continue;
        for (BlockId x : blocks_)
          for (BlockId y : blocks_)
            if (x != y) prove_disjoint(a, x, b, y);
      }
  }

  void prove_disjoint(Sharer a, BlockId x, Sharer b, BlockId y) {
    for (const ByteExtent& first : block_extents(layout_of(a), x))
      for (const ByteExtent& second : block_extents(layout_of(b), y))
        if (first.begin < second.end && second.begin < first.end)
          find(fmt::format("block {} of {} and block {} of {} share bytes [{}, {})", index_of(x),
                           name_of(a), index_of(y), name_of(b), std::max(first.begin, second.begin),
                           std::min(first.end, second.end)));
  }

  // Writes every element of the block through the view, or reads it through the layout.
  void visit_block(Sharer s, BlockId block, bool writing, SparseBytes& bytes) {
    const LayerLayout& layer = layout_of(s);
    const auto visit = [&](const Row& row) {
      fill_values(s, block, row);
      if (writing)
        write(s, block, row, bytes);
      else
        read(s, block, row, bytes);
    };
    if (layer.num_kv == 0) {
      for (std::size_t state = 0; state < layer.states.size(); ++state) {
        const StateLayout& tensor = layer.states[state];
        const std::int64_t inner =
            config_.groups[s.group].layer_spec(s.layer).states[state].dims.back();
        for (std::int64_t r = 0; r < tensor.num_elements / inner; ++r)
          visit({static_cast<std::int64_t>(state), r, 0, inner, tensor.itemsize_bytes});
      }
      return;
    }
    for (std::int64_t kv = 0; kv < layer.num_kv; ++kv)
      for (std::int64_t slot = 0; slot < layer.block_size; ++slot)
        for (std::int64_t head = 0; head < layer.num_kv_heads; ++head)
          visit({kv, slot, head, layer.head_size, layer.element_size_bytes});
  }

  // The row's own bytes: a function of layer, block and place.
  void fill_values(Sharer s, BlockId block, const Row& row) {
    std::uint64_t key = splitmix64(s.group << 32 | s.layer);
    key = splitmix64(key ^ static_cast<std::uint64_t>(index_of(block)));
    key = splitmix64(key ^ static_cast<std::uint64_t>(row.slot << 24 | row.head << 4 | row.kv));
    const auto size = static_cast<std::size_t>(row.elements * row.itemsize);
    values_.resize(size);
    for (std::size_t i = 0; i < size; i += 8) {
      const std::uint64_t word = splitmix64(key + i);
      std::memcpy(values_.data() + i, &word, std::min<std::size_t>(8, size - i));
    }
  }

  // The index of the row's first element in the view; false when a dimension has no such index.
  bool index_in_view(Sharer s, BlockId block, const Row& row, const TensorView& view) {
    const LayerViews& views = views_of(s);
    index_.assign(view.shape.size(), 0);
    const auto set = [&](std::int32_t dim, std::int64_t value) {
      if (dim >= 0) index_[dim] = value;
    };
    if (views.kernel_block_size == 0) {
      set(0, index_of(block));
      std::int64_t rest = row.slot;
      for (std::size_t dim = view.shape.size() - 1; dim-- > 1;) {
        index_[dim] = rest % view.shape[dim];
        rest /= view.shape[dim];
      }
    } else {
      set(views.block_dim,
          index_of(block) * kernel_block_stride(views) + row.slot / views.kernel_block_size);
      set(views.token_dim, row.slot % views.kernel_block_size);
      set(views.kv_dim, row.kv);
      set(views.head_dim, row.head);
    }
    for (std::size_t dim = 0; dim < index_.size(); ++dim)
      if (index_[dim] >= view.shape[dim]) return false;
    return row.elements <= view.shape.back();
  }

  void write(Sharer s, BlockId block, const Row& row, SparseBytes& bytes) {
    const LayerViews& views = views_of(s);
    const std::size_t which = views.kernel_block_size == 0 ? static_cast<std::size_t>(row.kv) : 0;
    const TensorView& view = views.tensors[which];
    if (!index_in_view(s, block, row, view))
      return find_at(s, block, row,
                     fmt::format("index [{}] is outside the view [{}]", fmt::join(index_, ", "),
                                 fmt::join(view.shape, ", ")));
    const auto size = static_cast<std::size_t>(row.itemsize);
    for (std::int64_t element = 0; element < row.elements;) {
      // A dense row is written at once.
      const std::int64_t run = view.stride.back() == 1 ? row.elements : 1;
      index_.back() = element;
      const std::int64_t at = offset_(view, index_);
      if (at < 0 || at + run * row.itemsize > bytes.size_bytes())
        return find_at(s, block, row,
                       fmt::format("byte {} is outside the buffer of {}", at, bytes.size_bytes()));
      bytes.write(at, std::span(values_).subspan(static_cast<std::size_t>(element) * size,
                                                 static_cast<std::size_t>(run) * size));
      element += run;
    }
    proof_.elements += row.elements;
  }

  void read(Sharer s, BlockId block, const Row& row, SparseBytes& bytes) {
    const LayerLayout& layer = layout_of(s);
    const std::int64_t at = layer.num_kv == 0
                                ? state_byte_offset(layer, block, static_cast<std::size_t>(row.kv),
                                                    row.slot * row.elements)
                                : byte_offset(layer, block, row.kv, row.slot, row.head, 0);
    const std::int64_t end = at + row.elements * row.itemsize;
    const auto holds_row = [&](const ByteExtent& e) { return e.begin <= at && end <= e.end; };
    if (std::ranges::none_of(block_extents(layer, block), holds_row))
      find_at(s, block, row, fmt::format("bytes [{}, {}) are not the block's own", at, end));
    if (end > bytes.size_bytes())
      return find_at(
          s, block, row,
          fmt::format("byte {} is outside the buffer of {}", end - 1, bytes.size_bytes()));
    if (!bytes.holds(at, values_)) find_at(s, block, row, "holds something else");
  }

  const KVCacheConfig& config_;
  const PoolLayout& layout_;
  const PoolViews& views_;
  const ViewOffset& offset_;
  const ProofOptions& options_;
  std::vector<BlockId> blocks_;
  std::vector<std::uint8_t> values_;
  std::vector<std::int64_t> index_;
  LayoutProof proof_;
};

}  // namespace

LayoutProof prove_layout(const KVCacheConfig& config, const PoolLayout& layout,
                         const PoolViews& views, const ViewOffset& offset,
                         const ProofOptions& options) {
  LS_CHECK(views.groups.size() == layout.groups.size() &&
               views.tensor_size_bytes.size() == layout.tensor_size_bytes.size(),
           "{} groups of views, {} of layouts", views.groups.size(), layout.groups.size());
  return Prover(config, layout, views, offset, options).run();
}

}  // namespace lockstep
