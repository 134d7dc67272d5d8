// How relations make the other case of a pair.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "properties/case_rules.h"
#include "traces/saved_case.h"

namespace lockstep {

// Nothing: the change is none here, or the engine would not take it.
using Changed = std::optional<SavedCase>;

// The case with a change, if it is one and breaks no rule of the engine that held before.
template <class Change>
Changed changed(const SavedCase& saved, const Change& change) {
  SavedCase other = saved;
  change(other);
  const bool sound = (broken_rules(other) & ~broken_rules(saved)) == 0;
  return other == saved || !sound ? std::nullopt : Changed(std::move(other));
}

inline void set_setting(SavedCase& saved, std::string_view name, std::int64_t value) {
  std::erase_if(saved.settings, [&](const auto& setting) { return setting.first == name; });
  saved.settings.emplace_back(name, value);
}

}  // namespace lockstep
