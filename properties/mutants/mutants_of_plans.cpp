// The catalogue's defects of memory plans: views and addresses, proved by bytes or at work, and the
// figures that engines report about a plan. Also the defects of caches with their own plans:
// HiSparse's pages, caches replicated over context parallel ranks, and a draft model's cache.
#include "properties/mutants/mutant_parts.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

using enum Feature;

// Selects an attention backend and the kernel blocks that it takes. A backend that takes none of
// the plan's blocks leaves them as they are.
void choose(SavedCase& saved, AttentionBackend backend) {
  saved.attention_backend = backend;
  if (const auto sizes = kernel_block_sizes(saved.cache, backend))
    saved.kernel_block_sizes = *sizes;
}
// FlashAttention has the K/V dimension first, which some defects confuse with the blocks.
void flash(SavedCase& saved) { choose(saved, AttentionBackend::flash_attn); }

// Where vLLM decides per group whether tokens are sharded.
constexpr auto kSource = "vllm 0.33.0, v1/worker/gpu/block_table.py (dcp_sharded)";

// Returns a bias for replicated caches with sharded ones. Excluded kinds are refused with them, or
// have no row per token.
GeneratorOptions with_whole_caches(FeatureSet more = {}) {
  FeatureSet always{full_attention, whole_caches, long_prompts};
  always.add(more);
  return on_executor(always, {states, chunked_local, hidden_state, two_block_pool, cross_attention,
                              sinks, reference_windows, drafter_cache, bounded_replay});
}

// Returns a bias for a draft model with its own cache: one group, no step in flight, and none of
// the release's own defaults.
GeneratorOptions with_drafter(FeatureSet more = {}) {
  FeatureSet always{full_attention, drafts, drafter_cache, prefix_caching};
  always.add(more);
  return on_executor(
      always, {states, context_parallel, two_block_pool, scaled_rows, uniform_type, packed_pages,
               connector_peers, host_tier, several_groups, async_scheduling, served});
}

// Half of the drafts are rejected: passes must continue from accepted and from rejected ones. A
// step in flight would fix the number of drafts.
void over_three_passes(SavedCase& saved) {
  saved.engine.async_scheduling = false;
  saved.draft_acceptance_percent = 50;
}

// Lets requests run to max_model_len, so that drafts reach positions past the last one.
void up_to_the_last_token(SavedCase& saved) {
  over_three_passes(saved);
  for (TraceRecord& record : saved.trace.records)
    if (auto* request = std::get_if<TraceRequest>(&record)) {
      request->spec.max_tokens = saved.engine.max_model_len;
      request->output.length = saved.engine.max_model_len;
    }
}

constexpr auto kRead = "invariant.read_page";

// Adds what HiSparse needs to move pages: long shared prefixes and a pool too small for all.
FeatureSet with_pages(FeatureSet more) {
  more.add({hisparse, shared_prefixes, tight_pool, long_prompts});
  return more;
}
// of_pages() judges the decisions about pages; rows_of_pages() the copies of their rows.
GeneratorOptions of_pages(FeatureSet more = {}) { return decisions(with_pages(more)); }
GeneratorOptions rows_of_pages(FeatureSet more = {}) {
  return on_executor(with_pages(more), {two_block_pool, context_parallel});
}
// As with_whole_caches(), without a backend.
GeneratorOptions decided_with_whole_caches() {
  GeneratorOptions bias = with_whole_caches();
  bias.backend = "none";
  return bias;
}

// Decisions about HiSparse's pages and replicated caches.
const Mutant kOfPages[] = {
    row("page-host-held-twice", kOwn,
        "a copy of a page holds its host block twice, and frees it once",
        "HiSparse, and a page that fills up", {"invariant.page_leak", "liveness"}, of_pages()),
    row("page-copy-unheld", kOwn,
        "a copy of a page does not hold its device blocks: they are reallocated while it is in "
        "flight",
        "HiSparse, and a request that ends while its pages are copied",
        {"invariant.page_under_way"}, of_pages()),
    row("page-last-untold", kOwn,
        "workers do not receive the position of a request's last page, and write nowhere",
        "HiSparse", {"invariant.written_page"}, of_pages()),
    row("page-loss-untold", kOwn,
        "workers receive new pages, and not those that were lost since: they read a block that now "
        "belongs to another request",
        "HiSparse, and a full pool", {kRead}, of_pages()),
    row("page-loss-forgotten", kOwn, "a page whose block was reallocated still counts as resident",
        "HiSparse, and a full pool", {kRead}, of_pages()),
    row("page-copy-stale", kOwn,
        "a reallocated block still counts as the copy of a published page, and a hit takes it over",
        "HiSparse, and a hit on a page whose block was reallocated", {kRead}, of_pages()),
    row("page-restore-dropped", "vllm 0.33.0, v1/hisparse/coordinator.py (findings, 46)",
        "the last page of a load stays on the host, and is read from an empty block",
        "HiSparse with peers, and a load that ends inside a page", {kRead},
        of_pages({connector_peers})),
    row("page-mirror-short", kOwn,
        "rows on the last page of a step are not written to the host, and the page counts as clean",
        "HiSparse, and a step that writes two pages of a request", {"invariant.clean_page"},
        of_pages()),
    row("page-without-hot-region", kOwn,
        "pages are freed before the request has a hot region to read them through",
        "HiSparse, and a full pool", {"invariant.hot_region"}, of_pages()),
    row("page-all-resident", kOwn,
        "a step that reads from the host is reported as reading nothing there",
        "HiSparse, and a hit or a full pool", {"invariant.all_resident"}, of_pages()),
    row("whole-blocks-shared",
        "vllm 0.33.0, v1/core/single_type_kv_cache_manager.py (dcp_world_size)",
        "blocks of a replicated cache are counted as if the ranks shared its tokens: requests get "
        "a part of what they need",
        "a replicated cache and a sharded one", {"invariant.table_covers"},
        decided_with_whole_caches()),
};

// Defects of a plan at work: the wrong address shows as a wrong row in a case that runs.
const Mutant kAtWork[] = {
    // HiSparse's rows, as a backend copies them and looks them up.
    row("rows-mirror-short", kOwn, "the last token of a step is not written to the host",
        "HiSparse", {kHost}, rows_of_pages()),
    row("rows-residency-kept", kOwn, "a page that is no longer on the device is still read there",
        "HiSparse, and a page whose block was reallocated", {kDigest, kOutput}, rows_of_pages()),
    row("rows-restore-dropped", kOwn, "the last page of a load does not come back to the device",
        "HiSparse with peers, and a load that ends inside a page", {kWritten},
        rows_of_pages({connector_peers})),
    row("rows-host-unread", kOwn, "the null block is read instead of the host page",
        "HiSparse, and a hit or a full pool", {kDigest, kOutput}, rows_of_pages()),
    row("hot-region-kept", "vllm 0.33.0, v1/hisparse/runtime.py: invalidate_blocks",
        "the next request in a batch row inherits the previous request's hot region",
        "HiSparse, and two requests that read from the host in one row", {kWritten, kDigest},
        rows_of_pages()),
    row("hot-evicts-used", kOwn, "a row that is read takes a slot that the same read uses",
        "HiSparse, and a hot region that is full", {kWritten, kDigest, kMemory}, rows_of_pages()),
    row("hot-row-by-slot", kOwn, "a hot region is filled with the host rows of its slots' numbers",
        "HiSparse, and a hit or a full pool", {kWritten, kDigest}, rows_of_pages()),
    // Views and layouts. Older pages have K and V in separate halves, hence on_older_pages().
    row("layout-not-updated", "vllm 38081",
        "attention views keep all K before all V although the pages are shared with states",
        "attention and states in one model, on a backend with the K/V dimension first",
        {kWritten, kMemory},
        on_older_pages({full_attention, states, several_groups}, {two_block_pool}), flash),
    row("layout-equal-page", "vllm 41657",
        "all layers of a tensor are shaped like its first one: equal bytes, different blocks",
        "equal pages with different block sizes", {kWritten, kMemory, kDigest},
        on_older_pages({full_attention, sliding_window, several_groups, different_block_sizes},
                       {two_block_pool, mla, chunked_local, states})),
    row("layout-two-heads", "LMCache 4467",
        "the K/V dimension is distinguished from the heads by its size: [.., 2, heads] or [.., "
        "heads, 2]",
        "two KV heads", {kWritten, kMemory},
        on_older_pages({full_attention}, {states, mla, sliding_window, chunked_local})),
    row("layout-order-lost", "vllm 22663",
        "rows are laid out NHD where HND was requested, or vice versa", "two KV heads", {kWritten},
        on_executor({full_attention}, {states, mla, sliding_window, chunked_local})),
    row("order-layer-stride", "LMCache 4463, 4247",
        "the stride from layer to layer of an overlaid cache is one row of tokens short",
        "two equal layers in a group, in any of the six layouts", {kWritten},
        on_executor({full_attention}, {packed_pages})),
    row("order-head-stride", "LMCache 4463, dynamo 14416",
        "heads of an overlaid cache are as far apart as if K and V were separate: half a content "
        "short",
        "two KV heads, in any of the six layouts", {kWritten, kDigest},
        on_executor({full_attention}, {states, mla, sliding_window, chunked_local, packed_pages})),
    row("pack-stride", "vllm 35703 review",
        "strides of (num_blocks, 2) are put on a (2, num_blocks) view",
        "packed attention, on a backend with the K/V dimension first", {kWritten, kMemory, kDigest},
        on_executor({full_attention, packed_pages},
                    {several_groups, mla, sliding_window, chunked_local, states}),
        flash),
    row("pack-offset", "vllm 35703", "every layer of a pack is at offset 0", "packed attention",
        {kWritten, kMemory},
        on_executor({full_attention, packed_pages},
                    {several_groups, mla, sliding_window, chunked_local, states})),
    // A draft model's cache: which tokens its passes read, and which rows they write.
    row("draft-token-unshifted", kOwn,
        "the draft model's first pass gets the tokens at its positions, not the next ones",
        "EAGLE's or MTP's drafts", {kWritten}, with_drafter()),
    row("draft-module-first", kOwn, "every module of MTP is given the first module's tokens",
        "MTP of several modules", {kWritten}, with_drafter(), over_three_passes),
    row("draft-row-kept", kOwn,
        "the row written for a draft is not written again by the step that verifies it", "drafts",
        {kWritten}, with_drafter(), over_three_passes),
    row("draft-rejected-counted", kOwn, "further passes continue after rejected drafts",
        "two drafts and a rejected one", {kWritten}, with_drafter(), over_three_passes),
    row("draft-not-run-again", kOwn,
        "rows of later modules that rejected drafts went into are not run again",
        "MTP of several modules, and several rejected drafts", {kWritten}, with_drafter(),
        over_three_passes),
    row("draft-position-late", kOwn, "each further pass writes a position too far", "two drafts",
        {kWritten}, with_drafter()),
    row("draft-position-stuck", kOwn, "further passes write over the row of the last token",
        "two drafts", {kWritten}, with_drafter()),
    row("draft-unclamped", kOwn,
        "drafts past max_model_len keep their positions: they go to slots that no token has, or to "
        "none",
        "a request that reaches its last tokens", {kWritten}, with_drafter(), up_to_the_last_token),
    row("draft-past-table", kOwn,
        "a draft whose position has no entry goes to the block of a stale entry past the table's "
        "end",
        "the first step of a prompt of whole blocks, where no slots for drafts are given",
        {kWritten, kMemory, "page_untouched", "reuse"},
        [] {
          GeneratorOptions options = with_drafter({bursts, shared_prefixes});
          options.engine = "";
          for (const Release& release : releases())
            if (release.draft_runner == DraftRunner::first) options.engine = release.name;
          return options;
        }()),
    // Replicated caches with sharded ones: which ranks write and read which rows.
    row("whole-dealt-out", kSource, "a rank writes only its share of a replicated cache",
        "a replicated cache and a sharded one", {kSlots}, with_whole_caches()),
    row("dealt-out-whole", kSource,
        "every rank writes all tokens of a sharded cache, as if replicated: also where its table "
        "has no entries for them",
        "a replicated cache and a sharded one", {kSlots, kMemory}, with_whole_caches()),
    row("whole-block-of-all", kSource,
        "slots of a replicated cache are computed with the tokens that all ranks have in a block "
        "of a sharded one",
        "a replicated cache and a sharded one", {kSlots}, with_whole_caches()),
    row("whole-read-in-part",
        "vllm 0.33.0, v1/worker/gpu/spec_decode/speculator.py (dcp_local_seq_lens)",
        "attention over a replicated cache receives the length of the rank's share",
        "a replicated cache and a sharded one", {kDigest}, with_whole_caches()),
};

// Views and addresses, proved without running: every element must have its own byte.
const Mutant kAddresses[] = {
    row("layout-two-blocks", "vllm 37236", "the block dimension is guessed from shape[0] == 2",
        "a pool of two blocks, in a model with attention and states", {"layout.bytes"},
        PlanBias{.states = true, .num_blocks = 2}),
    row("layout-restride-hidden", "vLLM 0.22.1, model runner V2",
        "the re-stride of attention pages is applied to every cache that looks like one",
        "hidden states in a pool of two blocks", {"layout.bytes"},
        PlanBias{.states = true, .split_blocks = true, .hidden_states = true, .num_blocks = 2}),
    row("ambiguous-refused", "vLLM 0.22.1, model runner V2",
        "a cache of shape (2, 2, ...) is refused because its dimensions cannot be told apart by "
        "size",
        "attention with states in a pool of two blocks", {"layout.refused"},
        PlanBias{.states = true, .num_blocks = 2}),
    row("state-spec-unhandled", "vllm 38041", "layers with states get no view at all",
        "any model with states", {"layout.refused"}, PlanBias{.states = true}),
    row("kernel-block-num-blocks", "vllm 38081",
        "num_blocks is not multiplied by the kernel blocks in a block: the view is too short for "
        "the last of them",
        "kernel blocks shorter than the manager's", {"layout.bytes"},
        PlanBias{.states = true, .split_blocks = true}),
    row("pack-num-blocks", "vllm 35703",
        "the page of a pack is counted once: the view and the tensor disagree", "packed attention",
        {"layout.bytes"}, PlanBias{.states = true, .packed = true}),
    // 3,000,000 blocks exceed 2 GiB in every tensor.
    row("offset-int32", "vllm 1486, 1514, 50427", "block id times block stride in 32 bits",
        "a tensor of more than 2 GiB", {"layout.bytes"},
        PlanBias{.states = true, .num_blocks = 3'000'000}),
};

// Figures that engines report about a plan.
const Mutant kFigures[] = {
    row("capacity-all-groups", "vllm 40384",
        "groups whose cost does not grow with length divide the capacity", "attention with states",
        {"capacity.tokens"}, PlanBias{.states = true}),
    row("capacity-sliding", "vllm 40417", "windows divide the capacity",
        "attention with sliding windows", {"capacity.tokens"}, PlanBias{.windows = true}),
    row("routed-buffer", "vllm 37118",
        "a buffer indexed by slots is sized by the capacity: writes out of bounds",
        "a hybrid, whose slots outnumber its tokens", {"capacity.slot_rows"},
        PlanBias{.states = true}),
    row("state-blocks-capped", "vllm 38270",
        "requests beyond the state blocks are capped silently, and starve later",
        "max_num_seqs beyond the state blocks of the pool", {"capacity.refusal"},
        PlanBias{.states = true, .many_requests = true}),
    row("cp-memory", "vllm 39949 review",
        "the context parallel ranks are left out of a memory estimate", "context parallelism",
        {"capacity.tokens"}, PlanBias{.ranks = true}),
    row("hit-rate-pack", "vllm 35703",
        "the layers of a pack count as a longer block: a hit must fill it, and most prompts are "
        "shorter",
        "packed attention with states that are kept for hits", {"capacity.hit_step"},
        PlanBias{.states = true, .packed = true, .aligned_states = true}),
};

}  // namespace

std::span<const Mutant> mutants_of_shares_and_pages() { return kOfPages; }
std::span<const Mutant> mutants_of_plans_at_work() { return kAtWork; }
std::span<const Mutant> mutants_of_addresses() { return kAddresses; }
std::span<const Mutant> mutants_of_figures() { return kFigures; }

}  // namespace lockstep
