// Shows by bytes that a backend's views and the model's layout address the same memory: every
// element is written through the view and read back where the layout says it lies.
//
// For each assignment of blocks to groups (in turn, every group gets every block):
// 1. every element of every layer is written through the backend's view, and none outside its
//    buffer;
// 2. read through the layout, each has its own value: no two elements, layers, states or blocks of
//    different owners share a byte;
// 3. the bytes that no element has (padding, empty places of a pack) still hold the poison;
// 4. what a block's layers address lies inside the block's own extents. Cost: all bytes of the
//    tensors looked at, once per group. For large pools name a few blocks: memory is kept only
//    where something was written.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "reference/plan/layout.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// The backend's address arithmetic: byte offset of the element at `index` of a view.
using ViewOffset =
    std::function<std::int64_t(const TensorView& view, std::span<const std::int64_t> index)>;

struct ProofOptions {
  std::vector<BlockId> blocks;        // empty: all
  std::vector<std::int32_t> tensors;  // empty: all
  std::size_t findings_max = 8;
};

struct LayoutProof {
  std::int64_t elements = 0;    // written and read back
  std::int64_t bytes_kept = 0;  // without an element, found untouched
  std::vector<std::string> findings;
  bool holds() const { return findings.empty(); }
};

// Requires views of the same plan: one entry a layer.
LayoutProof prove_layout(const KVCacheConfig& config, const PoolLayout& layout,
                         const PoolViews& views, const ViewOffset& offset,
                         const ProofOptions& options = {});

}  // namespace lockstep
