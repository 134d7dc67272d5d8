#include "base/number_text.h"

namespace lockstep {

std::string with_commas(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  // No comma directly after a minus sign.
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string counted(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", with_commas(count), noun, count == 1 ? "" : "s");
}

std::string on_one_line(std::string_view text) {
  std::string line;
  for (const char c : text)
    line += c == '\n'                     ? "\\n"
            : (c & 0xe0) == 0 || c == 127 ? fmt::format("\\u{:04x}", static_cast<int>(c))
                                          : std::string(1, c);
  return line;
}

// Appends the digits of the whole part, then exactly `digits` digits of the fraction, zeros where
// it has fewer. Every step checks for overflow.
std::optional<std::int64_t> scaled_decimal_of(std::string_view text, int digits) {
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  const std::size_t point = text.find('.');
  const std::string_view whole = text.substr(0, point);
  const std::string_view fraction =
      point == text.npos ? std::string_view{} : text.substr(point + 1);
  if (whole.empty() || (point != text.npos && fraction.empty())) return std::nullopt;

  std::int64_t value = 0;  // negative or zero: -2^63 is a value, 2^63 is not
  const auto push_digit = [&value](char c) {
    return c >= '0' && c <= '9' && !__builtin_mul_overflow(value, 10, &value) &&
           !__builtin_sub_overflow(value, c - '0', &value);
  };
  for (const char c : whole)
    if (!push_digit(c)) return std::nullopt;
  for (std::size_t i = 0; i < static_cast<std::size_t>(digits); ++i)
    if (!push_digit(i < fraction.size() ? fraction[i] : '0')) return std::nullopt;
  for (std::size_t i = static_cast<std::size_t>(digits); i < fraction.size(); ++i) {
    // Digits beyond the scale: only zeros lose nothing.
    if (fraction[i] != '0') return std::nullopt;
  }
  if (negative) return value;
  std::int64_t positive = 0;
  if (__builtin_sub_overflow(std::int64_t{0}, value, &positive)) return std::nullopt;
  return positive;
}

std::string decimal_text_of(std::int64_t scaled, int digits) {
  // 0 - bits is the magnitude also of -2^63, whose negation overflows in 64 bits with a sign.
  const std::uint64_t bits = static_cast<std::uint64_t>(scaled);
  const std::string text = fmt::format("{:0>{}}", scaled < 0 ? 0 - bits : bits, digits + 1);
  const std::size_t whole = text.size() - static_cast<std::size_t>(digits);
  std::string_view fraction = std::string_view(text).substr(whole);
  // Trailing zeros carry no information; at least one digit stays after the point.
  while (fraction.ends_with('0')) fraction.remove_suffix(1);
  return fmt::format("{}{}.{}", scaled < 0 ? "-" : "", std::string_view(text).substr(0, whole),
                     fraction.empty() ? "0" : fraction);
}

}  // namespace lockstep
