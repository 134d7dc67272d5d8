// The catalogue's defects of views at work: layouts, packings, and what they are told apart by.
#include "properties/mutants/mutant_catalogue.h"
#include "properties/mutants/mutants_on_device.h"
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

std::vector<Mutant> view_mutants() {
  return {
      {.id = "layout-not-updated",
       .site = kBackend,
       .source = "vllm 38081",
       .mechanism =
           "attention views keep all K before all V although the pages are shared with states",
       .exposed_by = "attention and states in one model, on a backend with the K/V dimension first",
       .caught_by = {kWritten, kMemory},
       .bias = on_device({full_attention, states, several_groups}, {two_block_pool}),
       .reshape = flash},
      {.id = "layout-equal-page",
       .site = kBackend,
       .source = "vllm 41657",
       .mechanism = "all layers of a tensor are shaped like its first one: equal bytes, different "
                    "blocks",
       .exposed_by = "equal pages with different block sizes",
       .caught_by = {kWritten, kMemory, kDigest},
       .bias = on_device({full_attention, sliding_window, several_groups, different_block_sizes},
                         {two_block_pool, mla, chunked_local, states})},
      {.id = "layout-two-heads",
       .site = kBackend,
       .source = "LMCache 4467",
       .mechanism = "the K/V dimension is told from the heads by its size: [.., 2, heads] or [.., "
                    "heads, 2]",
       .exposed_by = "two KV heads",
       .caught_by = {kWritten, kMemory},
       .bias = on_device({full_attention}, {states, mla, sliding_window, chunked_local})},
      {.id = "layout-order-lost",
       .site = kBackend,
       .source = "vllm 22663",
       .mechanism = "rows are laid out NHD where HND was requested, or vice versa",
       .exposed_by = "two KV heads",
       .caught_by = {kWritten},
       .bias = on_device({full_attention}, {states, mla, sliding_window, chunked_local})},
      {.id = "pack-stride",
       .site = kBackend,
       .source = "vllm 35703 review",
       .mechanism = "strides of (num_blocks, 2) are put on a (2, num_blocks) view",
       .exposed_by = "packed attention, on a backend with the K/V dimension first",
       .caught_by = {kWritten, kMemory, kDigest},
       .bias = on_device({full_attention, packed_pages},
                         {several_groups, mla, sliding_window, chunked_local, states}),
       .reshape = flash},
      {.id = "pack-offset",
       .site = kBackend,
       .source = "vllm 35703",
       .mechanism = "every layer of a pack lies at offset 0",
       .exposed_by = "packed attention",
       .caught_by = {kWritten, kMemory},
       .bias = on_device({full_attention, packed_pages},
                         {several_groups, mla, sliding_window, chunked_local, states})},
  };
}

}  // namespace lockstep
