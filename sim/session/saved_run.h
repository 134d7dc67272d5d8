// From a run to a saved case and back: what a replay needs to come to the same divergence again.
//
// Settings that a saved case keeps by name: probe_rows, query_rows, untouched_pages,
// queries_per_kv, num_streams, delay_streams, tensor_parallel_size, pipeline_parallel_size,
// data_parallel_size, enforce_eager (0 or 1), cp_kv_cache_interleave_size, step_base_ns,
// step_token_ns, draft_acceptance_percent; block_order, the seed of free_order_of(); of a
// connector: connector (0 none; a digit a part, in order: 1 peers, 2 a host tier, 3 peers of one
// group), host_blocks, load_failed_percent (-1: as each part does by itself), transfer_delay_steps,
// load_failure_fails. An absent one has its default.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/session/session.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// Everything but trace and recording, which the caller adds.
SavedCase save_case(std::string name, const LockstepConfig& config,
                    const TraceWorkloadOptions& options, const RunSummary& summary);
// The first `count` records of a trace: those that a run had consumed when it ended, and the
// header.
void keep_records(Trace& trace, std::int64_t count);

LockstepConfig config_of(const SavedCase& saved);
// Plants the defect of that name where it belongs: in the scheduler, in a connector, in how an
// engine sets its connectors up, in data parallel ranks, in files of hidden states. Every other
// name is taken for one of the backend's, which refuses those that it does not know when it is
// made.
void plant(LockstepConfig& config, const std::string& mutant);
// The name of what is planted; empty: nothing.
std::string mutant_of(const LockstepConfig& config);
// The order in which the pool first hands out its blocks, shuffled by setting block_order; empty:
// as an engine does.
std::vector<BlockId> free_order_of(const SavedCase& saved);
TraceWorkloadOptions workload_options_of(const SavedCase& saved);
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
