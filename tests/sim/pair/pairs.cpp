#include "tests/sim/pair/pairs.h"

#include <gtest/gtest.h>

#include "cuda_backend/backends.h"

namespace lockstep {

std::vector<KVCacheGroupSpec> one_group() { return {make_group("a", 2, full_spec())}; }
std::vector<KVCacheGroupSpec> hybrid() {
  return {make_group("a", 1, full_spec()), make_group("b", 1, sliding_spec(40))};
}

PairOptions pair_of(std::vector<KVCacheGroupSpec> groups, std::int64_t prefill_blocks,
                    std::int64_t decode_blocks) {
  PairOptions options;
  options.prefill = make_world(groups, prefill_blocks);
  options.decode = make_world(std::move(groups), decode_blocks);
  for (LockstepConfig* config : {&options.prefill, &options.decode}) {
    config->engine.engine = "vllm-0.22.1";
    config->engine.scheduler_reserve_full_isl = true;
  }
  return options;
}

NetworkOptions worst_network(std::uint64_t seed) {
  return {.seed = seed,
          .loss_percent = 10,
          .duplicate_percent = 10,
          .damage_percent = 5,
          .straggler_percent = 10,
          .straggler_ns = 100'000'000,
          .dead_percent = 10,
          .slow_percent = 10};
}

TransferTimes hasty() { return {.retry_ns = 5'000'000, .retries_max = 3, .lease_ns = 400'000'000}; }

PairReport run_to_end(const PairOptions& options, const Trace& trace) {
  const auto client = make_trace_workload(trace, {.step_time = {}, .seed = 3});
  auto report = run_pair(options, *client);
  EXPECT_TRUE(report.has_value()) << report.error().message;
  return report.value_or(PairReport{});
}

PairReport run_with_pages(PairOptions options, const Trace& trace) {
  for (LockstepConfig* config : {&options.prefill, &options.decode})
    config->backend.num_host_blocks = options.staging_blocks;
  std::vector<std::unique_ptr<Backend>> backends;
  const auto add = [&](const BackendConfig& device, std::vector<Backend*>& ranks) {
    for (std::int32_t rank = 0; rank < num_ranks(device); ++rank) {
      auto backend = make_simt_backend(config_of_rank(device, rank));
      EXPECT_TRUE(backend.has_value());
      ranks.push_back(backends.emplace_back(std::move(*backend)).get());
    }
  };
  add(options.prefill.backend, options.prefill_ranks);
  add(options.decode.backend, options.decode_ranks);
  return run_to_end(options, trace);
}

}  // namespace lockstep
