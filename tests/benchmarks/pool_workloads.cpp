#include "tests/benchmarks/pool_workloads.h"

#include "base/check.h"

namespace lockstep::cuda {
namespace {

template <class T>
const T* put(Device& device, const std::vector<T>& values, const char* name) {
  const auto size = static_cast<std::int64_t>(values.size() * sizeof(T));
  auto* memory = device.allocate(size, name);
  device.upload(memory, values.data(), size);
  return reinterpret_cast<const T*>(memory);
}

}  // namespace

std::vector<Workload> pool_workloads(Device& device, const KernelTable& kernels, PoolSize size) {
  const std::int32_t pages = size.num_pages;
  const std::int64_t bytes = pages * size.page_bytes;
  std::byte* pool = device.allocate(bytes, "pool");
  device.zero(pool, bytes);
  const BlockRegion* region = put<BlockRegion>(device,
                                               {{.base = pool,
                                                 .block_stride = size.page_bytes,
                                                 .size_bytes = size.page_bytes,
                                                 .unit_bytes = 16}},
                                               "pages");
  const auto* group = put<RegionRange>(device, {{0, 1}}, "group");
  const auto* page_size = put<std::int64_t>(device, {size.page_bytes}, "page size");
  std::vector<GroupBlockItem> blocks;
  std::vector<BlockCopyItem> copies;
  std::vector<FingerprintItem> prints;
  for (std::int32_t page = 0; page < pages; ++page) {
    blocks.push_back({0, page});
    prints.push_back({0, page});
    if (page < pages / 2) copies.push_back({0, page, page + pages / 2});
  }
  auto* sums = reinterpret_cast<unsigned long long*>(
      device.allocate(std::int64_t{16} * pages, "fingerprints"));
  device.zero(sums, std::int64_t{16} * pages);
  const ZeroBlocksParams zero{region, group, put(device, blocks, "blocks"),
                              pages,  1,     size.page_bytes};
  const CopyRegion* copied = put<CopyRegion>(device,
                                             {{.target = pool,
                                               .source = pool,
                                               .target_stride = size.page_bytes,
                                               .source_stride = size.page_bytes,
                                               .size_bytes = size.page_bytes,
                                               .unit_bytes = 16}},
                                             "copy regions");
  const CopyBlocksParams copy{copied,    group, put(device, copies, "copies"),
                              pages / 2, 1,     size.page_bytes};
  const PoisonBlocksParams poison{region, page_size, nullptr, 1, pages, 0, size.page_bytes};
  const FingerprintParams fingerprint{region, put(device, prints, "prints"), sums, pages,
                                      size.page_bytes};
  LS_CHECK(device.finish().has_value(), "a pool of {} bytes does not fit the device", bytes);
  const auto with = [](auto launcher, auto params) {
    return [launcher, params](const LaunchPlace& place) { return launcher(place, params); };
  };
  return {{"pool_zero", bytes, pages, with(kernels.zero_blocks, zero)},
          {"pool_copy", pages / 2 * 2 * size.page_bytes, pages, with(kernels.copy_blocks, copy)},
          {"pool_poison", bytes, pages, with(kernels.poison_blocks, poison)},
          {"pool_fingerprint", bytes, pages, with(kernels.fingerprint_pages, fingerprint)}};
}

}  // namespace lockstep::cuda
