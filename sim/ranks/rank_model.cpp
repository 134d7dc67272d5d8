#include "sim/ranks/rank_model.h"

#include <utility>

#include "reference/plan/rank_plan.h"
#include "sim/engine/lockstep.h"

namespace lockstep {

Result<RankModel> rank_model(const BackendConfig& device, std::int32_t rank) {
  BackendConfig own = device_of_rank(device, rank);
  auto plan = rank_plan(device.plan, own.parallel, device.queries_per_kv);
  if (!plan) return tl::unexpected(plan.error());
  own.plan = std::move(plan->plan);
  auto model = MemoryModel::create(own.plan, own.attention_backend, own.layout, own.layout_rule,
                                   own.num_host_blocks, own.numbers, plan->layers);
  if (!model) return tl::unexpected(model.error());
  return RankModel{std::move(own), std::move(*model)};
}

}  // namespace lockstep
