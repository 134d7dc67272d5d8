// The messages of the worker protocol and its replies, as lines of JSON: docs/protocols.md.
//
// Readers check the form of a reply and its value types; JsonObject collects the first error. Not
// checked here: whether lists of a reply have matching lengths (WorkerBackend::is_whole()).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/json_reader.h"
#include "base/result.h"
#include "reference/types/scheduler_types.h"
#include "sim/worker/page_map.h"
#include "traces/formats/recording.h"
#include "traces/formats/scheduler_protocol.h"

namespace lockstep {

// Version that both sides must have: the hello of any other one is refused.
inline constexpr std::string_view kWorkerProtocol = "worker_protocol";
inline constexpr std::int64_t kWorkerProtocolVersion = 1;

// Messages; each ends with a newline.
// Opens a case. `memory`: path of the file that both processes map. `kernel_block_sizes`: per
// group, in tokens; empty: blocks are not split.
std::string worker_open_message(const RecordingHeader& header, std::string_view memory,
                                std::span<const std::int64_t> kernel_block_sizes);

// A row of a step: what the engine sends to its worker for it, and the contents of its tokens. The
// pointers are valid during the step.
struct WorkerRow {
  const ScheduledRequest* scheduled = nullptr;
  std::string_view name;
  const RequestSpec* spec = nullptr;
  std::int64_t num_known = 0;                // known tokens, without drafts
  std::vector<std::vector<BlockId>> blocks;  // newly sent, per group
  std::vector<std::int32_t> drafts;          // tokens to verify
  std::vector<std::uint64_t> contents;       // one per scheduled token
};
// One step as the worker receives it, in the engine's order.
struct WorkerStep {
  std::int64_t step = 0;
  // Tokens that the previous step sampled, by request name.
  std::vector<std::pair<std::string, std::vector<std::int32_t>>> sampled;
  std::vector<WorkerRow> rows;
  std::vector<std::string> finished, preempted;
  std::vector<BlockId> zero;
  std::vector<KVCacheBlockCopy> copies;
};
// One step. REQUIRES: the contents of each row are set.
std::string worker_step_message(const WorkerStep& step);
// What the previous step sampled, as a separate message. Workers with recurrent states copy them on
// receipt, before anything else is written.
std::string worker_sample_message(const WorkerStep& step);

// Hidden states of a finished request, which the worker saves in a file.
struct SavedStates {
  std::string request, layer;
  std::int64_t num_tokens = 0;
};
std::string worker_extract_message(std::span<const SavedStates> wanted);

// Replies. The hello lists features; the model runner is one of them: "runner:v1".
EngineHello read_hello_of(JsonObject& object, std::string_view protocol, std::int64_t version);

// The reply to an open message.
struct WorkerOpened {
  std::string refused;     // the reason; if set, nothing else is
  std::int64_t bytes = 0;  // of the shared memory
  std::string order;       // layout of later releases; empty: that of 0.22.1
  std::vector<WorkerLayer> layers;
};
WorkerOpened read_worker_opened(JsonObject& object);

// The block tables and slots of one group, as the worker's kernels received them.
struct WorkerGroupFacts {
  std::vector<std::vector<std::int32_t>> tables;  // by row of the worker's batch
  // Tables that attention reads through, if they are not the first entries of `tables`; else empty.
  std::vector<std::vector<std::int32_t>> reads;
  std::vector<Slot> slots;  // of all tokens; empty for state groups
};
// What the worker did with a step, in the order of its own batch, which may differ from the
// engine's.
struct WorkerFacts {
  std::vector<std::string> rows;         // request names
  std::vector<std::int32_t> num_tokens;  // per row
  std::vector<std::int64_t> positions;   // per token, row by row
  std::vector<WorkerGroupFacts> groups;
  std::vector<std::string> faults;  // differences that the worker's process found
};
// Returns the facts of an `executed` reply.
WorkerFacts read_worker_facts(JsonObject& object);
// Returns the faults of a `sampled` reply.
std::vector<std::string> read_worker_sampled(JsonObject& object);
// Returns the files of an `extracted` reply.
std::vector<std::string> read_worker_extracted(JsonObject& object);
// Appends the bytes of the file's tensor hidden_states: [num_tokens, hidden_size]. Errors: an
// unreadable file, or no such tensor.
Result<void> append_saved_states(const std::string& file, std::vector<std::uint8_t>& rows);

}  // namespace lockstep
