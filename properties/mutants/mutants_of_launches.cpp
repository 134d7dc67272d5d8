// The catalogue's defects of block tables and slots, and of how kernels are launched: from captured
// graphs, and on real numbers.
#include "properties/mutants/mutant_parts.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

using enum Feature;

// Captures graphs up to 64 tokens, which covers most steps of generated cases.
void with_graphs(SavedCase& saved) { saved.max_cudagraph_capture_size = 64; }
// Computes attention and states with real numbers. Words (the default) only show which row was
// read.
void with_real_numbers(SavedCase& saved) { saved.numbers = Numbers::real; }
// Changes all rows to one-byte elements. Twice as many elements per row, from two-byte types, keep
// the page size, so the plan still holds.
void with_int8_numbers(SavedCase& saved) {
  with_real_numbers(saved);
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) {
      spec.head_size *= itemsize_bytes(spec.dtype);
      if (spec.head_size_v != 0) spec.head_size_v *= itemsize_bytes(spec.dtype);
      spec.dtype = DType::int8;
    });
}

// Adds a 4-byte scale to rows, by dropping 4 one-byte elements: the row keeps its size. Rows that
// are not a multiple of 4 bytes, or too short, stay as they are.
void with_row_scales(SavedCase& saved) {
  with_real_numbers(saved);
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) {
      const std::int64_t row_bytes = spec.head_size * itemsize_bytes(spec.dtype);
      if (spec.kv_quant_mode != KVQuantMode::none || row_bytes % 4 != 0 || row_bytes < 8) return;
      spec.head_size = row_bytes - 4;
      spec.dtype = DType::int8;
      spec.kv_quant_mode = KVQuantMode::int8_per_token_head;
    });
}

// Changes all rows to nvfp4: two e2m1 elements per byte and 16 elements per scale, with linear
// scales. The page size changes, so the plan is made again.
void with_fp4_numbers(SavedCase& saved) {
  with_real_numbers(saved);
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) {
      spec.head_size = 64;
      spec.head_size_v = 0;
      spec.dtype = DType::uint8;
      spec.kv_quant_mode = KVQuantMode::nvfp4;
      spec.page_size_padded.reset();
    });
  plan_again(saved);
}

// Shards tokens in runs of 4 over two ranks; other cases have runs of 1.
void over_two_context_ranks(SavedCase& saved) {
  saved.engine.dcp = 2;
  saved.cp_kv_cache_interleave_size = 4;
}

// Tables and slots first, then hidden states' slots, graphs, scales, and real numbers in states.
const Mutant kLaunches[] = {
    row("stale-table-entry", "vllm-tt-plugin 103, vllm 42273",
        "a reused row keeps the entries of freed blocks past its length",
        "a row reused by a shorter table", {kTable},
        on_executor({full_attention, long_prompts}, {states, two_block_pool})),
    row("table-width", "vllm-ascend 11466, vllm 41233",
        "rows are too narrow for the blocks of drafts' states and spill into the next row",
        "a request as long as its row, with states and drafts", {kTable, kMemory},
        on_executor({states, drafts}, {two_block_pool})),
    row("table-async-upload", "TensorRT-LLM 15546",
        "a staging buffer is reused before its copy has run: tables get another step's block ids",
        "the second step that appends blocks", {kTable},
        on_executor({full_attention}, {states, two_block_pool})),
    row("table-late-clear", "TensorRT-LLM 14423",
        "the row of an ended request is cleared after the next request has taken it",
        "a row that is left and taken in one step", {kTable},
        on_executor({full_attention, bursts}, {states})),
    row("slot-wrong-block-size", "vllm 51031, 46301, 51328",
        "slots are computed with the block size of another group, or of the kernel",
        "two block sizes, or kernel blocks shorter than the manager's", {kSlots},
        on_executor({full_attention, several_groups, different_block_sizes, sliding_window},
                    {two_block_pool})),
    row("slot-past-row", "vllm 53982, 54296",
        "slots are looked up past the row of a group with fewer blocks than the widest",
        "groups of different block sizes, and a second row", {kSlots, kMemory},
        on_executor({full_attention, sliding_window, several_groups, different_block_sizes, bursts,
                     long_prompts},
                    {two_block_pool})),
    row("slot-pad-rows", "vllm 13418",
        "padded rows of a captured graph reach the cache write with slot 0 instead of PAD",
        "a padded batch", {kSlots}, on_executor({full_attention}, {states})),
    row("slot-stale-tail", "vllm-tt-plugin 103, vllm 42273",
        "the tail of a padded batch keeps tokens of the previous step; their slots are looked up "
        "in rows that now belong to others",
        "a step with fewer tokens than the previous one, in a padded batch", {kSlots, kMemory},
        on_executor({full_attention, long_prompts}, {states, two_block_pool})),
    row("slot-interleave-ignored", "vllm 51031, 54679",
        "tokens are sharded over the context parallel ranks one by one instead of in runs: a rank "
        "keeps others' tokens",
        "context parallelism with an interleave beyond 1", {kSlots},
        on_executor({full_attention}, {several_groups, states, mla, sliding_window, chunked_local,
                                       hidden_state, two_block_pool}),
        over_two_context_ranks),
    row("kernel-block-unsplit", "vllm 38081",
        "the kernel's block table holds manager block ids: a block of 560 tokens for a kernel that "
        "takes 16, 32 or 64",
        "kernel blocks shorter than the manager's", {kSlots},
        on_executor({full_attention, states, several_groups, kernel_blocks}, {two_block_pool})),
    row("hidden-slot-mapping", "vllm 39949, 51328",
        "hidden states are written to slots from another group's block ids",
        "hidden states with attention", {kSlots, kMemory},
        on_executor({full_attention, hidden_state, several_groups}, {two_block_pool})),
    // slot-pad-rows shows in graphs in the same way: tests/cuda_backend/mutants_test.cpp.
    row("graph-stale-param", kOwn,
        "a captured launch keeps the token count of its capture instead of reading it from memory",
        "two batches of different sizes that are padded to the same size", {kSlots, kMemory},
        on_executor({full_attention}, {states, two_block_pool}), with_graphs),
    row("graph-too-small", kOwn,
        "the next smaller graph is replayed, which lacks the last tokens of the batch",
        "a batch between two captured sizes", {kSlots, kDigest, kMemory},
        on_executor({full_attention}, {states, two_block_pool}), with_graphs),
    row("graph-stale-pointer", kOwn,
        "a buffer grows after a graph was captured, and the graph keeps reading the old one",
        "a captured batch, a larger one, and one of the first size again",
        {kSlots, kWritten, kDigest, kOutput, kMemory},
        on_executor({full_attention, long_prompts}, {states, two_block_pool}), with_graphs),
    // Real numbers: the defects below read and write the right rows, with wrong values.
    row("combine-unscaled", kOwn,
        "partial softmaxes of a split context are added without their rescale",
        "real numbers, and a context longer than a split", {kOutput},
        on_executor({full_attention, long_prompts}, {states, hidden_state}), with_real_numbers),
    row("window-off-by-one", kOwn, "attention sees one token more than its window",
        "real numbers, and a request longer than a window", {kOutput, kMemory},
        on_executor({full_attention, sliding_window, several_groups, long_prompts},
                    {states, hidden_state}),
        with_real_numbers),
    row("scale-of-other-layer", kOwn,
        "a quantised cache is written and read with the scale of the next layer",
        "real numbers in a cache of 8-bit elements", {kWritten},
        on_executor({full_attention}, {states, hidden_state, several_groups}), with_int8_numbers),
    row("scale-of-other-head", kOwn,
        "the scale of a token's row is stored and read as that of the next head",
        "real numbers, int8_per_token_head, two KV heads or more", {kWritten, kMemory},
        on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
        with_row_scales),
    row("scale-not-stored", kOwn,
        "a token's row is quantised but its scale is not stored: the row is read with a stale one",
        "real numbers, int8_per_token_head", {kWritten, kMemory},
        on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
        with_row_scales),
    row("scales-swizzled", "vllm csrc/nvfp4_kv_cache_kernels.cu, forks for sm_120",
        "nvfp4: V's scales are swizzled as kernels of sm_100 read them, and read as they are",
        "real numbers, nvfp4 in heads of 64 elements and blocks of 4 tokens", {kWritten},
        on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
        with_fp4_numbers),
    row("scales-behind-rows", "vllm models/minimax_m3, forks for sm_121",
        "nvfp4: scales are written and read after the elements of their row, not in an area of the "
        "block",
        "real numbers, nvfp4, two rows in a block", {kWritten, kMemory},
        on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
        with_fp4_numbers),
    row("conv-offset-ignored", kOwn,
        "a convolution reads the inputs before a step's tokens as if no draft of the previous step "
        "had been accepted",
        "real numbers, states with drafts, one of them accepted", {kWritten, kStateOutput},
        on_executor({states, drafts, long_prompts}, {two_block_pool}), with_real_numbers),
    row("state-targets-last", kOwn, "the states after each draft all go to the last draft's block",
        "real numbers, recurrent states with drafts", {kWritten},
        on_executor({states, drafts, long_prompts}, {two_block_pool}), with_real_numbers),
    row("checkpoint-last-inputs", "vllm model_executor/layers/mamba/checkpoint.py",
        "a checkpoint keeps the inputs of the convolution from the end of the chunk and the "
        "recurrent state from its inside",
        "real numbers, a chunk that exports a state from its inside", {kWritten},
        on_executor({states, full_attention, several_groups, prefix_caching, long_prompts,
                     prefill_checkpoints},
                    {two_block_pool, drafts}),
        with_real_numbers),
    row("chunk-carry-undecayed", kOwn,
        "the state before a piece of a chunk enters the piece's outputs without its decay",
        "real numbers, recurrent states, a chunk after another, or of more than 32 tokens",
        {kWritten, kStateOutput}, on_executor({states, drafts, long_prompts}, {two_block_pool}),
        with_real_numbers),
};

}  // namespace

std::span<const Mutant> mutants_of_launches() { return kLaunches; }

}  // namespace lockstep
