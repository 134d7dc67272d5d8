// Text for a person: numbers, durations, columns.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

std::string with_commas(std::int64_t value);                      // 1234567 -> "1,234,567"
std::string counted(std::int64_t count, std::string_view noun);   // "1 step", "1,200 steps"
std::string duration_text(double seconds);                        // "850 ms", "12.3 s", "2 min 5 s"
std::string size_text(std::int64_t bytes);                        // "8,192 bytes", "1.2 GiB"
std::string percent_text(std::int64_t part, std::int64_t whole);  // "40.2 %"; "-" of nothing

// One line of a table: a name, a figure, and what more there is to say.
std::string row_text(std::string_view name, std::string_view figure, std::string_view more = {});

// Prints "lockstep: MESSAGE" to stderr; kExitRefused.
int refuse(std::string_view message);

}  // namespace lockstep
