#include "sim/verdict/state_hash.h"

namespace lockstep {

void StateHashChain::add(const SchedulerOutput& decision) {
  add(static_cast<std::uint64_t>(decision.step) << 32 | decision.scheduled.size());
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    add(static_cast<std::uint64_t>(index_of(scheduled.id)) << 32 |
        static_cast<std::uint32_t>(scheduled.num_tokens));
    add(static_cast<std::uint64_t>(scheduled.computed) << 32 |
        static_cast<std::uint64_t>(scheduled.num_spec) << 2 |
        static_cast<std::uint64_t>(scheduled.is_new) << 1 |
        static_cast<std::uint64_t>(scheduled.is_resumed));
  }
  const auto add_all = [this](const auto& list) {
    add(list.size());
    for (const auto& entry : list) add(static_cast<std::uint64_t>(entry));
  };
  add_all(decision.block_ends);
  add_all(decision.block_ids);
  add_all(decision.spec_tokens);
  add_all(decision.preempted);
  add_all(decision.finished);
  add_all(decision.zero);
  add_all(decision.common_prefix_blocks);
}

}  // namespace lockstep
