// Memory of a simulated GPU and the pinned memory of its host.
//
// 1. Fresh bytes are never zero, so code that relies on zeroes fails.
// 2. Released memory is overwritten and never allocated again. Work that still reads it reads other
//    bytes, and work that copies it is refused.
// 3. Every other address is pageable memory of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

namespace lockstep::cuda {

enum class MemoryKind : std::uint8_t { device, pinned, pageable };

class SimulatedMemory {
 public:
  // `fresh`: the value of every byte of a new allocation.
  SimulatedMemory(std::int64_t device_bytes, std::int64_t pinned_bytes, int fresh)
      : left_{device_bytes, pinned_bytes}, fresh_(fresh) {}

  // Aligned to 256. Null: no memory.
  void* allocate(MemoryKind kind, std::size_t size_bytes);
  // False: no live allocation of this kind begins there.
  bool release(MemoryKind kind, void* memory);
  // Nothing: the range leaves an allocation, or is in a released one.
  std::optional<MemoryKind> kind_of(const void* memory, std::size_t size_bytes) const;
  std::int64_t num_live(MemoryKind kind) const;

 private:
  struct Block {
    MemoryKind kind;
    std::size_t size_bytes;
    std::unique_ptr<std::byte, void (*)(void*)> bytes;
    bool is_live = true;
  };
  std::map<const std::byte*, Block> blocks_;  // by first byte
  std::int64_t left_[2];                      // bytes, by kind
  int fresh_;
};

}  // namespace lockstep::cuda
