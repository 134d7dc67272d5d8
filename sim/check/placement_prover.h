// Proves by bytes that a plan whose groups overlay one allocation is sound: every page is computed
// a second time in closed form, and every byte of a small pool is checked.
//
// 1. The closed form of each layout and the page's strides name the same bytes.
// 2. Within a group no byte belongs to two layers or blocks.
// 3. A byte of block b in one group belongs to no other block in any group. This makes the overlay
//    sound, since a block is in one group at a time.
// 4. Every page is inside the allocation.
// 5. Zeroing a block clears all its rows of tokens, and nothing of another block.
// 6. Copying a block copies all bytes of every layer.
// 7. A connector's copy of a block has all bytes of every layer that it moves, and nothing of
//    another block: reported separately, since it concerns engines with that connector only.
// Bytes outside every page are padding. Not checked: kernels' accesses inside a page.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/placement/offload_regions.h"

namespace lockstep {

struct PlacementFinding {
  // "closed form", "overlap", "overlay", "bounds", "zeroing", "copy"; of rule 7 "simple offload",
  // "offloading"
  std::string rule;
  std::string text;  // layers, blocks and bytes
};

struct PlacementProof {
  std::int64_t owned_bytes = 0, padding_bytes = 0;  // of the device's allocation
  std::vector<PlacementFinding> findings;           // the first of each rule
  std::vector<PlacementFinding> with_connectors;    // of rule 7
  bool holds() const { return findings.empty(); }
};

// Requires pages of the same plan, and a pool small enough to look at every row.
PlacementProof prove_placement(const Placement& plan, const WorkerPages& pages);

}  // namespace lockstep
