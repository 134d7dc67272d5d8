// The bytes of a large buffer of which little is touched: chunks appear when they are written or
// read, holding poison that depends on the byte's place.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>

namespace lockstep {

class SparseBytes {
 public:
  static constexpr std::int64_t kChunkBytes = 65536;

  explicit SparseBytes(std::int64_t size_bytes) : size_bytes_(size_bytes) {}
  std::int64_t size_bytes() const { return size_bytes_; }

  // Require [offset, offset + bytes.size()) to lie inside the buffer.
  void write(std::int64_t offset, std::span<const std::uint8_t> bytes);
  // Whether the buffer holds these bytes there; the bytes count as addressed from now on.
  bool holds(std::int64_t offset, std::span<const std::uint8_t> bytes);

  // Calls `changed` for the first byte of each chunk that was never addressed and no longer holds
  // poison; returns how many bytes in touched chunks were not addressed.
  std::int64_t for_each_overwritten(const std::function<void(std::int64_t offset)>& changed) const;

 private:
  struct Chunk {
    std::array<std::uint8_t, kChunkBytes> bytes;
    std::array<std::uint8_t, kChunkBytes> addressed{};  // 0 or 1
  };
  Chunk& chunk(std::int64_t index);

  std::int64_t size_bytes_;
  std::map<std::int64_t, std::unique_ptr<Chunk>> chunks_;
};

}  // namespace lockstep
