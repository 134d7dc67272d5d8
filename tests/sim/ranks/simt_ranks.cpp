#include "tests/sim/ranks/simt_ranks.h"

#include <numeric>

#include "cuda_backend/backends.h"

namespace lockstep {

Result<RunReport> run_on_ranks(const LockstepConfig& config, int num_requests,
                               std::vector<std::int32_t> ranks) {
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(num_ranks(config.backend)));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  std::vector<std::unique_ptr<Backend>> owned;
  std::vector<Backend*> backends;
  for (const std::int32_t rank : ranks) {
    auto backend = make_simt_backend(config_of_rank(config.backend, rank));
    if (!backend) return tl::unexpected(backend.error());
    backends.push_back(backend->get());
    owned.push_back(std::move(*backend));
  }
  SessionParts parts;
  parts.clients = make_trace_workload(make_traffic(3, num_requests),
                                      {.step_time = {}, .seed = 7, .num_spec_tokens = 0});
  parts.borrowed = std::move(backends);
  return run_session(config, std::move(parts));
}

}  // namespace lockstep
