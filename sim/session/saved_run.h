// From the spec of a run, or a saved case, to what runs: configuration, workload, the pool's order.
// And back, so that a replay comes to the same divergence again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/session/session.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// The run as it was and how it ended; trace or recording are added by the caller.
SavedCase case_of(std::string name, const RunSpec& run, const RunSummary& summary);
// The first `count` records of a trace: those that a run had consumed when it ended, and the
// header.
void keep_records(Trace& trace, std::int64_t count);

// A mutant that is none of the engine's is taken for one of the backend's, which refuses those that
// it does not know when it is made.
LockstepConfig config_of(const RunSpec& run);
// A recording says itself what becomes of requests whose load fails.
LockstepConfig config_of(const SavedCase& saved);
// The order in which the pool first hands out its blocks, shuffled by block_order; empty: as an
// engine does.
std::vector<BlockId> free_order_of(const RunSpec& run);
TraceWorkloadOptions workload_options_of(const RunSpec& run);
// The requests of a saved case as a source of records.
std::unique_ptr<TraceReader> trace_reader_of(Trace trace);
// Its trace by the clock, or its recording step by step when it has one; without a connector of the
// configuration.
std::unique_ptr<Workload> workload_of(const SavedCase& saved);
// What Session::open() is given for it, less a backend and who looks on.
SessionParts parts_of(const SavedCase& saved);
// Its requests on one engine that nothing disturbs: no faults, no data parallel ranks, no
// connectors of theirs.
Result<std::unique_ptr<Session>> open_undisturbed(const SavedCase& saved, LockstepConfig config,
                                                  BackendFactory backend, Attach attach);

}  // namespace lockstep
