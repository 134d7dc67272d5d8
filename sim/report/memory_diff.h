// The memory of one model under several releases, side by side: what an upgrade costs it. Each
// release plans by its own planner (0.22.1's for all before the overlaid plan) and keeps states as
// it serves them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/plan/model_spec.h"
#include "reference/types/engine_config.h"

namespace lockstep {

struct ReleaseMemory {
  std::string engine;
  bool by_older_planner = false;  // the release has another, which this project has not
  std::string refused;            // by the planner, or by a worker; empty: it is served
  std::string order;              // of the cache; older releases: none
  MambaCacheMode states = MambaCacheMode::none;
  std::int64_t block_size = 0;  // tokens of the smallest block that is found by prefix
  std::int64_t groups = 0;
  std::int64_t num_blocks = 0;
  std::int64_t bytes_per_block = 0;
  std::int64_t capacity_tokens = 0;
  double at_once = 0;  // requests of max_model_len
  bool operator==(const ReleaseMemory&) const = default;
};

// `engine`: prefix caching and drafts, which decide how states are kept; its name is ignored.
// `says_mode`: the user set options.mamba_cache_mode. Errors: a name without a profile, layers that
// tp does not divide.
Result<std::vector<ReleaseMemory>> memory_of_releases(const ModelSpec& model,
                                                      const PlanOptions& options, bool says_mode,
                                                      EngineConfig engine,
                                                      std::span<const std::string> engines);

// Whether all of them are served with the same capacity.
bool is_same_memory(std::span<const ReleaseMemory> releases);

// A table, one release a line, and by how much capacity changes from one to the next.
std::string memory_table(const ModelSpec& model, const PlanOptions& options,
                         std::span<const ReleaseMemory> releases);

}  // namespace lockstep
