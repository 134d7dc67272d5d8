// The catalogue's defects of block tables and slots.
#include "properties/mutants/mutant_catalogue.h"
#include "properties/mutants/mutants_on_device.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

using enum Feature;

void over_two_context_ranks(SavedCase& saved) {
  saved.engine.dcp = 2;
  saved.cp_kv_cache_interleave_size = 4;
}

}  // namespace

std::vector<Mutant> table_mutants() {
  return {
      {.id = "stale-table-entry",
       .site = kBackend,
       .source = "vllm-tt-plugin 103, vllm 42273",
       .mechanism = "a reused row keeps the entries of freed blocks past its length",
       .exposed_by = "a row reused by a shorter table",
       .caught_by = {kTable},
       .bias = on_device({full_attention, long_prompts}, {states, two_block_pool})},
      {.id = "table-width",
       .site = kBackend,
       .source = "vllm-ascend 11466, vllm 41233",
       .mechanism = "rows are too narrow for the blocks of drafts' states and spill into the next "
                    "row",
       .exposed_by = "a request as long as its row, with states and drafts",
       .caught_by = {kTable, kMemory},
       .bias = on_device({states, drafts}, {two_block_pool})},
      {.id = "table-async-upload",
       .site = kBackend,
       .source = "TensorRT-LLM 15546",
       .mechanism = "a staging buffer is reused before its copy has run: tables get another "
                    "step's block ids",
       .exposed_by = "the second step that appends blocks",
       .caught_by = {kTable},
       .bias = on_device({full_attention}, {states, two_block_pool})},
      {.id = "table-late-clear",
       .site = kBackend,
       .source = "TensorRT-LLM 14423",
       .mechanism = "the row of a request that left is cleared after the next request has taken it",
       .exposed_by = "a row that is left and taken in one step",
       .caught_by = {kTable},
       .bias = on_device({full_attention, bursts}, {states})},
      {.id = "slot-wrong-block-size",
       .site = kBackend,
       .source = "vllm 51031, 46301, 51328",
       .mechanism = "slots are computed with the block size of another group, or of the kernel",
       .exposed_by = "two block sizes, or kernel blocks shorter than the manager's",
       .caught_by = {kSlots},
       .bias = on_device({full_attention, several_groups, different_block_sizes, sliding_window},
                         {two_block_pool})},
      {.id = "slot-past-row",
       .site = kBackend,
       .source = "vllm 53982, 54296",
       .mechanism = "slots are looked up past the row of a group with fewer blocks than the widest",
       .exposed_by = "groups of different block sizes, and a second row",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention, sliding_window, several_groups, different_block_sizes,
                          bursts, long_prompts},
                         {two_block_pool})},
      {.id = "slot-pad-rows",
       .site = kBackend,
       .source = "vllm 13418",
       .mechanism = "padded rows of a captured graph reach the cache write with slot 0 instead of "
                    "PAD",
       .exposed_by = "a padded batch",
       .caught_by = {kSlots},
       .bias = on_device({full_attention}, {states})},
      {.id = "slot-stale-tail",
       .site = kBackend,
       .source = "vllm-tt-plugin 103, vllm 42273",
       .mechanism = "the tail of a padded batch keeps tokens of the step before; their slots are "
                    "looked up in rows that now belong to others",
       .exposed_by = "a step with fewer tokens than the one before, in a padded batch",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention, long_prompts}, {states, two_block_pool})},
      {.id = "slot-interleave-ignored",
       .site = kBackend,
       .source = "vllm 51031, 54679",
       .mechanism = "tokens are dealt to the context parallel ranks one by one instead of in "
                    "runs: a rank keeps others' tokens",
       .exposed_by = "context parallelism with an interleave beyond 1",
       .caught_by = {kSlots},
       .bias = on_device({full_attention}, {several_groups, states, mla, sliding_window,
                                            chunked_local, hidden_state, two_block_pool}),
       .reshape = over_two_context_ranks},
      {.id = "kernel-block-unsplit",
       .site = kBackend,
       .source = "vllm 38081",
       .mechanism = "the kernel's block table holds manager block ids: a block of 560 tokens for a "
                    "kernel that takes 16, 32 or 64",
       .exposed_by = "kernel blocks shorter than the manager's",
       .caught_by = {kSlots},
       .bias =
           on_device({full_attention, states, several_groups, kernel_blocks}, {two_block_pool})},
      {.id = "hidden-slot-mapping",
       .site = kBackend,
       .source = "vllm 39949, 51328",
       .mechanism = "hidden states are written to slots from another group's block ids",
       .exposed_by = "hidden states beside attention",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention, hidden_state, several_groups}, {two_block_pool})},
  };
}

}  // namespace lockstep
