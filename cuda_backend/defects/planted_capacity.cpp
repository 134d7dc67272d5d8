#include "cuda_backend/defects/planted_capacity.h"

#include <algorithm>

namespace lockstep::cuda {
namespace {

// The older figure: blocks shared out among groups, the smallest block size of them each.
std::int64_t shared_out_tokens(const KVCacheConfig& plan, bool count_states) {
  std::int64_t groups = 0;
  std::int64_t smallest = 0;
  for (const KVCacheGroupSpec& group : plan.groups) {
    const bool bounded_state =
        group.spec.kind == CacheKind::mamba && group.spec.mamba_cache_mode != MambaCacheMode::all;
    if (bounded_state && !count_states) continue;
    ++groups;
    smallest = smallest == 0 ? group.spec.block_size : std::min(smallest, group.spec.block_size);
  }
  return groups == 0 ? 0 : plan.num_blocks / groups * smallest;
}

}  // namespace

std::string_view name_of(CapacityDefect defect) {
  switch (defect) {
    case CapacityDefect::none:
      return "none";
    case CapacityDefect::capacity_all_groups:
      return "capacity-all-groups";
    case CapacityDefect::capacity_sliding:
      return "capacity-sliding";
    case CapacityDefect::routed_buffer:
      return "routed-buffer";
    case CapacityDefect::state_blocks_capped:
      return "state-blocks-capped";
    case CapacityDefect::cp_memory:
      return "cp-memory";
    case CapacityDefect::hit_rate_pack:
      return "hit-rate-pack";
  }
  return "?";
}

std::optional<CapacityDefect> capacity_defect_from_name(std::string_view name) {
  using enum CapacityDefect;
  for (const CapacityDefect defect : {capacity_all_groups, capacity_sliding, routed_buffer,
                                      state_blocks_capped, cp_memory, hit_rate_pack})
    if (name_of(defect) == name) return defect;
  return std::nullopt;
}

Result<EngineCapacity> planted_capacity(const KVCacheConfig& plan, const RequestLimits& told,
                                        CapacityDefect defect) {
  RequestLimits limits = told;
  if (defect == CapacityDefect::cp_memory) limits.context_ranks = 1;
  const bool has_states = std::ranges::any_of(plan.groups, [](const KVCacheGroupSpec& group) {
    return group.spec.kind == CacheKind::mamba;
  });
  if (defect == CapacityDefect::state_blocks_capped && has_states)
    limits.max_num_seqs = std::min(limits.max_num_seqs, plan.num_blocks);
  auto capacity = engine_capacity(plan, limits);
  if (!capacity) return capacity;
  if (defect == CapacityDefect::capacity_all_groups)
    capacity->capacity_tokens = shared_out_tokens(plan, true);
  if (defect == CapacityDefect::capacity_sliding)
    capacity->capacity_tokens = shared_out_tokens(plan, false);
  if (defect == CapacityDefect::routed_buffer)
    capacity->slot_buffer_rows = capacity->capacity_tokens;
  if (defect == CapacityDefect::hit_rate_pack) {
    KVCacheConfig longer = plan;
    for (KVCacheGroupSpec& group : longer.groups) group.spec.block_size *= group.layers_per_page;
    const auto hits = engine_capacity(longer, limits);
    if (!hits) return hits;
    capacity->hit_step_tokens = hits->hit_step_tokens;
  }
  return capacity;
}

}  // namespace lockstep::cuda
