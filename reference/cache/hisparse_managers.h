// The managers of HiSparse's groups. Source of the rules:
// vllm/v1/core/single_type_kv_cache_manager.py.
//
// Invariants
// (1) The source keeps every page of a request in the host pool, and publishes a page once the host
//     holds it. Its block ids are those of the host pool.
// (2) A resident table has one entry per page and only grows. An entry is null where the page came
//     from the host. The manager collects changes and sends them to workers as residency updates.
// (3) A hot region is allocated as a whole, by the first allocation after it was requested.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "reference/cache/attention_managers.h"

namespace lockstep {

class HiSparseCoordinator;

class HiSparseSourceManager : public FullAttentionManager {
 public:
  // REQUIRES: `pool` is the host pool.
  HiSparseSourceManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                        BlockSizes sizes, BlockPool& pool, HiSparseCoordinator& coordinator)
      : FullAttentionManager(spec, group, config, sizes, pool), coordinator_(coordinator) {}

  // Host blocks count against no device pool: none, or more than it owns.
  std::int64_t num_blocks_to_allocate(const Request& request,
                                      std::span<const BlockId> new_computed_blocks,
                                      const SlotDemand& demand) const override;
  void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                              bool zeroes) override;
  // ... as soon as they are on the host.
  void cache_blocks(Request& request, std::int32_t num_tokens) override;
  void publish(Request& request, std::int32_t num_tokens) {
    FullAttentionManager::cache_blocks(request, num_tokens);
  }
  void free(Request& request) override { pool_.free_blocks_reversed(pop(request)); }
  std::vector<BlockId> pop(Request& request) override;

  BlockPool& pool() { return pool_; }
  std::int32_t group() const { return group_; }
  std::vector<BlockId>& blocks(Request& request) const { return of(request).blocks; }
  // Of the request's first pages.
  std::vector<BlockKey> keys_of(const Request& request, std::int32_t num_pages) const;
  std::int32_t num_cached_blocks(const Request& request) const {
    return std::max(of(request).num_cached_blocks, 0);
  }

 private:
  HiSparseCoordinator& coordinator_;
};

// Groups whose prefixes the source caches for them.
class HiSparseDeviceManager : public GroupManager {
 public:
  HiSparseDeviceManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                        BlockSizes sizes, BlockPool& pool, HiSparseCoordinator& coordinator)
      : GroupManager(spec, group, config, sizes, pool), coordinator_(coordinator) {}
  void take_computed_blocks(Request& request, std::span<const BlockId>, std::int32_t) override {
    of(request).num_cached_blocks = 0;
  }
  void cache_blocks(Request&, std::int32_t) override {}
  void free(Request& request) override { pool_.free_blocks_reversed(pop(request)); }
  std::int32_t find_longest_cache_hit(const HitQuery&, std::span<const std::int32_t>,
                                      std::span<std::vector<BlockId>* const> hits) const override;

 protected:
  HiSparseCoordinator& coordinator_;
};

class HiSparseHotManager : public HiSparseDeviceManager {
 public:
  using HiSparseDeviceManager::HiSparseDeviceManager;

  void require_hot(const Request& request) { required_.insert(&request); }
  bool has_hot(const Request& request) const {
    return std::ssize(of(request).blocks) == spec_.blocks_per_request;
  }
  std::int64_t num_blocks_to_allocate(const Request& request, std::span<const BlockId>,
                                      const SlotDemand& demand) const override;
  void take_local_tokens(Request& request, std::int32_t num_local_tokens) override;
  void allocate_loaded_blocks(Request& request, std::int32_t, bool) override {
    require_hot(request);
  }
  std::size_t allocate_new_blocks(Request& request, const SlotDemand& demand) override;
  std::vector<BlockId> pop(Request& request) override;

 private:
  std::set<const Request*> required_;
};

class HiSparseResidentManager : public HiSparseDeviceManager {
 public:
  HiSparseResidentManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                          BlockSizes sizes, BlockPool& pool, HiSparseCoordinator& coordinator);

  std::int64_t num_blocks_to_allocate(const Request& request, std::span<const BlockId>,
                                      const SlotDemand& demand) const override;
  void take_local_tokens(Request& request, std::int32_t num_local_tokens) override;
  // The last page is written on; those before it stay on the host.
  void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                              bool zeroes) override;
  std::vector<BlockId> pop(Request& request) override;

  std::int32_t num_pages(const Request& request) const {
    return static_cast<std::int32_t>(of(request).blocks.size());
  }
  // Where a page lies now; the null block: not on the device.
  BlockId page(const Request& request, std::int32_t index) const;
  // False: it lies somewhere already, or there is no such page.
  bool adopt(const Request& request, std::int32_t index, BlockId block);
  // The block that it was read from; the null block: none.
  BlockId drop(const Request& request, std::int32_t index);
  // Of one request: pages that admission reserves.
  std::int64_t admission_cap() const { return *admission_cap_; }
  BlockPool& pool() { return pool_; }

 private:
  std::map<const Request*, std::map<std::int32_t, BlockId>> changes_;
};

}  // namespace lockstep
