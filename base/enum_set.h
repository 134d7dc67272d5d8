// A set of values of an enum with at most 64 of them, the first being 0.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace lockstep {

template <class E>
class EnumSet {
 public:
  constexpr EnumSet() = default;
  constexpr EnumSet(std::initializer_list<E> values) {
    for (const E value : values) add(value);
  }
  constexpr void add(E value) { bits_ |= bit(value); }
  constexpr void add(EnumSet values) { bits_ |= values.bits_; }
  constexpr void add_if(bool condition, E value) { bits_ |= condition ? bit(value) : 0; }
  constexpr void remove(E value) { bits_ &= ~bit(value); }
  constexpr void remove(EnumSet values) { bits_ &= ~values.bits_; }
  constexpr bool has(E value) const { return (bits_ & bit(value)) != 0; }
  constexpr bool has_any_of(EnumSet values) const { return (bits_ & values.bits_) != 0; }
  constexpr bool has_all_of(EnumSet values) const { return (bits_ & values.bits_) == values.bits_; }
  bool operator==(const EnumSet&) const = default;

 private:
  static constexpr std::uint64_t bit(E value) {
    return std::uint64_t{1} << static_cast<std::uint8_t>(value);
  }
  std::uint64_t bits_ = 0;
};

}  // namespace lockstep
