// Schedulers and caches with a defect: each part is the usual one with one step done wrong.
//
// Invariants
// (1) At most one part differs from those of SchedulerParts: the one that the defect names.
// (2) A part does not change after it was made; the defect is the same for the whole run.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reference/defects/scheduler_defect.h"
#include "reference/schedule/scheduler_impl.h"

namespace lockstep {

class PlantedParts final : public SchedulerParts {
 public:
  explicit PlantedParts(SchedulerDefect defect) : defect_(defect) {}
  std::unique_ptr<BlockPool> pool(std::int64_t num_blocks, bool enable_caching,
                                  FreedBlocks freed_blocks) const override;
  std::unique_ptr<GroupManager> manager(const KVCacheSpec& spec, std::int32_t group,
                                        const EngineConfig& config, BlockSizes sizes,
                                        BlockPool& pool) const override;
  std::unique_ptr<HiSparseCoordinator> hisparse(const EngineConfig& config,
                                                std::unique_ptr<BlockPool> host,
                                                BlockPool& device) const override;
  std::unique_ptr<KVCacheCoordinator> coordinator(const EngineConfig& config,
                                                  std::span<const KVCacheGroupSpec> groups,
                                                  BlockSizes sizes,
                                                  std::int64_t num_blocks) const override;
  std::unique_ptr<Scheduler::Impl> scheduler(const EngineConfig& engine,
                                             const std::vector<KVCacheGroupSpec>& groups,
                                             BlockSizes sizes, std::int64_t num_blocks,
                                             const KVTransfer& transfer) const override;

 private:
  SchedulerDefect defect_;
};

}  // namespace lockstep
