// How relations make the other case of a pair.
#pragma once

#include <optional>
#include <utility>

#include "properties/shrink/case_rules.h"
#include "traces/formats/saved_case.h"

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

}  // namespace lockstep
