// The loop on a backend that is right: every kind of cache runs to the end without a divergence, on
// traffic with hits, preemptions, evictions, aborts and second turns; the same run twice is the
// same chain of hashes.
#include "sim/session/session.h"

#include <gtest/gtest.h>

#include "tests/sim/world.h"

namespace lockstep {
namespace {

struct World {
  const char* title;
  std::vector<KVCacheGroupSpec> groups;
  std::int64_t num_blocks;
};

std::vector<World> worlds() {
  KVCacheSpec mla = full_spec();
  mla.kind = CacheKind::mla;
  mla.num_kv_heads = 1;
  KVCacheSpec chunked = full_spec();
  chunked.kind = CacheKind::chunked_local;
  chunked.attention_chunk_size = 32;
  KVCacheSpec odd =
      full_spec(16, DType::fp8_e4m3);  // rows of 5 bytes: no word of a page is one row's
  odd.head_size = 5;
  KVCacheSpec hidden = full_spec();
  hidden.kind = CacheKind::hidden_state;
  hidden.num_kv_heads = 1;
  hidden.head_size = 20;
  return {
      {"full attention, bf16", {make_group("a", 2, full_spec())}, 24},
      {"full attention, fp32", {make_group("a", 1, full_spec(16, DType::fp32))}, 24},
      {"full attention, fp16", {make_group("a", 1, full_spec(16, DType::fp16))}, 24},
      {"rows of partial words", {make_group("a", 2, odd)}, 24},
      {"MLA", {make_group("a", 2, mla)}, 24},
      {"full attention and sliding window",
       {make_group("a", 1, full_spec()), make_group("b", 2, sliding_spec(40))},
       30},
      {"full attention and chunked local attention",
       {make_group("a", 1, full_spec()), make_group("b", 1, chunked)},
       20},
      {"states in mode none",
       {make_group("a", 1, full_spec()), make_group("m", 2, mamba_spec(MambaCacheMode::none, 256))},
       22},
      {"states in mode align",
       {make_group("a", 1, full_spec()), make_group("m", 2, mamba_spec(MambaCacheMode::align))},
       30},
      {"hidden states", {make_group("a", 1, full_spec()), make_group("h", 1, hidden)}, 44},
  };
}

TEST(Lockstep, EveryKindOfCacheAgreesWithPlainLoops) {
  for (const World& world : worlds()) {
    const LockstepConfig config = make_world(world.groups, world.num_blocks);
    PlainBackend backend(config.backend);
    const auto report = run_world(config, make_traffic(3, 60), &backend);
    ASSERT_TRUE(report) << world.title << ": " << report.error().message;
    const RunSummary& summary = report->summary;
    EXPECT_EQ(summary.verdict, Verdict::agreed)
        << world.title << ": " << (summary.divergence ? to_text(*summary.divergence) : "stuck");
    EXPECT_EQ(summary.finished_requests + summary.aborted_requests, summary.requests)
        << world.title;
    EXPECT_GT(summary.pages_checked, 0);
    EXPECT_GT(summary.preemptions, 0) << world.title;
    if (config.engine.enable_prefix_caching) {
      EXPECT_GT(summary.cached_tokens, 0) << world.title;
      EXPECT_GT(summary.evictions, 0) << world.title;
    }
  }
}

}  // namespace
}  // namespace lockstep
