#include "cuda_backend/simt/arena.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"

namespace simt {
namespace {
constexpr std::size_t kPageBytes = 4096;
}

VirtualRange::VirtualRange(VirtualRange&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      is_shared_(other.is_shared_) {}

VirtualRange& VirtualRange::operator=(VirtualRange&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(is_shared_, other.is_shared_);
  return *this;
}

VirtualRange::~VirtualRange() {
  if (base_ != nullptr) munmap(base_, size_bytes_);
}

VirtualRange VirtualRange::reserve(std::size_t size_bytes, const std::string& shared_file) {
  VirtualRange range;
  range.is_shared_ = !shared_file.empty();
  const int fd = range.is_shared_ ? open(shared_file.c_str(), O_RDWR | O_CLOEXEC) : -1;
  const bool has_file = fd >= 0 && ftruncate(fd, static_cast<off_t>(size_bytes)) == 0;
  void* base = MAP_FAILED;
  if (has_file || !range.is_shared_)
    base = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                (has_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_NORESERVE, fd, 0);
  if (fd >= 0) close(fd);
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
  const int advice = is_shared_ ? MADV_REMOVE : MADV_DONTNEED;
  if (madvise(base_ + first_page, last_page - first_page, advice) != 0 && is_shared_)
    std::memset(base_ + first_page, 0, last_page - first_page);
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

namespace {

constexpr std::size_t kNoChunk = std::numeric_limits<std::size_t>::max();
// Between these sizes an allocation is expected to be touched densely: fewer TLB misses are worth
// it.
constexpr std::size_t kHugePagesFrom = std::size_t{8} << 20;
constexpr std::size_t kHugePagesTo = std::size_t{1} << 30;

}  // namespace

lockstep::Result<Arena> Arena::reserve(std::size_t wanted_bytes, std::size_t least_bytes,
                                       bool with_shadow, const std::string& shared_file) {
  for (std::size_t size = wanted_bytes / kChunkBytes * kChunkBytes; size >= least_bytes && size > 0;
       size = size / 2 / kChunkBytes * kChunkBytes) {
    Arena arena;
    arena.memory_ = VirtualRange::reserve(size, shared_file);
    arena.owners_ = VirtualRange::reserve(size / kChunkBytes * sizeof(std::uint32_t));
    if (with_shadow) {
      arena.shadow_ = VirtualRange::reserve(size);
      arena.origins_ = VirtualRange::reserve(size);
    }
    const bool shadowed = !with_shadow || (arena.shadow_ && arena.origins_);
    if (arena.memory_ && arena.owners_ && shadowed) return arena;
  }
  return lockstep::fail(fmt::format(
      "device arena: no {} bytes of address space ({} with shadow); raise the limits on virtual "
      "memory and overcommit, or ask for a smaller arena",
      least_bytes, with_shadow ? least_bytes * 3 : least_bytes));
}

std::size_t Arena::take_chunks(std::size_t count) {
  const std::size_t chunks = memory_.size_bytes() / kChunkBytes;
  if (count <= chunks - next_chunk_) {
    const std::size_t first = next_chunk_;
    next_chunk_ += count;
    return first;
  }
  const auto run = std::find_if(free_runs_.begin(), free_runs_.end(),
                                [count](const FreeRun& r) { return r.count >= count; });
  if (run == free_runs_.end()) return kNoChunk;
  const std::size_t first = run->first;
  run->first += count;
  run->count -= count;
  if (run->count == 0) free_runs_.erase(run);
  return first;
}

lockstep::Result<std::byte*> Arena::allocate(std::size_t size_bytes, std::string name) {
  const std::size_t chunks =
      size_bytes > memory_.size_bytes()
          ? kNoChunk
          : (kRedZoneBytes + size_bytes + kRedZoneBytes + kChunkBytes - 1) / kChunkBytes;
  const std::size_t first = chunks == kNoChunk ? kNoChunk : take_chunks(chunks);
  if (first == kNoChunk)
    return lockstep::fail(fmt::format("device arena: '{}' wants {} bytes; {} of {} are in use",
                                      name, size_bytes, live_bytes_, memory_.size_bytes()));
  LS_CHECK(allocations_.size() < std::numeric_limits<std::uint32_t>::max());
  const std::size_t offset = first * kChunkBytes + kRedZoneBytes;
  allocations_.push_back({memory_.begin() + offset, size_bytes, std::move(name), true});
  const auto owner = static_cast<std::uint32_t>(allocations_.size());
  std::fill_n(owners() + first, chunks, owner);
  live_bytes_ += size_bytes;
  if (size_bytes >= kHugePagesFrom && size_bytes <= kHugePagesTo) {
    memory_.prefer_huge_pages(offset, size_bytes);
    if (shadow_) shadow_.prefer_huge_pages(offset, size_bytes);
  }
  return memory_.base() + offset;
}

bool Arena::release(const void* address) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (!contains(begin)) return false;
  const std::size_t first = (begin - memory_.begin()) / kChunkBytes;
  const std::uint32_t owner = owners()[first];
  if (owner == 0) return false;
  Allocation& allocation = allocations_[owner - 1];
  if (allocation.begin != begin || !allocation.live) return false;
  allocation.live = false;
  live_bytes_ -= allocation.size_bytes;
  const std::size_t offset = begin - memory_.begin();
  memory_.release(offset, allocation.size_bytes);
  if (shadow_) {
    shadow_.release(offset / 16 * 16, (allocation.size_bytes + 15) / 16 * 16);
    origins_.release(offset / 16 * 16, (allocation.size_bytes + 15) / 16 * 16);
  }
  const std::size_t chunks =
      (kRedZoneBytes + allocation.size_bytes + kRedZoneBytes + kChunkBytes - 1) / kChunkBytes;
  free_runs_.push_back({first, chunks});
  return true;
}

const Allocation* Arena::nearest(std::uintptr_t address) const {
  std::size_t chunk = std::min((address - memory_.begin()) / kChunkBytes, next_chunk_);
  if (chunk == next_chunk_ && chunk > 0) --chunk;
  const std::uint32_t owner = next_chunk_ == 0 ? 0 : owners()[chunk];
  return owner == 0 ? nullptr : &allocations_[owner - 1];
}

}  // namespace simt
