// Bytes as hexadecimal digits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lockstep {

// "11 3f 73": the first `max` of them, for a person.
std::string hex_bytes(std::span<const std::uint8_t> bytes, std::size_t max = 32);
// "113f73": all of them, for a file.
std::string hex_digits(std::span<const std::uint8_t> bytes);

}  // namespace lockstep
