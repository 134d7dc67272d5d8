// Ids that all folders share. Each is its own type where a mix-up of two ids would compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

// Index of a block in the pool, in [0, num_blocks). Block 0 is the null block (vLLM 0.33.0,
// v1/core/block_pool.py, BlockPool.null_block): it is never written or freed, and in a block table
// it marks an entry that holds nothing. A pool of num_blocks blocks therefore has num_blocks - 1
// usable ones.
enum class BlockId : std::int32_t {};
inline constexpr BlockId kNullBlock{0};
constexpr std::int32_t index_of(BlockId block) { return static_cast<std::int32_t>(block); }

// Index of a block in the host tier, a pool of pinned host memory. The host tier has no null block:
// 0 is an ordinary block.
enum class HostBlockId : std::int32_t {};
constexpr std::int32_t index_of(HostBlockId block) { return static_cast<std::int32_t>(block); }

// Number of a request inside one scheduler. Numbers are dense, so they index an IdVector; a number
// is reused only after its request has ended.
enum class RequestId : std::uint32_t {};
constexpr std::uint32_t index_of(RequestId request) { return static_cast<std::uint32_t>(request); }

// Position of one token in one group's cache: slot = block_id * block_size + offset. block_size 16,
// block 3, token 5 of the block: slot 53. 64 bits, since num_blocks * block_size may exceed 2^31. A
// kernel writes nothing for PAD_SLOT_ID (vLLM 0.33.0, v1/attention/backends/utils.py).
using Slot = std::int64_t;
inline constexpr Slot PAD_SLOT_ID = -1;

// Key of a block's content in the prefix cache, 128 bits (reference/cache/block_hash.h). Equal keys
// stand for equal tokens, parents and extra keys, up to hash collisions.
struct BlockKey {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const BlockKey&) const = default;
};

// A vector with one element per id from 0, indexed only by that id's type: rows[BlockId] does not
// compile where rows is per request. Id: one of the enum classes above. Not checked: that an id is
// below size(), as with std::vector.
template <class Id, class T>
class IdVector : private std::vector<T> {
  using Base = std::vector<T>;

 public:
  using Base::assign;
  using Base::Base;
  using Base::begin;
  using Base::emplace_back;
  using Base::empty;
  using Base::end;
  using Base::push_back;
  using Base::resize;
  using Base::size;

  T& operator[](Id id) { return Base::operator[](static_cast<std::size_t>(id)); }
  const T& operator[](Id id) const { return Base::operator[](static_cast<std::size_t>(id)); }
};

}  // namespace lockstep
