// Mistakes that can be planted in how hidden states are handed over; docs/mutants.md tells them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep {

enum class HiddenStateDefect : std::uint8_t {
  none,
  save_race,  // a file is written under the name that it is looked for
};
std::optional<HiddenStateDefect> hidden_state_defect_from_name(std::string_view name);
std::string_view name_of(HiddenStateDefect defect);  // none: empty

}  // namespace lockstep
