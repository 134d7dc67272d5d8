#include "tests/benchmarks/flashinfer_append.h"

#include <cuda_bf16.h>

#include <flashinfer/page.cuh>

namespace lockstep::cuda {
namespace {

constexpr std::int32_t kBlockSize = 16, kHeads = 8, kHeadSize = 128;
constexpr std::int64_t kRowElements = std::int64_t{kHeads} * kHeadSize;

template <class T>
T* put(Device& device, const std::vector<T>& values, const char* name) {
  const auto size = static_cast<std::int64_t>(values.size() * sizeof(T));
  auto* memory = device.allocate(size, name);
  device.upload(memory, values.data(), size);
  return reinterpret_cast<T*>(memory);
}
nv_bfloat16* zeros(Device& device, std::int64_t count, const char* name) {
  auto* memory = device.allocate(2 * count, name);
  device.zero(memory, 2 * count);
  return reinterpret_cast<nv_bfloat16*>(memory);
}

}  // namespace

// One request whose pages are those of the pool in order: a token's position is its slot.
Workload flashinfer_append(Device& device, std::int32_t num_tokens) {
  const std::int32_t num_pages = num_tokens / kBlockSize + 1;
  std::vector<std::int32_t> pages, positions, requests(static_cast<std::size_t>(num_tokens), 0);
  for (std::int32_t page = 0; page < num_pages; ++page) pages.push_back(page);
  for (const std::int64_t slot : scattered(std::int64_t{num_pages} * kBlockSize))
    if (std::ssize(positions) < num_tokens) positions.push_back(static_cast<std::int32_t>(slot));
  const std::int64_t half = kBlockSize * kRowElements;  // of a page: K, then V
  nv_bfloat16* cache = zeros(device, 2 * half * num_pages, "cache");
  const std::int64_t strides[] = {2 * half, kRowElements, kHeadSize};
  const flashinfer::paged_kv_t<nv_bfloat16, std::int32_t> paged(
      kHeads, kBlockSize, kHeadSize, 1, flashinfer::QKVLayout::kNHD, cache, cache + half, strides,
      put(device, pages, "indices"), put<std::int32_t>(device, {0, num_pages}, "indptr"),
      put<std::int32_t>(device, {kBlockSize}, "last_page_len"));
  nv_bfloat16* keys = zeros(device, kRowElements * num_tokens, "keys");
  nv_bfloat16* values = zeros(device, kRowElements * num_tokens, "values");
  std::int32_t* const batch_indices = put(device, requests, "batch_indices");
  std::int32_t* const on_device = put(device, positions, "positions");
  const std::int64_t bytes = num_tokens * (8 * kRowElements + 8);  // two indices for a slot
  return {"flashinfer_append_bf16_nhd", bytes, num_tokens, [=](const LaunchPlace& place) -> int {
            return flashinfer::AppendPagedKVCache(paged, keys, values, batch_indices, on_device,
                                                  static_cast<std::uint32_t>(num_tokens),
                                                  kRowElements, kHeadSize, kRowElements, kHeadSize,
                                                  static_cast<cudaStream_t>(place.stream));
          }};
}

}  // namespace lockstep::cuda
