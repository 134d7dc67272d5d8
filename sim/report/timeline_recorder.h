// Fills a Timeline while a run goes on, within its limits.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "reference/types/scheduler_types.h"
#include "sim/engine/decision_source.h"
#include "sim/engine/lockstep.h"
#include "sim/report/timeline.h"

namespace lockstep {

class TimelineRecorder {
 public:
  explicit TimelineRecorder(const LockstepConfig& config);

  void added(RequestId id, std::string_view name, std::int64_t prompt_tokens, std::int64_t step);
  void decided(const SchedulerOutput& decision, const DecisionSource& decisions,
               std::int64_t now_ns);
  void finished(std::span<const StoppedRequest> stopped, const CacheCounters& counters,
                const DecisionSource& decisions);
  // The request leaves at the end of the current step.
  void ended(RequestId id, std::string_view reason);
  Timeline take();

 private:
  void extend(std::int32_t lane, LaneSpan::Kind kind, std::int64_t step);
  std::int32_t lane_of(RequestId id) const;
  void add_step(const TimelineStep& step);
  void follow_blocks(const DecisionSource& decisions, TimelineStep& entry);
  void thin_steps();
  void thin_changes();

  const LockstepConfig& config_;
  Timeline timeline_;
  std::vector<std::int32_t> lanes_;  // by RequestId; -1: not drawn
  std::vector<BlockChange> drawn_;   // per block: the state drawn last
  std::vector<BlockChange> blocks_;  // per block: the state now
  std::int64_t step_ = 0;
  std::int64_t stride_ = 1;         // steps in one entry
  std::int64_t change_stride_ = 1;  // steps between two looks at the pool
  std::int64_t undrawn_lanes_ = 0;
};

}  // namespace lockstep
