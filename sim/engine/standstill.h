// What a run looks like when nothing runs any more: the queue with what each request holds and
// misses, for find_wait_cycle().
#pragma once

#include <cstdint>
#include <map>

#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/engine/decision_source.h"
#include "sim/engine/wait_graph.h"

namespace lockstep {

// Blocks that `tokens` tokens of one request take in all groups.
std::int64_t num_blocks_for(std::span<const KVCacheGroupSpec> groups, std::int64_t tokens);

// Blocks that a waiting request has to be given beside those it holds: for all its tokens where the
// engine reserves them at once, else for its next chunk.
std::int64_t num_blocks_missing(const EngineConfig& engine,
                                std::span<const KVCacheGroupSpec> groups, std::int64_t num_tokens,
                                std::int64_t num_computed_tokens, std::int64_t blocks_held);

// Since when requests of a run that wait hold blocks. With a KV connector only: without one, none
// do.
class HoldingWatch {
 public:
  // Once a step, after its output was processed.
  void step(const DecisionSource& decisions, std::int64_t step);
  std::int64_t since(RequestId request) const;  // -1: holds none

 private:
  std::map<RequestId, std::int64_t> since_;
};

std::int64_t num_blocks_held(const DecisionSource& decisions, RequestId request,
                             std::size_t num_groups);

// REQUIRES: no request runs.
Standstill standstill_of(const DecisionSource& decisions, const EngineConfig& engine,
                         const KVCacheConfig& plan, const HoldingWatch& watch);

}  // namespace lockstep
