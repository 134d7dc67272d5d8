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
    {.id = "page-host-held-twice",
     .mechanism = "a copy of a page holds its host block twice, and frees it once",
     .exposed_by = "HiSparse, and a page that fills up",
     .caught_by = {"invariant.page_leak", "liveness"},
     .bias = of_pages()},
    {.id = "page-copy-unheld",
     .mechanism = "a copy of a page does not hold its device blocks: they are reallocated while "
                  "it is in flight",
     .exposed_by = "HiSparse, and a request that ends while its pages are copied",
     .caught_by = {"invariant.page_under_way"},
     .bias = of_pages()},
    {.id = "page-last-untold",
     .mechanism = "workers do not receive the position of a request's last page, and write nowhere",
     .exposed_by = "HiSparse",
     .caught_by = {"invariant.written_page"},
     .bias = of_pages()},
    {.id = "page-loss-untold",
     .mechanism = "workers receive new pages, and not those that were lost since: they read a "
                  "block that now belongs to another request",
     .exposed_by = "HiSparse, and a full pool",
     .caught_by = {kRead},
     .bias = of_pages()},
    {.id = "page-loss-forgotten",
     .mechanism = "a page whose block was reallocated still counts as resident",
     .exposed_by = "HiSparse, and a full pool",
     .caught_by = {kRead},
     .bias = of_pages()},
    {.id = "page-copy-stale",
     .mechanism = "a reallocated block still counts as the copy of a published page, and a hit "
                  "takes it over",
     .exposed_by = "HiSparse, and a hit on a page whose block was reallocated",
     .caught_by = {kRead},
     .bias = of_pages()},
    {.id = "page-restore-dropped",
     .source = "vllm 0.33.0, v1/hisparse/coordinator.py (findings, 46)",
     .mechanism = "the last page of a load stays on the host, and is read from an empty block",
     .exposed_by = "HiSparse with peers, and a load that ends inside a page",
     .caught_by = {kRead},
     .bias = of_pages({connector_peers})},
    {.id = "page-mirror-short",
     .mechanism = "rows on the last page of a step are not written to the host, and the page "
                  "counts as clean",
     .exposed_by = "HiSparse, and a step that writes two pages of a request",
     .caught_by = {"invariant.clean_page"},
     .bias = of_pages()},
    {.id = "page-without-hot-region",
     .mechanism = "pages are freed before the request has a hot region to read them through",
     .exposed_by = "HiSparse, and a full pool",
     .caught_by = {"invariant.hot_region"},
     .bias = of_pages()},
    {.id = "page-all-resident",
     .mechanism = "a step that reads from the host is reported as reading nothing there",
     .exposed_by = "HiSparse, and a hit or a full pool",
     .caught_by = {"invariant.all_resident"},
     .bias = of_pages()},
    {.id = "whole-blocks-shared",
     .source = "vllm 0.33.0, v1/core/single_type_kv_cache_manager.py (dcp_world_size)",
     .mechanism = "blocks of a replicated cache are counted as if the ranks shared its tokens: "
                  "requests get a part of what they need",
     .exposed_by = "a replicated cache and a sharded one",
     .caught_by = {"invariant.table_covers"},
     .bias = decided_with_whole_caches()},
};

// Defects of a plan at work: the wrong address shows as a wrong row in a case that runs.
const Mutant kAtWork[] = {
    // HiSparse's rows, as a backend copies them and looks them up.
    {.id = "rows-mirror-short",
     .mechanism = "the last token of a step is not written to the host",
     .exposed_by = "HiSparse",
     .caught_by = {kHost},
     .bias = rows_of_pages()},
    {.id = "rows-residency-kept",
     .mechanism = "a page that is no longer on the device is still read there",
     .exposed_by = "HiSparse, and a page whose block was reallocated",
     .caught_by = {kDigest, kOutput},
     .bias = rows_of_pages()},
    {.id = "rows-restore-dropped",
     .mechanism = "the last page of a load does not come back to the device",
     .exposed_by = "HiSparse with peers, and a load that ends inside a page",
     .caught_by = {kWritten},
     .bias = rows_of_pages({connector_peers})},
    {.id = "rows-host-unread",
     .mechanism = "the null block is read instead of the host page",
     .exposed_by = "HiSparse, and a hit or a full pool",
     .caught_by = {kDigest, kOutput},
     .bias = rows_of_pages()},
    {.id = "hot-region-kept",
     .source = "vllm 0.33.0, v1/hisparse/runtime.py: invalidate_blocks",
     .mechanism = "the next request in a batch row inherits the previous request's hot region",
     .exposed_by = "HiSparse, and two requests that read from the host in one row",
     .caught_by = {kWritten, kDigest},
     .bias = rows_of_pages()},
    {.id = "hot-evicts-used",
     .mechanism = "a row that is read takes a slot that the same read uses",
     .exposed_by = "HiSparse, and a hot region that is full",
     .caught_by = {kWritten, kDigest, kMemory},
     .bias = rows_of_pages()},
    {.id = "hot-row-by-slot",
     .mechanism = "a hot region is filled with the host rows of its slots' numbers",
     .exposed_by = "HiSparse, and a hit or a full pool",
     .caught_by = {kWritten, kDigest},
     .bias = rows_of_pages()},
    // Views and layouts. Older pages have K and V in separate halves, hence on_older_pages().
    {.id = "layout-not-updated",
     .source = "vllm 38081",
     .mechanism =
         "attention views keep all K before all V although the pages are shared with states",
     .exposed_by = "attention and states in one model, on a backend with the K/V dimension first",
     .caught_by = {kWritten, kMemory},
     .bias = on_older_pages({full_attention, states, several_groups}, {two_block_pool}),
     .reshape = flash},
    {.id = "layout-equal-page",
     .source = "vllm 41657",
     .mechanism =
         "all layers of a tensor are shaped like its first one: equal bytes, different blocks",
     .exposed_by = "equal pages with different block sizes",
     .caught_by = {kWritten, kMemory, kDigest},
     .bias = on_older_pages({full_attention, sliding_window, several_groups, different_block_sizes},
                            {two_block_pool, mla, chunked_local, states})},
    {.id = "layout-two-heads",
     .source = "LMCache 4467",
     .mechanism = "the K/V dimension is distinguished from the heads by its size: [.., 2, heads] "
                  "or [.., heads, 2]",
     .exposed_by = "two KV heads",
     .caught_by = {kWritten, kMemory},
     .bias = on_older_pages({full_attention}, {states, mla, sliding_window, chunked_local})},
    {.id = "layout-order-lost",
     .source = "vllm 22663",
     .mechanism = "rows are laid out NHD where HND was requested, or vice versa",
     .exposed_by = "two KV heads",
     .caught_by = {kWritten},
     .bias = on_executor({full_attention}, {states, mla, sliding_window, chunked_local})},
    {.id = "order-layer-stride",
     .source = "LMCache 4463, 4247",
     .mechanism = "the stride from layer to layer of an overlaid cache is one row of tokens short",
     .exposed_by = "two equal layers in a group, in any of the six layouts",
     .caught_by = {kWritten},
     .bias = on_executor({full_attention}, {packed_pages})},
    {.id = "order-head-stride",
     .source = "LMCache 4463, dynamo 14416",
     .mechanism = "heads of an overlaid cache are as far apart as if K and V were separate: half "
                  "a content short",
     .exposed_by = "two KV heads, in any of the six layouts",
     .caught_by = {kWritten, kDigest},
     .bias =
         on_executor({full_attention}, {states, mla, sliding_window, chunked_local, packed_pages})},
    {.id = "pack-stride",
     .source = "vllm 35703 review",
     .mechanism = "strides of (num_blocks, 2) are put on a (2, num_blocks) view",
     .exposed_by = "packed attention, on a backend with the K/V dimension first",
     .caught_by = {kWritten, kMemory, kDigest},
     .bias = on_executor({full_attention, packed_pages},
                         {several_groups, mla, sliding_window, chunked_local, states}),
     .reshape = flash},
    {.id = "pack-offset",
     .source = "vllm 35703",
     .mechanism = "every layer of a pack is at offset 0",
     .exposed_by = "packed attention",
     .caught_by = {kWritten, kMemory},
     .bias = on_executor({full_attention, packed_pages},
                         {several_groups, mla, sliding_window, chunked_local, states})},
    // A draft model's cache: which tokens its passes read, and which rows they write.
    {.id = "draft-token-unshifted",
     .mechanism =
         "the draft model's first pass gets the tokens at its positions, not the next ones",
     .exposed_by = "EAGLE's or MTP's drafts",
     .caught_by = {kWritten},
     .bias = with_drafter()},
    {.id = "draft-module-first",
     .mechanism = "every module of MTP is given the first module's tokens",
     .exposed_by = "MTP of several modules",
     .caught_by = {kWritten},
     .bias = with_drafter(),
     .reshape = over_three_passes},
    {.id = "draft-row-kept",
     .mechanism = "the row written for a draft is not written again by the step that verifies it",
     .exposed_by = "drafts",
     .caught_by = {kWritten},
     .bias = with_drafter(),
     .reshape = over_three_passes},
    {.id = "draft-rejected-counted",
     .mechanism = "further passes continue after rejected drafts",
     .exposed_by = "two drafts and a rejected one",
     .caught_by = {kWritten},
     .bias = with_drafter(),
     .reshape = over_three_passes},
    {.id = "draft-not-run-again",
     .mechanism = "rows of later modules that rejected drafts went into are not run again",
     .exposed_by = "MTP of several modules, and several rejected drafts",
     .caught_by = {kWritten},
     .bias = with_drafter(),
     .reshape = over_three_passes},
    {.id = "draft-position-late",
     .mechanism = "each further pass writes a position too far",
     .exposed_by = "two drafts",
     .caught_by = {kWritten},
     .bias = with_drafter()},
    {.id = "draft-position-stuck",
     .mechanism = "further passes write over the row of the last token",
     .exposed_by = "two drafts",
     .caught_by = {kWritten},
     .bias = with_drafter()},
    {.id = "draft-unclamped",
     .mechanism = "drafts past max_model_len keep their positions: they go to slots that no token "
                  "has, or to none",
     .exposed_by = "a request that reaches its last tokens",
     .caught_by = {kWritten},
     .bias = with_drafter(),
     .reshape = up_to_the_last_token},
    {.id = "draft-past-table",
     .mechanism = "a draft whose position has no entry goes to the block of a stale entry past the "
                  "table's end",
     .exposed_by =
         "the first step of a prompt of whole blocks, where no slots for drafts are given",
     .caught_by = {kWritten, kMemory, "page_untouched", "reuse"},
     .bias =
         [] {
           GeneratorOptions options = with_drafter({bursts, shared_prefixes});
           options.engine = "";
           for (const Release& release : releases())
             if (release.draft_runner == DraftRunner::first) options.engine = release.name;
           return options;
         }()},
    // Replicated caches with sharded ones: which ranks write and read which rows.
    {.id = "whole-dealt-out",
     .source = kSource,
     .mechanism = "a rank writes only its share of a replicated cache",
     .exposed_by = "a replicated cache and a sharded one",
     .caught_by = {kSlots},
     .bias = with_whole_caches()},
    {.id = "dealt-out-whole",
     .source = kSource,
     .mechanism = "every rank writes all tokens of a sharded cache, as if replicated: also where "
                  "its table has no entries for them",
     .exposed_by = "a replicated cache and a sharded one",
     .caught_by = {kSlots, kMemory},
     .bias = with_whole_caches()},
    {.id = "whole-block-of-all",
     .source = kSource,
     .mechanism = "slots of a replicated cache are computed with the tokens that all ranks have "
                  "in a block of a sharded one",
     .exposed_by = "a replicated cache and a sharded one",
     .caught_by = {kSlots},
     .bias = with_whole_caches()},
    {.id = "whole-read-in-part",
     .source = "vllm 0.33.0, v1/worker/gpu/spec_decode/speculator.py (dcp_local_seq_lens)",
     .mechanism = "attention over a replicated cache receives the length of the rank's share",
     .exposed_by = "a replicated cache and a sharded one",
     .caught_by = {kDigest},
     .bias = with_whole_caches()},
};

// Views and addresses, proved without running: every element must have its own byte.
const Mutant kAddresses[] = {
    {.id = "layout-two-blocks",
     .source = "vllm 37236",
     .mechanism = "the block dimension is guessed from shape[0] == 2",
     .exposed_by = "a pool of two blocks, in a model with attention and states",
     .caught_by = {"layout.bytes"},
     .plan = {.states = true, .num_blocks = 2}},
    {.id = "layout-restride-hidden",
     .source = "vLLM 0.22.1, model runner V2",
     .mechanism = "the re-stride of attention pages is applied to every cache that looks like one",
     .exposed_by = "hidden states in a pool of two blocks",
     .caught_by = {"layout.bytes"},
     .plan = {.states = true, .split_blocks = true, .hidden_states = true, .num_blocks = 2}},
    {.id = "ambiguous-refused",
     .source = "vLLM 0.22.1, model runner V2",
     .mechanism = "a cache of shape (2, 2, ...) is refused because its dimensions cannot be "
                  "told apart by size",
     .exposed_by = "attention with states in a pool of two blocks",
     .caught_by = {"layout.refused"},
     .plan = {.states = true, .num_blocks = 2}},
    {.id = "state-spec-unhandled",
     .source = "vllm 38041",
     .mechanism = "layers with states get no view at all",
     .exposed_by = "any model with states",
     .caught_by = {"layout.refused"},
     .plan = {.states = true}},
    {.id = "kernel-block-num-blocks",
     .source = "vllm 38081",
     .mechanism = "num_blocks is not multiplied by the kernel blocks in a block: the view is too "
                  "short for the last of them",
     .exposed_by = "kernel blocks shorter than the manager's",
     .caught_by = {"layout.bytes"},
     .plan = {.states = true, .split_blocks = true}},
    {.id = "pack-num-blocks",
     .source = "vllm 35703",
     .mechanism = "the page of a pack is counted once: the view and the tensor disagree",
     .exposed_by = "packed attention",
     .caught_by = {"layout.bytes"},
     .plan = {.states = true, .packed = true}},
    // 3,000,000 blocks exceed 2 GiB in every tensor.
    {.id = "offset-int32",
     .source = "vllm 1486, 1514, 50427",
     .mechanism = "block id times block stride in 32 bits",
     .exposed_by = "a tensor of more than 2 GiB",
     .caught_by = {"layout.bytes"},
     .plan = {.states = true, .num_blocks = 3'000'000}},
};

// Figures that engines report about a plan.
const Mutant kFigures[] = {
    {.id = "capacity-all-groups",
     .source = "vllm 40384",
     .mechanism = "groups whose cost does not grow with length divide the capacity",
     .exposed_by = "attention with states",
     .caught_by = {"capacity.tokens"},
     .plan = {.states = true}},
    {.id = "capacity-sliding",
     .source = "vllm 40417",
     .mechanism = "windows divide the capacity",
     .exposed_by = "attention with sliding windows",
     .caught_by = {"capacity.tokens"},
     .plan = {.windows = true}},
    {.id = "routed-buffer",
     .source = "vllm 37118",
     .mechanism = "a buffer indexed by slots is sized by the capacity: writes out of bounds",
     .exposed_by = "a hybrid, whose slots outnumber its tokens",
     .caught_by = {"capacity.slot_rows"},
     .plan = {.states = true}},
    {.id = "state-blocks-capped",
     .source = "vllm 38270",
     .mechanism = "requests beyond the state blocks are capped silently, and starve later",
     .exposed_by = "max_num_seqs beyond the state blocks of the pool",
     .caught_by = {"capacity.refusal"},
     .plan = {.states = true, .many_requests = true}},
    {.id = "cp-memory",
     .source = "vllm 39949 review",
     .mechanism = "the context parallel ranks are left out of a memory estimate",
     .exposed_by = "context parallelism",
     .caught_by = {"capacity.tokens"},
     .plan = {.ranks = true}},
    {.id = "hit-rate-pack",
     .source = "vllm 35703",
     .mechanism = "the layers of a pack count as a longer block: a hit must fill it, and most "
                  "prompts are shorter",
     .exposed_by = "packed attention with states that are kept for hits",
     .caught_by = {"capacity.hit_step"},
     .plan = {.states = true, .packed = true, .aligned_states = true}},
};

}  // namespace

std::span<const Mutant> mutants_of_shares_and_pages() { return kOfPages; }
std::span<const Mutant> mutants_of_plans_at_work() { return kAtWork; }
std::span<const Mutant> mutants_of_addresses() { return kAddresses; }
std::span<const Mutant> mutants_of_figures() { return kFigures; }

}  // namespace lockstep
