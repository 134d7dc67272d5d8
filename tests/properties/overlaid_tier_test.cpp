// A host tier with the overlaid memory: the pages are those of vLLM 0.33.0 in each of its layouts,
// the decisions those of the release whose connectors are modelled. A load must return what was
// stored, byte by byte, wherever heads and layers of a block are.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda_backend/backends.h"
#include "sim/session/session.h"
#include "tests/properties/cache_kinds.h"

namespace lockstep {
namespace {

using tests::CacheKindCase;

// Connectors load no states, the rows of 2026 are decided by 0.33.0 alone, and a prompt of these
// requests fills no longer block.
bool is_loaded(const CacheKindCase& kind) {
  return kind.name != tests::kWithRing && kind.num_modules == 0 &&
         std::ranges::all_of(kind.groups, [](const KVCacheGroupSpec& group) {
           return group.spec.kind != CacheKind::mamba && group.spec.block_size <= 8 &&
                  group.spec.dcp_sharded;
         });
}

Result<RunReport> run_with_tier(const CacheKindCase& kind, CacheLayout order,
                                const std::string& mutant) {
  SavedCase placed = tests::case_in(kind, order);
  placed.check = CheckMode::fast;
  SavedCase decided = placed;
  decided.layout = CacheLayout::NHD;
  decided.engine.engine = "vllm-0.22.1";
  decided.engine.async_scheduling = false;
  decided.connector.parts = {ConnectorKind::host};
  decided.connector.num_host_blocks = 400;
  decided.connector.delay_steps_max = 1;
  // Other prompts take the pool, then the first ones come back.
  const auto first = decided.trace.records;
  for (std::uint32_t round = 1; round <= 2; ++round)
    for (std::uint32_t i = 0; i < first.size() * (3 - round); ++i) {
      TraceRequest request = std::get<TraceRequest>(first[i % first.size()]);
      request.spec.name += "-" + std::to_string(round) + "-" + std::to_string(i);
      request.spec.arrival_ns += std::int64_t{round} << 40;
      if (round == 1) {
        request.spec.prompt = {};
        request.spec.prompt.append({TokenRun::Kind::seeded, 100 + i, 0, 24});
      }
      decided.trace.records.emplace_back(request);
    }
  LockstepConfig config = config_of(decided);
  const std::int64_t num_host_blocks = config.backend.num_host_blocks;
  config.backend = config_of(placed).backend;
  config.backend.num_host_blocks = num_host_blocks;
  config.backend.mutant = mutant;
  SessionParts parts = parts_of(decided);
  parts.backend = make_simt_backend;
  LS_ASSIGN_OR_RETURN(auto session, Session::open(config, std::move(parts)));
  return session->run();
}

// How it ended, and blocks loaded from the tier.
std::string ending(const Result<RunReport>& report) {
  if (!report) return report.error().message;
  const RunSummary& summary = report->summary;
  return summary.divergence ? std::string(name_of(summary.divergence->phase))
                            : std::string(name_of(summary.verdict));
}

TEST(OverlaidTier, HoldsTheBytesOfEveryKindOfRowsInEveryOrder) {
  int kinds = 0;
  for (const CacheKindCase& kind : tests::cache_kinds()) {
    if (!is_loaded(kind) || reads_beside_tokens(kind.groups.back().spec)) continue;
    ++kinds;
    for (const CacheLayout order : kOverlaidLayouts) {
      if (!kind.orders.contains(order)) continue;
      const std::string where = kind.name + " in " + std::string(name_of(order));
      const auto report = run_with_tier(kind, order, "");
      ASSERT_EQ(ending(report), "agreed") << where;
      EXPECT_GT(report->summary.blocks_loaded, 0) << where;
      EXPECT_NE(ending(run_with_tier(kind, order, "transfer-wrong-end")), "agreed") << where;
    }
  }
  EXPECT_GE(kinds, 15);
}

}  // namespace
}  // namespace lockstep
