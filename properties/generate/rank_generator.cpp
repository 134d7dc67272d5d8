// Ranks of every kind, few of each: what grows with their number is the time alone.
#include <algorithm>

#include "properties/generate/generator_parts.h"
#include "reference/plan/page_size.h"
#include "sim/engine/lockstep.h"

namespace lockstep {
namespace {

// The plan again, with other heads and states: pages of all groups as large as the largest.
bool plan_with(SavedCase& saved, std::vector<KVCacheGroupSpec> groups) {
  for (KVCacheGroupSpec& group : groups) group.spec.page_size_padded.reset();
  auto plan = plan_for_groups(std::move(groups), saved.cache.num_blocks);
  if (!plan) return false;
  saved.cache = std::move(*plan);
  return true;
}

// Groups whose pages follow from more than their heads and states.
bool is_special(const KVCacheGroupSpec& group) {
  return group.layers_per_page > 1 || group.is_uniform_type() ||
         group.spec.kv_quant_mode != KVQuantMode::none;
}

// Cut: heads and channels are multiples of tp. Replicated: fewer heads than ranks.
void draw_tensor_parallel(Draw& draw, SavedCase& saved) {
  const std::int32_t tp = draw.choices.one_of({2, 2, 4});
  const bool replicated = draw.has(Feature::replicated_heads);
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  for (KVCacheGroupSpec& group : groups) {
    KVCacheSpec& spec = group.spec;
    if (!is_state_kind(spec.kind) && !has_single_rows(spec))
      spec.num_kv_heads =
          replicated ? draw.choices.one_of({1, tp / 2}) : tp * draw.choices.between(1, 2);
    for (StateTensorSpec& state : spec.states)
      for (std::int64_t& dim : state.dims) dim = round_up(dim, tp);
  }
  if (!plan_with(saved, std::move(groups))) return;
  saved.tensor_parallel_size = tp;
  saved.queries_per_kv = tp * static_cast<std::int32_t>(draw.choices.between(1, 2));
}

}  // namespace

void draw_ranks(Draw& draw, SavedCase& saved) {
  if (draw.runs_kernels() && std::ranges::none_of(saved.cache.groups, is_special)) {
    if (draw.has(Feature::tensor_parallel)) draw_tensor_parallel(draw, saved);
    if (draw.has(Feature::pipeline_parallel)) saved.pipeline_parallel_size = 2;
  }
  if (!draw.has(Feature::data_parallel)) return;
  saved.data_parallel_size = static_cast<std::int32_t>(draw.choices.between(2, 3));
  saved.enforce_eager = draw.choices.below(2) != 0;
}

}  // namespace lockstep
