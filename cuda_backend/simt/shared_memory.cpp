#include "cuda_backend/simt/shared_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"

namespace simt {

// Returns the site's id, unique in the process. Executors on several OS threads may call this at
// the same time.
static std::uint32_t id_of(runtime::SharedSite& site) {
  static std::atomic<std::uint32_t> last{0};
  const std::atomic_ref<std::uint32_t> id(site.id);
  std::uint32_t known = id.load(std::memory_order_relaxed);
  if (known != 0) return known;
  const std::uint32_t fresh = ++last;
  return id.compare_exchange_strong(known, fresh) ? fresh : known;
}

void SharedMemory::begin_launch(std::size_t dynamic_bytes, std::size_t capacity_bytes) {
  LS_CHECK(dynamic_bytes <= capacity_bytes, "{} bytes of {}", dynamic_bytes, capacity_bytes);
  capacity_bytes_ = capacity_bytes;
  ++launch_serial_;
  placed_.clear();
  top_ = 0;
  used_bytes_ = 0;
  place_at_top(kDynamic, dynamic_bytes, 16, "(dynamic)");
}

void SharedMemory::poison() { std::memset(range_.base(), 0xff, top_); }

void* SharedMemory::place_at_top(std::size_t id, std::size_t bytes, std::size_t alignment,
                                 const char* name) {
  if (used_bytes_ + bytes > capacity_bytes_) return nullptr;
  const std::size_t step = std::max<std::size_t>(alignment, 16);
  const std::size_t offset = (top_ + kRedZoneBytes + step - 1) / step * step;
  if (offset + bytes + kRedZoneBytes > kRangeBytes) return nullptr;
  used_bytes_ += bytes;
  top_ = offset + bytes;
  if (variables_.size() <= id) variables_.resize(id + 1);
  variables_[id] = {range_.begin() + offset, bytes, name, launch_serial_};
  placed_.push_back(id);
  return range_.base() + offset;
}

void* SharedMemory::place(runtime::SharedSite& site, std::size_t bytes, std::size_t alignment,
                          const char* name) {
  const std::uint32_t id = id_of(site);
  if (id < variables_.size() && variables_[id].placed_in == launch_serial_)
    return reinterpret_cast<void*>(variables_[id].begin);
  return place_at_top(id, bytes, alignment, name);
}

const SharedMemory::Variable* SharedMemory::find(std::uintptr_t address, std::size_t bytes) const {
  for (const std::size_t id : placed_) {
    const Variable& v = variables_[id];
    if (address >= v.begin && address + bytes <= v.begin + v.size_bytes) return &v;
  }
  return nullptr;
}

const SharedMemory::Variable* SharedMemory::nearest(std::uintptr_t address) const {
  const Variable* best = nullptr;
  for (const std::size_t id : placed_) {
    const Variable& v = variables_[id];
    if (v.begin <= address && (best == nullptr || v.begin > best->begin)) best = &v;
  }
  return best;
}

}  // namespace simt
