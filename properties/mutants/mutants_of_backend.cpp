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
    {.id = "drop-slot",
     .mechanism = "the K/V write leaves out the last scheduled token of every step",
     .exposed_by = "any step",
     .caught_by = {kWritten},
     .bias = on_executor(kAttention, {states})},
    {.id = "wrong-stride",
     .mechanism = "the block stride of the attention views is one token row short",
     .exposed_by = "any block but the null block",
     .caught_by = {kWritten},
     .bias = on_executor(kAttention, {states})},
    {.id = "write-past-page",
     .mechanism =
         "the last part of a row starts one token late, so that a block ends past its page",
     .exposed_by = "any step; past the page: a full block",
     .caught_by = {kWritten},
     .bias = on_executor(kAttention, {states})},
    {.id = "uninitialised-read",
     .mechanism = "the K/V rows of a step's last token are never computed",
     .exposed_by = "any step, in check mode",
     .caught_by = {kMemory, kWritten},
     .bias = on_executor(kAttention, {states}, "check")},
    {.id = "race",
     .mechanism = "a second CTA writes the first token's row with the last token's content",
     .exposed_by = "any step in check mode; two tokens or more in fast mode",
     .caught_by = {kMemory},
     .bias = on_executor(kAttention, {states}, "check")},
    {.id = "zero-lost",
     .source = "vllm 35219, 43990",
     .mechanism = "blocks are not zeroed before use: bytes of another type stay in them",
     .exposed_by = "attention with states, whose new blocks are zeroed",
     .caught_by = {kWritten},
     .bias = on_executor({full_attention, states, several_groups}, {two_block_pool})},
    {.id = "zero-stride",
     .mechanism = "zeroing goes from block to block by a stride that is a few bytes short",
     .exposed_by = "attention with states, whose new blocks are zeroed",
     .caught_by = {kWritten, "page_untouched"},  // with blocks outermost
     .bias = on_executor({full_attention, states, several_groups}, {two_block_pool})},
    {.id = "stale-nan",
     .source = "vllm 35219, 43990",
     .mechanism = "attention reads its last block to the end: recycled bytes are read as "
                  "numbers, or as NaN",
     .exposed_by = "a query that ends inside a block",
     .caught_by = {kOutput},
     .bias = on_executor(kAttention, {states})},
    {.id = "hidden-flatten",
     .source = "vllm 39949",
     .mechanism = "extraction reads a padded, strided cache as if it were dense: padding comes "
                  "back as hidden states",
     .exposed_by = "hidden states of two blocks in padded pages",
     .caught_by = {kExtraction, kMemory},
     .bias = on_executor({full_attention, hidden_state, several_groups, padded_pages},
                         {two_block_pool})},
    {.id = "hidden-chunk-save",
     .source = "vllm 39949",
     .mechanism = "states are saved after a chunk of a chunked prefill: fewer states than tokens",
     .exposed_by = "a request with hidden states that ends",
     .caught_by = {kExtraction},
     .bias = on_executor({full_attention, hidden_state, several_groups}, {two_block_pool})},
    {.id = "hidden-save-race",
     .source = "vllm 37374",
     .mechanism = "the file of a request's hidden states is written under its final name, so a "
                  "trainer can see it before it is complete",
     .exposed_by = "a request with hidden states that ends, and a trainer that polls",
     .caught_by = {"hidden_file"},
     .bias = on_executor({full_attention, hidden_state, several_groups}, {two_block_pool})},
    {.id = "state-copy-lost",
     .source = "vllm 51766",
     .mechanism = "the state is not copied from the hit or the previous block into the new one",
     .exposed_by = "a block boundary or a hit in mode align",
     .caught_by = {kWritten},
     .bias = on_executor(
         {full_attention, states, several_groups, prefix_caching, shared_prefixes, long_prompts},
         {two_block_pool})},
    {.id = "checkpoint-lost",
     .source = "vllm model_executor/layers/mamba/checkpoint.py",
     .mechanism = "a prefill does not store the state of its checkpoint: a hit finds what the "
                  "block held before",
     .exposed_by = "a chunk that exports a state from its inside",
     .caught_by = {kWritten},
     .bias = on_executor(kCheckpoints, {two_block_pool, drafts})},
    {.id = "checkpoint-early",
     .source = "vllm model_executor/layers/mamba/checkpoint.py",
     .mechanism = "a checkpoint is the state before its last token",
     .exposed_by = "a chunk that exports a state from its inside",
     .caught_by = {kWritten, kStateOutput},
     .bias = on_executor(kCheckpoints, {two_block_pool, drafts})},
    {.id = "part-copy-lost",
     .source = "vllm v1/worker/utils.py, copy_kv_cache_blocks_inplace",
     .mechanism = "a hit that ends inside a block continues in a block that it was not copied to",
     .exposed_by = "a hit inside a block",
     .caught_by = {kWritten},
     .bias = on_executor(kPartsOfBlocks,
                         {two_block_pool, drafts, sliding_window, chunked_local, hidden_state})},
    {.id = "copy-first-view",
     .source = "vllm 55112",
     .mechanism = "of several views at one address the shortest is copied: the tail of an "
                  "attention block is not copied",
     .exposed_by = "a hit inside a block, states and layers outermost",
     .caught_by = {kWritten},
     .bias = on_executor(kPartsOfBlocks,
                         {two_block_pool, drafts, sliding_window, chunked_local, hidden_state}),
     .reshape = with_layers_outermost},
    {.id = "part-copy-late",
     .source = "vllm v1/worker/utils.py, copy_kv_cache_blocks_inplace",
     .mechanism = "a block is copied for a hit after the step has written and read the copy",
     .exposed_by = "a hit inside a block",
     .caught_by = {kWritten},
     .bias = on_executor(kPartsOfBlocks,
                         {two_block_pool, drafts, sliding_window, chunked_local, hidden_state})},
    {.id = "copy-unordered",
     .source = "vllm 46278, sglang 36738",
     .mechanism = "readers of a copied or loaded block do not wait for it, and a store does not "
                  "wait for what it stores",
     .exposed_by = "several streams, and copies of states from block to block",
     .caught_by = {kMemory, kWritten},
     .bias = on_executor(
         {full_attention, states, several_groups, prefix_caching, shared_prefixes, long_prompts},
         {two_block_pool}),
     .reshape = over_four_streams},
    {.id = "state-pads-included",
     .source = "vllm 55178",
     .mechanism = "a padded prompt tail advances the state: h(N+k) saved as h(N)",
     .exposed_by = "any state update",
     .caught_by = {kWritten},
     .bias = on_executor(kHybrid, {two_block_pool})},
    {.id = "state-draft-reuse",
     .source = "vllm 57128",
     .mechanism = "a step continues from a state that has seen rejected drafts",
     .exposed_by = "states with drafts, one of them rejected",
     .caught_by = {kWritten},
     .bias = on_executor({states, drafts}, {two_block_pool})},
    {.id = "optimistic-count",
     .source = "vllm-ascend 10032",
     .mechanism = "the worker places a step's tokens by the engine's count, in which drafts of "
                  "the step in flight are computed although they were rejected",
     .exposed_by = "a rejected draft, with asynchronous scheduling",
     .caught_by = {kSlots},
     .bias = on_executor({full_attention, drafts, async_scheduling}, {two_block_pool})},
    {.id = "state-update-race",
     .source = "vllm 50729",
     .mechanism = "parallel copies inside one block overlap: two threads advance one word in place",
     .exposed_by = "any state update",
     .caught_by = {kMemory, kWritten},
     .bias = on_executor(kHybrid, {two_block_pool}, "check")},
    {.id = "state-stride-unpadded",
     .source = "vllm 38081 review",
     .mechanism = "states are strided by the real page instead of the padded page: block b "
                  "drifts into b-1",
     .exposed_by = "states in padded pages",
     .caught_by = {kWritten},
     .bias = on_executor({full_attention, states, several_groups, padded_pages}, {two_block_pool})},
    {.id = "state-offset-wrong-itemsize",
     .source = "vllm 38081 review",
     .mechanism = "the second state's offset is counted in items of the first",
     .exposed_by = "two states of different dtype",
     .caught_by = {kWritten},
     .bias = on_executor(kHybrid, {two_block_pool})},
    // Recomputed windows and rings. A ring needs a prompt longer than its 8 or 16 entries.
    {.id = "replay-overwrites-hit",
     .source = "vllm models/deepseek_v41/nvidia/model_state.py",
     .mechanism = "tokens that are computed again for a window have slots in the groups that a "
                  "hit found: cached rows are written while others read them",
     .exposed_by = "a hit longer than a window that is computed again",
     .caught_by = {kSlots},
     .bias = on_executor(kReplays, kCachedWindows)},
    {.id = "replay-window-kept",
     .source = "vllm models/deepseek_v41/nvidia/model_state.py",
     .mechanism =
         "tokens that are computed again have no slots in their window either, which stays empty",
     .exposed_by = "a hit longer than a window that is computed again",
     .caught_by = {kSlots},
     .bias = on_executor(kReplays, kCachedWindows)},
    {.id = "replay-reads-before",
     .source = "vllm v1/attention/backends/mla/sparse_swa.py",
     .mechanism = "attention reads window tokens before the first recomputed one",
     .exposed_by = "a hit longer than a window that is computed again",
     .caught_by = {kDigest},
     .bias = on_executor(kReplays, kCachedWindows)},
    {.id = "ring-taken-for-table",
     .source = "vllm models/qwen4_exp/common/qsa_cache.py",
     .mechanism = "slots of a ring are looked up as if it continued in the next entry of the table",
     .exposed_by = "a request longer than a ring",
     .caught_by = {kSlots, kMemory},
     .bias = on_executor(kWithRings, {two_block_pool}, "check")},
    {.id = "ring-not-clipped",
     .source = "vllm models/deepseek_v41/common/ops/fused_compress_quant_cache.py",
     .mechanism =
         "of a chunk longer than a ring all tokens are written, several to a row, in any order",
     .exposed_by = "a chunk longer than a ring",
     .caught_by = {kSlots},
     .bias = on_executor(kWithRings, {two_block_pool})},
    {.id = "ring-read-shifted",
     .mechanism = "a ring is read as if it had half as many rows",
     .exposed_by = "a request longer than half a ring",
     .caught_by = {kDigest},
     .bias = on_executor(kWithRings, {two_block_pool})},
    // Compressed rows, and several rows per token. Both change how many rows a block has.
    {.id = "compressed-other-ratio",
     .source = "vllm v1/attention/backends/mla/compressor_utils.py",
     .mechanism = "rows are written by the ratio of a layer that compresses twice as much",
     .exposed_by = "as many tokens as make a compressed row",
     .caught_by = {kWritten},
     .bias = on_executor(kCompressedRows, {two_block_pool})},
    {.id = "compressed-open-row",
     .source = "vllm models/qwen4_exp/common/qsa_cache.py",
     .mechanism = "attention reads the row that its last tokens have not made complete yet",
     .exposed_by = "a token count that is not a multiple of the row",
     .caught_by = {kDigest},
     .bias = on_executor(kCompressedRows, {two_block_pool})},
    {.id = "rows-counted-as-tokens",
     .source = "vllm model_executor/models/whisper_causal.py, num_actual_tokens",
     .mechanism =
         "of a cache with several rows per token, a step writes as many rows as it has tokens",
     .exposed_by = "any step, with several rows per token",
     .caught_by = {kWritten},
     .bias = on_executor(kSeveralRows, {two_block_pool})},
    {.id = "length-in-tokens",
     .source = "vllm model_executor/models/whisper_causal.py, seq_lens",
     .mechanism = "of a cache with several rows per token, attention reads as many rows as there "
                  "are tokens",
     .exposed_by = "any read, with several rows per token",
     .caught_by = {kDigest},
     .bias = on_executor(kSeveralRows, {two_block_pool, pipeline_parallel})},
    {.id = "mapped-dense",
     .source = "vllm v1/worker/utils.py, map_to_kernel_block_table",
     .mechanism = "the table of rows whose kernels take parts of a block counts those parts as if "
                  "no other layer's page were between two blocks",
     .exposed_by = "compressed rows of several layers, blocks outermost",
     .caught_by = {kWritten, kMemory},
     .bias = on_executor({mla, rings, compressed_rows, mapped_tables}, {two_block_pool}),
     .reshape = with_blocks_outermost},
    // Rows of encoders, sinks and reference windows.
    {.id = "cross-slots-of-another",
     .source = "vllm model_executor/layers/attention/cross_attention.py",
     .mechanism =
         "what an encoder computes is written through the table of the batch's first request",
     .exposed_by = "a request that is admitted after another",
     .caught_by = {kSlots, kMemory},
     .bias = on_executor(kEncoder, kApart)},
    {.id = "cross-reads-causally",
     .source = "vllm model_executor/layers/attention/cross_attention.py",
     .mechanism = "cross attention is masked like attention among tokens: the first tokens see "
                  "only the first rows of the encoder",
     .exposed_by = "an encoder with more rows than a step has tokens",
     .caught_by = {kDigest},
     .bias = on_executor(kEncoder, kApart)},
    {.id = "cross-row-lost",
     .mechanism = "the last row that a step's encoders compute is not written",
     .exposed_by = "an encoder's rows",
     .caught_by = {kWritten},
     .bias = on_executor(kEncoder, kApart)},
    {.id = "sink-block-shifted",
     .source = "vllm model_executor/layers/attention/static_sink_attention.py",
     .mechanism = "sinks are written from the null block on, and read from the block after it",
     .exposed_by = "sinks",
     .caught_by = {kWritten},
     .bias = on_executor(kSink, kApart)},
    {.id = "sinks-not-read",
     .source = "vllm model_executor/layers/attention/static_sink_attention.py",
     .mechanism = "tables are not extended by the sinks: attention begins with the tokens, and "
                  "ends that much earlier",
     .exposed_by = "sinks",
     .caught_by = {kDigest, kMemory},
     .bias = on_executor(kSink, kApart)},
    {.id = "rswa-gap-read",
     .source = "vllm v1/attention/backends/flash_attn.py, rswa_mask_mod",
     .mechanism = "attention reads freed blocks between the prompt and the window",
     .exposed_by = "more output than a reference window has tokens",
     .caught_by = {kOutput},
     .bias = on_executor(kWindow, kApart)},
    // Ranks of one model: which heads and layers each one stores.
    {.id = "tp-head-offset",
     .mechanism = "a rank's first KV head is its own number instead of its number times its heads",
     .exposed_by = "two KV heads or more on a tensor parallel rank",
     .caught_by = {kWritten},
     .bias =
         on_executor({full_attention, tensor_parallel}, {replicated_heads, packed_pages, states})},
    {.id = "tp-heads-not-replicated",
     .source = "vllm config/model.py, get_num_kv_heads",
     .mechanism = "KV heads are numbered consecutively over ranks where they should be replicated",
     .exposed_by = "more tensor parallel ranks than KV heads",
     .caught_by = {kWritten},
     .bias =
         on_executor({full_attention, tensor_parallel, replicated_heads}, {packed_pages, states})},
    {.id = "pp-layer-offset",
     .mechanism = "every stage but the first takes layers shifted by one",
     .exposed_by = "two pipeline stages",
     .caught_by = {kWritten},
     .bias = on_executor({full_attention, pipeline_parallel, several_groups}, {packed_pages})},
    // Data parallel ranks: an idle rank runs a batch of padding, so that collectives match.
    {.id = "dp-idle-writes",
     .source = "vllm 13418, in the dummy batch",
     .mechanism = "the tokens of an idle rank's batch have slot 0 where they should have none",
     .exposed_by = "an idle data parallel rank",
     .caught_by = {kSlots},
     .bias = on_executor({full_attention, data_parallel}, {states})},
    {.id = "dp-sync-shape",
     .source = "vllm 39949, follow-up",
     .mechanism = "an idle rank reports its tokens to the others in a tensor of another shape",
     .exposed_by = "an idle data parallel rank and a busy one",
     .caught_by = {"collective"},
     .bias = on_executor({full_attention, data_parallel})},
    {.id = "sp-padding",
     .source = "vllm 39949, follow-up",
     .mechanism = "the tokens of an idle rank are not padded to a multiple of tp",
     .exposed_by = "sequence parallelism without graphs, and an idle rank",
     .caught_by = {"collective"},
     .bias = on_executor({full_attention, data_parallel}, {several_groups, states, packed_pages,
                                                           mla, sliding_window, chunked_local}),
     .reshape = eagerly_over_two},
    {.id = "dp-idle-skips",
     .source = "vllm v1/engine/core.py, execute_dummy_batch",
     .mechanism = "an idle rank skips the step, and the others wait for it",
     .exposed_by = "an idle data parallel rank and a busy one",
     .caught_by = {"liveness"},
     .bias = on_executor({full_attention, data_parallel})},
    {.id = "dp-graph-alone",
     .source = "vllm v1/worker/dp_utils.py, _post_process_cudagraph_mode",
     .mechanism = "a rank replays its graph, with the collectives of equal ranks, while another "
                  "has no graph for its tokens",
     .exposed_by = "a data parallel rank with more tokens than the largest graph takes",
     .caught_by = {"collective"},
     .bias = on_executor({full_attention, data_parallel}),
     .reshape = over_small_graphs},
};

}  // namespace

std::span<const Mutant> mutants_of_backend() { return kBackend; }

}  // namespace lockstep
