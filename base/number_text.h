// Formats numbers and bytes as text, for a person and as exact decimals for files.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

std::string with_commas(std::int64_t value);                     // 1234567 -> "1,234,567"
std::string counted(std::int64_t count, std::string_view noun);  // "1 step", "1,200 steps"

// Escapes control characters as \n or \u0001: a newline in a request's name would forge a line.
std::string on_one_line(std::string_view text);

// "a, b, c": `of` returns the text of a row, or is its member.
template <class Rows, class Of>
std::string joined(const Rows& rows, Of of, std::string_view separator = ", ") {
  return fmt::format("{}", fmt::join(rows | std::views::transform(of), separator));
}

// Decimal numbers as exact integers, without a double: "47.0319600" s with 9 digits is 47031960000
// ns. Reading and writing such a number any number of times does not change it.

// Returns [-]DIGITS[.DIGITS] times 10^digits. Absent: the text has another form ("+1", ".5", "1.",
// "1e3"), the scale would cut off a digit other than 0, or the result does not fit into 64 bits
// with a sign. "0.25" with 1 digit: absent. "0.50" with 1 digit: 5.
std::optional<std::int64_t> scaled_decimal_of(std::string_view text, int digits);

// Returns the shortest text that scaled_decimal_of() turns back into `scaled`, with at least one
// digit after the point: 1000000000 with 9 digits is "1.0".
std::string decimal_text_of(std::int64_t scaled, int digits);

// Returns the first `max` bytes as hexadecimal digits for a person: "11 3f 73".
inline std::string hex_bytes(std::span<const std::uint8_t> bytes, std::size_t max = 32) {
  return fmt::format("{:02x}", fmt::join(bytes.first(std::min(max, bytes.size())), " "));
}
// Returns all bytes as hexadecimal digits for a file: "113f73".
inline std::string hex_digits(std::span<const std::uint8_t> bytes) {
  std::string digits(2 * bytes.size(), '0');
  for (std::size_t i = 0; i < digits.size(); ++i)
    digits[i] = "0123456789abcdef"[i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15];
  return digits;
}

}  // namespace lockstep
