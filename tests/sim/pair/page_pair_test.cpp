// Real pages between two engines: what the prefill engine's kernels have written is stored, sent
// and loaded, and the decode engine's memory model agrees with every byte of it.
#include <gtest/gtest.h>

#include <algorithm>

#include "reference/memory/memory_model.h"
#include "reference/plan/rank_plan.h"
#include "sim/pair/transfer_ledger.h"
#include "tests/sim/pair/pairs.h"

namespace lockstep {
namespace {

std::string what_of(const PairReport& report) {
  return report.finding ? report.finding->check + ": " + report.finding->what : "no finding";
}

TEST(PagePair, WhateverTheNetworkDoesEveryPageOfBothEnginesIsWhatTheModelSays) {
  std::int64_t finished = 0, leases = 0, lost = 0;
  for (const auto& groups : {one_group(), hybrid()})
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      PairOptions options = pair_of(groups, 60, groups.size() > 1 ? 400 : 60);
      options.network = worst_network(seed);
      options.times = hasty();
      options.staging_blocks = 3;
      const PairReport report = run_with_pages(options, make_traffic(seed, 30));
      EXPECT_EQ(report.verdict, PairVerdict::kept) << "seed " << seed << ": " << what_of(report);
      EXPECT_EQ(report.ended(), report.requests);
      EXPECT_GT(report.blocks_checked, 10);
      EXPECT_GT(report.prefill.blocks_stored, 10);
      EXPECT_GT(report.decode.blocks_loaded, 10);
      EXPECT_GT(report.decode.bytes_checked, 1'000'000);
      finished += report.finished_requests;
      leases += report.transfers.leases_expired;
      lost += report.transfers.blocks_lost;
    }
  EXPECT_GT(finished, 100);
  EXPECT_GT(leases, 0);
  EXPECT_GT(lost, 0);
}

TEST(PagePair, WithPagesTheRunIsTheOneWithoutButForTheBytes) {
  PairOptions options = pair_of(one_group(), 60, 60);
  options.network = worst_network(5);
  options.staging_blocks = 2;
  const PairReport without = run_to_end(options, make_traffic(5, 20));
  const PairReport with = run_with_pages(options, make_traffic(5, 20));
  ASSERT_EQ(with.verdict, PairVerdict::kept) << what_of(with);
  EXPECT_EQ(with.network, without.network);
  EXPECT_EQ(with.transfers, without.transfers);
  EXPECT_EQ(with.simulated_ns, without.simulated_ns);
  EXPECT_EQ(with.steps(), without.steps());
  EXPECT_EQ(with.decode.blocks_loaded, without.decode.blocks_loaded);
}

TEST(PagePair, ABlockThatOnlyAPartOfIsComputedBringsTheRestAlongAndNobodyReadsIt) {
  Trace trace = make_traffic(1, 1);
  auto& request = std::get<TraceRequest>(trace.records[0]);
  request.abort.reset();
  request.spec.prompt = {};
  request.spec.prompt.append({TokenRun::Kind::seeded, 9, 0, 37});  // 5 slots of the third block
  const PairReport report = run_with_pages(pair_of(one_group(), 60, 60), trace);
  EXPECT_EQ(report.verdict, PairVerdict::kept) << what_of(report);
  EXPECT_EQ(report.decode.blocks_loaded, 3);
  EXPECT_EQ(report.finished_requests, 1);
}

// Content ids do not depend on when bytes are copied.
TEST(PagePair, CopiesThatComeTooEarlyShowInRealPagesAndNowhereElse) {
  for (const auto& [defect, check] :
       {std::pair{TransferDefect::stage_read_early, "transfer.read_content"},
        std::pair{TransferDefect::load_before_arrival, "memory.divergence"}}) {
    PairOptions options = pair_of(one_group(), 60, 60);
    options.defect = defect;
    EXPECT_EQ(run_to_end(options, make_traffic(5, 10)).verdict, PairVerdict::kept);
    const PairReport report = run_with_pages(options, make_traffic(5, 10));
    ASSERT_EQ(report.verdict, PairVerdict::broken) << name_of(defect);
    EXPECT_EQ(report.finding->check, check) << report.finding->what;
  }
}

TEST(PagePair, CopiesAreOrderedAgainstComputeByTheGraphOfTheirStepAlone) {
  PairOptions options = pair_of(hybrid(), 60, 400);
  for (LockstepConfig* config : {&options.prefill, &options.decode}) {
    config->backend.num_streams = 3;
    config->backend.delay_streams = true;
    config->backend.seed = 7;
  }
  const PairReport ordered = run_with_pages(options, make_traffic(2, 15));
  EXPECT_EQ(ordered.verdict, PairVerdict::kept) << what_of(ordered);
  EXPECT_GT(ordered.decode.blocks_loaded, 10);
  for (LockstepConfig* config : {&options.prefill, &options.decode})
    config->backend.mutant = "copy-unordered";
  const PairReport unordered = run_with_pages(options, make_traffic(2, 15));
  ASSERT_EQ(unordered.verdict, PairVerdict::broken);
  EXPECT_EQ(unordered.finding->check, "memory.divergence") << unordered.finding->what;
}

TEST(PagePair, LatentsAndNumbersOfEightBitsCrossAsAnyBytesDo) {
  KVCacheSpec latent = full_spec();
  latent.kind = CacheKind::mla;
  latent.num_kv_heads = 1;
  latent.head_size = 24;
  for (const KVCacheSpec& spec : {latent, full_spec(16, DType::fp8_e4m3)}) {
    PairOptions options = pair_of({make_group("a", 2, spec)}, 60, 60);
    for (LockstepConfig* config : {&options.prefill, &options.decode})
      if (spec.dtype == DType::fp8_e4m3) config->backend.numbers = Numbers::real;
    const PairReport report = run_with_pages(options, make_traffic(4, 15));
    EXPECT_EQ(report.verdict, PairVerdict::kept) << what_of(report);
    EXPECT_GT(report.decode.blocks_loaded, 10);
  }
}

// Heads that are cut, heads that both ranks hold, and latents, which all do.
TEST(PagePair, EveryTensorParallelRankSendsAndTakesItsPartOfABlock) {
  for (const std::int32_t num_kv_heads : {4, 1}) {
    KVCacheSpec spec = full_spec();
    spec.num_kv_heads = num_kv_heads;
    PairOptions options = pair_of({make_group("a", 2, spec)}, 60, 60);
    options.network = worst_network(5);
    for (LockstepConfig* config : {&options.prefill, &options.decode}) {
      config->backend.parallel.tp_size = 2;
      config->backend.queries_per_kv = 2;
    }
    const PairReport report = run_with_pages(options, make_traffic(4, 15));
    ASSERT_EQ(report.verdict, PairVerdict::kept) << what_of(report);
    EXPECT_GT(report.decode.blocks_loaded, 10);
    EXPECT_GT(report.decode.union_rows_checked, 0);
    for (LockstepConfig* config : {&options.prefill, &options.decode})
      config->backend.mutant = num_kv_heads == 1 ? "tp-heads-not-replicated" : "tp-head-offset";
    EXPECT_EQ(run_with_pages(options, make_traffic(4, 15)).verdict, PairVerdict::broken);
  }
}

// Both of the sender's ranks are right; only the assignment of their parts is wrong.
TEST(PagePair, PartsInTheOrderOfOtherRanksAreNotWhatWasToBeSent) {
  BackendConfig device = pair_of(one_group(), 60, 60).decode.backend;
  device.parallel.tp_size = 2;
  device.queries_per_kv = 2;
  const auto holds = page_payloads(device);
  ASSERT_TRUE(holds) << holds.error().message;
  const std::vector<ContentId> contents(16, ContentId{77});
  std::vector<std::uint8_t> payload;
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    const auto plan =
        rank_plan(device.plan, config_of_rank(device, rank).parallel, device.queries_per_kv);
    auto model = MemoryModel::create(plan->plan, device.attention_backend, device.layout,
                                     device.layout_rule, 1, device.numbers, plan->layers);
    ASSERT_TRUE(model) << model.error().message;
    model->begin_step(0);
    model->fill_host_block(0, HostBlockId{0}, 0, contents, model->add_writer("r"), {});
    const auto& bytes = *model->host_block(HostBlockId{0}).bytes;
    payload.insert(payload.end(), bytes.begin(), bytes.begin() + model->host_bytes_of(0));
  }
  EXPECT_TRUE((*holds)(0, contents, payload));
  std::ranges::rotate(payload, payload.begin() + std::ssize(payload) / 2);
  EXPECT_FALSE((*holds)(0, contents, payload));
  EXPECT_FALSE((*holds)(0, contents, std::span(payload).first(payload.size() / 2)));
}

TEST(PagePair, RefusesEnginesThatLayTheirBlocksOutInTwoWaysAndStages) {
  const auto refusal = [](const PairOptions& options) {
    const auto client = make_trace_workload(make_traffic(1, 1), {});
    const auto report = run_pair(options, *client);
    return report ? std::string("accepted") : report.error().message;
  };
  PairOptions options = pair_of(one_group(), 60, 60);
  PlainBackend prefill(options.prefill.backend), decode(options.decode.backend);
  options.prefill_ranks = {&prefill};
  options.decode_ranks = {&decode};
  EXPECT_NE(refusal(options).find("a host tier of 0 blocks for a staging buffer of 64"),
            std::string::npos);
  options.prefill.backend.layout = CacheLayout::HND;
  EXPECT_NE(refusal(options).find("both engines must use the same block layout"),
            std::string::npos);
  options.decode.backend.parallel.pp_size = 2;
  EXPECT_NE(refusal(options).find("only blocks of tensor parallel ranks"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
