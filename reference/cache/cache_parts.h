// Makes the parts of a cache: the seam where a pool, a manager or a coordinator of another make
// goes in. Planted defects are of another make (reference/defects/).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "reference/plan/block_sizes.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

class BlockPool;
class GroupManager;
class HiSparseCoordinator;
class KVCacheCoordinator;

struct CacheParts {
  virtual ~CacheParts() = default;
  virtual std::unique_ptr<BlockPool> pool(std::int64_t num_blocks, bool enable_caching,
                                          FreedBlocks freed_blocks) const;
  virtual std::unique_ptr<GroupManager> manager(const KVCacheSpec& spec, std::int32_t group,
                                                const EngineConfig& config, BlockSizes sizes,
                                                BlockPool& pool) const;
  // REQUIRES: `device` outlives it.
  virtual std::unique_ptr<HiSparseCoordinator> hisparse(const EngineConfig& config,
                                                        std::unique_ptr<BlockPool> host,
                                                        BlockPool& device) const;
  virtual std::unique_ptr<KVCacheCoordinator> coordinator(const EngineConfig& config,
                                                          std::span<const KVCacheGroupSpec> groups,
                                                          BlockSizes sizes,
                                                          std::int64_t num_blocks) const;
};

}  // namespace lockstep
