// The parts that can be taken out of a saved case, and the case without them: records of the trace
// or of the recording, groups and layers of the plan.
//
// (1) What is left is whole: requests name no removed one in `after`, times never decrease, tensors
//     hold the layers that are there, and the pages of all groups are equally large.
// (2) The case that is given is not changed.
//
// Not looked after here: whether the run still fails, and whether an engine takes the options.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "traces/formats/saved_case.h"

namespace lockstep {

// A request or a control; in a recording a request with all that is said about it.
std::size_t num_records(const SavedCase& saved);
// keep[i]: record i stays. REQUIRES: one entry a record.
SavedCase with_records(const SavedCase& saved, const std::vector<bool>& keep);

// The requests of the trace or of the recording, in order; the pointers are into `saved`.
std::vector<RequestSpec*> requests_of(SavedCase& saved);
std::vector<const RequestSpec*> requests_of(const SavedCase& saved);
// The same of a trace alone, with outputs and aborts; empty for a recording.
std::vector<TraceRequest*> trace_requests_of(SavedCase& saved);

// Takes the tokens out of the prompt that no literal run points to, after runs were cut.
void drop_unused_tokens(Prompt& prompt);

SavedCase without_group(const SavedCase& saved, std::size_t group);
SavedCase without_layer(const SavedCase& saved, std::size_t group, std::size_t layer);

// Layers that keep a state instead of keys and values.
bool has_states(const SavedCase& saved);
bool has_connector(const SavedCase& saved);
// Loads of its connector may leave blocks unfilled.
bool may_lose_blocks(const SavedCase& saved);

// Changes every spec of a group alike: the group's own and those of its layers.
void change_specs(SavedCase& saved, std::size_t group,
                  const std::function<void(KVCacheSpec&)>& change);

// Tensors for the groups as they are: pages padded to the largest and not beyond. False: a group
// packs several layers into a page, or a page is too large to count, and nothing was changed.
bool plan_again(SavedCase& saved);
// Another number of blocks in the same plan. False: a tensor is not a whole number of pages, and
// nothing was changed.
bool set_num_blocks(SavedCase& saved, std::int64_t num_blocks);

}  // namespace lockstep
