#include "tests/properties/busy_case.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "sim/engine/faults.h"
#include "sim/session/session.h"

namespace lockstep {

SavedCase busy_case(std::string_view faults, bool async_scheduling) {
  SavedCase saved;
  saved.backend = "none";
  saved.check = CheckMode::fast;
  saved.engine.block_size = 4;
  saved.engine.max_num_seqs = 4;
  saved.engine.max_num_batched_tokens = 32;
  saved.engine.long_prefill_token_threshold = 8;
  saved.engine.max_model_len = 40;
  saved.engine.async_scheduling = async_scheduling;
  KVCacheGroupSpec group;
  group.layer_names = {"a"};
  group.spec.block_size = 4;
  group.spec.head_size = 8;
  saved.cache = *plan_for_groups({group}, 41);
  saved.kernel_block_sizes = {4};
  for (std::uint32_t i = 0; i < 4; ++i) {
    TraceRequest request;
    request.spec.name = fmt::format("r{}", i);
    request.spec.prompt.append({TokenRun::Kind::seeded, i + 1, 0, 24 + i});
    request.spec.arrival_ns = i;
    request.spec.max_tokens = request.output.length = 6;
    saved.trace.records.emplace_back(request);
  }
  if (!faults.empty()) {
    const auto plan = fault_plan_from_text(faults);
    EXPECT_TRUE(plan) << plan.error().message;
    saved.faults = faults_of(*plan);
  }
  return saved;
}

}  // namespace lockstep
