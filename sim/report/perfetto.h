// A run as a trace for Perfetto (ui.perfetto.dev, trace_processor): a track for each request with
// what it was at, one for the steps, and counters of the pool, the queues and the prefix cache.
//
// (1) Perfetto's own format: a Trace of TracePackets (protos/perfetto/trace/trace.proto), tracks by
//     TrackDescriptor, slices and counters by TrackEvent.
// (2) Time is the run's virtual clock; where two steps share an instant, a step is a microsecond.
//
// Drawn is what a Timeline holds; what it has left out stands in the name of its track.
#pragma once

#include <string>

#include "sim/report/timeline.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// The bytes of the trace. `title`: what was run.
std::string perfetto_trace(const std::string& title, const RunSummary& summary,
                           const Timeline& timeline);

}  // namespace lockstep
