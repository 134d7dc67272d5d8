// Facts of an engine's own worker about a step, as a recording may carry them: the key `facts` of a
// step, where the header has `worker_facts` (docs/formats.md, "Worker facts"). They show which
// rows, slots and pages the worker used, so that the audit can check them without the engine.
//
// Everything is in the order of the worker's own batch, which may differ from the order of
// scheduling.
//
// Not checked here: the facts themselves; this file only reads and writes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"

namespace lockstep {

class JsonValue;
class JsonWriter;
struct RecordingHeader;
struct WorkedBy;

// A request of the batch, with the number of its tokens that ran.
struct FactRow {
  std::string id;
  std::int32_t tokens = 0;
  bool operator==(const FactRow&) const = default;
};

// What the worker used for one KV cache group.
struct GroupFacts {
  // [num_rows, blocks of the row]: block tables as the worker keeps them.
  std::vector<std::vector<BlockId>> tables;
  // [num_tokens]: block * block_size + offset of each token; -1 is padding. Empty: a group of
  // states.
  std::vector<Slot> slots;
  bool operator==(const GroupFacts&) const = default;
};

// A page whose bytes differ from those before the step.
struct ChangedPage {
  std::int32_t tensor = 0;
  BlockId block{};
  // Digest of all bytes of the page, 32 hexadecimal digits. It serves to compare two files.
  std::string digest;
  // Offsets within the block, ascending, whose rows have changed in any layer of the block's group.
  std::vector<std::int32_t> slots;
  // True if bytes outside all rows of the block's group have changed, such as padding.
  bool beside = false;
  bool operator==(const ChangedPage&) const = default;
};

// The facts of one step.
struct WorkerStepFacts {
  std::vector<FactRow> rows;
  // [num_tokens]: position of each token in its request, row by row.
  std::vector<std::int64_t> positions;
  // [num_groups]; empty if no request ran.
  std::vector<GroupFacts> groups;
  // Blocks that were to be zeroed and are zero, except for the slots that the step wrote.
  std::vector<BlockId> zeroed;
  std::vector<ChangedPage> changed;
  bool operator==(const WorkerStepFacts&) const = default;
};

// Reads and writes `facts` of a step. `header` bounds blocks and groups.
WorkerStepFacts read_worker_step_facts(JsonValue value, const RecordingHeader& header);
void write_worker_step_facts(JsonWriter& out, const WorkerStepFacts& facts);

// {"engine":{..},"runner":..,"states":..,"plant":..}; empty members are omitted.
WorkedBy read_worked_by(JsonValue value);
void write_worked_by(JsonWriter& out, const WorkedBy& worked);
// The header's key: {"version":1,"worked_by":{..}}.
WorkedBy read_worker_facts_key(JsonValue value);
void write_worker_facts_key(JsonWriter& out, const WorkedBy& worked);

}  // namespace lockstep
