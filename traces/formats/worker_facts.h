// What an engine's own worker made of a step, as a recording may carry it: the key `facts` of a
// step, where the header has `worker_facts` (docs/formats.md, "Worker facts").
//
// Everything is in the order of the worker's own batch. This file reads and writes it; the audit
// judges it.
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

// A request of the batch, and how many tokens of it ran.
struct FactRow {
  std::string id;
  std::int32_t tokens = 0;
  bool operator==(const FactRow&) const = default;
};

struct GroupFacts {
  std::vector<std::vector<BlockId>> tables;  // by row
  std::vector<Slot> slots;                   // of all tokens; a group of states has none
  bool operator==(const GroupFacts&) const = default;
};

// A page with other bytes than before the step.
struct ChangedPage {
  std::int32_t tensor = 0;
  BlockId block{};
  std::string digest;               // of all its bytes, 32 hexadecimal digits
  std::vector<std::int32_t> slots;  // whose rows, of any layer of the block's group, have changed
  bool beside = false;              // bytes that no row of the block's group has
  bool operator==(const ChangedPage&) const = default;
};

struct WorkerStepFacts {
  std::vector<FactRow> rows;
  std::vector<std::int64_t> positions;  // of all tokens
  std::vector<GroupFacts> groups;       // empty where nothing ran
  // zeroed on request, and then zero wherever no slot was written
  std::vector<BlockId> zeroed;
  std::vector<ChangedPage> changed;
  bool operator==(const WorkerStepFacts&) const = default;
};

WorkerStepFacts read_worker_step_facts(JsonValue value, const RecordingHeader& header);
void write_worker_step_facts(JsonWriter& out, const WorkerStepFacts& facts);

WorkedBy read_worked_by(JsonValue value);
void write_worked_by(JsonWriter& out, const WorkedBy& worked);
// {"version":1,"worked_by":{..}} of a header.
WorkedBy read_worker_facts_key(JsonValue value);
void write_worker_facts_key(JsonWriter& out, const WorkedBy& worked);

}  // namespace lockstep
