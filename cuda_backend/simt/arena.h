// Device memory on the CPU: one large sparse range of virtual memory and the allocations in it.
//
// Invariants:
//  1. Every allocation has a name, starts at a multiple of 256 bytes, and is surrounded by at least
//     256 bytes that belong to no allocation.
//  2. Address to allocation is one table look-up: a chunk of 64 KiB belongs to one allocation at
//     most.
//  3. Freed addresses are reused only after all fresh ones, the longest freed first.
//  4. Untouched memory costs nothing: a pool of 100 GB with a few pages in use fits a laptop.
// Not done here: checks of accesses (checker.h) and the state of bytes (shadow.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "base/result.h"

namespace simt {

// A range of zeroed virtual memory that costs physical memory only where it is touched.
class VirtualRange {
 public:
  VirtualRange() = default;
  VirtualRange(VirtualRange&& other) noexcept;
  VirtualRange& operator=(VirtualRange&& other) noexcept;
  ~VirtualRange();

  // An empty range (bool false) when the system refuses: address space or overcommit is limited.
  // `shared_file`: a file in memory that the range maps and that other processes may map; empty:
  // private memory.
  static VirtualRange reserve(std::size_t size_bytes, const std::string& shared_file = {});

  explicit operator bool() const { return base_ != nullptr; }
  std::byte* base() const { return base_; }
  std::size_t size_bytes() const { return size_bytes_; }
  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(base_); }
  bool contains(std::uintptr_t address) const { return address - begin() < size_bytes_; }

  // Releases the physical memory; the bytes read as zero again. Any offset and size: whole pages
  // inside are released, the rest at both ends is set to zero.
  void release(std::size_t offset, std::size_t size_bytes);
  // Calls visit(offset, size) for the parts that have physical memory, adjacent pages joined. It
  // may skip a page that was swapped out.
  void for_each_resident(std::size_t offset, std::size_t size_bytes,
                         const std::function<void(std::size_t, std::size_t)>& visit) const;
  // Larger pages where the kernel has them: right for memory that will be touched densely.
  void prefer_huge_pages(std::size_t offset, std::size_t size_bytes);

 private:
  std::byte* base_ = nullptr;
  std::size_t size_bytes_ = 0;
  bool is_shared_ = false;
};

struct Allocation {
  std::uintptr_t begin = 0;
  std::size_t size_bytes = 0;
  std::string name;
  bool live = false;
  bool holds(std::uintptr_t address, std::size_t bytes) const {
    return address >= begin && bytes <= size_bytes && address - begin <= size_bytes - bytes;
  }
};

class Arena {
 public:
  static constexpr std::size_t kAlignment = 256;
  static constexpr std::size_t kRedZoneBytes = 256;
  static constexpr std::size_t kChunkBytes = 64 * 1024;

  // Reserves wanted_bytes; halves until the system agrees, down to least_bytes. With shadow, as
  // much again is reserved for definedness and for origins each. shared_file: see VirtualRange.
  static lockstep::Result<Arena> reserve(std::size_t wanted_bytes, std::size_t least_bytes,
                                         bool with_shadow, const std::string& shared_file = {});

  lockstep::Result<std::byte*> allocate(std::size_t size_bytes, std::string name);
  // False if the address is not the start of a live allocation.
  bool release(const void* address);

  bool contains(std::uintptr_t address) const { return memory_.contains(address); }
  // The allocation, live or freed, whose chunks hold the address; null: never allocated.
  const Allocation* find(std::uintptr_t address) const {
    const std::uint32_t owner = owners()[(address - memory_.begin()) / kChunkBytes];
    return owner == 0 ? nullptr : &allocations_[owner - 1];
  }
  // The nearest allocation at or before an address outside of all, for reports; or null.
  const Allocation* nearest(std::uintptr_t address) const;

  std::size_t size_bytes() const { return memory_.size_bytes(); }
  std::size_t live_bytes() const { return live_bytes_; }
  const VirtualRange& memory() const { return memory_; }
  VirtualRange& memory() { return memory_; }
  // Bytes from the start of the arena up to the last chunk that was ever allocated.
  std::size_t used_extent_bytes() const { return next_chunk_ * kChunkBytes; }
  const std::deque<Allocation>& allocations() const { return allocations_; }
  VirtualRange& shadow() { return shadow_; }
  VirtualRange& origins() { return origins_; }

 private:
  struct FreeRun {  // whole chunks
    std::size_t first;
    std::size_t count;
  };
  std::uint32_t* owners() const { return reinterpret_cast<std::uint32_t*>(owners_.base()); }
  std::size_t take_chunks(std::size_t count);  // first chunk, or SIZE_MAX

  VirtualRange memory_;
  VirtualRange shadow_;   // 16 bytes for each 16 bytes
  VirtualRange origins_;  // likewise
  VirtualRange owners_;   // index into allocations_ + 1, by chunk
  std::deque<Allocation> allocations_;
  std::deque<FreeRun> free_runs_;  // in the order in which they were freed
  std::size_t next_chunk_ = 0;
  std::size_t live_bytes_ = 0;
};

}  // namespace simt
