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
    {.id = "stale-table-entry",
     .source = "vllm-tt-plugin 103, vllm 42273",
     .mechanism = "a reused row keeps the entries of freed blocks past its length",
     .exposed_by = "a row reused by a shorter table",
     .caught_by = {kTable},
     .bias = on_executor({full_attention, long_prompts}, {states, two_block_pool})},
    {.id = "table-width",
     .source = "vllm-ascend 11466, vllm 41233",
     .mechanism =
         "rows are too narrow for the blocks of drafts' states and spill into the next row",
     .exposed_by = "a request as long as its row, with states and drafts",
     .caught_by = {kTable, kMemory},
     .bias = on_executor({states, drafts}, {two_block_pool})},
    {.id = "table-async-upload",
     .source = "TensorRT-LLM 15546",
     .mechanism = "a staging buffer is reused before its copy has run: tables get another step's "
                  "block ids",
     .exposed_by = "the second step that appends blocks",
     .caught_by = {kTable},
     .bias = on_executor({full_attention}, {states, two_block_pool})},
    {.id = "table-late-clear",
     .source = "TensorRT-LLM 14423",
     .mechanism = "the row of an ended request is cleared after the next request has taken it",
     .exposed_by = "a row that is left and taken in one step",
     .caught_by = {kTable},
     .bias = on_executor({full_attention, bursts}, {states})},
    {.id = "slot-wrong-block-size",
     .source = "vllm 51031, 46301, 51328",
     .mechanism = "slots are computed with the block size of another group, or of the kernel",
     .exposed_by = "two block sizes, or kernel blocks shorter than the manager's",
     .caught_by = {kSlots},
     .bias = on_executor({full_attention, several_groups, different_block_sizes, sliding_window},
                         {two_block_pool})},
    {.id = "slot-past-row",
     .source = "vllm 53982, 54296",
     .mechanism = "slots are looked up past the row of a group with fewer blocks than the widest",
     .exposed_by = "groups of different block sizes, and a second row",
     .caught_by = {kSlots, kMemory},
     .bias = on_executor({full_attention, sliding_window, several_groups, different_block_sizes,
                          bursts, long_prompts},
                         {two_block_pool})},
    {.id = "slot-pad-rows",
     .source = "vllm 13418",
     .mechanism =
         "padded rows of a captured graph reach the cache write with slot 0 instead of PAD",
     .exposed_by = "a padded batch",
     .caught_by = {kSlots},
     .bias = on_executor({full_attention}, {states})},
    {.id = "slot-stale-tail",
     .source = "vllm-tt-plugin 103, vllm 42273",
     .mechanism = "the tail of a padded batch keeps tokens of the previous step; their slots are "
                  "looked up in rows that now belong to others",
     .exposed_by = "a step with fewer tokens than the previous one, in a padded batch",
     .caught_by = {kSlots, kMemory},
     .bias = on_executor({full_attention, long_prompts}, {states, two_block_pool})},
    {.id = "slot-interleave-ignored",
     .source = "vllm 51031, 54679",
     .mechanism = "tokens are sharded over the context parallel ranks one by one instead of in "
                  "runs: a rank keeps others' tokens",
     .exposed_by = "context parallelism with an interleave beyond 1",
     .caught_by = {kSlots},
     .bias = on_executor({full_attention}, {several_groups, states, mla, sliding_window,
                                            chunked_local, hidden_state, two_block_pool}),
     .reshape = over_two_context_ranks},
    {.id = "kernel-block-unsplit",
     .source = "vllm 38081",
     .mechanism = "the kernel's block table holds manager block ids: a block of 560 tokens for a "
                  "kernel that takes 16, 32 or 64",
     .exposed_by = "kernel blocks shorter than the manager's",
     .caught_by = {kSlots},
     .bias =
         on_executor({full_attention, states, several_groups, kernel_blocks}, {two_block_pool})},
    {.id = "hidden-slot-mapping",
     .source = "vllm 39949, 51328",
     .mechanism = "hidden states are written to slots from another group's block ids",
     .exposed_by = "hidden states with attention",
     .caught_by = {kSlots, kMemory},
     .bias = on_executor({full_attention, hidden_state, several_groups}, {two_block_pool})},
    // slot-pad-rows shows in graphs in the same way: tests/cuda_backend/mutants_test.cpp.
    {.id = "graph-stale-param",
     .mechanism = "a captured launch keeps the token count of its capture instead of reading it "
                  "from memory",
     .exposed_by = "two batches of different sizes that are padded to the same size",
     .caught_by = {kSlots, kMemory},
     .bias = on_executor({full_attention}, {states, two_block_pool}),
     .reshape = with_graphs},
    {.id = "graph-too-small",
     .mechanism = "the next smaller graph is replayed, which lacks the last tokens of the batch",
     .exposed_by = "a batch between two captured sizes",
     .caught_by = {kSlots, kDigest, kMemory},
     .bias = on_executor({full_attention}, {states, two_block_pool}),
     .reshape = with_graphs},
    {.id = "graph-stale-pointer",
     .mechanism =
         "a buffer grows after a graph was captured, and the graph keeps reading the old one",
     .exposed_by = "a captured batch, a larger one, and one of the first size again",
     .caught_by = {kSlots, kWritten, kDigest, kOutput, kMemory},
     .bias = on_executor({full_attention, long_prompts}, {states, two_block_pool}),
     .reshape = with_graphs},
    // Real numbers: the defects below read and write the right rows, with wrong values.
    {.id = "combine-unscaled",
     .mechanism = "partial softmaxes of a split context are added without their rescale",
     .exposed_by = "real numbers, and a context longer than a split",
     .caught_by = {kOutput},
     .bias = on_executor({full_attention, long_prompts}, {states, hidden_state}),
     .reshape = with_real_numbers},
    {.id = "window-off-by-one",
     .mechanism = "attention sees one token more than its window",
     .exposed_by = "real numbers, and a request longer than a window",
     .caught_by = {kOutput, kMemory},
     .bias = on_executor({full_attention, sliding_window, several_groups, long_prompts},
                         {states, hidden_state}),
     .reshape = with_real_numbers},
    {.id = "scale-of-other-layer",
     .mechanism = "a quantised cache is written and read with the scale of the next layer",
     .exposed_by = "real numbers in a cache of 8-bit elements",
     .caught_by = {kWritten},
     .bias = on_executor({full_attention}, {states, hidden_state, several_groups}),
     .reshape = with_int8_numbers},
    {.id = "scale-of-other-head",
     .mechanism = "the scale of a token's row is stored and read as that of the next head",
     .exposed_by = "real numbers, int8_per_token_head, two KV heads or more",
     .caught_by = {kWritten, kMemory},
     .bias = on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
     .reshape = with_row_scales},
    {.id = "scale-not-stored",
     .mechanism = "a token's row is quantised but its scale is not stored: the row is read with "
                  "a stale one",
     .exposed_by = "real numbers, int8_per_token_head",
     .caught_by = {kWritten, kMemory},
     .bias = on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
     .reshape = with_row_scales},
    {.id = "scales-swizzled",
     .source = "vllm csrc/nvfp4_kv_cache_kernels.cu, forks for sm_120",
     .mechanism =
         "nvfp4: V's scales are swizzled as kernels of sm_100 read them, and read as they are",
     .exposed_by = "real numbers, nvfp4 in heads of 64 elements and blocks of 4 tokens",
     .caught_by = {kWritten},
     .bias = on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
     .reshape = with_fp4_numbers},
    {.id = "scales-behind-rows",
     .source = "vllm models/minimax_m3, forks for sm_121",
     .mechanism = "nvfp4: scales are written and read after the elements of their row, not in an "
                  "area of the block",
     .exposed_by = "real numbers, nvfp4, two rows in a block",
     .caught_by = {kWritten, kMemory},
     .bias = on_executor({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
     .reshape = with_fp4_numbers},
    {.id = "conv-offset-ignored",
     .mechanism = "a convolution reads the inputs before a step's tokens as if no draft of the "
                  "previous step had been accepted",
     .exposed_by = "real numbers, states with drafts, one of them accepted",
     .caught_by = {kWritten, kStateOutput},
     .bias = on_executor({states, drafts, long_prompts}, {two_block_pool}),
     .reshape = with_real_numbers},
    {.id = "state-targets-last",
     .mechanism = "the states after each draft all go to the last draft's block",
     .exposed_by = "real numbers, recurrent states with drafts",
     .caught_by = {kWritten},
     .bias = on_executor({states, drafts, long_prompts}, {two_block_pool}),
     .reshape = with_real_numbers},
    {.id = "checkpoint-last-inputs",
     .source = "vllm model_executor/layers/mamba/checkpoint.py",
     .mechanism = "a checkpoint keeps the inputs of the convolution from the end of the chunk "
                  "and the recurrent state from its inside",
     .exposed_by = "real numbers, a chunk that exports a state from its inside",
     .caught_by = {kWritten},
     .bias = on_executor({states, full_attention, several_groups, prefix_caching, long_prompts,
                          prefill_checkpoints},
                         {two_block_pool, drafts}),
     .reshape = with_real_numbers},
    {.id = "chunk-carry-undecayed",
     .mechanism =
         "the state before a piece of a chunk enters the piece's outputs without its decay",
     .exposed_by =
         "real numbers, recurrent states, a chunk after another, or of more than 32 tokens",
     .caught_by = {kWritten, kStateOutput},
     .bias = on_executor({states, drafts, long_prompts}, {two_block_pool}),
     .reshape = with_real_numbers},
};

}  // namespace

std::span<const Mutant> mutants_of_launches() { return kLaunches; }

}  // namespace lockstep
