#include "cuda_backend/pool/host_tier.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"

namespace lockstep::cuda {

constexpr auto kTierAsTensor = static_cast<std::int32_t>(0x80000000u);  // of rule (12)

// The widest access that both ends of a copy allow.
static std::int32_t unit_of(const BlockRegion& region, std::int64_t offset, std::int64_t stride) {
  const std::int64_t all = region.unit_bytes | offset | stride;
  return static_cast<std::int32_t>(all & -all);
}

HostTier::Direction::Direction(Device& device, const char* operation, bool towards_host)
    : name(operation),
      to_host(towards_host),
      regions(device, std::string(operation) + ": regions"),
      items(device, std::string(operation) + ": blocks") {}

HostTier::HostTier(Device& device, const BackendConfig& config, const LayerCaches& layers)
    : device_(device),
      config_(config),
      layers_(layers),
      num_blocks_(config.num_host_blocks),
      loads_(device, "load_blocks", false),
      stores_(device, "store_blocks", true) {}

HostTier::~HostTier() {
  if (memory_ != nullptr) device_.release_host(memory_);
}

Result<std::unique_ptr<HostTier>> HostTier::create(Device& device, const BackendConfig& config,
                                                   const LayerCaches& layers) {
  LS_CHECK(config.num_host_blocks >= 0, "{} host blocks", config.num_host_blocks);
  if (config.num_host_blocks == 0) return std::unique_ptr<HostTier>();
  std::unique_ptr<HostTier> tier(new HostTier(device, config, layers));
  LS_RETURN_IF_ERROR(tier->allocate());
  return tier;
}

void HostTier::place_groups() {
  offsets_.resize(layers_.regions.size());
  std::int64_t of_source = 0;
  for (std::size_t g = 0; g < layers_.regions_of_group.size(); ++g) {
    const RegionRange& group = layers_.regions_of_group[g];
    const bool is_resident = is_resident_pages(config_.plan.groups[g]);
    const std::int64_t begin = is_resident ? of_source : 0;
    std::int64_t offset = begin;
    for (std::int32_t i = group.begin; i < group.end; ++i) {
      offsets_[i] = offset;
      offset += layers_.regions[i].size_bytes;
      max_region_bytes_ = std::max(max_region_bytes_, layers_.regions[i].size_bytes);
    }
    max_regions_ = std::max(max_regions_, group.end - group.begin);
    if (is_resident) of_source = offset;
    group_bytes_.push_back(offset - begin);
    block_bytes_ = std::max(block_bytes_, offset);
  }
  LS_CHECK(group_bytes_.size() == config_.plan.groups.size() && of_source <= block_bytes_,
           "{} of {} groups, {} bytes of the source in {}", group_bytes_.size(),
           config_.plan.groups.size(), of_source, block_bytes_);
  for (std::size_t g = 0; g < group_bytes_.size(); ++g)
    if (is_sparse_source(config_.plan.groups[g])) group_bytes_[g] = of_source;
}

Result<void> HostTier::allocate() {
  place_groups();
  memory_ = device_.allocate_host(num_blocks_ * block_bytes_, "host tier");
  if (device_.failed()) return device_.finish();
  std::vector<std::byte> poison(num_blocks_ * block_bytes_);
  for (std::int64_t block = 0; block < num_blocks_; ++block)
    fill_poison(static_cast<std::uint64_t>(Poison::fresh), kTierAsTensor, block, 0,
                std::span(poison).subspan(block * block_bytes_, block_bytes_));
  device_.upload(memory_, poison.data(), num_blocks_ * block_bytes_);
  upload_regions(loads_);
  upload_regions(stores_);
  regions_of_group_.upload(layers_.regions_of_group);
  pages_.host = {{.base = memory_,
                  .block_stride = block_bytes_,
                  .size_bytes = block_bytes_,
                  .tensor_offset = 0,
                  .tensor = 0,
                  .unit_bytes = unit_of({.unit_bytes = 16}, 0, block_bytes_)}};
  pages_.upload();
  return device_.finish();
}

void HostTier::upload_regions(Direction& direction) {
  LS_CHECK(offsets_.size() == layers_.regions.size(), "{} offsets of {} regions", offsets_.size(),
           layers_.regions.size());
  std::vector<CopyRegion> regions;
  for (std::size_t i = 0; i < layers_.regions.size(); ++i) {
    const BlockRegion& in_cache = layers_.regions[i];
    std::byte* in_tier = memory_ + offsets_[i];
    CopyRegion& region = regions.emplace_back();
    region.target = direction.to_host ? in_tier : in_cache.base;
    region.source = direction.to_host ? in_cache.base : in_tier;
    region.target_stride = direction.to_host ? block_bytes_ : in_cache.block_stride;
    region.source_stride = direction.to_host ? in_cache.block_stride : block_bytes_;
    region.size_bytes = in_cache.size_bytes;
    region.unit_bytes = unit_of(in_cache, offsets_[i], block_bytes_);
    LS_CHECK(offsets_[i] + region.size_bytes <= block_bytes_, "region {}: {} bytes at {} of {}", i,
             region.size_bytes, offsets_[i], block_bytes_);
  }
  direction.regions.upload(regions);
}

void HostTier::load(std::span<const HostTransfer> transfers) { move(loads_, transfers); }
void HostTier::store(std::span<const HostTransfer> transfers) { move(stores_, transfers); }

void HostTier::move(Direction& direction, std::span<const HostTransfer> transfers) {
  if (transfers.empty()) return;
  direction.items.host.clear();
  for (const HostTransfer& item : transfers) {
    const std::int32_t block = index_of(item.block), host = index_of(item.host);
    LS_CHECK(host >= 0 && host < num_blocks_, "host block {} of {}", host, num_blocks_);
    LS_CHECK(item.group >= 0 && std::cmp_less(item.group, group_bytes_.size()), "group {} of {}",
             item.group, group_bytes_.size());
    direction.items.host.push_back(direction.to_host ? BlockCopyItem{item.group, block, host}
                                                     : BlockCopyItem{item.group, host, block});
  }
  device_.launch(device_.kernels().copy_blocks,
                 CopyBlocksParams{.regions = direction.regions.data(),
                                  .groups = regions_of_group_.data(),
                                  .items = direction.items.upload(),
                                  .num_items = static_cast<std::int32_t>(transfers.size()),
                                  .max_regions = max_regions_,
                                  .max_region_bytes = max_region_bytes_},
                 [&](Operation& operation) { describe(direction, operation); });
}

void HostTier::describe(const Direction& direction, Operation& operation) const {
  operation.named(direction.name).read_all(direction.regions, direction.items, regions_of_group_);
  for (const BlockCopyItem& item : direction.items.host) {
    const RegionRange regions = layers_.regions_of_group[item.group];
    if (regions.begin == regions.end) continue;
    const std::int32_t host = direction.to_host ? item.target : item.source;
    const std::int32_t block = direction.to_host ? item.source : item.target;
    std::vector<MemoryRange>& cache = direction.to_host ? operation.reads : operation.writes;
    for (std::int32_t i = regions.begin; i < regions.end; ++i)
      cache.push_back(range_in_block(layers_.regions[i], block));
    (direction.to_host ? operation.writes : operation.reads)
        .push_back(
            range_of(at(HostBlockId{host}) + offsets_[regions.begin], group_bytes_[item.group]));
  }
}

std::byte* HostTier::at(HostBlockId host) const {
  LS_CHECK(index_of(host) >= 0 && index_of(host) < num_blocks_, "host block {} of {}",
           index_of(host), num_blocks_);
  return memory_ + index_of(host) * block_bytes_;
}

Result<void> HostTier::fingerprint(std::span<const HostBlockId> hosts,
                                   std::span<Fingerprint> fingerprints) {
  LS_CHECK(hosts.size() == fingerprints.size(), "{} host blocks, {} fingerprints", hosts.size(),
           fingerprints.size());
  if (hosts.empty()) return device_.finish();
  fingerprints_.items().clear();
  for (const HostBlockId host : hosts) {
    at(host);  // checks it
    fingerprints_.items().push_back({0, index_of(host)});
  }
  return fingerprints_.run(pages_.host, pages_, fingerprints);
}

Result<std::vector<std::uint8_t>> HostTier::read(std::int32_t group, HostBlockId host) {
  std::vector<std::uint8_t> bytes(group_bytes_[group]);
  device_.download(bytes.data(), at(host), group_bytes_[group]);
  LS_RETURN_IF_ERROR(device_.finish());
  return bytes;
}

Result<void> HostTier::write(std::int32_t group, HostBlockId host,
                             std::span<const std::uint8_t> bytes) {
  LS_CHECK(std::ssize(bytes) == group_bytes_[group], "{} bytes for a block of {}", bytes.size(),
           group_bytes_[group]);
  device_.upload(at(host), bytes.data(), group_bytes_[group]);
  return device_.finish();
}

}  // namespace lockstep::cuda
