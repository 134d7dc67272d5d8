// Mooncake's request traces (JSON lines): timestamp in ms, lengths, and the ids of the prompt's
// blocks of 512 tokens, the last of them covering what is left. An id stands for the block's
// content and everything before it, so equal ids are equal prefixes; here it is the seed of a
// symbolic run.
//
// Keys: timestamp (or created_time), input_length (or input_tokens), output_length (or
// output_tokens), hash_ids. Any other key is refused, and so is a row whose ids do not cover its
// prompt exactly. Arrivals count from the trace's own zero; rows at equal times keep the file's
// order.
#pragma once

#include <memory>

#include "traces/importers/open_trace.h"

namespace lockstep {

Result<std::unique_ptr<TraceReader>> open_mooncake(const std::string& path,
                                                   const ImportOptions& options);

}  // namespace lockstep
