// Records what a worker did with a step, in the form of a recording
// (traces/formats/worker_facts.h): what it reports of its batch, and the bytes of its memory that
// it has changed.
//
// Invariants
// (1) before() and after() enclose one step: after() compares with the copy that the last before()
//     took, and the memory has the same size in both.
// (2) Pages are compared and digested in the model's byte order, whatever the worker's.
//
// Cost per step: a copy and a comparison of the whole pool. Only recordings of small pools use it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/worker/page_map.h"
#include "sim/worker/worker_protocol.h"
#include "traces/formats/worker_facts.h"

namespace lockstep {

// Compares the worker's memory around each step.
class FactsTaker {
 public:
  // REQUIRES: all arguments outlive the object.
  FactsTaker(const KVCacheConfig& plan, const MemoryPlan& layout,
             const std::vector<WorkerLayer>& views, const PageMap& map,
             const std::vector<std::int32_t>& group_of_block)
      : plan_(plan), layout_(layout), views_(views), map_(map), group_of_block_(group_of_block) {}

  // Copies the memory before a step.
  void before(std::span<const std::uint8_t> memory) {
    before_.assign(memory.begin(), memory.end());
  }
  // Returns the facts of the step. REQUIRES: the lists in `said` have matching lengths (rows,
  // tokens, groups).
  WorkerStepFacts after(std::span<const std::uint8_t> memory, const WorkerFacts& said,
                        const WorkerStep& told);

 private:
  // Adds the page to the changed ones if any byte differs, with its digest and the changed slots.
  void take_page(std::span<const std::uint8_t> memory, std::int32_t tensor, BlockId block,
                 WorkerStepFacts& facts);
  // Returns true if every slot of the block that the step did not write is zero.
  bool is_zeroed(std::span<const std::uint8_t> memory, BlockId block,
                 const WorkerStepFacts& facts) const;

  const KVCacheConfig& plan_;
  const MemoryPlan& layout_;
  const std::vector<WorkerLayer>& views_;  // in the order of the layout's layers
  const PageMap& map_;
  const std::vector<std::int32_t>& group_of_block_;
  std::vector<std::uint8_t> before_;
  std::vector<std::uint8_t> page_, page_before_;
};

}  // namespace lockstep
