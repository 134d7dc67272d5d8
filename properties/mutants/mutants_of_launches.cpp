// The catalogue's defects of how kernels are launched: from captured graphs, and on real numbers.
#include <algorithm>
#include <iterator>

#include "properties/mutants/mutant_catalogue.h"
#include "properties/mutants/mutants_on_device.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

using enum Feature;

void with_graphs(SavedCase& saved) { saved.max_cudagraph_capture_size = 64; }
void with_real_numbers(SavedCase& saved) { saved.numbers = Numbers::real; }
// Elements of one byte in rows twice as long: pages stay as large as they are.
void with_int8_numbers(SavedCase& saved) {
  with_real_numbers(saved);
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) {
      spec.head_size *= itemsize_bytes(spec.dtype);
      if (spec.head_size_v != 0) spec.head_size_v *= itemsize_bytes(spec.dtype);
      spec.dtype = DType::int8;
    });
}

// Rows with a scale behind them, as long as they were before.
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

// slot-pad-rows shows in graphs as it does without: tests/cuda_backend/mutants_test.cpp.
std::vector<Mutant> graph_mutants() {
  return {
      {.id = "graph-stale-param",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a captured launch keeps the token count of its capture instead of reading it "
                    "from memory",
       .exposed_by = "two batches of different sizes that are padded to the same size",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention}, {states, two_block_pool}),
       .reshape = with_graphs},
      {.id = "graph-too-small",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the next smaller graph is replayed, which lacks the last tokens of the batch",
       .exposed_by = "a batch between two captured sizes",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention}, {states, two_block_pool}),
       .reshape = with_graphs},
      {.id = "graph-stale-pointer",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a buffer grows after a graph was captured, and the graph goes on reading the "
                    "old one",
       .exposed_by = "a captured batch, a larger one, and one of the first size again",
       .caught_by = {kSlots, kWritten, kDigest, kOutput, kMemory},
       .bias = on_device({full_attention, long_prompts}, {states, two_block_pool}),
       .reshape = with_graphs},
  };
}

std::vector<Mutant> number_mutants() {
  return {
      {.id = "combine-unscaled",
       .site = kBackend,
       .source = "this project",
       .mechanism = "partial softmaxes of a split context are added without their rescale",
       .exposed_by = "real numbers, and a context longer than a split",
       .caught_by = {kOutput},
       .bias = on_device({full_attention, long_prompts}, {states, hidden_state}),
       .reshape = with_real_numbers},
      {.id = "window-off-by-one",
       .site = kBackend,
       .source = "this project",
       .mechanism = "attention sees one token more than its window",
       .exposed_by = "real numbers, and a request longer than a window",
       .caught_by = {kOutput, kMemory},
       .bias = on_device({full_attention, sliding_window, several_groups, long_prompts},
                         {states, hidden_state}),
       .reshape = with_real_numbers},
      {.id = "scale-of-other-layer",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a quantised cache is written and read with the scale of the next layer",
       .exposed_by = "real numbers in a cache of 8-bit elements",
       .caught_by = {kWritten},
       .bias = on_device({full_attention}, {states, hidden_state, several_groups}),
       .reshape = with_int8_numbers},
      {.id = "scale-of-other-head",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the scale of a token's row is stored and read as that of the next head",
       .exposed_by = "real numbers, int8_per_token_head, two KV heads or more",
       .caught_by = {kWritten, kMemory},
       .bias = on_device({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
       .reshape = with_row_scales},
      {.id = "scale-not-stored",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a token's row is quantised but its scale is not stored: the row is read with "
                    "a stale one",
       .exposed_by = "real numbers, int8_per_token_head",
       .caught_by = {kWritten, kMemory},
       .bias = on_device({full_attention}, {states, hidden_state, several_groups, scaled_rows}),
       .reshape = with_row_scales},
      {.id = "conv-offset-ignored",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a convolution reads the inputs before a step's tokens as if no draft of the "
                    "previous step had been accepted",
       .exposed_by = "real numbers, states with drafts, one of them accepted",
       .caught_by = {kWritten, kStateOutput},
       .bias = on_device({states, drafts, long_prompts}, {two_block_pool}),
       .reshape = with_real_numbers},
      {.id = "state-targets-last",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the states after each draft all go to the last draft's block",
       .exposed_by = "real numbers, recurrent states with drafts",
       .caught_by = {kWritten},
       .bias = on_device({states, drafts, long_prompts}, {two_block_pool}),
       .reshape = with_real_numbers},
      {.id = "chunk-carry-undecayed",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the state before a piece of a chunk enters the piece's outputs without its "
                    "decay",
       .exposed_by = "real numbers, recurrent states, a chunk behind another or of over 32 tokens",
       .caught_by = {kWritten, kStateOutput},
       .bias = on_device({states, drafts, long_prompts}, {two_block_pool}),
       .reshape = with_real_numbers},
  };
}

}  // namespace

std::vector<Mutant> launch_mutants() {
  std::vector<Mutant> all = graph_mutants();
  std::ranges::move(number_mutants(), std::back_inserter(all));
  return all;
}

}  // namespace lockstep
