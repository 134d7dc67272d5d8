// Finds the owner of bytes: searches all contents that the model expects in the cache for one that
// explains what was found in place of the expected bytes.
//
// Read-only, but expensive: it tries every live row and state. For divergences, not for steps.
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
