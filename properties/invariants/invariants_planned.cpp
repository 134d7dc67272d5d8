// Whether pools are planned for what requests hold.
#include <fmt/core.h>

#include <algorithm>

#include "properties/invariants/invariants.h"
#include "properties/invariants/planned_need.h"
#include "reference/plan/page_size.h"
#include "reference/plan/request_need.h"

namespace lockstep {

// Pools are planned without what a step takes while another is in flight, and without the slots of
// drafts (docs/findings.md, 5 and 6): as much is let pass here, and liveness says what comes of it.
void Invariants::check_planned(const StepView& view) {
  const PlanOptions options = plan_options_of(engine_);
  // Beside the step that has just been decided. What one of them kept stays until the next one.
  in_flight_max_ = std::max(in_flight_max_, view.model().num_steps_in_flight() - 1);
  for (std::int32_t g = 0; g < std::ssize(plan_.groups); ++g) {
    const KVCacheGroupSpec& group = plan_.groups[static_cast<std::size_t>(g)];
    std::int64_t most = max_blocks_per_request(group, options);
    if (engine_.async_scheduling)
      most += in_flight_max_ * (is_state_kind(group.spec.kind)
                                    ? 1
                                    : cdiv(engine_.max_num_batched_tokens, group.spec.block_size));
    // States are planned with a block for each draft; where the release retires by scheduled tokens
    // it keeps as many again, in case drafts are rejected.
    if (!is_state_kind(group.spec.kind) || profile_.retire_basis == RetireBasis::scheduled)
      most += cdiv(engine_.num_spec_tokens, group.spec.block_size);
    for (const RequestId id : holding(view)) {
      const auto table = view.model().block_table(id, g);
      const auto held = std::ssize(table) - std::ranges::count(table, kNullBlock);
      if (held > most)
        return fail("planned_blocks", std::string(view.model().name(id)),
                    fmt::format("{} blocks of group {} are held, and the pool is planned for {} a "
                                "request",
                                held, g, most));
    }
  }
}

}  // namespace lockstep
