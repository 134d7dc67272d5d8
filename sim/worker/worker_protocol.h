// The messages of the worker protocol and its replies, as lines of JSON: docs/protocols.md.
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

inline constexpr std::int64_t kWorkerProtocolVersion = 1;

// Messages, each with its newline. `protocol`: "worker_protocol" and the like.
std::string hello_message_of(std::string_view protocol, std::int64_t version);
std::string worker_hello_message();
// `memory`: the path of what both map. `kernel_block_sizes`: by group; empty: blocks are not split.
std::string worker_open_message(const RecordingHeader& header, std::string_view memory,
                                std::span<const std::int64_t> kernel_block_sizes);

// A row of a step: what the engine tells its worker of it, and the contents of its tokens.
struct WorkerRow {
  const ScheduledRequest* scheduled = nullptr;
  std::string_view name;
  const RequestSpec* spec = nullptr;
  std::int64_t num_known = 0;                // tokens, drafts left out
  std::vector<std::vector<BlockId>> blocks;  // handed over, by group
  std::vector<std::int32_t> drafts;
  std::vector<std::uint64_t> contents;
};
struct WorkerStep {
  std::int64_t step = 0;
  // What the previous step sampled, by request.
  std::vector<std::pair<std::string, std::vector<std::int32_t>>> sampled;
  std::vector<WorkerRow> rows;
  std::vector<std::string> finished, preempted;
  std::vector<BlockId> zero;
  std::vector<KVCacheBlockCopy> copies;
};
std::string worker_step_message(const WorkerStep& step);
// What the previous step sampled, as its own message: for workers that move states on receipt,
// before anything is written in between.
std::string worker_sample_message(const WorkerStep& step);

// Hidden states of a request that has finished, for the worker to save in a file.
struct SavedStates {
  std::string request, layer;
  std::int64_t num_tokens = 0;
};
std::string worker_extract_message(std::span<const SavedStates> wanted);

// Replies. Of hello: the features; the runner is one of them, "runner:v1".
EngineHello read_hello_of(JsonObject& object, std::string_view protocol, std::int64_t version);
EngineHello read_worker_hello(JsonObject& object);

struct WorkerOpened {
  std::string refused;  // not empty: and nothing else
  std::int64_t bytes = 0;
  std::string order;
  std::vector<WorkerLayer> layers;
};
WorkerOpened read_worker_opened(JsonObject& object);

struct WorkerGroupFacts {
  std::vector<std::vector<std::int32_t>> tables;  // by row of the worker's batch
  // What attention reads through, where it is not the first entries of `tables`; else empty.
  std::vector<std::vector<std::int32_t>> reads;
  std::vector<Slot> slots;  // of all tokens; none of groups that keep states
};
// What the worker made of a step, in the order of its own batch.
struct WorkerFacts {
  std::vector<std::string> rows;
  std::vector<std::int32_t> num_tokens;
  std::vector<std::int64_t> positions;
  std::vector<WorkerGroupFacts> groups;
  std::vector<std::string> faults;
};
WorkerFacts read_worker_facts(JsonObject& object);
// The faults of a `sampled`.
std::vector<std::string> read_worker_sampled(JsonObject& object);
// The files of an `extracted`, and the rows in one of them.
std::vector<std::string> read_worker_extracted(JsonObject& object);
Result<void> append_saved_states(const std::string& file, std::vector<std::uint8_t>& rows);

}  // namespace lockstep
