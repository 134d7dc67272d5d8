// What a block is on the network: the content ids of its slots, where both engines run without a
// backend, or else the bytes of all its layers, as a host block has them (sim/protocol/backend.h,
// rule 12), on each tensor parallel rank, one after the other.
//
// Both stand for the contents of the slots, so whoever knows the tokens can tell whether what was
// sent, or has come, is theirs: by the model's rows, not by anything a backend computed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/result.h"
#include "reference/memory/content.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// Whether the first slots of a block of `group` hold `contents` in `bytes`. What lies in the slots
// behind is not looked at: nobody may read it.
using HoldsContents = std::function<bool(std::int32_t group, std::span<const ContentId> contents,
                                         std::span<const std::uint8_t> bytes)>;

HoldsContents content_id_payloads(std::span<const KVCacheGroupSpec> groups);
// Refused: what the memory model refuses. REQUIRES: tensor parallel ranks alone.
Result<HoldsContents> page_payloads(const BackendConfig& device);

}  // namespace lockstep
