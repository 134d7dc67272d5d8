// The catalogue's defects of memory plans: views and addresses, proved by bytes or at work, and
// figures that engines tell of a plan. They are planted in cuda_backend/defects/.
#include "properties/mutants/mutant_parts.h"
#include "reference/plan/kernel_blocks.h"

namespace lockstep {
namespace {

using enum Feature;

void choose(SavedCase& saved, AttentionBackend backend) {
  saved.attention_backend = backend;
  if (const auto sizes = kernel_block_sizes(saved.cache, backend))
    saved.kernel_block_sizes = *sizes;
}
void flash(SavedCase& saved) { choose(saved, AttentionBackend::flash_attn); }

}  // namespace

std::vector<Mutant> address_mutants() {
  return {
      {.id = "layout-two-blocks",
       .source = "vllm 37236",
       .mechanism = "the block dimension is guessed from shape[0] == 2",
       .exposed_by = "a pool of two blocks, in a model with attention and states",
       .caught_by = {"layout.bytes"},
       .plan = {.states = true, .num_blocks = 2}},
      {.id = "layout-restride-hidden",
       .source = "vLLM 0.22.1, model runner V2",
       .mechanism =
           "the re-stride of attention pages is applied to every cache that looks like one",
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
       .mechanism = "num_blocks is not multiplied by the kernel blocks in a block: the view is "
                    "too short for the last of them",
       .exposed_by = "kernel blocks shorter than the manager's",
       .caught_by = {"layout.bytes"},
       .plan = {.states = true, .split_blocks = true}},
      {.id = "pack-num-blocks",
       .source = "vllm 35703",
       .mechanism = "the page of a pack is counted once: the view and the tensor disagree",
       .exposed_by = "packed attention",
       .caught_by = {"layout.bytes"},
       .plan = {.states = true, .packed = true}},
      {.id = "offset-int32",
       .source = "vllm 1486, 1514, 50427",
       .mechanism = "block id times block stride in 32 bits",
       .exposed_by = "a tensor of more than 2 GiB",
       .caught_by = {"layout.bytes"},
       .plan = {.states = true, .num_blocks = 3'000'000}},
  };
}

std::vector<Mutant> figure_mutants() {
  return {
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
}

std::vector<Mutant> view_mutants() {
  return {
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
       .mechanism = "all layers of a tensor are shaped like its first one: equal bytes, different "
                    "blocks",
       .exposed_by = "equal pages with different block sizes",
       .caught_by = {kWritten, kMemory, kDigest},
       .bias =
           on_older_pages({full_attention, sliding_window, several_groups, different_block_sizes},
                          {two_block_pool, mla, chunked_local, states})},
      {.id = "layout-two-heads",
       .source = "LMCache 4467",
       .mechanism =
           "the K/V dimension is distinguished from the heads by its size: [.., 2, heads] or [.., "
           "heads, 2]",
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
       .mechanism =
           "the stride from layer to layer of an overlaid cache is one row of tokens short",
       .exposed_by = "two equal layers in a group, in any of the six layouts",
       .caught_by = {kWritten},
       .bias = on_executor({full_attention}, {packed_pages})},
      {.id = "order-head-stride",
       .source = "LMCache 4463, dynamo 14416",
       .mechanism =
           "heads of an overlaid cache are as far apart as if K and V were separate: half a "
           "content short",
       .exposed_by = "two KV heads, in any of the six orders",
       .caught_by = {kWritten, kDigest},
       .bias = on_executor({full_attention},
                           {states, mla, sliding_window, chunked_local, packed_pages})},
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
       .mechanism = "every layer of a pack lies at offset 0",
       .exposed_by = "packed attention",
       .caught_by = {kWritten, kMemory},
       .bias = on_executor({full_attention, packed_pages},
                           {several_groups, mla, sliding_window, chunked_local, states})},
  };
}

}  // namespace lockstep
