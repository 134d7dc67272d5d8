// The requests of a recording as a request trace: for another engine, which samples at other steps
// than the recorded one did.
#pragma once

#include "base/result.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

// What came before step k arrives at k * step_ns: on a clock on which every step takes step_ns that
// is before step k again, as long as no engine idles longer. A request's output is as long as the
// recorded one; one that did not end gets all its max_tokens. Errors: a recording with a KV
// connector.
Result<Trace> trace_of(const Recording& recording, std::int64_t step_ns);

}  // namespace lockstep
