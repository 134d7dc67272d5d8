// What the loop of one engine is told.
#pragma once

#include <cstdint>

#include "reference/types/engine_config.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// What is read back in one step beyond tables, slots and written pages, which are always compared.
struct CheckBudget {
  std::int64_t probe_rows = 16'384;  // cache rows (token, part, head) under attention digests
  std::int64_t query_rows = 4'096;   // under attention outputs
  std::int64_t untouched_pages = 64;
  bool operator==(const CheckBudget&) const = default;
};

struct RunConfig {
  EngineConfig engine;
  BackendConfig device;  // device.plan says groups and pool, with or without a backend
  CheckBudget budget;
  std::int64_t steps_max = 0;  // stop after so many; 0: no limit
};

}  // namespace lockstep
