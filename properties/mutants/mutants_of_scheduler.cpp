// The catalogue's defects of decisions (switched on in reference/defects/scheduler_defect.h), of a
// host tier, and between engines.
//
// two_block_pool is excluded almost everywhere: its single usable block leaves no room for sharing,
// windows or preemptions.
#include "properties/mutants/mutant_parts.h"
#include "properties/shrink/case_parts.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

using enum Feature;

// As decisions(), with the newest release that has a policy. Releases are ordered, so the last
// match is the newest.
GeneratorOptions decisions_with(bool EngineProfile::*policy, FeatureSet always, FeatureSet never) {
  GeneratorOptions options = decisions(always, never);
  for (const EngineProfile& release : engine_profiles())
    if (release.*policy) options.engine = release.name;
  return options;
}

// Sets two context parallel ranks. The generator combines them with one group only, hence the
// exclusions of the row.
void share_context(SavedCase& saved) { saved.engine.dcp = 2; }

// Hashes that cover the next token exist only with EAGLE.
void draft_with_eagle(SavedCase& saved) { saved.engine.spec_method = SpecMethod::eagle; }

// Adds a host tier of 8 blocks, so small that it also evicts.
void with_host_tier(SavedCase& saved) {
  saved.connector.parts = {ConnectorKind::host};
  saved.connector.num_host_blocks = 8;
}
// 60 percent of the loads fail: some succeed, or no request would ever continue.
void with_failing_loads(SavedCase& saved) {
  with_host_tier(saved);
  saved.connector.load_failed_percent = 60;
}
// A store may take up to 12 steps, longer than many requests run.
void with_late_stores(SavedCase& saved) {
  with_host_tier(saved);
  saved.connector.delay_steps_max = 12;
}
// Returns a bias for cases with a host tier: one release that is modelled with connectors, prefix
// caching, and a tight pool, so that blocks are evicted and loaded again.
GeneratorOptions beside_host_tier(FeatureSet always) {
  always.add({full_attention, prefix_caching, shared_prefixes, tight_pool});
  return {.engine = std::string(connector_profile().name),
          .always = always,
          .never = {states, two_block_pool, priority_policy, async_scheduling},
          .backend = "simt",
          .check = "fast"};
}

// Excludes all other groups. vLLM assigns lost blocks to requests only with one group.
GeneratorOptions one_group(GeneratorOptions options) {
  options.never.add({several_groups, hidden_state, sliding_window, chunked_local, mla});
  return options;
}

constexpr FeatureSet kHybridPrefixes{states, full_attention, several_groups, shared_prefixes};

// Hashes, hits, frees, states, admission, drafts and resumed requests, in this order.
const Mutant kDecisions[] = {
    row("hash-extra-keys", "vllm 44701, 30931, 36708",
        "the cache salt is left out of the block hash, so requests that must not share find each "
        "other's blocks",
        "equal prompts with different salts", {"audit.attention_read", "audit.state_read"},
        decisions({salts, shared_prefixes})),
    row("hash-cp-granularity", "vllm 26296",
        "the hash block is not multiplied by the context parallel ranks: a block is found by the "
        "hash of a part of its tokens",
        "context parallelism and prompts that diverge inside a block", {"audit.attention_read"},
        decisions(
            {full_attention, shared_prefixes, long_prompts},
            {several_groups, states, sliding_window, chunked_local, mla, drafts, two_block_pool}),
        share_context),
    row("hash-next-token", "vLLM 0.33.0 design",
        "a block's hash leaves out the token after it, which EAGLE's draft model has read, and no "
        "block of a hit is dropped for it",
        "EAGLE's drafts and prompts that differ right after a block", {"audit.draft_read"},
        decisions({full_attention, drafts, shared_prefixes}), draft_with_eagle),
    row("hash-stale", "kvcached 363",
        "a reused block keeps its old hash until its new content is published",
        "a resend of a prompt while its blocks are being overwritten",
        {"invariant.published", "invariant.hit", "invariant.hash_to_block", "audit.attention_read",
         "audit.token_write", "audit.handed_out"},
        decisions({tight_pool, shared_prefixes})),
    row("hit-same-step", "vllm 38715",
        "a request hits a state that another request of the same step has yet to write",
        "two requests of one prompt in one step, and states in mode align", {"audit.state_read"},
        decisions({states, full_attention, several_groups, shared_prefixes, bursts},
                  {two_block_pool})),
    row("hit-untouched-evicted", "vllm 44409",
        "one group's new blocks evict another group's hit before it is taken: one block, two "
        "owners",
        "a hit in several groups while the free queue is nearly empty",
        {"invariant.ref_cnt", "invariant.one_group", "invariant.conservation", "invariant.hit"},
        decisions({several_groups, full_attention, tight_pool, shared_prefixes}, {two_block_pool})),
    row("hit-one-group-truncated", "vllm-ascend 14810",
        "only the first group's hit is cut to the common length; the others keep blocks beyond it",
        "two groups of full attention and one that shortens the hit",
        {"invariant.one_writer", "invariant.queue_front", "audit.handed_out", "audit.token_write"},
        decisions({several_groups, full_attention, hidden_state, states, shared_prefixes},
                  {two_block_pool})),
    row("hit-longest-group", "TensorRT-LLM 10875",
        "the hit is as long as the longest group's, not as the one common to all groups",
        "a group that has kept less of the prefix than another",
        {"invariant.table_covers", "invariant.hit", "audit.attention_read", "audit.state_read"},
        decisions({several_groups, full_attention, states, shared_prefixes}, {two_block_pool})),
    row("hit-whole-prompt", "vLLM V1 design",
        "a hit may cover the last token too, which leaves nothing to compute logits from",
        "a resend of a prompt of whole blocks", {"liveness", "invariant.hit"},
        decisions({full_attention, shared_prefixes}, {drafts})),
    row("hit-window-short", "TensorRT-LLM 2983",
        "a window's hit is one block shorter than the window reaches back",
        "a window that is not a whole number of blocks, some of it evicted",
        {"audit.attention_read", "invariant.hit"},
        decisions({sliding_window, tight_pool, shared_prefixes, long_prompts}, {two_block_pool})),
    row("free-optimistic", "vllm 47728",
        "a window is retired by a token count that includes drafts",
        "rejected drafts, a window, and a pool in which freed blocks are reused at once",
        {"audit.token_write", "audit.handed_out", "audit.attention_read"},
        decisions({drafts, sliding_window, tight_pool, bursts}, {two_block_pool})),
    row("free-in-flight", "vllm 45357",
        "a preempted request stays in the step being decided, on blocks that are free or another "
        "request's",
        "a victim that has already been scheduled: policy priority",
        {"invariant.limits", "audit.token_write", "invariant.table_covers"},
        decisions(
            {priority_policy, priorities, no_full_isl_reserve, tight_pool, bursts, full_attention},
            {two_block_pool})),
    row("free-twice", "vllm 42571, 3347",
        "a block that requests share is in one batch of frees twice",
        "a request that ends while another shares its prefix",
        {"engine.check", "invariant.ref_cnt", "invariant.conservation", "invariant.free_order"},
        decisions({shared_prefixes, bursts})),
    row("free-forward-order", "vLLM V1 design",
        "a request's blocks are freed head first: the prefix is evicted before its tail",
        "a request that ends with two blocks or more", {"invariant.free_order"},
        decisions({full_attention, long_prompts})),
    row("free-by-id", kOwn,
        "a request's blocks are freed in the order of their ids, as into a sorted free list: which "
        "is evicted first depends on numbers",
        "a request that ends with blocks in no rising order of ids", {"invariant.free_order"},
        decisions({full_attention, long_prompts, tight_pool})),
    row("free-window-early", kOwn,
        "a window is counted one token short, and its first block is freed",
        "a window that begins with the last token of a block",
        {"audit.attention_read", "audit.handed_out"},
        decisions({sliding_window, tight_pool, long_prompts, bursts}, {two_block_pool})),
    row("free-preempted-lost", kOwn, "the blocks of a preempted request are never freed",
        "a preemption", {"invariant.conservation", "invariant.ref_cnt"},
        decisions({no_full_isl_reserve, tight_pool, bursts, full_attention}, {two_block_pool})),
    row("state-wrong-boundary", "vllm 51113, 45477",
        "chunks are not cut at block boundaries: a state taken at one token count is published "
        "under the hash of another",
        "mode align and prompts in chunks", {"audit.state_read"},
        decisions(kHybridPrefixes, {two_block_pool})),
    row("state-partial-block", "vllm 34587",
        "mode all publishes the state of a block that is not full",
        "mode all, a chunk that ends inside a block, and a hit on that block",
        {"audit.state_read", "invariant.published"},
        decisions_with(&EngineProfile::caches_states_in_mode_all,
                       {states, shared_prefixes, bursts, long_prompts},
                       {several_groups, full_attention, mla, sliding_window, chunked_local, drafts,
                        two_block_pool})),
    row("state-leak-null-gap", "vllm 55450",
        "retirement stops at a null entry, and older states stay until the request ends",
        "a prompt in chunks of several blocks in mode align, a step in flight",
        {"invariant.planned_blocks"},
        decisions({states, full_attention, several_groups, long_prompts, async_scheduling},
                  {two_block_pool, drafts})),
    row("state-spec-blocks", "vllm 41233",
        "the blocks for the states of drafts are not counted, so these states have no blocks",
        "drafts in a model with states", {"audit.state_read", "invariant.table_covers"},
        decisions({states, drafts}, {async_scheduling, two_block_pool})),
    row("state-freed-early", "vllm 51766",
        "the state that a new block continues is freed before it was copied",
        "a hit or a chunk that ends at a block boundary in mode align",
        {"audit.state_read", "audit.handed_out"},
        decisions({states, full_attention, several_groups, long_prompts, tight_pool},
                  {two_block_pool})),
    row("admission-uncapped", kOwn,
        "a request needs room for all of its tokens even in a group that keeps few of them, and "
        "waits forever",
        "a prompt longer than the pool holds, in a window", {"liveness"},
        decisions({sliding_window, long_prompts, tight_pool},
                  {no_full_isl_reserve, full_attention, mla, two_block_pool})),
    row("drafts-kept", "vLLM V1 design", "rejected drafts stay counted as computed",
        "a rejected draft",
        {"liveness", "audit.scheduled_tokens", "audit.attention_read", "invariant.limits"},
        decisions({drafts}, {async_scheduling})),
    row("drafts-outlive-preemption", "vLLM V1 design",
        "a preempted request keeps the drafts after tokens that it recomputes",
        "a request that is preempted before its drafts are scheduled", {"audit.drafts"},
        decisions({drafts, tight_pool, bursts, no_full_isl_reserve},
                  {async_scheduling, two_block_pool})),
    row("stale-output-taken", "vLLM 0.33.0 design",
        "output that was in flight when a reset sent its request back is still processed",
        "a reset that preempts running requests, with a step in flight", {"audit.stale_output"},
        decisions({resets, running_resets, async_scheduling, bursts}, {drafts})),
    row("resume-appended", "vLLM V1 design",
        "a resumed request receives only its new blocks, like a running one",
        "a preempted request that resumes with a hit",
        {"audit.state_read", "audit.token_write", "audit.attention_read", "audit.draft_slots",
         "invariant.table_covers"},
        decisions({no_full_isl_reserve, tight_pool, bursts, full_attention, long_prompts},
                  {two_block_pool})),
    row("common-prefix-overcount", kOwn,
        "blocks that two requests share count as common to the whole batch",
        "three running requests, two of which share a prefix (0.22.1: cascade attention)",
        {"audit.common_prefix"},
        decisions_with(&EngineProfile::reports_common_prefix_blocks,
                       {full_attention, shared_prefixes, bursts}, {two_block_pool})),
    // Requests that are refused, or end at an unfavourable moment: these need faults.
    row("refused-hit-kept", kOwn,
        "a request that hits a prefix but is refused the rest of its blocks keeps its references "
        "to the hit",
        "a hit while the pool is full or gives nothing",
        {"invariant.ref_cnt", "invariant.conservation"},
        decisions({faults, shared_prefixes, full_attention, tight_pool}, {two_block_pool})),
    row("abort-twice", kOwn,
        "an abort of a request that has just finished retires it a second time",
        "a client that disconnects while the last token is in flight", {"engine.check"},
        decisions({faults, full_attention})),
    row("abort-in-flight-kept", kOwn,
        "the blocks of a request aborted with a step in flight wait for an output that never "
        "reaches it",
        "an abort between a decision and its output",
        {"invariant.conservation", "invariant.ref_cnt", "invariant.leak", "audit.conservation"},
        decisions({faults, aborts, full_attention})),
    // Encoders, sinks and reference windows. Wrong decisions about their rows show only in pages,
    // so these cases run on the executor.
    row("encoder-skipped-on-resume", kOwn,
        "a request that resumes after a preemption skips its encoder: its rows were in blocks that "
        "now belong to others",
        "a preempted request with an encoder", {"decide"},
        on_executor({full_attention, cross_attention, no_full_isl_reserve, tight_pool, bursts,
                     same_instant},
                    kApart)),
    row("cross-blocks-short", kOwn, "blocks for an encoder's rows are counted in whole ones",
        "an encoder with no whole blocks of rows", {"invariant.table_covers"},
        on_executor({full_attention, cross_attention}, kApart)),
    row("sinks-given-away", "vllm 0.33.0, v1/core/single_type_kv_cache_manager.py (findings, 38)",
        "no blocks are kept for sinks: the first requests get those that the worker writes them to",
        "sinks", {"invariant.ref_cnt", "invariant.one_group"},
        on_executor({full_attention, sinks}, kApart)),
    row("rswa-window-short", kOwn, "a reference window frees a block that attention still reads",
        "more output than a reference window has tokens, in a full pool", {kDigest, kOutput},
        on_executor({full_attention, long_prompts, reference_windows, tight_pool, bursts}, kApart)),
};

// Defects of transfers to and from a host tier, which the memory model follows block by block.
const Mutant kHostTier[] = {
    row("transfer-wrong-end", "dynamo 8419, vllm 43996",
        "the last blocks of a transfer are moved in place of the first",
        "a host tier, and two blocks of a group moved in one step", {kHost, kWritten},
        beside_host_tier({long_prompts}), with_host_tier),
    row("transfer-flatten", "vllm 39949",
        "a transfer treats a cache as one long array and ignores padding and other layers between "
        "its blocks",
        "a host tier, and padded pages or several layers in a host block", {kHost, kWritten},
        beside_host_tier({several_groups, padded_pages}), with_host_tier),
    row("transfer-failed-marked-ok", "dynamo 15079",
        "a failed load from the host tier is not reported: its blocks count as computed",
        "a host tier, and loads that fail", {"decide", "transfer"}, one_group(beside_host_tier({})),
        with_failing_loads),
    row("free-send-in-flight", "vllm 45357",
        "a finished request frees its blocks while stores of them are pending",
        "a host tier, and stores that outlive their request", {"transfer"}, beside_host_tier({}),
        with_late_stores),
};

// Defects between two engines and among connectors. Their switches are in
// sim/pair/transfer_protocol.h and sim/connectors/. The two `hold-` rows need no switch:
// vllm-0.22.1 itself has them.
const Mutant kTransfers[] = {
    row("send-freed-early", kOwn,
        "the prefill engine frees its blocks when it has sent the last of them, not when they are "
        "known to have arrived",
        "any load; a lost block makes it wrong data", {"transfer.freed_early"}, TransferBias{}),
    row("delivery-twice", kOwn,
        "a block that arrives twice is written and counted twice: the load counts as complete with "
        "a block missing",
        "a network that repeats packets, or a repeated read", {"transfer.delivered_twice"},
        TransferBias{}),
    row("recv-failed-marked-ok", "dynamo 15079; vLLM 0.22.1's NIXL worker with several groups",
        "a failed load is reported as received, and none of its blocks as invalid",
        "blocks lost for good", {"transfer.incomplete"}, TransferBias{}),
    row("completion-stale", kOwn,
        "the release of an earlier attempt counts as one of the current attempt: its blocks are "
        "free before they are read",
        "a failed load, prefilled again, and a release that comes late", {"transfer.freed_early"},
        TransferBias{.fails_requests = true}),
    // These concern the bytes in flight, which content ids do not show.
    row("stage-read-early", "vllm 46278, sglang 36738: the same race",
        "the bytes to send are read from the staging buffer before the step that stores the blocks "
        "there has run",
        "any load, and pages", {"transfer.read_content"}, TransferBias{.has_pages = true}),
    row("load-before-arrival", "vllm 46278, sglang 36738: the same race",
        "blocks are loaded into pages before their bytes have arrived in the staging buffer: pages "
        "receive its old content",
        "any load, and pages", {"memory.divergence"}, TransferBias{.has_pages = true}),
    row("hold-head-of-line", "vLLM 0.22.1 (connectors/connector_async/0014)",
        "a request that holds nothing and does not fit is queued before fully loaded ones: nothing "
        "runs again",
        "a tight pool, and a load that received nothing", {"liveness.head_of_line"},
        TransferBias{.subject = TransferSubject::holds, .tight = true}),
    row("hold-partial-deadlock", "vLLM 0.22.1 (connectors/connector_failures_fail/0000)",
        "partly loaded requests each hold what the other needs to continue", "a tight pool",
        {"liveness.partial_load"}, TransferBias{.subject = TransferSubject::holds, .tight = true}),
    row("hma-any", "vllm 39949",
        "a MultiConnector reports support for several groups when any part has it",
        "parts that differ in this", {"connector.hybrid_groups"},
        TransferBias{.subject = TransferSubject::connectors}),
    row("hma-before-config", "vllm 39949",
        "support for several groups is queried before the offloading backend has set its "
        "connector: the engine does not start",
        "offloading, and no other connector", {"connector.start"},
        TransferBias{.subject = TransferSubject::connectors}),
};

}  // namespace

std::span<const Mutant> mutants_of_decisions() { return kDecisions; }
std::span<const Mutant> mutants_of_host_tier() { return kHostTier; }
std::span<const Mutant> mutants_of_transfers() { return kTransfers; }

}  // namespace lockstep
