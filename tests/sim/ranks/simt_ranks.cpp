#include "tests/sim/ranks/simt_ranks.h"

#include <numeric>

#include "cuda_backend/simt_backend.h"

namespace lockstep {

Result<RunReport> run_on_ranks(const LockstepConfig& config, int num_requests,
                               std::vector<std::int32_t> ranks) {
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(num_ranks(config.device)));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  std::vector<std::unique_ptr<Backend>> owned;
  std::vector<Backend*> backends;
  for (const std::int32_t rank : ranks) {
    auto backend = make_simt_backend(device_of_rank(config.device, rank));
    if (!backend) return tl::unexpected(backend.error());
    backends.push_back(backend->get());
    owned.push_back(std::move(*backend));
  }
  auto decisions = make_reference_decisions(config.engine, config.device.plan.groups,
                                            config.device.plan.num_blocks);
  if (!decisions) return tl::unexpected(decisions.error());
  const auto workload = make_trace_workload(trace_reader_of(make_traffic(3, num_requests)),
                                            {.step_time = {}, .seed = 7, .num_spec_tokens = 0});
  return run_lockstep(config, **decisions, *workload, std::span<Backend* const>(backends));
}

}  // namespace lockstep
