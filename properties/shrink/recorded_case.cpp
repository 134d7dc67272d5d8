#include "properties/shrink/recorded_case.h"

#include <utility>

#include "sim/session/session.h"
#include "traces/formats/recording_trace.h"

namespace lockstep {

Result<SavedCase> case_of(std::string name, Recording recording) {
  if (recording.header.connector)
    return fail(name + ": a recording of a KV connector, whose loads the model does not decide");
  auto plan = plan_for_groups(recording.header.groups, recording.header.num_blocks);
  if (!plan) return tl::unexpected(plan.error());
  SavedCase saved;
  saved.name = std::move(name);
  saved.engine = recording.header.options.config;
  saved.kernel_block_sizes = make_backend_config(saved.engine, *plan).kernel_block_sizes;
  saved.cache = std::move(*plan);
  saved.backend = "none";
  saved.check = CheckMode::fast;
  saved.trace.header.source = {.kind = "recording", .name = recording.header.family, .seed = {}};
  saved.recording = std::move(recording);
  return saved;
}

Result<SavedCase> on_a_clock(const SavedCase& saved) {
  constexpr std::int64_t kStepNs = 10'000'000;
  auto trace = trace_of(*saved.recording, kStepNs);
  if (!trace) return tl::unexpected(trace.error());
  SavedCase other = saved;
  other.trace = std::move(*trace);
  other.recording.reset();
  other.step_time = {.base_ns = kStepNs, .per_token_ns = 0};
  return other;
}

}  // namespace lockstep
