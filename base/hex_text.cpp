#include "base/hex_text.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {

std::string hex_bytes(std::span<const std::uint8_t> bytes, std::size_t max) {
  return fmt::format("{:02x}", fmt::join(bytes.first(std::min(max, bytes.size())), " "));
}

std::string hex_digits(std::span<const std::uint8_t> bytes) {
  return fmt::format("{:02x}", fmt::join(bytes, ""));
}

}  // namespace lockstep
