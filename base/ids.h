// Ids that every folder speaks of, as types of their own where a mix-up would compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

// A place in the pool of blocks. Block 0 is the null block: never written, never freed, standing
// for "nothing kept here" in a block table.
enum class BlockId : std::int32_t {};
inline constexpr BlockId kNullBlock{0};
constexpr std::int32_t index_of(BlockId block) { return static_cast<std::int32_t>(block); }

// A position in the host tier, a pool of pinned host memory. It has no null block.
enum class HostBlockId : std::int32_t {};
constexpr std::int32_t index_of(HostBlockId block) { return static_cast<std::int32_t>(block); }

// A request inside one scheduler: dense, reused only after the request has ended.
enum class RequestId : std::uint32_t {};
constexpr std::uint32_t index_of(RequestId request) { return static_cast<std::uint32_t>(request); }

// slot = block_id * block_size + offset. A slot of PAD_SLOT_ID writes nothing.
using Slot = std::int64_t;
inline constexpr Slot PAD_SLOT_ID = -1;

// The name of a block's content in the prefix cache. reference/cache/block_hash.h makes it.
struct BlockKey {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const BlockKey&) const = default;
};

// A vector with an element for each id from 0 on, indexed by that id's type and no other.
// Not checked: that an id is below size(), as with std::vector.
// Id: one of the enum classes above.
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
