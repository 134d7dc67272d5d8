// Proves by bytes that a plan of memory is sound, in a pool small enough to look at every row.
//
// 1. A second derivation (a backend's views, a worker's strided pages) puts every row where the
//    plan does, in whole elements and inside the layer's tensors.
// 2. Every row is inside the block's own regions.
// 3. Within a group no byte belongs to two layers or blocks.
// 4. A byte of block b in one group belongs to no other block in any group. This makes sharing
//    tensors and overlaying an allocation sound, since a block is in one group at a time.
// 5. Zeroing a block clears all its rows of tokens, and nothing of another block.
// 6. Copying a block copies all bytes of every layer.
// 7. A connector's copy of a block has all bytes of every layer that it moves, and nothing of
//    another block: reported separately, since it concerns engines with that connector only.
// Rules 5 to 7 are of an allocation that groups overlay. Not checked: what a kernel accesses; what
// has no row is padding.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/memory/model_placement.h"

namespace lockstep {

struct PlanFinding {
  // "derivation", "bounds", "overlap", "overlay", "zeroing", "copy"; of rule 7 "simple offload",
  // "offloading"
  std::string rule;
  std::string text;  // layers, blocks and bytes
};

struct PlanProof {
  std::int64_t rows = 0;                     // looked at
  std::vector<PlanFinding> findings;         // the first of each rule
  std::vector<PlanFinding> with_connectors;  // of rule 7
  bool holds() const { return findings.empty(); }
};

struct ProofOptions {
  std::vector<BlockId> blocks;        // empty: all
  std::vector<std::int32_t> tensors;  // empty: all
};

// A backend's address arithmetic: byte offset of the element at `index` of a view.
using ViewOffset =
    std::function<std::int64_t(const TensorView& view, std::span<const std::int64_t> index)>;

// Requires views of the same plan: one entry per layer.
PlanProof prove_views(const MemoryPlan& plan, const PoolViews& views, const ViewOffset& offset,
                      const ProofOptions& options = {});

// Rules 2 to 4, without a second derivation.
PlanProof prove_rows(const MemoryPlan& plan);

// Requires pages of the same plan.
PlanProof prove_pages(const Placement& plan, const WorkerPages& pages);

}  // namespace lockstep
