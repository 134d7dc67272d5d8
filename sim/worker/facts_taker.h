// Takes down what a worker did with a step, as a recording carries it (traces/formats/
// worker_facts.h): what it says of its batch, and the bytes of its memory that it has changed.
//
// Invariants
// (1) before() and after() enclose one step: after() compares with the copy that the last before()
//     took, and the memory has the same size in both.
// (2) Pages are compared and digested in the model's order of their bytes, whatever the worker's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/worker/page_map.h"
#include "sim/worker/worker_protocol.h"
#include "traces/formats/worker_facts.h"

namespace lockstep {

class FactsTaker {
 public:
  // All must outlive it.
  FactsTaker(const KVCacheConfig& plan, const MemoryPlan& layout,
             const std::vector<WorkerLayer>& views, const PageMap& map,
             const std::vector<std::int32_t>& group_of_block)
      : plan_(plan), layout_(layout), views_(views), map_(map), group_of_block_(group_of_block) {}

  void before(std::span<const std::uint8_t> memory) {
    before_.assign(memory.begin(), memory.end());
  }
  // REQUIRES: `said` has facts of as many rows, tokens and groups as it says it has.
  WorkerStepFacts after(std::span<const std::uint8_t> memory, const WorkerFacts& said,
                        const WorkerStep& told);

 private:
  void take_page(std::span<const std::uint8_t> memory, std::int32_t tensor, BlockId block,
                 WorkerStepFacts& facts);
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
