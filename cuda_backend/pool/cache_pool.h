// The cache in device memory, and every operation on whole blocks and pages of it.
//
// Invariants:
// 1. Every tensor of the plan has its bytes in one buffer: its own, or, for an overlaid layout, one
//    buffer for all tensors, in the order of the plan.
// 2. A tensor has num_blocks pages of equal size; page_sizes_ has one entry per tensor.
// 3. After create() every byte of every tensor holds Poison::fresh (rule 8 of the protocol).
// 4. A buffer is one named allocation. A device that watches accesses reports what leaves it. On
//    any other device the allocation starts and ends with a guard zone of guard_bytes_, and
//    check_guards() compares the zones after every step.
// 5. guards_ and found_guards_ have the same size: every zone as written and as read back.
// 6. An operation on several blocks is one launch, unless an item needs another item's result
//    (block_waves.h).
// Not checked here: that block ids are meaningful. They come from the program.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/pool/block_waves.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// Fingerprints of pages: one launch over items(), each {tensor, block}.
class PageFingerprints {
 public:
  PageFingerprints(Device& device, std::string items, std::string sums)
      : device_(device), items_(device, std::move(items)), sums_(device, std::move(sums)) {}

  std::vector<FingerprintItem>& items() { return items_.host; }
  // `pages`: of each tensor, `on_device` the same there. Calls finish().
  // REQUIRES: one fingerprint per item.
  Result<void> run(std::span<const BlockRegion> pages, const DeviceArray<BlockRegion>& on_device,
                   std::span<Fingerprint> fingerprints);

 private:
  Device& device_;
  StagedItems<FingerprintItem> items_;
  StagedItems<unsigned long long> sums_;  // [num_items, 2]
};

class CachePool {
 public:
  // places, given: see layer_caches(). Errors: no memory, a plan that layer_caches() refuses.
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
  // Copies: of BlockCopy or PartCopy.
  template <class Copies>
  void copy(const Copies& copies) {
    copies_.host.clear();
    for (const auto& one : copies)
      copies_.host.push_back({one.group, index_of(one.source), index_of(one.target)});
    launch_copies();
  }
  // Advances states. Updates that depend on each other run in order.
  void update_states(std::span<const StateUpdate> updates,
                     const DeviceArray<std::uint64_t>& contents);

  // Calls finish().
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints);
  Result<std::vector<std::uint8_t>> read_page(PageId page);

  // Starts the download of all guard zones. After finish(), check_guards() reports the first byte
  // that was written and restores all zones.
  void download_guards();
  void check_guards(std::vector<MemoryReport>& reports);

  const std::byte* address(PageId page, std::int64_t byte) const;
  // Adds the page and byte to a report about a tensor's memory.
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
  // Parameters of a launch over the regions of groups.
  template <class Params, class Region, class Item>
  Params over_regions(const DeviceArray<Region>& regions, const Item* items,
                      std::size_t count) const;
  // Copies copies_.
  void launch_copies();
  // Launches updates [first, first + count) of the step, padded to num_padded.
  void launch_updates(std::size_t first, std::size_t count, std::int32_t num_padded,
                      const DeviceArray<std::uint64_t>& contents);
  // Adds the bytes that the layers of a group use in a block.
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

  DeviceArray<BlockRegion> regions_{device_, "block regions"};
  DeviceArray<BlockRegion> poison_regions_{device_, "poison regions"};
  DeviceArray<BlockRegion> pages_{device_, "page regions"};
  DeviceArray<CopyRegion> copy_regions_{device_, "copy regions"};  // of regions_, onto themselves
  DeviceArray<RegionRange> regions_of_group_{device_, "regions of groups"};
  DeviceArray<RegionRange> states_of_group_{device_, "states of groups"};
  DeviceArray<StateCache> states_{device_, "state caches"};
  DeviceArray<std::int64_t> device_page_sizes_{device_, "page sizes"};
  StagedItems<PoisonItem> poison_{device_, "blocks to poison"};
  StagedItems<GroupBlockItem> zeros_{device_, "blocks to zero"};
  StagedItems<BlockCopyItem> copies_{device_, "blocks to copy"};
  StagedItems<StateUpdateItem> updates_{device_, "state updates"};
  PageFingerprints fingerprints_{device_, "pages to fingerprint", "fingerprints"};
  std::vector<std::byte> guards_, found_guards_;  // all zones, as they should be and as they are
};

}  // namespace lockstep::cuda
