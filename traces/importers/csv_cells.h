// Cells of a CSV line: no quotes, which none of the traces here has.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace lockstep {

std::vector<std::string_view> split_cells(std::string_view line);

// The digits of `text` as a number from min to max.
std::optional<std::int64_t> digits_of(std::string_view text, std::int64_t min, std::int64_t max);

}  // namespace lockstep
