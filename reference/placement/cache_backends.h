// What each attention backend of the engine asks of a cache: kernel block sizes, orders, whether it
// serves prefill context parallelism, and what a layer makes of its page. One row a backend; the
// names are those of the recordings, the facts those of vLLM's backends
// (vllm/v1/attention/backends, vllm/models/deepseek_v4*, vllm/models/qwen4_exp).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/placement/cache_order.h"
#include "reference/placement/cache_spec.h"

namespace lockstep {

// The GPU family that backends depend on.
enum class DeviceFamily : std::uint8_t { none, sm90, sm100 };

// Block sizes that a kernel takes: the listed ones, or every multiple of one.
struct KernelSizes {
  std::vector<std::int64_t> listed;
  std::int64_t multiple_of = 0;  // 0: only the listed ones
  bool takes(std::int64_t block_size) const;
  std::int64_t smallest() const;
};

// What a layer makes of its page [B, H, N, C].
enum class PageBinding : std::uint8_t {
  as_is,
  rows,            // [B, N, C]: one head
  rows_then_head,  // [B, N, H, C]
  states,          // one view a state
};

struct CacheBackend {
  std::string_view name;
  std::vector<std::int64_t> listed = {};  // kernel sizes in tokens
  std::int64_t multiple_of = 0;
  std::vector<CacheLayout> orders = {};  // best first; empty: any
  PageBinding binding = PageBinding::as_is;
  bool serves_pcp = false;
};
// nullptr: not a backend that the model knows.
const CacheBackend* find_cache_backend(std::string_view name);

// `spec`: of a layer of the backend, or its facts.
KernelSizes kernel_sizes(const CacheBackend& backend, DeviceFamily device, const KVCacheSpec& spec);
std::vector<CacheLayout> declared_orders(const CacheBackend& backend, DeviceFamily device);
bool is_state_backend(const CacheBackend& backend);

// The block itself if all take it, else the largest listed size that divides it and that all take
// (vllm/v1/worker/utils.py: select_common_block_size). An Error: there is none.
Result<std::int64_t> common_kernel_block(std::int64_t block_size,
                                         const std::vector<KernelSizes>& sizes);

}  // namespace lockstep
