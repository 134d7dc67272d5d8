#include "properties/generate/fault_generator.h"

#include <algorithm>
#include <utility>

#include "properties/generate/generator_parts.h"
#include "properties/invariants/planned_need.h"

namespace lockstep {
namespace {

using enum FaultKind;

constexpr std::int64_t kLastsMax = 6;  // steps

PlannedFault draw_fault(ChoiceSource& choices, const FaultRoom& room) {
  PlannedFault fault;
  fault.kind = choices.one_of({refuse_allocation, pinch_pool, pinch_pool, early_output, late_output,
                               abort_waiting, abort_first_chunk, abort_mid_prefill, abort_decode,
                               abort_preempted, abort_in_flight, abort_again});
  fault.step = choices.below(room.steps);
  if (is_abort(fault.kind)) {
    if (fault.kind != abort_again) fault.number = choices.below(4);
    return fault;
  }
  fault.steps = choices.between(1, kLastsMax);
  if (fault.kind == pinch_pool)
    fault.number = std::max<std::int64_t>(
        0, room.blocks_of_request -
               choices.one_of<std::int64_t>({0, 0, 0, 1, room.blocks_of_request / 2}));
  return fault;
}

}  // namespace

FaultPlan draw_faults(ChoiceSource& choices, const FaultRoom& room) {
  std::vector<PlannedFault> faults;
  const std::int64_t count = choices.between(1, room.faults_max);
  for (std::int64_t i = 0; i < count; ++i) faults.push_back(draw_fault(choices, room));
  return FaultPlan(std::move(faults));
}

void draw_fault_plan(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::faults)) return;
  const FaultRoom room{.blocks_of_request =
                           planned_blocks_of_request(saved.engine, saved.cache.groups)};
  saved.faults = faults_of(draw_faults(draw.choices, room));
}

}  // namespace lockstep
