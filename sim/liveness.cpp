#include "sim/liveness.h"

#include <fmt/core.h>

#include "reference/page_size.h"

namespace lockstep {
namespace {

constexpr std::int64_t kCheckEvery = 1024;
constexpr std::int64_t kRoundsOfPreemption = 4;

// Blocks that all of a request's tokens take in a group.
std::int64_t blocks_for(const KVCacheSpec& spec, std::int64_t tokens) {
  if (spec.kind == CacheKind::mamba && spec.mamba_cache_mode != MambaCacheMode::all)
    return 1 + spec.num_speculative_blocks;
  std::int64_t kept = tokens;
  if (spec.kind == CacheKind::sliding_window)
    kept = std::min(tokens, spec.sliding_window + spec.block_size);
  if (spec.kind == CacheKind::chunked_local)
    kept = std::min(tokens, spec.attention_chunk_size + spec.block_size);
  return cdiv(kept, spec.block_size);
}

}  // namespace

bool ProgressGuard::is_stuck(const DecisionSource& decisions) {
  if (++steps_ % kCheckEvery != 0) return false;
  std::int64_t tokens = 0;
  for (const RequestId id : decisions.running()) tokens += decisions.num_tokens(id);
  for (const RequestId id : decisions.waiting()) tokens += decisions.num_tokens(id);
  const std::int64_t per_step = config_.engine.async_scheduling ? 2 : 1;
  return steps_ > kRoundsOfPreemption * per_step * tokens;
}

std::string why_stuck(const DecisionSource& decisions, const KVCacheConfig& plan, RequestId id) {
  const std::int64_t tokens = decisions.num_tokens(id);
  std::int64_t needed = 0;
  for (const KVCacheGroupSpec& group : plan.groups) needed += blocks_for(group.spec, tokens);
  const std::int64_t total = plan.num_blocks - 1;  // without the null block
  const std::int64_t free = decisions.num_free_blocks();
  std::string why = fmt::format("needs about {} blocks for its {} tokens; {} of {} are free",
                                needed, tokens, free, total);
  if (needed > total) return why + ": it can never fit";
  if (free < needed) return why + ", and nobody runs who would free any";
  return why + ": they would do, yet it is not scheduled";
}

}  // namespace lockstep
