// The shared memory of the running CTA: a small arena with a red zone around every variable.
//
// Invariants:
//  1. A variable keeps its address for one launch. begin_cta() makes its bytes undefined again.
//  2. A launch has the capacity of any GPU's CTA, 48 KiB without red zones. With opt-in it has that
//     of an H100 or H200 CTA, 227 KiB.
//  3. Dynamic shared memory is placed first, even if it has no bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda_backend/simt/arena.h"
#include "cuda_backend/simt/kernel_runtime.h"

namespace simt {

class SharedMemory {
 public:
  static constexpr std::size_t kCapacityBytes = 48 * 1024;
  static constexpr std::size_t kLargeCapacityBytes = 227 * 1024;
  static constexpr std::size_t kRedZoneBytes = 64;
  static constexpr std::size_t kRangeBytes = 1024 * 1024;

  struct Variable {
    std::uintptr_t begin = 0;
    std::size_t size_bytes = 0;
    const char* name = nullptr;
    std::uint64_t placed_in = 0;  // launch serial; another one: not placed
  };

  SharedMemory() : range_(VirtualRange::reserve(kRangeBytes)) {}
  bool usable() const { return static_cast<bool>(range_); }

  // REQUIRES: dynamic_bytes <= capacity_bytes.
  void begin_launch(std::size_t dynamic_bytes, std::size_t capacity_bytes);
  // Fills what the launch has used so far with a pattern that reads as a NaN in every float type.
  void poison();

  // Null when the capacity is exceeded.
  void* place(runtime::SharedSite& site, std::size_t bytes, std::size_t alignment,
              const char* name);
  void* dynamic() const { return reinterpret_cast<void*>(variables_[kDynamic].begin); }

  bool contains(std::uintptr_t address) const { return range_.contains(address); }
  std::size_t offset_of(std::uintptr_t address) const { return address - range_.begin(); }
  std::size_t used_extent_bytes() const { return top_; }
  std::size_t capacity_bytes() const { return capacity_bytes_; }
  const VirtualRange& range() const { return range_; }
  // The variable that holds all of the bytes, or null.
  const Variable* find(std::uintptr_t address, std::size_t bytes) const;
  // The placed variable that begins last before the address, or null.
  const Variable* nearest(std::uintptr_t address) const;

 private:
  static constexpr std::size_t kDynamic = 0;  // site ids begin at 1

  void* place_at_top(std::size_t id, std::size_t bytes, std::size_t alignment, const char* name);

  VirtualRange range_;
  std::vector<Variable> variables_ = std::vector<Variable>(1);  // by site id
  std::vector<std::size_t> placed_;                             // ids placed in this launch
  std::uint64_t launch_serial_ = 0;
  std::size_t top_ = 0;
  std::size_t used_bytes_ = 0;
  std::size_t capacity_bytes_ = kCapacityBytes;  // of this launch
};

}  // namespace simt
