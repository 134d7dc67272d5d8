// The memory of one model under several releases, side by side: what an upgrade costs. Each release
// plans with its own planner (0.22.1's for all releases before the overlaid plan) and keeps states
// as it serves them.
//
// Not shown: memory of weights and activations; options.memory_bytes is what the caches get.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/plan/model_spec.h"
#include "reference/types/engine_config.h"

namespace lockstep {

// One release's plan. With several workers, capacity and concurrency are those of the tightest one.
struct ReleaseMemory {
  std::string engine;
  bool by_older_planner = false;  // the release's own planner is not modelled
  std::string refused;            // the reason; empty: the release starts
  std::string order;              // layout of the cache; empty for older releases
  MambaCacheMode states = MambaCacheMode::none;
  std::int64_t block_size = 0;  // tokens per block of the prefix cache
  std::int64_t groups = 0;
  std::int64_t num_blocks = 0;
  std::int64_t bytes_per_block = 0;
  std::int64_t capacity_tokens = 0;
  double at_once = 0;  // concurrent requests of max_model_len tokens
  bool operator==(const ReleaseMemory&) const = default;
};

// Plans the model under each of `engines`, in order. A release that refuses the plan has its reason
// in `refused`. `engine`: prefix caching and drafts, which decide how states are kept; its name is
// ignored. `says_mode`: the user set options.mamba_cache_mode. Errors: a name without a profile,
// layers that tp does not divide.
Result<std::vector<ReleaseMemory>> memory_of_releases(const ModelSpec& model,
                                                      const PlanOptions& options, bool says_mode,
                                                      EngineConfig engine,
                                                      std::span<const std::string> engines);

// Returns a table with one release per line, and the change of capacity from line to line.
std::string memory_table(const ModelSpec& model, const PlanOptions& options,
                         std::span<const ReleaseMemory> releases);

}  // namespace lockstep
