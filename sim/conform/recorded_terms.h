// A step of a run in the terms of a recording: what conform holds against a recorded step, and what
// a run recorder writes.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/engine/lockstep.h"
#include "traces/formats/recording.h"

namespace lockstep {

// "stop", "length", "abort", "error"
std::string_view reason_of(FinishReason reason);
std::vector<std::string> names_of(const StepView& view, std::span<const RequestId> ids);

// What was decided: everything but the events, the common prefix, tables and the connector.
void write_decision(const StepView& view, RecordedStep& step);
// The whole block table of one request. REQUIRES: it is live, or has finished and keeps its blocks.
RecordedTable table_of(const StepView& view, RequestId id);
// ... of every running request.
std::vector<RecordedTable> tables_of(const StepView& view);
// With a KV connector: the queue of skipped requests, and the tables of those that load.
void write_transfers(const StepView& view, RecordedStep& step);
// What the step's reset_prefix_cache events returned, in order.
void write_reset_results(const StepView& view, std::vector<RecordedEvent>& events);
// What the step's output ended, and what became of the prefix cache.
void write_outcome(const StepView& view, RecordedStep& step);

}  // namespace lockstep
