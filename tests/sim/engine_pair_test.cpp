// Prefill and decode apart, over a network that does its worst: whatever is delayed, lost, repeated
// or damaged, every request ends, and no block holds anything but what was computed for it.
#include "sim/engine_pair.h"

#include <gtest/gtest.h>

#include "tests/sim/world.h"

namespace lockstep {
namespace {

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

PairReport run(const PairOptions& options, const Trace& trace) {
  const auto client = make_trace_workload(trace_reader_of(trace), {.seed = 3});
  auto report = run_pair(options, *client);
  EXPECT_TRUE(report.has_value()) << report.error().message;
  return report.value_or(PairReport{});
}

TEST(EnginePair, over_a_sound_network_every_request_is_prefilled_once_and_loaded_once) {
  const PairOptions options = pair_of({make_group("a", 1, full_spec())}, 60, 60);
  const PairReport report = run(options, make_traffic(5, 60));
  EXPECT_EQ(report.verdict, PairVerdict::kept) << report.finding->what;
  EXPECT_EQ(report.finished_requests + report.aborted_requests, report.requests);
  EXPECT_GT(report.transfers.loads, 20);
  EXPECT_EQ(report.transfers.loads_failed, 0);
  EXPECT_EQ(report.transfers.reads_again, 0);
  EXPECT_EQ(report.prefilled_again, 0);
}

}  // namespace
}  // namespace lockstep
