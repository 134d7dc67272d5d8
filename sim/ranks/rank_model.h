// What one of the ranks of an engine has of the cache: its own plan, and the memory model of it.
//
// (1) Every rank of `device` is made here, whoever asks: the ranks of a run and those that look at
//     what another engine has sent cut the plan of the whole model alike.
// Not checked: that there is such a rank (num_ranks() says how many).
#pragma once

#include <cstdint>

#include "base/result.h"
#include "reference/memory/memory_model.h"
#include "sim/protocol/backend.h"

namespace lockstep {

struct RankModel {
  BackendConfig device;  // as device_of_rank() says, but with the plan of the rank alone
  MemoryModel model;
};

// Refused: degrees that the plan cannot be cut into, and what the model cannot follow.
Result<RankModel> rank_model(const BackendConfig& device, std::int32_t rank);

}  // namespace lockstep
