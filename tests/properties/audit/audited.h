// Small recordings, and what the audit says of them.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "properties/audit/auditor.h"

namespace lockstep {

inline std::vector<AuditFinding> audit(const Recording& recording,
                                       AuditScope scope = AuditScope::running_engine) {
  Auditor auditor(recording.header, scope);
  for (const RecordedStep& step : recording.steps) auditor.step(step);
  auditor.end(recording.end);
  return auditor.take_findings();
}

// Without steps: one group of full attention.
inline Recording recording_of_one_group(const std::string& version, std::int32_t block_size,
                                        std::int64_t num_blocks) {
  Recording recording;
  recording.header.engine = {"vllm", version};
  recording.header.groups.resize(1);
  recording.header.groups[0].spec.block_size = block_size;
  recording.header.num_blocks = num_blocks;
  recording.header.scheduler_block_size = block_size;
  recording.header.hash_block_size = block_size;
  return recording;
}

// All of them have the same tokens, as far as they go.
inline RecordedEvent added_request(const std::string& name, std::uint32_t num_tokens,
                                   std::int32_t max_tokens) {
  RecordedEvent event;
  event.request.name = name;
  event.request.prompt.append({TokenRun::Kind::seeded, 7, 0, num_tokens});
  event.request.max_tokens = max_tokens;
  return event;
}

// With blocks it is new.
inline RecordedScheduled scheduled_row(const std::string& id, std::int32_t computed,
                                       std::int32_t tokens,
                                       std::optional<BlocksPerGroup> blocks = {}) {
  RecordedScheduled row;
  row.id = id;
  row.tokens = tokens;
  row.computed = computed;
  row.is_new = blocks.has_value();
  row.blocks = std::move(blocks);
  return row;
}

}  // namespace lockstep
