// The names of an enum's values, in one table for both directions.
#pragma once

#include <array>
#include <cstddef>
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

}  // namespace lockstep
