// Numbers in text for a person.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

std::string with_commas(std::int64_t value);                     // 1234567 -> "1,234,567"
std::string counted(std::int64_t count, std::string_view noun);  // "1 step", "1,200 steps"

}  // namespace lockstep
