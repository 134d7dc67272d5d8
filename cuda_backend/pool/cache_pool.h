// The cache in device memory: one raw buffer for each tensor of the plan, or for all of them where
// the layout is overlaid, every byte poisoned at start, and what works on whole blocks and pages.
//
// 1. A buffer is one named allocation. A device that watches accesses reports what leaves it; on
//    any other the allocation begins and ends with a guard zone, which is poisoned as a page that
//    does not exist and looked at after every step.
// 2. Operations on several blocks are one launch, unless one must see what another did.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/pool/block_waves.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class CachePool {
 public:
  // places, given: as layer_caches() takes them.
  static Result<std::unique_ptr<CachePool>> create(Device& device, const BackendConfig& config,
                                                   std::span<const LayerOfModel> places,
                                                   const PoolViews* given = nullptr);
  ~CachePool();
  CachePool(const CachePool&) = delete;
  CachePool& operator=(const CachePool&) = delete;

  const LayerCaches& layers() const { return layers_; }

  void poison_all(Poison kind);
  void poison(std::span<const PoisonBlock> blocks);
  void zero(std::span<const GroupBlock> blocks);
  void copy(std::span<const BlockCopy> copies);
  void copy(std::span<const PartCopy> parts);
  // Updates run in order where one reads or overwrites what another left.
  void update_states(std::span<const StateUpdate> updates,
                     const DeviceArray<std::uint64_t>& contents);

  // Calls finish().
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints);
  Result<std::vector<std::uint8_t>> read_page(PageId page);

  // Starts the download of all guard zones; after finish() the second call reports the first byte
  // that was written to, and makes all of them whole again.
  void download_guards();
  void check_guards(std::vector<MemoryReport>& reports);

  const std::byte* address(PageId page, std::int64_t byte) const;
  // The page and byte of a report that lies in a tensor.
  MemoryReport locate(DeviceReport report) const;

 private:
  CachePool(Device& device, const BackendConfig& config);
  Result<void> allocate(std::span<const LayerOfModel> places, const PoolViews* given);
  void add_buffer(std::string name, std::size_t first_tensor, std::size_t end_tensor);
  std::byte* guard(std::size_t zone) const;
  void fill_guards();
  std::int64_t page_size_bytes(std::int32_t tensor) const { return page_sizes_[tensor]; }
  template <class Describe>
  void launch_poison(const PoisonItem* items, std::int64_t count, Poison kind, Describe describe);
  // The parameters of a launch over the regions of groups.
  template <class Params, class Item>
  Params over_regions(const Item* items, std::size_t count) const;
  // Updates [first, first + count) of the step, padded to num_padded.
  void launch_copies();
  void launch_updates(std::size_t first, std::size_t count, std::int32_t num_padded,
                      const DeviceArray<std::uint64_t>& contents);
  // What the layers of a group use in a block.
  void add_region_ranges(std::int32_t group, std::int32_t block,
                         std::vector<MemoryRange>& ranges) const;

  Device& device_;
  const BackendConfig& config_;
  BlockWaves waves_;
  // An allocation, and the tensors that follow one another in it.
  struct Buffer {
    std::byte* memory = nullptr;  // behind the guard zone in front
    std::int64_t size_bytes = 0;  // without guard zones
    std::string name;
    std::size_t first_tensor = 0;
  };
  std::vector<Buffer> buffers_;
  std::vector<std::byte*> tensors_;
  std::int64_t guard_bytes_ = 0;  // on each side of a buffer
  std::vector<std::int64_t> page_sizes_;
  LayerCaches layers_;
  std::int32_t max_regions_ = 0, max_states_ = 0;  // of any group
  std::int64_t max_region_bytes_ = 0, max_state_bytes_ = 0;

  DeviceArray<BlockRegion> regions_, poison_regions_, pages_;
  DeviceArray<RegionRange> regions_of_group_, states_of_group_;
  DeviceArray<StateCache> states_;
  DeviceArray<std::int64_t> device_page_sizes_;
  DeviceArray<PoisonItem> poison_items_;
  DeviceArray<GroupBlockItem> zero_items_;
  DeviceArray<BlockCopyItem> copy_items_;
  DeviceArray<StateUpdateItem> state_items_;
  DeviceArray<FingerprintItem> fingerprint_items_;
  DeviceArray<unsigned long long> sums_;
  // Host staging, kept from step to step.
  std::vector<PoisonItem> host_poison_;
  std::vector<GroupBlockItem> host_zero_;
  std::vector<BlockCopyItem> host_copies_;
  std::vector<StateUpdateItem> host_updates_;
  std::vector<FingerprintItem> host_fingerprints_;
  std::vector<unsigned long long> host_sums_;
  std::vector<std::byte> guards_, found_guards_;  // all zones, as they should be and as they are
};

}  // namespace lockstep::cuda
