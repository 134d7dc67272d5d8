#include "tests/conformance/sparse_bytes.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/seeded_random.h"

namespace lockstep {
namespace {

// Of the eight bytes that `offset` lies in, little-endian.
std::uint64_t poison_word(std::int64_t offset) {
  return splitmix64(static_cast<std::uint64_t>(offset >> 3) ^ 0x706F69736F6Eull);
}
std::uint8_t poison(std::int64_t offset) {
  return static_cast<std::uint8_t>(poison_word(offset) >> (8 * (offset & 7)));
}

// Calls f(chunk index, offset in the chunk, part of [0, size)) for each chunk that the range meets.
template <class F>
void for_each_part(std::int64_t offset, std::size_t size, F&& f) {
  std::size_t done = 0;
  while (done < size) {
    const std::int64_t at = offset + static_cast<std::int64_t>(done);
    const auto inside = static_cast<std::size_t>(at % SparseBytes::kChunkBytes);
    const std::size_t count =
        std::min(size - done, static_cast<std::size_t>(SparseBytes::kChunkBytes) - inside);
    f(at / SparseBytes::kChunkBytes, inside, done, count);
    done += count;
  }
}

}  // namespace

SparseBytes::Chunk& SparseBytes::chunk(std::int64_t index) {
  std::unique_ptr<Chunk>& chunk = chunks_[index];
  if (!chunk) {
    chunk = std::make_unique<Chunk>();
    for (std::int64_t i = 0; i < kChunkBytes; i += 8) {
      const std::uint64_t word = poison_word(index * kChunkBytes + i);
      std::memcpy(chunk->bytes.data() + i, &word, sizeof(word));
    }
  }
  return *chunk;
}

void SparseBytes::write(std::int64_t offset, std::span<const std::uint8_t> bytes) {
  LS_CHECK(offset >= 0 && offset + std::ssize(bytes) <= size_bytes_, "{} + {} of {}", offset,
           bytes.size(), size_bytes_);
  for_each_part(offset, bytes.size(),
                [&](std::int64_t c, std::size_t at, std::size_t from, std::size_t count) {
                  std::memcpy(chunk(c).bytes.data() + at, bytes.data() + from, count);
                });
}

bool SparseBytes::holds(std::int64_t offset, std::span<const std::uint8_t> bytes) {
  LS_CHECK(offset >= 0 && offset + std::ssize(bytes) <= size_bytes_, "{} + {} of {}", offset,
           bytes.size(), size_bytes_);
  bool equal = true;
  for_each_part(offset, bytes.size(),
                [&](std::int64_t c, std::size_t at, std::size_t from, std::size_t count) {
                  Chunk& part = chunk(c);
                  equal &= std::memcmp(part.bytes.data() + at, bytes.data() + from, count) == 0;
                  std::memset(part.addressed.data() + at, 1, count);
                });
  return equal;
}

std::int64_t SparseBytes::for_each_overwritten(
    const std::function<void(std::int64_t offset)>& changed) const {
  std::int64_t kept = 0;
  for (const auto& [index, chunk] : chunks_) {
    bool reported = false;
    for (std::int64_t i = 0; i < std::min(kChunkBytes, size_bytes_ - index * kChunkBytes); ++i) {
      if (chunk->addressed[i] != 0) continue;
      ++kept;
      if (reported || chunk->bytes[i] == poison(index * kChunkBytes + i)) continue;
      changed(index * kChunkBytes + i);
      reported = true;
    }
  }
  return kept;
}

}  // namespace lockstep
