// What `lockstep fuzz` found in this project and in the engines, each in the smallest case that
// showed it.
#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "properties/audit/audit.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "properties/judge/tally.h"
#include "properties/shrink/case_parts.h"
#include "sim/conform/conform.h"
#include "sim/session/session.h"
#include "traces/formats/saved_case.h"

namespace lockstep {
namespace {

KVCacheGroupSpec group_of(const std::string& layer, CacheKind kind, std::int64_t block_size) {
  KVCacheGroupSpec group;
  group.layer_names = {layer};
  group.spec.kind = kind;
  group.spec.block_size = block_size;
  group.spec.head_size = 8;
  if (kind == CacheKind::chunked_local) group.spec.attention_chunk_size = 2 * block_size;
  if (kind == CacheKind::mamba) {
    group.spec.mamba_cache_mode = MambaCacheMode::align;
    group.spec.states = {{{2, 4}, DType::fp32}};
  }
  return group;
}

SavedCase case_of(std::vector<KVCacheGroupSpec> groups, std::int64_t num_blocks) {
  SavedCase saved;
  saved.backend = "none";
  saved.attention_backend = AttentionBackend::triton_attn;
  saved.engine.block_size = static_cast<std::int32_t>(groups.front().spec.block_size);
  saved.engine.max_num_seqs = 4;
  saved.engine.max_num_batched_tokens = 64;
  saved.engine.max_model_len = 64;
  for (const KVCacheGroupSpec& group : groups)
    if (group.spec.kind == CacheKind::mamba) saved.engine.mamba_cache_mode = MambaCacheMode::align;
  const auto plan = plan_for_groups(std::move(groups), num_blocks);
  EXPECT_TRUE(plan) << plan.error().message;
  saved.cache = *plan;
  return saved;
}

TraceRequest request_of(std::string name, std::uint64_t seed, std::uint32_t prompt,
                        std::int32_t output) {
  TraceRequest request;
  request.spec.name = std::move(name);
  request.spec.prompt.append({TokenRun::Kind::seeded, seed, 0, prompt});
  request.spec.max_tokens = request.output.length = output;
  request.output.fill = 7;
  return request;
}

// Seed 21. An empty step may still process the output that ends a request: with capacity for one
// request, only then can the next one be admitted. The loop called that an idle step, and the run
// stuck.
TEST(FoundByFuzzing, AStepThatTakesAnOutputInIsNotIdle) {
  SavedCase saved = case_of({group_of("a", CacheKind::full_attention, 4)}, 8);
  saved.engine.max_num_seqs = 1;
  saved.engine.async_scheduling = true;
  saved.trace.records = {request_of("first", 1, 3, 1), request_of("second", 2, 3, 1)};
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  EXPECT_EQ(outcome.tally[Reached::length_end], 2);
}

// Seed 2341. A victim that the step had already served is taken out of it again; its tokens stayed
// in the step's total.
TEST(FoundByFuzzing, TheTotalOfAStepLeavesItsVictimsOut) {
  struct Totals final : StepObserver {
    bool decided(const StepView& view) override {
      std::int64_t sum = 0;
      for (const ScheduledRequest& scheduled : view.decision.scheduled) sum += scheduled.num_tokens;
      EXPECT_EQ(view.decision.total_num_scheduled_tokens, sum) << "step " << view.decision.step;
      preemptions += std::ssize(view.decision.preempted);
      return true;
    }
    std::int64_t preemptions = 0;
  } totals;
  SavedCase saved = case_of({group_of("a", CacheKind::full_attention, 4)}, 11);
  saved.engine.policy = SchedulingPolicy::priority;
  saved.engine.enable_prefix_caching = false;
  saved.engine.scheduler_reserve_full_isl = false;
  saved.engine.long_prefill_token_threshold = 8;
  TraceRequest low = request_of("low", 1, 33, 1);
  low.spec.priority = 1;
  saved.trace.records = {low, request_of("high", 2, 6, 4)};
  const Outcome outcome =
      judge(saved, JudgeOptions{.backend = {}, .observer = &totals, .hashes = nullptr});
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  EXPECT_GT(totals.preemptions, 0);
}

// Seed 670. vLLM asserts that this case never happens; the model accepted it, and hit tokens that
// were never computed.
TEST(FoundByFuzzing, EagleBesideChunkedLocalAttentionIsRefusedWhereAHitDropsABlock) {
  SavedCase saved = case_of(
      {group_of("a", CacheKind::full_attention, 4), group_of("b", CacheKind::chunked_local, 4)},
      40);
  saved.engine.spec_method = SpecMethod::eagle;
  saved.engine.num_spec_tokens = 1;
  saved.trace.records = {request_of("r", 1, 9, 3)};
  EXPECT_EQ(judge(saved).kind, OutcomeKind::agreed);
  saved.engine.engine = "vllm-0.22.1";
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::refused);
  EXPECT_NE(outcome.what.find("eagle with a chunked_local group"), std::string::npos)
      << outcome.what;
}

// Seeds 357, 841 and others. A state that drafts carry past the end of a block is copied into that
// block after sampling; the program of a step left it out, and a later hit read an older state.
TEST(FoundByFuzzing, AStateThatDraftsCarryPastABorderIsThereForTheNextHit) {
  SavedCase saved = case_of(
      {group_of("a", CacheKind::full_attention, 16), group_of("m", CacheKind::mamba, 16)}, 20);
  saved.backend = "simt";
  saved.engine.spec_method = SpecMethod::ngram;
  saved.engine.num_spec_tokens = 2;
  saved.cache.groups[1].spec.num_speculative_blocks = 2;
  saved.draft_acceptance_percent = 0;
  TraceRequest reader = request_of("reader", 1, 13, 2);
  reader.spec.prompt.tokens.assign(9, 7);
  reader.spec.prompt.runs.push_back({TokenRun::Kind::literal, 0, 0, 9});
  reader.after = {"writer"};
  saved.trace.records = {request_of("writer", 1, 13, 8), reader};
  const Outcome outcome = judge(saved, make_simt_backend);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.check << ": " << outcome.what;
  EXPECT_EQ(outcome.tally[Reached::hit_mamba_align], 1);
  EXPECT_GT(outcome.tally[Reached::rejected_draft], 0);
  EXPECT_EQ(outcome.tally[Reached::with_backend], 1);
}

// Seed 12268, docs/findings.md, 5. One request alone: what vLLM 0.33.0 plans for 16 tokens of it
// (four blocks of full attention, one of chunks, two states), and the null block.
TEST(FoundByFuzzing, WithAStepInFlightStatesOutgrowThePoolPlannedForThem) {
  KVCacheGroupSpec chunks = group_of("c", CacheKind::chunked_local, 16);
  chunks.spec.attention_chunk_size = 16;
  SavedCase saved = case_of(
      {group_of("a", CacheKind::full_attention, 4), chunks, group_of("m", CacheKind::mamba, 4)},
      4 + 1 + 2 + 1);
  saved.engine.max_model_len = 16;
  saved.engine.max_num_seqs = 1;
  saved.engine.max_num_batched_tokens = 5;
  saved.engine.scheduler_reserve_full_isl = false;
  saved.engine.async_scheduling = true;
  saved.trace.records = {request_of("r", 1, 14, 2)};
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::stuck) << outcome.check << outcome.what;
  SavedCase one_at_a_time = saved;
  one_at_a_time.engine.async_scheduling = false;
  EXPECT_EQ(judge(one_at_a_time).kind, OutcomeKind::agreed);
  SavedCase larger = saved;
  larger.cache.num_blocks += 2;
  for (KVCacheTensor& tensor : larger.cache.tensors)
    tensor.size_bytes = tensor.size_bytes / saved.cache.num_blocks * larger.cache.num_blocks;
  EXPECT_EQ(judge(larger).kind, OutcomeKind::agreed);
}

// Seed 156876, docs/findings.md, 6. The window before a chunk and the chunk are nine tokens, four
// blocks; three draft slots more are five.
TEST(FoundByFuzzing, SlotsOfDraftsOutgrowThePoolPlannedForAWindow) {
  KVCacheGroupSpec window = group_of("w", CacheKind::sliding_window, 3);
  window.spec.sliding_window = 5;
  const auto run = [&](std::int64_t num_blocks) {
    SavedCase saved = case_of({window}, num_blocks);
    saved.engine.max_model_len = 23;
    saved.engine.max_num_seqs = 1;
    saved.engine.max_num_batched_tokens = 5;
    saved.engine.spec_method = SpecMethod::eagle;
    saved.engine.num_spec_tokens = 3;
    saved.trace.records = {request_of("r", 1, 16, 1)};
    return judge(saved);
  };
  EXPECT_EQ(run(4 + 1).kind, OutcomeKind::stuck);
  EXPECT_EQ(run(4 + 1 + 2).kind, OutcomeKind::agreed);
}

// Seed 4389, of this project: with a step in flight a request publishes in its next step what it
// computed in the previous one. If that next step preempts it, what it published is still computed,
// and the invariant mistook it for finding 3.
TEST(FoundByFuzzing, WhatAVictimHadComputedMayBeFoundFromTheStepThatPreemptsIt) {
  SavedCase saved = case_of({group_of("m", CacheKind::mamba, 4)}, 4);
  saved.engine.max_num_seqs = 2;
  saved.engine.max_num_batched_tokens = 12;
  saved.engine.max_model_len = 30;
  saved.engine.policy = SchedulingPolicy::priority;
  saved.engine.async_scheduling = true;
  TraceRequest low = request_of("low", 101, 27, 3);
  low.spec.priority = 1;
  TraceRequest high = request_of("high", 1, 4, 2);
  high.spec.arrival_ns = 1;
  saved.trace.records = {low, high};
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.check << ": " << outcome.what;
  EXPECT_GT(outcome.tally[Reached::preemption], 0);
}

// Seed 7044561. A run without progress for a thousand steps counted as stuck; an engine without
// requests makes no progress while another runs.
TEST(FoundByFuzzing, AnEngineWithoutRequestsIsNotStuckBesideOneThatRuns) {
  SavedCase saved = case_of({group_of("a", CacheKind::full_attention, 16)}, 100);
  saved.engine.max_model_len = 1200;
  saved.data_parallel_size = 2;
  saved.trace.records = {request_of("r", 1, 10, 1100)};
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  EXPECT_GT(outcome.tally[Reached::idle_dp_rank], 1024);
}

// Of this project, docs/findings.md, 1: the state hit is a block longer than the attention hit, and
// the entry between them is filled with the block of `salted`, whose tokens are the same. The step
// zeroes it; that was left out for blocks of a hit, and the run agreed.
TEST(FoundByFuzzing, ABlockThatCountsAsHitAndIsZeroedHoldsNothing) {
  SavedCase saved = case_of(
      {group_of("a", CacheKind::full_attention, 4), group_of("m", CacheKind::mamba, 4)}, 13);
  saved.backend = "simt";
  saved.attention_backend = AttentionBackend::any_size;
  saved.engine.engine = "vllm-0.22.1";
  saved.engine.max_model_len = 24;
  saved.engine.spec_method = SpecMethod::eagle;
  saved.engine.num_spec_tokens = 1;
  saved.cache.groups[1].spec.num_speculative_blocks = 1;
  TraceRequest salted = request_of("salted", 1, 12, 1);
  salted.spec.cache_salt = "a";
  salted.spec.arrival_ns = 1'000'000'000;
  TraceRequest reader = request_of("reader", 1, 13, 1);
  reader.spec.arrival_ns = 2'000'000'000;
  saved.trace.records = {request_of("writer", 1, 12, 1), salted, reader};
  const Outcome outcome = judge(saved, make_simt_backend);
  EXPECT_EQ(outcome.check, "decide");
  EXPECT_NE(outcome.what.find("the step zeroes it"), std::string::npos) << outcome.what;
}

// Seed 2219 of vLLM 0.22.1's own scheduler (docs/findings.md, 23): its pool counts two blocks free
// that are not. The model counts what is there, and shares blocks beyond the hit (finding 2).
TEST(FoundByFuzzing, VllmCountsBlocksFreeThatAShorterLoadDidNotTake) {
  const std::string folder = LOCKSTEP_SOURCE_DIR "/tests/regressions/";
  const auto audited = audit_recording(folder + "vllm_0_22_1_load_shorter_than_hit.jsonl");
  ASSERT_TRUE(audited) << audited.error().message;
  ASSERT_EQ(audited->findings.size(), 1u);
  EXPECT_EQ(audited->findings.front().rule, AuditRule::conservation);
  EXPECT_EQ(audited->findings.front().step, 1);
  const auto saved = read_saved_case(folder + "load_shorter_than_hit.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const KnownFinding* of_model = known_finding(*saved, judge(*saved));
  ASSERT_NE(of_model, nullptr);
  EXPECT_EQ(of_model->number, 2);
}

// Seed 3910 of SGLang 0.5.23: the tree replaces the table of a request that runs and is not in the
// step, which the recording lists as preempted.
TEST(FoundByFuzzing, ARequestWhoseTableIsReplacedIsNoVictim) {
  const auto audited = audit_recording(
      LOCKSTEP_SOURCE_DIR "/tests/regressions/sglang_0_5_23_table_of_an_unscheduled_request.jsonl");
  ASSERT_TRUE(audited) << audited.error().message;
  EXPECT_TRUE(audited->findings.empty()) << audited->findings.front().what;
}

// Seed 20131 of SGLang 0.5.23, and a recording with states: the blocks that a replaced table still
// has keep their content, and a copy may start from a block that the same step copies to. The last
// is of an engine whose request continues in the block of another in which its hit ends.
TEST(FoundByFuzzing, BlocksThatARequestKeepsOrContinuesKeepTheirContent) {
  for (const std::string name :
       {"sglang_0_5_23_replaced_table_of_a_part", "sglang_0_5_23_replaced_table_of_states",
        "hit_continues_inside_a_block"}) {
    const std::string path = LOCKSTEP_SOURCE_DIR "/tests/regressions/" + name + ".jsonl";
    auto recording = read_recording(path);
    ASSERT_TRUE(recording) << recording.error().message;
    auto saved = case_of(name, *std::move(recording), Decides::recording);
    ASSERT_TRUE(saved) << saved.error().message;
    Tally tally;
    TallyCounter counter(*saved, tally);
    for (const RecordedStep& step : saved->recording->steps) counter.step(step);
    EXPECT_EQ(tally[Reached::preemption], 0) << name;
    saved->backend = "simt";
    saved->attention_backend = AttentionBackend::any_size;
    saved->engine.engine = EngineConfig().engine;  // SGLang has no profile
    SessionParts parts = parts_of(*saved);
    parts.backend = make_simt_backend;
    const auto session = Session::open(config_of(*saved), std::move(parts));
    ASSERT_TRUE(session) << session.error().message;
    const auto report = (*session)->run();
    ASSERT_TRUE(report) << report.error().message;
    const auto& divergence = report->summary.divergence;
    EXPECT_EQ(report->summary.verdict, Verdict::agreed) << (divergence ? divergence->message : "");
    const auto audited = audit_recording(path);
    ASSERT_TRUE(audited) << audited.error().message;
    EXPECT_TRUE(audited->findings.empty()) << audited->findings.front().what;
  }
}

// Seed 2219 of 0.22.1 with --conform: the model counts the blocks that exist.
TEST(FoundByFuzzing, ACountThatAShorterLoadMakesWrongIsThatFindingWithConformToo) {
  const auto saved = read_saved_case(
      LOCKSTEP_SOURCE_DIR "/tests/regressions/load_ends_before_a_hit_of_hidden_states.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  Outcome outcome;
  outcome.kind = OutcomeKind::violation;
  outcome.check = "conform.free_blocks";
  outcome.step = 1;
  const KnownFinding* known = known_finding_of_engine(*saved, outcome);
  ASSERT_NE(known, nullptr);
  EXPECT_EQ(known->number, 23);
  outcome.check = "conform.scheduled";
  EXPECT_EQ(known_finding_of_engine(*saved, outcome), nullptr);
}

// Seed 1080 of 0.33.0 with --conform: long_prefill_token_threshold binds a request that is alone
// in the queues while another one loads.
TEST(FoundByFuzzing, ARequestThatLoadsIsCompanyOfALongPrefill) {
  const auto conformed = conform_recording(
      LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_0_33_0_threshold_counts_loads.jsonl");
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
}

// Findings 26, 27, 28 and 48 to 54 are defects of a worker, whose host names them by their cause.
TEST(FoundByFuzzing, AWorkerNamesItsFindings) {
  const auto saved =
      read_saved_case(LOCKSTEP_SOURCE_DIR "/tests/regressions/events_of_loaded_blocks.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const auto number_of = [&](const std::string& what) {
    Outcome outcome;
    outcome.kind = OutcomeKind::divergence;
    outcome.what = what;
    const KnownFinding* finding = known_finding(*saved, outcome, JudgeOptions{});
    return finding == nullptr ? 0 : finding->number;
  };
  EXPECT_EQ(number_of("input: finding 26: the metadata has no counts"), 26);
  EXPECT_EQ(number_of("exception: EngineFault: finding 27: tables have [8, 4] entries"), 27);
  EXPECT_EQ(number_of("input: finding 28: layers.2 has 48 padded tokens"), 28);
  EXPECT_EQ(number_of("input: finding 48: the metadata has no counts"), 48);
  EXPECT_EQ(number_of("input: finding 49: layers.1 continues the state of block 2"), 49);
  EXPECT_EQ(number_of("input: finding 50: layers.0 reads 4 tokens of r0 as context, of 3"), 50);
  EXPECT_EQ(number_of("input: finding 51: batch: after append_row, row 0"), 51);
  EXPECT_EQ(number_of("input: finding 52: r3 continues from the state after 1 accepted"), 52);
  EXPECT_EQ(number_of("input: finding 53: r3 continues from the state after 1 accepted"), 53);
  EXPECT_EQ(number_of("input: finding 54: layers.0 verifies 2 tokens of r0"), 54);
  EXPECT_EQ(number_of("input: row r0 feeds the model token 7; finding 28: "), 0);
}

// Seeds 8797 and 28899 of 0.22.1: after a reset a request waits forever for output that was
// dropped, and after a second one the engine takes output that it had to drop.
TEST(FoundByFuzzing, FindingTwentyTwoIsRecognised) {
  for (const std::string name :
       {"reset_leaves_a_request_waiting", "reset_again_takes_dropped_output"}) {
    const auto saved =
        read_saved_case(LOCKSTEP_SOURCE_DIR "/tests/regressions/" + name + ".case.jsonl");
    ASSERT_TRUE(saved) << saved.error().message;
    const Outcome outcome = judge(*saved, make_simt_backend);
    const KnownFinding* finding = known_finding(*saved, outcome, JudgeOptions{});
    ASSERT_NE(finding, nullptr) << name << ": " << outcome.what;
    EXPECT_EQ(finding->number, 22) << name;
  }
}

// False reports of the audit, seeds 176, 3493, 2026112600076367 and 2026112600135322 of 0.33.0: a
// load stores a block again under its hash; a hit that windows compute again has slots for drafts
// at its end; of two requests with one prompt, one stores its last block while the other still
// computes its own; blocks of equal tokens have hashes that cover the next token. The last one was
// a fault of the model, seed 990000070284: it announced a block that no hit reaches, and that was
// cached as a part.
TEST(FoundByFuzzing, TheAuditPassesWhatItOnceReported) {
  for (const std::string name :
       {"events_of_loaded_blocks", "replayed_window_with_drafts", "two_ends_of_equal_prompts",
        "equal_tokens_before_other_ends", "part_of_a_block_left_out"}) {
    const auto saved =
        read_saved_case(LOCKSTEP_SOURCE_DIR "/tests/regressions/" + name + ".case.jsonl");
    ASSERT_TRUE(saved) << saved.error().message;
    const Outcome outcome = judge(*saved, make_simt_backend);
    EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << name << ": " << outcome.what;
  }
}

}  // namespace
}  // namespace lockstep
