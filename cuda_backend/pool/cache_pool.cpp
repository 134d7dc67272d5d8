#include "cuda_backend/pool/cache_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"

namespace lockstep::cuda {
namespace {

constexpr std::int64_t kGuardBytes = 4096;

// Pads a batch of state updates.
constexpr StateUpdateItem kNoUpdate{
    .group = -1, .source = 0, .target = 0, .num_tokens = 0, .first_token = 0};

std::int32_t longest(std::span<const RegionRange> ranges) {
  std::int32_t most = 0;
  for (const RegionRange& range : ranges) most = std::max(most, range.end - range.begin);
  return most;
}

template <class Part>
std::int64_t largest(std::span<const Part> parts) {
  std::int64_t most = 0;
  for (const Part& part : parts) most = std::max(most, part.size_bytes);
  return most;
}

}  // namespace

CachePool::CachePool(Device& device, const BackendConfig& config)
    : device_(device), config_(config), waves_(config.plan.num_blocks) {}

CachePool::~CachePool() {
  for (const Buffer& buffer : buffers_)
    if (buffer.memory != nullptr) device_.release(buffer.memory - guard_bytes_);
}

Result<std::unique_ptr<CachePool>> CachePool::create(Device& device, const BackendConfig& config,
                                                     std::span<const LayerOfModel> places,
                                                     const PoolViews* given) {
  std::unique_ptr<CachePool> pool(new CachePool(device, config));
  LS_RETURN_IF_ERROR(pool->allocate(places, given));
  pool->poison_all(Poison::fresh);
  LS_RETURN_IF_ERROR(device.finish());
  return pool;
}

void CachePool::add_buffer(std::string name, std::size_t first_tensor, std::size_t end_tensor) {
  LS_CHECK(first_tensor == tensors_.size() && first_tensor <= end_tensor,
           "tensors {} to {} after {}", first_tensor, end_tensor, tensors_.size());
  Buffer& buffer = buffers_.emplace_back();
  buffer.name = std::move(name);
  buffer.first_tensor = first_tensor;
  for (std::size_t t = first_tensor; t < end_tensor; ++t)
    buffer.size_bytes += config_.plan.tensors[t].size_bytes;
  std::byte* memory = device_.allocate(buffer.size_bytes + 2 * guard_bytes_, buffer.name);
  if (memory != nullptr) buffer.memory = memory + guard_bytes_;
  std::byte* at = buffer.memory;
  for (std::size_t t = first_tensor; t < end_tensor; ++t) {
    tensors_.push_back(at);
    if (at != nullptr) at += config_.plan.tensors[t].size_bytes;
  }
}

Result<void> CachePool::allocate(std::span<const LayerOfModel> places, const PoolViews* given) {
  guard_bytes_ = device_.watches_accesses() ? 0 : kGuardBytes;
  const bool is_one = is_overlaid(config_.layout);
  if (is_one) add_buffer("KV cache", 0, config_.plan.tensors.size());
  for (std::size_t t = 0; t < config_.plan.tensors.size(); ++t) {
    const std::int64_t size_bytes = config_.plan.tensors[t].size_bytes;
    if (size_bytes % config_.plan.num_blocks != 0)
      return fail("tensor {}: {} bytes for {} blocks; pages of a tensor have one size", t,
                  size_bytes, config_.plan.num_blocks);
    page_sizes_.push_back(size_bytes / config_.plan.num_blocks);
    if (!is_one) add_buffer(fmt::format("KV cache tensor {}", t), t, t + 1);
  }
  LS_CHECK(tensors_.size() == config_.plan.tensors.size() && page_sizes_.size() == tensors_.size(),
           "{} tensors and {} page sizes of {}", tensors_.size(), page_sizes_.size(),
           config_.plan.tensors.size());
  if (!device_.failed()) fill_guards();
  LS_RETURN_IF_ERROR(device_.finish());
  LS_ASSIGN_OR_RETURN(layers_, layer_caches(config_, places, tensors_, given));
  LS_CHECK(layers_.pages.size() == tensors_.size() &&
               layers_.regions_of_group.size() == config_.plan.groups.size() &&
               layers_.states_of_group.size() == config_.plan.groups.size(),
           "{} pages of {} tensors, regions of {} and states of {} groups", layers_.pages.size(),
           tensors_.size(), layers_.regions_of_group.size(), layers_.states_of_group.size());
  max_regions_ = longest(layers_.regions_of_group);
  max_states_ = longest(layers_.states_of_group);
  max_region_bytes_ = largest<BlockRegion>(layers_.regions);
  max_state_bytes_ = largest<StateCache>(layers_.states);
  regions_.upload(layers_.regions);
  std::vector<CopyRegion> copies;
  for (const BlockRegion& region : layers_.regions)
    copies.push_back({region.base, region.base, region.block_stride, region.block_stride,
                      region.size_bytes, region.unit_bytes});
  copy_regions_.upload(copies);
  poison_regions_.upload(layers_.poison_regions);
  pages_.upload(layers_.pages);
  regions_of_group_.upload(layers_.regions_of_group);
  states_of_group_.upload(layers_.states_of_group);
  states_.upload(layers_.states);
  device_page_sizes_.upload(page_sizes_);
  return device_.finish();
}

template <class Describe>
void CachePool::launch_poison(const PoisonItem* items, std::int64_t count, Poison kind,
                              Describe describe) {
  device_.launch(device_.kernels().poison_blocks,
                 PoisonBlocksParams{
                     .regions = items != nullptr ? poison_regions_.data() : pages_.data(),
                     .page_size_bytes = device_page_sizes_.data(),
                     .items = items,
                     .num_regions = static_cast<std::int32_t>(
                         items != nullptr ? layers_.poison_regions.size() : layers_.pages.size()),
                     .num_items = static_cast<std::int32_t>(count),
                     .kind_of_all = static_cast<std::uint32_t>(kind),
                     .max_region_bytes = largest<BlockRegion>(layers_.pages)},
                 describe);
}

void CachePool::poison_all(Poison kind) {
  launch_poison(nullptr, config_.plan.num_blocks, kind, [](Operation&) {});
}

void CachePool::poison(std::span<const PoisonBlock> blocks) {
  if (blocks.empty()) return;
  poison_.host.clear();
  for (const PoisonBlock& item : blocks)
    poison_.host.push_back({index_of(item.block), static_cast<std::uint32_t>(item.kind)});
  const PoisonItem* items = poison_.upload();
  waves_.for_each_write<PoisonItem>(poison_.host, [&](std::size_t first, std::size_t count) {
    launch_poison(
        items + first, static_cast<std::int64_t>(count), Poison::fresh, [&](Operation& operation) {
          operation.named("poison_blocks").read_all(poison_regions_, device_page_sizes_, poison_);
          for (const PoisonItem& item : poison_.items(first, count))
            for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor)
              add_block_ranges(layers_, static_cast<std::int32_t>(tensor), item.block,
                               operation.writes);
        });
  });
}

template <class Params, class Region, class Item>
Params CachePool::over_regions(const DeviceArray<Region>& regions, const Item* items,
                               std::size_t count) const {
  return {.regions = regions.data(),
          .groups = regions_of_group_.data(),
          .items = items,
          .num_items = static_cast<std::int32_t>(count),
          .max_regions = max_regions_,
          .max_region_bytes = max_region_bytes_};
}

void CachePool::zero(std::span<const GroupBlock> blocks) {
  if (blocks.empty()) return;
  zeros_.host.clear();
  for (const GroupBlock& item : blocks) zeros_.host.push_back({item.group, index_of(item.block)});
  const GroupBlockItem* items = zeros_.upload();
  waves_.for_each_write<GroupBlockItem>(zeros_.host, [&](std::size_t first, std::size_t count) {
    device_.launch(device_.kernels().zero_blocks,
                   over_regions<ZeroBlocksParams>(regions_, items + first, count),
                   [&](Operation& operation) {
                     operation.named("zero_blocks").read_all(regions_, regions_of_group_, zeros_);
                     for (const GroupBlockItem& item : zeros_.items(first, count))
                       add_region_ranges(item.group, item.block, operation.writes);
                   });
  });
}

void CachePool::launch_copies() {
  if (copies_.host.empty()) return;
  const BlockCopyItem* items = copies_.upload();
  waves_.for_each_move<BlockCopyItem>(copies_.host, [&](std::size_t first, std::size_t count) {
    device_.launch(
        device_.kernels().copy_blocks,
        over_regions<CopyBlocksParams>(copy_regions_, items + first, count),
        [&](Operation& operation) {
          operation.named("copy_blocks").read_all(copy_regions_, regions_of_group_, copies_);
          for (const BlockCopyItem& item : copies_.items(first, count)) {
            add_region_ranges(item.group, item.source, operation.reads);
            add_region_ranges(item.group, item.target, operation.writes);
          }
        });
  });
}

void CachePool::add_region_ranges(std::int32_t group, std::int32_t block,
                                  std::vector<MemoryRange>& ranges) const {
  LS_CHECK(group >= 0 && std::cmp_less(group, layers_.regions_of_group.size()), "group {} of {}",
           group, layers_.regions_of_group.size());
  const RegionRange regions = layers_.regions_of_group[group];
  for (std::int32_t i = regions.begin; i < regions.end; ++i)
    ranges.push_back(range_in_block(layers_.regions[i], block));
}

void CachePool::update_states(std::span<const StateUpdate> updates,
                              const DeviceArray<std::uint64_t>& contents) {
  if (updates.empty()) return;
  updates_.host.clear();
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const StateUpdate& item = updates[i];
    updates_.host.push_back({item.group, index_of(item.source), index_of(item.target),
                             item.num_tokens, item.first_token});
    if (!item.is_checkpoint) continue;
    StateUpdateItem& update = updates_.host.back();
    LS_CHECK(i + 1 < updates.size() && updates[i + 1].group == item.group,
             "update {} of a checkpoint has no update after it", i);
    update.checkpoint = update.target;
    update.checkpoint_tokens = item.num_tokens;
    update.target = index_of(updates[++i].target);
    update.num_tokens += updates[i].num_tokens;
  }
  const auto count = static_cast<std::int32_t>(updates_.host.size());
  const std::int32_t size = device_.padded_batch(count);
  updates_.host.resize(std::max(count, size), kNoUpdate);
  updates_.upload();
  updates_.host.resize(static_cast<std::size_t>(count));
  // Several waves differ from step to step, so only a single wave is captured.
  bool one_wave = false;
  waves_.for_each_move<StateUpdateItem>(updates_.host, [&](std::size_t, std::size_t wave) {
    one_wave = wave == updates_.host.size();
  });
  if (one_wave && device_.captures(size))
    return device_.run_captured("state updates", size,
                                [&] { launch_updates(0, updates_.host.size(), size, contents); });
  waves_.for_each_move<StateUpdateItem>(updates_.host, [&](std::size_t first, std::size_t wave) {
    launch_updates(first, wave, static_cast<std::int32_t>(wave), contents);
  });
}

void CachePool::launch_updates(std::size_t first, std::size_t count, std::int32_t num_padded,
                               const DeviceArray<std::uint64_t>& contents) {
  LS_CHECK(first + count <= updates_.host.size() && std::cmp_less_equal(count, num_padded),
           "updates {} to {} of {}, padded to {}", first, first + count, updates_.host.size(),
           num_padded);
  device_.launch(
      device_.kernels().update_states,
      StateUpdateParams{.states = states_.data(),
                        .groups = states_of_group_.data(),
                        .items = updates_.data() + first,
                        .contents = contents.data(),
                        .num_items = num_padded,
                        .max_states = max_states_,
                        .max_state_bytes = max_state_bytes_},
      [&](Operation& operation) {
        operation.named("update_states").read_all(states_, states_of_group_, updates_, contents);
        for (const StateUpdateItem& item : updates_.items(first, count)) {
          add_region_ranges(item.group, item.source, operation.reads);
          add_region_ranges(item.group, item.target, operation.writes);
          if (item.checkpoint != 0)
            add_region_ranges(item.group, item.checkpoint, operation.writes);
        }
      });
}

Result<void> CachePool::fingerprint_pages(std::span<const PageId> pages,
                                          std::span<Fingerprint> fingerprints) {
  LS_CHECK(pages.size() == fingerprints.size(), "{} pages, {} fingerprints", pages.size(),
           fingerprints.size());
  if (pages.empty()) return device_.finish();
  fingerprints_.items().clear();
  for (const PageId& page : pages) {
    address(page, 0);  // checks it
    fingerprints_.items().push_back({page.tensor, index_of(page.block)});
  }
  return fingerprints_.run(layers_.pages, pages_, fingerprints);
}

Result<void> PageFingerprints::run(std::span<const BlockRegion> pages,
                                   const DeviceArray<BlockRegion>& on_device,
                                   std::span<Fingerprint> fingerprints) {
  LS_CHECK(fingerprints.size() == items_.host.size(), "{} fingerprints of {} pages",
           fingerprints.size(), items_.host.size());
  sums_.host.resize(2 * fingerprints.size());
  const auto sum_bytes = static_cast<std::int64_t>(sizeof(std::uint64_t) * sums_.host.size());
  sums_.reserve(std::ssize(sums_.host));
  device_.zero(sums_.data(), sum_bytes);
  device_.launch(
      device_.kernels().fingerprint_pages,
      FingerprintParams{.tensors = on_device.data(),
                        .items = items_.upload(),
                        .sums = sums_.data(),
                        .num_items = static_cast<std::int32_t>(items_.host.size()),
                        .max_page_bytes = largest<BlockRegion>(pages)},
      [&](Operation& operation) {
        operation.named("fingerprint_pages").read_all(on_device, items_).write_all(sums_);
        for (const FingerprintItem& item : items_.host)
          operation.read(range_in_block(pages[item.tensor], item.block));
      });
  device_.download(sums_.host.data(), sums_.data(), sum_bytes);
  LS_RETURN_IF_ERROR(device_.finish());
  for (std::size_t i = 0; i < fingerprints.size(); ++i)
    fingerprints[i] = {sums_.host[2 * i], sums_.host[2 * i + 1]};
  return {};
}

// Zone 2 * b precedes buffer b, zone 2 * b + 1 follows it.
std::byte* CachePool::guard(std::size_t zone) const {
  LS_CHECK(zone / 2 < buffers_.size(), "guard zone {} of {} buffers", zone, buffers_.size());
  const Buffer& buffer = buffers_[zone / 2];
  return buffer.memory + (zone % 2 == 1 ? buffer.size_bytes : -guard_bytes_);
}

void CachePool::fill_guards() {
  const auto size = static_cast<std::size_t>(guard_bytes_);
  guards_.resize(2 * buffers_.size() * size);
  for (std::size_t zone = 0; zone < 2 * buffers_.size() && size != 0; ++zone) {
    const auto bytes = std::span(guards_).subspan(zone * size, size);
    fill_poison(static_cast<std::uint64_t>(Poison::padding), static_cast<std::int32_t>(zone / 2),
                zone % 2 == 1 ? config_.plan.num_blocks : -1, 0, bytes);
    device_.upload(guard(zone), bytes.data(), guard_bytes_);
  }
  found_guards_ = guards_;
}

void CachePool::download_guards() {
  for (std::size_t zone = 0; zone < 2 * buffers_.size() && guard_bytes_ != 0; ++zone)
    device_.download(found_guards_.data() + static_cast<std::int64_t>(zone) * guard_bytes_,
                     guard(zone), guard_bytes_);
}

void CachePool::check_guards(std::vector<MemoryReport>& reports) {
  LS_CHECK(guards_.size() == found_guards_.size(), "{} bytes of guards, {} read back",
           guards_.size(), found_guards_.size());
  if (guards_.empty() || std::memcmp(guards_.data(), found_guards_.data(), guards_.size()) == 0)
    return;
  const auto differs = std::ranges::mismatch(guards_, found_guards_).in1;
  const std::int64_t at = differs - guards_.begin();
  const auto zone = static_cast<std::size_t>(at / guard_bytes_);
  const std::int64_t in_zone = at % guard_bytes_;
  MemoryReport report;
  report.kind = "guard zone";
  report.message = zone % 2 == 1 ? fmt::format("guard zone: a write {} bytes past the end of {}",
                                               in_zone, buffers_[zone / 2].name)
                                 : fmt::format("guard zone: a write {} bytes before {}",
                                               guard_bytes_ - in_zone, buffers_[zone / 2].name);
  reports.push_back(std::move(report));
  fill_guards();
}

const std::byte* CachePool::address(PageId page, std::int64_t byte) const {
  LS_CHECK(page.tensor >= 0 && std::cmp_less(page.tensor, tensors_.size()) &&
               index_of(page.block) >= 0 && index_of(page.block) < config_.plan.num_blocks,
           "page {} of tensor {}", index_of(page.block), page.tensor);
  const std::int64_t size = page_size_bytes(page.tensor);
  LS_CHECK(byte >= 0 && byte < size, "byte {} of a page of {}", byte, size);
  return tensors_[page.tensor] + std::int64_t{index_of(page.block)} * size + byte;
}

Result<std::vector<std::uint8_t>> CachePool::read_page(PageId page) {
  std::vector<std::uint8_t> bytes(page_size_bytes(page.tensor));
  device_.download(bytes.data(), address(page, 0), static_cast<std::int64_t>(bytes.size()));
  LS_RETURN_IF_ERROR(device_.finish());
  return bytes;
}

MemoryReport CachePool::locate(DeviceReport report) const {
  MemoryReport located = static_cast<MemoryReport&&>(report);
  const auto buffer = std::ranges::find(buffers_, report.allocation, &Buffer::name);
  if (buffer == buffers_.end()) return located;
  std::int64_t offset = report.byte_offset - guard_bytes_;
  if (offset < 0 || offset >= buffer->size_bytes) return located;
  auto tensor = static_cast<std::int32_t>(buffer->first_tensor);
  while (offset >= config_.plan.tensors[tensor].size_bytes)
    offset -= config_.plan.tensors[tensor++].size_bytes;
  const std::int64_t size = page_size_bytes(tensor);
  const std::int64_t block = offset / size;
  located.page = PageId{tensor, BlockId{static_cast<std::int32_t>(block)}};
  located.byte_in_page = offset - block * size;
  return located;
}

}  // namespace lockstep::cuda
