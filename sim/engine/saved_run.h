// From the spec of a run, or a saved case, to what runs: the configuration, the workload, the pool's
// order. And back, so that a replay comes to the same divergence again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/engine/lockstep.h"
#include "sim/engine/workload.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// The run as it was and how it ended; trace or recording are added by the caller.
SavedCase case_of(std::string name, const RunSpec& run, const RunSummary& summary);
// The first `count` records of a trace: those that a run had consumed when it ended, and the
// header.
void keep_records(Trace& trace, std::int64_t count);

LockstepConfig config_of(const RunSpec& run);
// A recording says itself what becomes of requests whose load fails.
LockstepConfig config_of(const SavedCase& saved);
// Plants the defect of that name where it belongs: in the scheduler, in a connector, in how an
// engine sets its connectors up, in data parallel ranks, in files of hidden states. Every other
// name is taken for one of the backend's, which refuses those that it does not know when it is
// made.
void plant(LockstepConfig& config, const std::string& mutant);
// The name of what is planted; empty: nothing.
std::string mutant_of(const LockstepConfig& config);
// The order in which the pool first hands out its blocks, shuffled by block_order; empty: as an
// engine does.
std::vector<BlockId> free_order_of(const RunSpec& run);
TraceWorkloadOptions workload_options_of(const RunSpec& run);
// The requests of a saved case as a source of records.
std::unique_ptr<TraceReader> trace_reader_of(Trace trace);
// Its trace by the clock, or its recording step by step when it has one; with its connector, unless
// there are data parallel ranks, each of which has its own.
std::unique_ptr<Workload> workload_of(const SavedCase& saved);

}  // namespace lockstep
