// Bytes as hexadecimal digits.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lockstep {

// "11 3f 73": the first `max` of them, for a person.
inline std::string hex_bytes(std::span<const std::uint8_t> bytes, std::size_t max = 32) {
  return fmt::format("{:02x}", fmt::join(bytes.first(std::min(max, bytes.size())), " "));
}
// "113f73": all of them, for a file.
inline std::string hex_digits(std::span<const std::uint8_t> bytes) {
  return fmt::format("{:02x}", fmt::join(bytes, ""));
}

}  // namespace lockstep
