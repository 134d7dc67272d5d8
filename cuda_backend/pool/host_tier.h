// The host tier: pinned host memory that blocks of the cache are stored to and loaded from, rule
// (12) of sim/protocol/backend.h.
//
// 1. A region of a block has one place in a host block and one in its tensor, each with a stride of
//    its own. Nothing is copied that no layer uses, and a page is never taken for one long array.
// 2. All blocks of a group that move in one direction are one launch. It says which bytes of the
//    cache and of the tier it reads and writes, so that streams are ordered around it as around any
//    other work.
// 3. Of HiSparse's groups a host block of the source holds the pages of all resident ones, in their
//    order.
// 4. Loads and stores keep lists of their own in device memory: neither waits for the other's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class HostTier {
 public:
  // Null without host blocks. Errors: no room. `layers` outlives the tier.
  static Result<std::unique_ptr<HostTier>> create(Device& device, const BackendConfig& config,
                                                  const LayerCaches& layers);
  ~HostTier();
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  // Where pages of a region of LayerCaches::regions lie in host block 0, and from block to block.
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
  // One direction: its regions, [group], and the pairs of the last step.
  struct Direction {
    Direction(Device& device, const char* name, bool to_host);
    const char* name;
    bool to_host;
    DeviceArray<PageRegion> regions;
    DeviceArray<BlockPair> pairs;
    std::vector<BlockPair> host_pairs;
  };

  HostTier(Device& device, const BackendConfig& config, const LayerCaches& layers);
  Result<void> allocate();
  void place_groups();
  void upload_regions(Direction& direction);
  void move(Direction& direction, std::span<const HostTransfer> transfers);
  void launch(Direction& direction, std::int32_t group, std::size_t first, std::size_t count);
  void describe(const Direction& direction, std::int32_t group, std::span<const BlockPair> pairs,
                Operation& operation) const;
  std::byte* at(HostBlockId host) const;

  Device& device_;
  const BackendConfig& config_;
  const LayerCaches& layers_;
  const std::int64_t num_blocks_;  // of the tier
  std::int64_t block_bytes_ = 0;   // of one of them
  std::int64_t max_region_bytes_ = 0;
  std::vector<std::int64_t> offsets_;  // of each region of LayerCaches::regions, in a host block
  std::vector<std::int64_t> group_bytes_;  // what a block of each group takes
  std::byte* memory_ = nullptr;
  Direction loads_, stores_;
  DeviceArray<BlockRegion> pages_;  // one: the tier, for fingerprints
  DeviceArray<FingerprintItem> fingerprint_items_;
  DeviceArray<unsigned long long> sums_;
};

}  // namespace lockstep::cuda
