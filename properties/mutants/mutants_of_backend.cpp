// The catalogue's defects of the backend: rows and states at work, and ranks (which heads and
// layers a rank has, and in which collectives data parallel ranks meet). Tables, launches and views
// have their own files.
#include "properties/mutants/mutant_parts.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

using enum Feature;

// States whose prefill exports a checkpoint. Prompts must span several blocks and be sent again, or
// no hit reads the exported state.
constexpr FeatureSet kCheckpoints = {
    full_attention, states,          several_groups, prefix_caching,
    long_prompts,   shared_prefixes, sessions,       prefill_checkpoints};
// A window that is recomputed after a hit: the hit must be longer than the window.
constexpr FeatureSet kReplays = {full_attention,  sliding_window, several_groups, prefix_caching,
                                 shared_prefixes, sessions,       long_prompts,   bounded_replay};
// Features that prevent recomputed windows, or hide them.
constexpr FeatureSet kCachedWindows = {states, chunked_local, hidden_state, two_block_pool};
// Hits that end inside a block of states, and turns of a conversation that continue from there.
constexpr FeatureSet kPartsOfBlocks = {
    full_attention, states,          several_groups, prefix_caching,
    long_prompts,   shared_prefixes, sessions,       hits_inside_blocks};

// In layer-outer layouts each layer is a view of its own at the block's address.
void with_layers_outermost(SavedCase& saved) { saved.layout = CacheLayout::LBNHC; }

// In block-outer layouts other layers' pages are between two blocks of one layer.
void with_blocks_outermost(SavedCase& saved) { saved.layout = CacheLayout::BLNHC; }

// With one stream the order of copies and kernels is given.
void over_four_streams(SavedCase& saved) { saved.num_streams = 4; }

// Sets eager execution and two tensor parallel ranks: without graphs, only sequence parallelism
// pads the single token of an idle rank.
void eagerly_over_two(SavedCase& saved) {
  saved.enforce_eager = true;
  saved.tensor_parallel_size = 2;
  saved.queries_per_kv = 2;
}

// Sets the smallest graphs, of 4 tokens: a step with more than a few prompt tokens has none.
void over_small_graphs(SavedCase& saved) {
  saved.enforce_eager = false;
  saved.max_cudagraph_capture_size = 4;
}

// Feature sets that several rows need.
constexpr FeatureSet kAttention{full_attention};
constexpr FeatureSet kHybrid{full_attention, states, several_groups};
constexpr FeatureSet kWithRings{full_attention, long_prompts, rings};
constexpr FeatureSet kSeveralRows{full_attention, several_rows};
constexpr FeatureSet kCompressedRows{mla, long_prompts, compressed_rows};
constexpr FeatureSet kEncoder{full_attention, cross_attention};
constexpr FeatureSet kSink{full_attention, sinks};
constexpr FeatureSet kWindow{full_attention, long_prompts, reference_windows};

// Writes and zeroing, hidden states, states, recomputed windows and rings, compressed rows,
// encoders and sinks, ranks.
const Mutant kBackend[] = {
    row("drop-slot", kOwn, "the K/V write leaves out the last scheduled token of every step",
        "any step", {kWritten}, on_executor(kAttention, {states})),
    row("wrong-stride", kOwn, "the block stride of the attention views is one token row short",
        "any block but the null block", {kWritten}, on_executor(kAttention, {states})),
    row("write-past-page", kOwn,
        "the last part of a row starts one token late, so that a block ends past its page",
        "any step; past the page: a full block", {kWritten}, on_executor(kAttention, {states})),
    row("uninitialised-read", kOwn, "the K/V rows of a step's last token are never computed",
        "any step, in check mode", {kMemory, kWritten}, on_executor(kAttention, {states}, "check")),
    row("race", kOwn, "a second CTA writes the first token's row with the last token's content",
        "any step in check mode; two tokens or more in fast mode", {kMemory},
        on_executor(kAttention, {states}, "check")),
    row("zero-lost", "vllm 35219, 43990",
        "blocks are not zeroed before use: bytes of another type stay in them",
        "attention with states, whose new blocks are zeroed", {kWritten},
        on_executor({full_attention, states, several_groups}, {two_block_pool})),
    row("zero-stride", kOwn,
        "zeroing goes from block to block by a stride that is a few bytes short",
        "attention with states, whose new blocks are zeroed",
        {kWritten, "page_untouched"},  // with blocks outermost
        on_executor({full_attention, states, several_groups}, {two_block_pool})),
    row("stale-nan", "vllm 35219, 43990",
        "attention reads its last block to the end: recycled bytes are read as numbers, or as NaN",
        "a query that ends inside a block", {kOutput}, on_executor(kAttention, {states})),
    row("hidden-flatten", "vllm 39949",
        "extraction reads a padded, strided cache as if it were dense: padding comes back as "
        "hidden states",
        "hidden states of two blocks in padded pages", {kExtraction, kMemory},
        on_executor({full_attention, hidden_state, several_groups, padded_pages},
                    {two_block_pool})),
    row("hidden-chunk-save", "vllm 39949",
        "states are saved after a chunk of a chunked prefill: fewer states than tokens",
        "a request with hidden states that ends", {kExtraction},
        on_executor({full_attention, hidden_state, several_groups}, {two_block_pool})),
    row("hidden-save-race", "vllm 37374",
        "the file of a request's hidden states is written under its final name, so a trainer can "
        "see it before it is complete",
        "a request with hidden states that ends, and a trainer that polls", {"hidden_file"},
        on_executor({full_attention, hidden_state, several_groups}, {two_block_pool})),
    row("state-copy-lost", "vllm 51766",
        "the state is not copied from the hit or the previous block into the new one",
        "a block boundary or a hit in mode align", {kWritten},
        on_executor(
            {full_attention, states, several_groups, prefix_caching, shared_prefixes, long_prompts},
            {two_block_pool})),
    row("checkpoint-lost", "vllm model_executor/layers/mamba/checkpoint.py",
        "a prefill does not store the state of its checkpoint: a hit finds what the block held "
        "before",
        "a chunk that exports a state from its inside", {kWritten},
        on_executor(kCheckpoints, {two_block_pool, drafts})),
    row("checkpoint-early", "vllm model_executor/layers/mamba/checkpoint.py",
        "a checkpoint is the state before its last token",
        "a chunk that exports a state from its inside", {kWritten, kStateOutput},
        on_executor(kCheckpoints, {two_block_pool, drafts})),
    row("part-copy-lost", "vllm v1/worker/utils.py, copy_kv_cache_blocks_inplace",
        "a hit that ends inside a block continues in a block that it was not copied to",
        "a hit inside a block", {kWritten},
        on_executor(kPartsOfBlocks,
                    {two_block_pool, drafts, sliding_window, chunked_local, hidden_state})),
    row("copy-first-view", "vllm 55112",
        "of several views at one address the shortest is copied: the tail of an attention block is "
        "not copied",
        "a hit inside a block, states and layers outermost", {kWritten},
        on_executor(kPartsOfBlocks,
                    {two_block_pool, drafts, sliding_window, chunked_local, hidden_state}),
        with_layers_outermost),
    row("part-copy-late", "vllm v1/worker/utils.py, copy_kv_cache_blocks_inplace",
        "a block is copied for a hit after the step has written and read the copy",
        "a hit inside a block", {kWritten},
        on_executor(kPartsOfBlocks,
                    {two_block_pool, drafts, sliding_window, chunked_local, hidden_state})),
    row("copy-unordered", "vllm 46278, sglang 36738",
        "readers of a copied or loaded block do not wait for it, and a store does not wait for "
        "what it stores",
        "several streams, and copies of states from block to block", {kMemory, kWritten},
        on_executor(
            {full_attention, states, several_groups, prefix_caching, shared_prefixes, long_prompts},
            {two_block_pool}),
        over_four_streams),
    row("state-pads-included", "vllm 55178",
        "a padded prompt tail advances the state: h(N+k) saved as h(N)", "any state update",
        {kWritten}, on_executor(kHybrid, {two_block_pool})),
    row("state-draft-reuse", "vllm 57128",
        "a step continues from a state that has seen rejected drafts",
        "states with drafts, one of them rejected", {kWritten},
        on_executor({states, drafts}, {two_block_pool})),
    row("optimistic-count", "vllm-ascend 10032",
        "the worker places a step's tokens by the engine's count, in which drafts of the step in "
        "flight are computed although they were rejected",
        "a rejected draft, with asynchronous scheduling", {kSlots},
        on_executor({full_attention, drafts, async_scheduling}, {two_block_pool})),
    row("state-update-race", "vllm 50729",
        "parallel copies inside one block overlap: two threads advance one word in place",
        "any state update", {kMemory, kWritten}, on_executor(kHybrid, {two_block_pool}, "check")),
    row("state-stride-unpadded", "vllm 38081 review",
        "states are strided by the real page instead of the padded page: block b drifts into b-1",
        "states in padded pages", {kWritten},
        on_executor({full_attention, states, several_groups, padded_pages}, {two_block_pool})),
    row("state-offset-wrong-itemsize", "vllm 38081 review",
        "the second state's offset is counted in items of the first",
        "two states of different dtype", {kWritten}, on_executor(kHybrid, {two_block_pool})),
    // Recomputed windows and rings. A ring needs a prompt longer than its 8 or 16 entries.
    row("replay-overwrites-hit", "vllm models/deepseek_v41/nvidia/model_state.py",
        "tokens that are computed again for a window have slots in the groups that a hit found: "
        "cached rows are written while others read them",
        "a hit longer than a window that is computed again", {kSlots},
        on_executor(kReplays, kCachedWindows)),
    row("replay-window-kept", "vllm models/deepseek_v41/nvidia/model_state.py",
        "tokens that are computed again have no slots in their window either, which stays empty",
        "a hit longer than a window that is computed again", {kSlots},
        on_executor(kReplays, kCachedWindows)),
    row("replay-reads-before", "vllm v1/attention/backends/mla/sparse_swa.py",
        "attention reads window tokens before the first recomputed one",
        "a hit longer than a window that is computed again", {kDigest},
        on_executor(kReplays, kCachedWindows)),
    row("ring-taken-for-table", "vllm models/qwen4_exp/common/qsa_cache.py",
        "slots of a ring are looked up as if it continued in the next entry of the table",
        "a request longer than a ring", {kSlots, kMemory},
        on_executor(kWithRings, {two_block_pool}, "check")),
    row("ring-not-clipped", "vllm models/deepseek_v41/common/ops/fused_compress_quant_cache.py",
        "of a chunk longer than a ring all tokens are written, several to a row, in any order",
        "a chunk longer than a ring", {kSlots}, on_executor(kWithRings, {two_block_pool})),
    row("ring-read-shifted", kOwn, "a ring is read as if it had half as many rows",
        "a request longer than half a ring", {kDigest}, on_executor(kWithRings, {two_block_pool})),
    // Compressed rows, and several rows per token. Both change how many rows a block has.
    row("compressed-other-ratio", "vllm v1/attention/backends/mla/compressor_utils.py",
        "rows are written by the ratio of a layer that compresses twice as much",
        "as many tokens as make a compressed row", {kWritten},
        on_executor(kCompressedRows, {two_block_pool})),
    row("compressed-open-row", "vllm models/qwen4_exp/common/qsa_cache.py",
        "attention reads the row that its last tokens have not made complete yet",
        "a token count that is not a multiple of the row", {kDigest},
        on_executor(kCompressedRows, {two_block_pool})),
    row("rows-counted-as-tokens", "vllm model_executor/models/whisper_causal.py, num_actual_tokens",
        "of a cache with several rows per token, a step writes as many rows as it has tokens",
        "any step, with several rows per token", {kWritten},
        on_executor(kSeveralRows, {two_block_pool})),
    row("length-in-tokens", "vllm model_executor/models/whisper_causal.py, seq_lens",
        "of a cache with several rows per token, attention reads as many rows as there are tokens",
        "any read, with several rows per token", {kDigest},
        on_executor(kSeveralRows, {two_block_pool, pipeline_parallel})),
    row("mapped-dense", "vllm v1/worker/utils.py, map_to_kernel_block_table",
        "the table of rows whose kernels take parts of a block counts those parts as if no other "
        "layer's page were between two blocks",
        "compressed rows of several layers, blocks outermost", {kWritten, kMemory},
        on_executor({mla, rings, compressed_rows, mapped_tables}, {two_block_pool}),
        with_blocks_outermost),
    // Rows of encoders, sinks and reference windows.
    row("cross-slots-of-another", "vllm model_executor/layers/attention/cross_attention.py",
        "what an encoder computes is written through the table of the batch's first request",
        "a request that is admitted after another", {kSlots, kMemory},
        on_executor(kEncoder, kApart)),
    row("cross-reads-causally", "vllm model_executor/layers/attention/cross_attention.py",
        "cross attention is masked like attention among tokens: the first tokens see only the "
        "first rows of the encoder",
        "an encoder with more rows than a step has tokens", {kDigest},
        on_executor(kEncoder, kApart)),
    row("cross-row-lost", kOwn, "the last row that a step's encoders compute is not written",
        "an encoder's rows", {kWritten}, on_executor(kEncoder, kApart)),
    row("sink-block-shifted", "vllm model_executor/layers/attention/static_sink_attention.py",
        "sinks are written from the null block on, and read from the block after it", "sinks",
        {kWritten}, on_executor(kSink, kApart)),
    row("sinks-not-read", "vllm model_executor/layers/attention/static_sink_attention.py",
        "tables are not extended by the sinks: attention begins with the tokens, and ends that "
        "much earlier",
        "sinks", {kDigest, kMemory}, on_executor(kSink, kApart)),
    row("rswa-gap-read", "vllm v1/attention/backends/flash_attn.py, rswa_mask_mod",
        "attention reads freed blocks between the prompt and the window",
        "more output than a reference window has tokens", {kOutput}, on_executor(kWindow, kApart)),
    // Ranks of one model: which heads and layers each one stores.
    row("tp-head-offset", kOwn,
        "a rank's first KV head is its own number instead of its number times its heads",
        "two KV heads or more on a tensor parallel rank", {kWritten},
        on_executor({full_attention, tensor_parallel}, {replicated_heads, packed_pages, states})),
    row("tp-heads-not-replicated", "vllm config/model.py, get_num_kv_heads",
        "KV heads are numbered consecutively over ranks where they should be replicated",
        "more tensor parallel ranks than KV heads", {kWritten},
        on_executor({full_attention, tensor_parallel, replicated_heads}, {packed_pages, states})),
    row("pp-layer-offset", kOwn, "every stage but the first takes layers shifted by one",
        "two pipeline stages", {kWritten},
        on_executor({full_attention, pipeline_parallel, several_groups}, {packed_pages})),
    // Data parallel ranks: an idle rank runs a batch of padding, so that collectives match.
    row("dp-idle-writes", "vllm 13418, in the dummy batch",
        "the tokens of an idle rank's batch have slot 0 where they should have none",
        "an idle data parallel rank", {kSlots},
        on_executor({full_attention, data_parallel}, {states})),
    row("dp-sync-shape", "vllm 39949, follow-up",
        "an idle rank reports its tokens to the others in a tensor of another shape",
        "an idle data parallel rank and a busy one", {"collective"},
        on_executor({full_attention, data_parallel})),
    row("sp-padding", "vllm 39949, follow-up",
        "the tokens of an idle rank are not padded to a multiple of tp",
        "sequence parallelism without graphs, and an idle rank", {"collective"},
        on_executor({full_attention, data_parallel},
                    {several_groups, states, packed_pages, mla, sliding_window, chunked_local}),
        eagerly_over_two),
    row("dp-idle-skips", "vllm v1/engine/core.py, execute_dummy_batch",
        "an idle rank skips the step, and the others wait for it",
        "an idle data parallel rank and a busy one", {"liveness"},
        on_executor({full_attention, data_parallel})),
    row("dp-graph-alone", "vllm v1/worker/dp_utils.py, _post_process_cudagraph_mode",
        "a rank replays its graph, with the collectives of equal ranks, while another has no graph "
        "for its tokens",
        "a data parallel rank with more tokens than the largest graph takes", {"collective"},
        on_executor({full_attention, data_parallel}), over_small_graphs),
};

}  // namespace

std::span<const Mutant> mutants_of_backend() { return kBackend; }

}  // namespace lockstep
