// Decimal numbers as exact integers: "47.0319600" seconds are 47031960000 ns, and no double comes
// near.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// [-]DIGITS[.DIGITS] times 10^digits; nothing when the text is anything else, when it has digits
// that the scale would cut off (zeros may be), or when the result needs more than 63 bits.
std::optional<std::int64_t> scaled_decimal_of(std::string_view text, int digits);

// The shortest text that scaled_decimal_of() turns back, with at least one digit behind the point:
// 1000000000 with 9 digits is "1.0".
std::string decimal_text_of(std::int64_t scaled, int digits);

}  // namespace lockstep
