// A range of zeroed virtual memory that costs physical memory only where it is touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace simt {

class VirtualRange {
 public:
  VirtualRange() = default;
  VirtualRange(VirtualRange&& other) noexcept;
  VirtualRange& operator=(VirtualRange&& other) noexcept;
  ~VirtualRange();

  // An empty range (bool false) when the system refuses: address space or overcommit is limited.
  static VirtualRange reserve(std::size_t size_bytes);

  explicit operator bool() const { return base_ != nullptr; }
  std::byte* base() const { return base_; }
  std::size_t size_bytes() const { return size_bytes_; }
  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(base_); }
  bool contains(std::uintptr_t address) const { return address - begin() < size_bytes_; }

  // Gives the physical memory back; the bytes read as zero again. Any offset and size: only whole
  // pages inside are given back, what is left of them at the ends is set to zero.
  void release(std::size_t offset, std::size_t size_bytes);
  // Calls visit(offset, size) for the pages of the part that hold physical memory, cut to the part,
  // neighbours joined. A page that was swapped out may be left out.
  void for_each_resident(std::size_t offset, std::size_t size_bytes,
                         const std::function<void(std::size_t, std::size_t)>& visit) const;
  // Larger pages where the kernel has them: right for memory that will be touched densely.
  void prefer_huge_pages(std::size_t offset, std::size_t size_bytes);

 private:
  std::byte* base_ = nullptr;
  std::size_t size_bytes_ = 0;
};

}  // namespace simt
