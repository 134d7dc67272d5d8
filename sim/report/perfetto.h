// A run as a trace for Perfetto (ui.perfetto.dev, trace_processor): one track per request with its
// phases, one for the steps, and counters of the pool, the queues and the prefix cache.
//
// Invariants
// (1) Perfetto's own format: a Trace of TracePackets (protos/perfetto/trace/trace.proto), tracks by
//     TrackDescriptor, slices and counters by TrackEvent.
// (2) Time is the run's virtual clock. Where two steps share an instant, a step takes one
//     microsecond.
//
// It shows the content of a Timeline; a track's name lists what the Timeline left out.
#pragma once

#include <string>

#include "sim/report/timeline.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// The bytes of the trace. `title`: what was run.
std::string perfetto_trace(const std::string& title, const RunSummary& summary,
                           const Timeline& timeline);

}  // namespace lockstep
