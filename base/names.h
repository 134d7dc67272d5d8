// Provides the words for the values of an enum in files, options and reports, and sets of its
// values.
//
// 1. A word is the enumerator's name in the source. Renaming an enumerator changes files that users
//    have.
// 2. An enum with other words has a table (EnumNames) and its own name_of().
// 3. Nothing is registered: the compiler spells the name of a value in __PRETTY_FUNCTION__, and the
//    words are constants of the program.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace lockstep {

// A value and its word, for an enum whose words are not its enumerators.
template <class E>
struct Named {
  E value;
  std::string_view name;
};
// Written as std::to_array<Named<E>>({{E::a, "a"}, ...}).
template <class E, std::size_t N>
using EnumNames = std::array<Named<E>, N>;

// Returns the word of a value, or `otherwise` for a value that is not in the table. Linear in N.
template <class E, std::size_t N>
constexpr std::string_view name_in(const EnumNames<E, N>& table, E value,
                                   std::string_view otherwise = "?") {
  for (const Named<E>& row : table)
    if (row.value == value) return row.name;
  return otherwise;
}

// Returns the value with this word. Absent: no value has it.
template <class E, std::size_t N>
constexpr std::optional<E> value_in(const EnumNames<E, N>& table, std::string_view name) {
  for (const Named<E>& row : table)
    if (row.name == name) return row.value;
  return std::nullopt;
}

// Separates the parts of an enum's words. Specialized as '-' for the ids of planted defects: the
// enumerator drop_slot is "drop-slot" on the command line.
template <class E>
inline constexpr char kWordJoint = '_';

namespace names {

// Returns the name of a value as the compiler spells it: "bf16" from "... [with auto value =
// lockstep::DType::bf16]". A number without an enumerator is spelled "(lockstep::DType)7", so the
// result contains a parenthesis.
template <auto value>
constexpr auto spelled() {
  std::string_view text = __PRETTY_FUNCTION__;
  text.remove_suffix(1);
  return text.substr(text.rfind(':') + 1);
}

// Holds the letters of a word, because __PRETTY_FUNCTION__ has underscores where the word may have
// another joint.
template <auto value>
inline constexpr auto kLetters = [] {
  std::array<char, spelled<value>().size()> letters{};
  std::ranges::replace_copy(spelled<value>(), letters.begin(), '_', kWordJoint<decltype(value)>);
  return letters;
}();

// Counts the enumerators from 0 up to the first number without one. REQUIRES: the values have no
// gap.
template <class E, std::size_t from = 0>
constexpr std::size_t count() {
  if constexpr (spelled<static_cast<E>(from)>().find(')') != std::string_view::npos)
    return from;
  else
    return count<E, from + 1>();
}

}  // namespace names

// The words of an enum, indexed by value. REQUIRES: its values count from 0 without a gap.
template <class E>
inline constexpr auto kWords = []<std::size_t... i>(std::index_sequence<i...>) {
  return std::array{std::string_view(names::kLetters<static_cast<E>(i)>.data(),
                                     names::kLetters<static_cast<E>(i)>.size())...};
}
(std::make_index_sequence<names::count<E>()>());

// Returns the word of a value; "?" for a number that is not an enumerator, which a cast may have
// made.
template <class E>
requires std::is_enum_v<E>
constexpr std::string_view name_of(E value) {
  const auto index = static_cast<std::size_t>(value);
  return index < kWords<E>.size() ? kWords<E>[index] : "?";
}

// Returns the value with this word. Absent: no value has it. Linear in the number of enumerators.
template <class E>
constexpr std::optional<E> from_name(std::string_view name) {
  const auto found = std::ranges::find(kWords<E>, name);
  if (found == kWords<E>.end()) return std::nullopt;
  return static_cast<E>(found - kWords<E>.begin());
}

// For an enum of planted defects, whose first enumerator is `none`: the defect with this id. "none"
// is not an id, so it is absent.
template <class E>
constexpr std::optional<E> defect_from_name(std::string_view name) {
  const std::optional<E> found = from_name<E>(name);
  return found == E::none ? std::nullopt : found;
}
// Every defect of such an enum, without `none`.
template <class E>
inline constexpr auto kAllDefects = [] {
  std::array<E, kWords<E>.size() - 1> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<E>(i + 1);
  return all;
}();

// A set of values of an enum, in 16 bytes: copied and compared like a number. REQUIRES: values from
// 0 to 127.
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
