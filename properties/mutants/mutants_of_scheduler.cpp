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

// Makes every reset of the prefix cache preempt all running requests. The generator's resets do
// not.
void preempt_with_resets(SavedCase& saved) {
  for (TraceRecord& record : saved.trace.records)
    if (auto* control = std::get_if<TraceControl>(&record)) control->preempts_running = true;
}

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
    {.id = "hash-extra-keys",
     .source = "vllm 44701, 30931, 36708",
     .mechanism = "the cache salt is left out of the block hash, so requests that must not share "
                  "find each other's blocks",
     .exposed_by = "equal prompts with different salts",
     .caught_by = {"audit.attention_read", "audit.state_read"},
     .bias = decisions({salts, shared_prefixes})},
    {.id = "hash-cp-granularity",
     .source = "vllm 26296",
     .mechanism = "the hash block is not multiplied by the context parallel ranks: a block is "
                  "found by the hash of a part of its tokens",
     .exposed_by = "context parallelism and prompts that diverge inside a block",
     .caught_by = {"audit.attention_read"},
     .bias = decisions(
         {full_attention, shared_prefixes, long_prompts},
         {several_groups, states, sliding_window, chunked_local, mla, drafts, two_block_pool}),
     .reshape = share_context},
    {.id = "hash-next-token",
     .source = "vLLM 0.33.0 design",
     .mechanism = "a block's hash leaves out the token after it, which EAGLE's draft model has "
                  "read, and no block of a hit is dropped for it",
     .exposed_by = "EAGLE's drafts and prompts that differ right after a block",
     .caught_by = {"audit.draft_read"},
     .bias = decisions({full_attention, drafts, shared_prefixes}),
     .reshape = draft_with_eagle},
    {.id = "hash-stale",
     .source = "kvcached 363",
     .mechanism = "a reused block keeps its old hash until its new content is published",
     .exposed_by = "a resend of a prompt while its blocks are being overwritten",
     .caught_by = {"invariant.published", "invariant.hit", "invariant.hash_to_block",
                   "audit.attention_read", "audit.token_write", "audit.handed_out"},
     .bias = decisions({tight_pool, shared_prefixes})},
    {.id = "hit-same-step",
     .source = "vllm 38715",
     .mechanism = "a request hits a state that another request of the same step has yet to write",
     .exposed_by = "two requests of one prompt in one step, and states in mode align",
     .caught_by = {"audit.state_read"},
     .bias = decisions({states, full_attention, several_groups, shared_prefixes, bursts},
                       {two_block_pool})},
    {.id = "hit-untouched-evicted",
     .source = "vllm 44409",
     .mechanism = "one group's new blocks evict another group's hit before it is taken: one "
                  "block, two owners",
     .exposed_by = "a hit in several groups while the free queue is nearly empty",
     .caught_by = {"invariant.ref_cnt", "invariant.one_group", "invariant.conservation",
                   "invariant.hit"},
     .bias = decisions({several_groups, full_attention, tight_pool, shared_prefixes},
                       {two_block_pool})},
    {.id = "hit-one-group-truncated",
     .source = "vllm-ascend 14810",
     .mechanism = "only the first group's hit is cut to the common length; the others keep "
                  "blocks beyond it",
     .exposed_by = "two groups of full attention and one that shortens the hit",
     .caught_by = {"invariant.one_writer", "invariant.queue_front", "audit.handed_out",
                   "audit.token_write"},
     .bias = decisions({several_groups, full_attention, hidden_state, states, shared_prefixes},
                       {two_block_pool})},
    {.id = "hit-longest-group",
     .source = "TensorRT-LLM 10875",
     .mechanism = "the hit is as long as the longest group's, not as the one common to all groups",
     .exposed_by = "a group that has kept less of the prefix than another",
     .caught_by = {"invariant.table_covers", "invariant.hit", "audit.attention_read",
                   "audit.state_read"},
     .bias =
         decisions({several_groups, full_attention, states, shared_prefixes}, {two_block_pool})},
    {.id = "hit-whole-prompt",
     .source = "vLLM V1 design",
     .mechanism = "a hit may cover the last token too, which leaves nothing to compute logits from",
     .exposed_by = "a resend of a prompt of whole blocks",
     .caught_by = {"liveness", "invariant.hit"},
     .bias = decisions({full_attention, shared_prefixes}, {drafts})},
    {.id = "hit-window-short",
     .source = "TensorRT-LLM 2983",
     .mechanism = "a window's hit is one block shorter than the window reaches back",
     .exposed_by = "a window that is not a whole number of blocks, some of it evicted",
     .caught_by = {"audit.attention_read", "invariant.hit"},
     .bias =
         decisions({sliding_window, tight_pool, shared_prefixes, long_prompts}, {two_block_pool})},
    {.id = "free-optimistic",
     .source = "vllm 47728",
     .mechanism = "a window is retired by a token count that includes drafts",
     .exposed_by = "rejected drafts, a window, and a pool in which freed blocks are reused at once",
     .caught_by = {"audit.token_write", "audit.handed_out", "audit.attention_read"},
     .bias = decisions({drafts, sliding_window, tight_pool, bursts}, {two_block_pool})},
    {.id = "free-in-flight",
     .source = "vllm 45357",
     .mechanism = "a preempted request stays in the step being decided, on blocks that are free "
                  "or another request's",
     .exposed_by = "a victim that has already been scheduled: policy priority",
     .caught_by = {"invariant.limits", "audit.token_write", "invariant.table_covers"},
     .bias = decisions(
         {priority_policy, priorities, no_full_isl_reserve, tight_pool, bursts, full_attention},
         {two_block_pool})},
    {.id = "free-twice",
     .source = "vllm 42571, 3347",
     .mechanism = "a block that requests share is in one batch of frees twice",
     .exposed_by = "a request that ends while another shares its prefix",
     .caught_by = {"engine.check", "invariant.ref_cnt", "invariant.conservation",
                   "invariant.free_order"},
     .bias = decisions({shared_prefixes, bursts})},
    {.id = "free-forward-order",
     .source = "vLLM V1 design",
     .mechanism = "a request's blocks are freed head first: the prefix is evicted before its tail",
     .exposed_by = "a request that ends with two blocks or more",
     .caught_by = {"invariant.free_order"},
     .bias = decisions({full_attention, long_prompts})},
    {.id = "free-by-id",
     .mechanism = "a request's blocks are freed in the order of their ids, as into a sorted free "
                  "list: which is evicted first depends on numbers",
     .exposed_by = "a request that ends with blocks in no rising order of ids",
     .caught_by = {"invariant.free_order"},
     .bias = decisions({full_attention, long_prompts, tight_pool})},
    {.id = "free-window-early",
     .mechanism = "a window is counted one token short, and its first block is freed",
     .exposed_by = "a window that begins with the last token of a block",
     .caught_by = {"audit.attention_read", "audit.handed_out"},
     .bias = decisions({sliding_window, tight_pool, long_prompts, bursts}, {two_block_pool})},
    {.id = "free-preempted-lost",
     .mechanism = "the blocks of a preempted request are never freed",
     .exposed_by = "a preemption",
     .caught_by = {"invariant.conservation", "invariant.ref_cnt"},
     .bias =
         decisions({no_full_isl_reserve, tight_pool, bursts, full_attention}, {two_block_pool})},
    {.id = "state-wrong-boundary",
     .source = "vllm 51113, 45477",
     .mechanism = "chunks are not cut at block boundaries: a state taken at one token count is "
                  "published under the hash of another",
     .exposed_by = "mode align and prompts in chunks",
     .caught_by = {"audit.state_read"},
     .bias = decisions(kHybridPrefixes, {two_block_pool})},
    {.id = "state-partial-block",
     .source = "vllm 34587",
     .mechanism = "mode all publishes the state of a block that is not full",
     .exposed_by = "mode all, a chunk that ends inside a block, and a hit on that block",
     .caught_by = {"audit.state_read", "invariant.published"},
     .bias = decisions_with(&EngineProfile::caches_states_in_mode_all,
                            {states, shared_prefixes, bursts, long_prompts},
                            {several_groups, full_attention, mla, sliding_window, chunked_local,
                             drafts, two_block_pool})},
    {.id = "state-leak-null-gap",
     .source = "vllm 55450",
     .mechanism = "retirement stops at a null entry, and older states stay until the request ends",
     .exposed_by = "a prompt in chunks of several blocks in mode align, a step in flight",
     .caught_by = {"invariant.planned_blocks"},
     .bias = decisions({states, full_attention, several_groups, long_prompts, async_scheduling},
                       {two_block_pool, drafts})},
    {.id = "state-spec-blocks",
     .source = "vllm 41233",
     .mechanism =
         "the blocks for the states of drafts are not counted, so these states have no blocks",
     .exposed_by = "drafts in a model with states",
     .caught_by = {"audit.state_read", "invariant.table_covers"},
     .bias = decisions({states, drafts}, {async_scheduling, two_block_pool})},
    {.id = "state-freed-early",
     .source = "vllm 51766",
     .mechanism = "the state that a new block continues is freed before it was copied",
     .exposed_by = "a hit or a chunk that ends at a block boundary in mode align",
     .caught_by = {"audit.state_read", "audit.handed_out"},
     .bias = decisions({states, full_attention, several_groups, long_prompts, tight_pool},
                       {two_block_pool})},
    {.id = "admission-uncapped",
     .mechanism = "a request needs room for all of its tokens even in a group that keeps few of "
                  "them, and waits forever",
     .exposed_by = "a prompt longer than the pool holds, in a window",
     .caught_by = {"liveness"},
     .bias = decisions({sliding_window, long_prompts, tight_pool},
                       {no_full_isl_reserve, full_attention, mla, two_block_pool})},
    {.id = "drafts-kept",
     .source = "vLLM V1 design",
     .mechanism = "rejected drafts stay counted as computed",
     .exposed_by = "a rejected draft",
     .caught_by = {"liveness", "audit.scheduled_tokens", "audit.attention_read",
                   "invariant.limits"},
     .bias = decisions({drafts}, {async_scheduling})},
    {.id = "drafts-outlive-preemption",
     .source = "vLLM V1 design",
     .mechanism = "a preempted request keeps the drafts after tokens that it recomputes",
     .exposed_by = "a request that is preempted before its drafts are scheduled",
     .caught_by = {"audit.drafts"},
     .bias = decisions({drafts, tight_pool, bursts, no_full_isl_reserve},
                       {async_scheduling, two_block_pool})},
    {.id = "stale-output-taken",
     .source = "vLLM 0.33.0 design",
     .mechanism = "output that was in flight when a reset sent its request back is still processed",
     .exposed_by = "a reset that preempts running requests, with a step in flight",
     .caught_by = {"audit.stale_output"},
     .bias = decisions({resets, async_scheduling, bursts}, {drafts}),
     .reshape = preempt_with_resets},
    {.id = "resume-appended",
     .source = "vLLM V1 design",
     .mechanism = "a resumed request receives only its new blocks, like a running one",
     .exposed_by = "a preempted request that resumes with a hit",
     .caught_by = {"audit.state_read", "audit.token_write", "audit.attention_read",
                   "audit.draft_slots", "invariant.table_covers"},
     .bias = decisions({no_full_isl_reserve, tight_pool, bursts, full_attention, long_prompts},
                       {two_block_pool})},
    {.id = "common-prefix-overcount",
     .mechanism = "blocks that two requests share count as common to the whole batch",
     .exposed_by =
         "three running requests, two of which share a prefix (0.22.1: cascade attention)",
     .caught_by = {"audit.common_prefix"},
     .bias = decisions_with(&EngineProfile::reports_common_prefix_blocks,
                            {full_attention, shared_prefixes, bursts}, {two_block_pool})},
    // Requests that are refused, or end at an unfavourable moment: these need faults.
    {.id = "refused-hit-kept",
     .mechanism = "a request that hits a prefix but is refused the rest of its blocks keeps its "
                  "references to the hit",
     .exposed_by = "a hit while the pool is full or gives nothing",
     .caught_by = {"invariant.ref_cnt", "invariant.conservation"},
     .bias = decisions({faults, shared_prefixes, full_attention, tight_pool}, {two_block_pool})},
    {.id = "abort-twice",
     .mechanism = "an abort of a request that has just finished retires it a second time",
     .exposed_by = "a client that disconnects while the last token is in flight",
     .caught_by = {"engine.check"},
     .bias = decisions({faults, full_attention})},
    {.id = "abort-in-flight-kept",
     .mechanism = "the blocks of a request aborted with a step in flight wait for an output that "
                  "never reaches it",
     .exposed_by = "an abort between a decision and its output",
     .caught_by = {"invariant.conservation", "invariant.ref_cnt", "invariant.leak",
                   "audit.conservation"},
     .bias = decisions({faults, aborts, full_attention})},
    // Encoders, sinks and reference windows. Wrong decisions about their rows show only in pages,
    // so these cases run on the executor.
    {.id = "encoder-skipped-on-resume",
     .mechanism = "a request that resumes after a preemption skips its encoder: its rows were in "
                  "blocks that now belong to others",
     .exposed_by = "a preempted request with an encoder",
     .caught_by = {"decide"},
     .bias = on_executor(
         {full_attention, cross_attention, no_full_isl_reserve, tight_pool, bursts, same_instant},
         kApart)},
    {.id = "cross-blocks-short",
     .mechanism = "blocks for an encoder's rows are counted in whole ones",
     .exposed_by = "an encoder with no whole blocks of rows",
     .caught_by = {"invariant.table_covers"},
     .bias = on_executor({full_attention, cross_attention}, kApart)},
    {.id = "sinks-given-away",
     .source = "vllm 0.33.0, v1/core/single_type_kv_cache_manager.py (findings, 38)",
     .mechanism = "no blocks are kept for sinks: the first requests get those that the worker "
                  "writes them to",
     .exposed_by = "sinks",
     .caught_by = {"invariant.ref_cnt", "invariant.one_group"},
     .bias = on_executor({full_attention, sinks}, kApart)},
    {.id = "rswa-window-short",
     .mechanism = "a reference window frees a block that attention still reads",
     .exposed_by = "more output than a reference window has tokens, in a full pool",
     .caught_by = {kDigest, kOutput},
     .bias = on_executor({full_attention, long_prompts, reference_windows, tight_pool, bursts},
                         kApart)},
};

// Defects of transfers to and from a host tier, which the memory model follows block by block.
const Mutant kHostTier[] = {
    {.id = "transfer-wrong-end",
     .source = "dynamo 8419, vllm 43996",
     .mechanism = "the last blocks of a transfer are moved in place of the first",
     .exposed_by = "a host tier, and two blocks of a group moved in one step",
     .caught_by = {kHost, kWritten},
     .bias = beside_host_tier({long_prompts}),
     .reshape = with_host_tier},
    {.id = "transfer-flatten",
     .source = "vllm 39949",
     .mechanism = "a transfer treats a cache as one long array and ignores padding and other "
                  "layers between its blocks",
     .exposed_by = "a host tier, and padded pages or several layers in a host block",
     .caught_by = {kHost, kWritten},
     .bias = beside_host_tier({several_groups, padded_pages}),
     .reshape = with_host_tier},
    {.id = "transfer-failed-marked-ok",
     .source = "dynamo 15079",
     .mechanism = "a failed load from the host tier is not reported: its blocks count as computed",
     .exposed_by = "a host tier, and loads that fail",
     .caught_by = {"decide", "transfer"},
     .bias = one_group(beside_host_tier({})),
     .reshape = with_failing_loads},
    {.id = "free-send-in-flight",
     .source = "vllm 45357",
     .mechanism = "a finished request frees its blocks while stores of them are pending",
     .exposed_by = "a host tier, and stores that outlive their request",
     .caught_by = {"transfer"},
     .bias = beside_host_tier({}),
     .reshape = with_late_stores},
};

// Defects between two engines and among connectors. Their switches are in
// sim/pair/transfer_protocol.h and sim/connectors/. The two `hold-` rows need no switch:
// vllm-0.22.1 itself has them.
const Mutant kTransfers[] = {
    {.id = "send-freed-early",
     .mechanism = "the prefill engine frees its blocks when it has sent the last of them, not "
                  "when they are known to have arrived",
     .exposed_by = "any load; a lost block makes it wrong data",
     .caught_by = {"transfer.freed_early"}},
    {.id = "delivery-twice",
     .mechanism = "a block that arrives twice is written and counted twice: the load counts as "
                  "complete with a block missing",
     .exposed_by = "a network that repeats packets, or a repeated read",
     .caught_by = {"transfer.delivered_twice"}},
    {.id = "recv-failed-marked-ok",
     .source = "dynamo 15079; vLLM 0.22.1's NIXL worker with several groups",
     .mechanism = "a failed load is reported as received, and none of its blocks as invalid",
     .exposed_by = "blocks lost for good",
     .caught_by = {"transfer.incomplete"}},
    {.id = "completion-stale",
     .mechanism = "the release of an earlier attempt counts as one of the current attempt: its "
                  "blocks are free before they are read",
     .exposed_by = "a failed load, prefilled again, and a release that comes late",
     .caught_by = {"transfer.freed_early"},
     .transfer = {.fails_requests = true}},
    // These concern the bytes in flight, which content ids do not show.
    {.id = "stage-read-early",
     .source = "vllm 46278, sglang 36738: the same race",
     .mechanism = "the bytes to send are read from the staging buffer before the step that "
                  "stores the blocks there has run",
     .exposed_by = "any load, and pages",
     .caught_by = {"transfer.read_content"},
     .transfer = {.has_pages = true}},
    {.id = "load-before-arrival",
     .source = "vllm 46278, sglang 36738: the same race",
     .mechanism = "blocks are loaded into pages before their bytes have arrived in the staging "
                  "buffer: pages receive its old content",
     .exposed_by = "any load, and pages",
     .caught_by = {"memory.divergence"},
     .transfer = {.has_pages = true}},
    {.id = "hold-head-of-line",
     .source = "vLLM 0.22.1 (connectors/connector_async/0014)",
     .mechanism = "a request that holds nothing and does not fit is queued before fully loaded "
                  "ones: nothing runs again",
     .exposed_by = "a tight pool, and a load that received nothing",
     .caught_by = {"liveness.head_of_line"},
     .transfer = {.subject = TransferSubject::holds, .tight = true}},
    {.id = "hold-partial-deadlock",
     .source = "vLLM 0.22.1 (connectors/connector_failures_fail/0000)",
     .mechanism = "partly loaded requests each hold what the other needs to continue",
     .exposed_by = "a tight pool",
     .caught_by = {"liveness.partial_load"},
     .transfer = {.subject = TransferSubject::holds, .tight = true}},
    {.id = "hma-any",
     .source = "vllm 39949",
     .mechanism = "a MultiConnector reports support for several groups when any part has it",
     .exposed_by = "parts that differ in this",
     .caught_by = {"connector.hybrid_groups"},
     .transfer = {.subject = TransferSubject::connectors}},
    {.id = "hma-before-config",
     .source = "vllm 39949",
     .mechanism = "support for several groups is queried before the offloading backend has set "
                  "its connector: the engine does not start",
     .exposed_by = "offloading, and no other connector",
     .caught_by = {"connector.start"},
     .transfer = {.subject = TransferSubject::connectors}},
};

}  // namespace

std::span<const Mutant> mutants_of_decisions() { return kDecisions; }
std::span<const Mutant> mutants_of_host_tier() { return kHostTier; }
std::span<const Mutant> mutants_of_transfers() { return kTransfers; }

}  // namespace lockstep
