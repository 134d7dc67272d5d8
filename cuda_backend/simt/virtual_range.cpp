#include "cuda_backend/simt/virtual_range.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace simt {
namespace {
constexpr std::size_t kPageBytes = 4096;
}

VirtualRange::VirtualRange(VirtualRange&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

VirtualRange& VirtualRange::operator=(VirtualRange&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

VirtualRange::~VirtualRange() {
  if (base_ != nullptr) munmap(base_, size_bytes_);
}

VirtualRange VirtualRange::reserve(std::size_t size_bytes) {
  void* base = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  VirtualRange range;
  if (base == MAP_FAILED) return range;
  range.base_ = static_cast<std::byte*>(base);
  range.size_bytes_ = size_bytes;
  // A sparse range of huge pages would cost 2 MiB for each place touched.
  madvise(base, size_bytes, MADV_NOHUGEPAGE);
  return range;
}

void VirtualRange::release(std::size_t offset, std::size_t size_bytes) {
  const std::size_t end = offset + size_bytes;
  const std::size_t first_page = (offset + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::size_t last_page = end / kPageBytes * kPageBytes;
  if (first_page >= last_page) {
    std::memset(base_ + offset, 0, size_bytes);
    return;
  }
  std::memset(base_ + offset, 0, first_page - offset);
  std::memset(base_ + last_page, 0, end - last_page);
  madvise(base_ + first_page, last_page - first_page, MADV_DONTNEED);
}

void VirtualRange::for_each_resident(
    std::size_t offset, std::size_t size_bytes,
    const std::function<void(std::size_t, std::size_t)>& visit) const {
  constexpr std::size_t kBatchPages = 4096;
  unsigned char resident[kBatchPages];
  const std::size_t end = offset + size_bytes;
  std::size_t run_begin = offset;
  std::size_t run_end = offset;  // empty run: nothing to visit yet
  for (std::size_t batch = offset / kPageBytes * kPageBytes; batch < end;
       batch += kBatchPages * kPageBytes) {
    const std::size_t pages = std::min(kBatchPages, (end - batch + kPageBytes - 1) / kPageBytes);
    if (mincore(base_ + batch, pages * kPageBytes, resident) != 0)
      std::fill_n(resident, pages, static_cast<unsigned char>(1));
    for (std::size_t i = 0; i < pages; ++i) {
      if ((resident[i] & 1) == 0) continue;
      const std::size_t page = batch + i * kPageBytes;
      if (run_end < page) {
        if (run_begin < run_end) visit(run_begin, run_end - run_begin);
        run_begin = std::max(page, offset);
      }
      run_end = std::min(page + kPageBytes, end);
    }
  }
  if (run_begin < run_end) visit(run_begin, run_end - run_begin);
}

void VirtualRange::prefer_huge_pages(std::size_t offset, std::size_t size_bytes) {
  const std::size_t first_page = (offset + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::size_t last_page = (offset + size_bytes) / kPageBytes * kPageBytes;
  if (first_page < last_page) madvise(base_ + first_page, last_page - first_page, MADV_HUGEPAGE);
}

}  // namespace simt
