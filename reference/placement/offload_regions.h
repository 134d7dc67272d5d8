// What connectors that keep blocks in host memory address in an overlaid allocation. Block ids have
// no group there: a block is moved as all regions of its id, so these must hold the union of the
// views at each address. Sources: vllm/v1/simple_kv_offload/worker.py (register_kv_caches),
// vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py (the same).
//
// 1. Byte c of block b lies at address + b * block_stride + c.
// Not here: transfers by canonical pages, which translate rows of one rank for another.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/placement/worker_pages.h"

namespace lockstep {

struct OffloadRegion {
  std::string first;  // layer that it is registered for
  std::int64_t address = 0, block_stride = 0, bytes = 0;
  bool operator==(const OffloadRegion&) const = default;
};

// SimpleCPUOffloadConnector: by the geometry of tensors. With layers outermost a region for every
// layer, in order LHBNC for every head slot of one; else the whole block.
std::vector<OffloadRegion> simple_offload_regions(const Placement& plan);

// OffloadingConnector, of the groups that are found by prefix: a page of each layer, or, as soon as
// blocks of a layer are not one page apart, a region as long as that stride from byte 0.
std::vector<OffloadRegion> offloading_regions(const Placement& plan, const WorkerPages& pages);
// Whether that connector moves blocks of the group.
bool is_offloaded(const PlacedGroup& group);

}  // namespace lockstep
