// The configuration of one engine's loop.
#pragma once

#include <cstdint>

#include "reference/types/engine_config.h"
#include "sim/protocol/backend.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

struct RunConfig {
  EngineConfig engine;
  BackendConfig backend;  // its plan says groups and pool, also where the decisions run alone
  CheckBudget budget;
  std::string drafter_not_followed{};  // why; empty: it is, or there is none
  std::int64_t steps_max = 0;          // stop after this many steps; 0: no limit
};

}  // namespace lockstep
