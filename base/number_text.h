// Numbers and bytes as text: for a person, and as exact decimals in files.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

std::string with_commas(std::int64_t value);                     // 1234567 -> "1,234,567"
std::string counted(std::int64_t count, std::string_view noun);  // "1 step", "1,200 steps"

// Decimal numbers as exact integers, without a double: "47.0319600" seconds are 47031960000 ns.

// [-]DIGITS[.DIGITS] times 10^digits; nothing when the text is anything else, when it has digits
// that the scale would cut off (zeros may be), or when the result needs more than 63 bits.
std::optional<std::int64_t> scaled_decimal_of(std::string_view text, int digits);

// The shortest text that scaled_decimal_of() turns back, with at least one digit behind the point:
// 1000000000 with 9 digits is "1.0".
std::string decimal_text_of(std::int64_t scaled, int digits);

// Bytes as hexadecimal digits, "11 3f 73": the first `max` of them, for a person.
inline std::string hex_bytes(std::span<const std::uint8_t> bytes, std::size_t max = 32) {
  return fmt::format("{:02x}", fmt::join(bytes.first(std::min(max, bytes.size())), " "));
}
// "113f73": all of them, for a file.
inline std::string hex_digits(std::span<const std::uint8_t> bytes) {
  return fmt::format("{:02x}", fmt::join(bytes, ""));
}

}  // namespace lockstep
