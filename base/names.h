// The names of an enum's values, in one table for both directions; and sets of its values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace lockstep {

template <class E>
struct Named {
  E value;
  std::string_view name;
};
// With std::to_array<Named<E>>({{E::a, "a"}, ...}).
template <class E, std::size_t N>
using EnumNames = std::array<Named<E>, N>;

// A value that is not in the table: `otherwise`.
template <class E, std::size_t N>
constexpr std::string_view name_in(const EnumNames<E, N>& table, E value,
                                   std::string_view otherwise = "?") {
  for (const Named<E>& row : table)
    if (row.value == value) return row.name;
  return otherwise;
}

template <class E, std::size_t N>
constexpr std::optional<E> value_in(const EnumNames<E, N>& table, std::string_view name) {
  for (const Named<E>& row : table)
    if (row.name == name) return row.value;
  return std::nullopt;
}

template <class E, std::size_t N>
constexpr std::array<E, N> values_in(const EnumNames<E, N>& table) {
  std::array<E, N> values{};
  for (std::size_t i = 0; i < N; ++i) values[i] = table[i].value;
  return values;
}

// A set of values of an enum: 128 at most, from 0.
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
  using Bits = unsigned __int128;
  static constexpr Bits bit(E value) { return Bits{1} << static_cast<std::uint8_t>(value); }
  Bits bits_ = 0;
};

}  // namespace lockstep
