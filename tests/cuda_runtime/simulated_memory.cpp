#include "tests/cuda_runtime/simulated_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kGivenBack = 0xDB;

}  // namespace

void* SimulatedMemory::allocate(MemoryKind kind, std::size_t size_bytes) {
  std::int64_t& left = left_[static_cast<std::size_t>(kind)];
  if (size_bytes == 0 || static_cast<std::int64_t>(size_bytes) > left) return nullptr;
  const std::size_t rounded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* bytes = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  LS_CHECK(bytes != nullptr, "{} bytes for a simulated GPU", rounded);
  std::memset(bytes, fresh_, rounded);
  left -= static_cast<std::int64_t>(size_bytes);
  blocks_.emplace(bytes, Block{kind, size_bytes, {bytes, std::free}});
  return bytes;
}

bool SimulatedMemory::release(MemoryKind kind, void* memory) {
  const auto found = blocks_.find(static_cast<const std::byte*>(memory));
  if (found == blocks_.end()) return false;
  Block& block = found->second;
  if (block.kind != kind || !block.is_live) return false;
  std::memset(memory, kGivenBack, block.size_bytes);
  block.is_live = false;
  left_[static_cast<std::size_t>(kind)] += static_cast<std::int64_t>(block.size_bytes);
  return true;
}

std::optional<MemoryKind> SimulatedMemory::kind_of(const void* memory,
                                                   std::size_t size_bytes) const {
  const auto* first = static_cast<const std::byte*>(memory);
  const auto after = blocks_.upper_bound(first);
  if (after != blocks_.begin()) {
    const auto& [begin, block] = *std::prev(after);
    if (std::less<>()(first, begin + block.size_bytes)) {
      const bool fits = size_bytes <= block.size_bytes - static_cast<std::size_t>(first - begin);
      return block.is_live && fits ? std::optional(block.kind) : std::nullopt;
    }
  }
  if (after != blocks_.end() && std::less<>()(after->first, first + size_bytes))
    return std::nullopt;
  return MemoryKind::pageable;
}

std::int64_t SimulatedMemory::num_live(MemoryKind kind) const {
  return std::ranges::count_if(blocks_, [&](const auto& entry) {
    return entry.second.kind == kind && entry.second.is_live;
  });
}

}  // namespace lockstep::cuda
