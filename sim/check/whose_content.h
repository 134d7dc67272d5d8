// Whose bytes are these? Looks through everything that the model knows to be in the cache for a
// content that explains what was found where something else should be.
//
// Read only, and dear: every live row and state is tried. For divergences, not for steps.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "reference/memory/memory_model.h"

namespace lockstep {

// `found` are the bytes at `first_byte` of the page, a row as far as the model knows (`owner`), or
// any bytes. Empty: they belong to nothing.
std::string whose_content(const MemoryModel& model, const ByteOwner& owner, std::int64_t first_byte,
                          std::span<const std::uint8_t> found);

// "K", "V", "row", "state 1".
std::string part_name(const ModelLayer& layer, std::int64_t part);

}  // namespace lockstep
