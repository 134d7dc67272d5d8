// Cache events as JSON lines, for whoever routes requests by what engines have cached
// (docs/formats.md, "Cache events").
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "reference/cache/cache_events.h"

namespace lockstep {

// One line for a step that has events, newline included; empty for one without.
std::string cache_events_line(std::int64_t step, std::span<const CacheEvent> events);

}  // namespace lockstep
