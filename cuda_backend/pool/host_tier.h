// The host tier: pinned host memory that blocks of the cache are stored to and loaded from. Rule
// (12) of sim/protocol/backend.h.
//
// Invariants:
// 1. The tier has num_blocks_ host blocks of block_bytes_ each, contiguous at memory_.
// 2. A region of a block has one offset in a host block and one address in its tensor, each with
//    its own stride. Only bytes that a layer uses are copied. A padded page is not one contiguous
//    array.
// 3. Transfers of one direction are one launch. The launch describes the bytes of the cache and of
//    the tier that it reads and writes, so streams order it like any other work.
// 4. Host pages: a host block of the source holds the pages of all resident groups, in their order.
// 5. Loads and stores have their own lists in device memory, so neither waits for the other.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/pool/cache_pool.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class HostTier {
 public:
  // Null without host blocks. Errors: no memory. REQUIRES: `layers` outlives the tier.
  static Result<std::unique_ptr<HostTier>> create(Device& device, const BackendConfig& config,
                                                  const LayerCaches& layers);
  ~HostTier();
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  // The place of a region of LayerCaches::regions in host block 0, and the stride between blocks.
  struct Place {
    std::byte* base = nullptr;
    std::int64_t offset = 0;  // in a host block
    std::int64_t block_stride = 0;
  };
  Place place_of(std::int32_t region) const {
    return {memory_ + offsets_[region], offsets_[region], block_bytes_};
  }
  MemoryRange range() const { return range_of(memory_, num_blocks_ * block_bytes_); }

  void load(std::span<const HostTransfer> transfers);
  void store(std::span<const HostTransfer> transfers);

  // These call finish().
  Result<void> fingerprint(std::span<const HostBlockId> hosts, std::span<Fingerprint> fingerprints);
  Result<std::vector<std::uint8_t>> read(std::int32_t group, HostBlockId host);
  Result<void> write(std::int32_t group, HostBlockId host, std::span<const std::uint8_t> bytes);

 private:
  // One direction: every region, and the transfers of the last step.
  struct Direction {
    Direction(Device& device, const char* name, bool to_host);
    const char* name;
    bool to_host;
    DeviceArray<CopyRegion> regions;
    StagedItems<BlockCopyItem> items;
  };

  HostTier(Device& device, const BackendConfig& config, const LayerCaches& layers);
  Result<void> allocate();
  void place_groups();
  void upload_regions(Direction& direction);
  void move(Direction& direction, std::span<const HostTransfer> transfers);
  void describe(const Direction& direction, Operation& operation) const;
  std::byte* at(HostBlockId host) const;

  Device& device_;
  const BackendConfig& config_;
  const LayerCaches& layers_;
  const std::int64_t num_blocks_;  // of the tier
  std::int64_t block_bytes_ = 0;   // of one of them
  std::int32_t max_regions_ = 0;   // of any group
  std::int64_t max_region_bytes_ = 0;
  std::vector<std::int64_t> offsets_;  // of each region of LayerCaches::regions, in a host block
  std::vector<std::int64_t> group_bytes_;  // of a block of each group
  std::byte* memory_ = nullptr;
  Direction loads_, stores_;
  DeviceArray<RegionRange> regions_of_group_{device_, "regions of groups in the host tier"};
  StagedItems<BlockRegion> pages_{device_, "host tier as a region"};  // one
  PageFingerprints fingerprints_{device_, "host blocks to fingerprint",
                                 "fingerprints of host blocks"};
};

}  // namespace lockstep::cuda
