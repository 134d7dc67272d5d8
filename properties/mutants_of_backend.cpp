// The catalogue's defects of the device side: tables, slots, rows, states, and views at work. Their
// switches are in cuda_backend/defect.h and view_defects.h.
#include "properties/case_parts.h"
#include "properties/mutant_catalogue.h"
#include "reference/kernel_blocks.h"

namespace lockstep {
namespace {

using enum Feature;
constexpr auto kBackend = MutantSite::backend;
constexpr auto kWritten = "page_written";
constexpr auto kDigest = "attention_digest";
constexpr auto kOutput = "attention_output";
constexpr auto kExtraction = "extraction";
constexpr auto kMemory = "memory_check";
constexpr auto kTable = "block_table";
constexpr auto kSlots = "slot_mapping";

// Cases that run on the CPU executor: dozens a second. Steps with drafts in flight have no program.
GeneratorOptions on_device(FeatureSet always, FeatureSet never = {}, std::string check = "fast") {
  never.add(async_scheduling);
  return {.engine = "vllm-0.33.0",
          .always = always,
          .never = never,
          .backend = "simt",
          .check = std::move(check),
          .requests_max = 6};
}

void choose(SavedCase& saved, AttentionBackend backend) {
  saved.attention_backend = backend;
  if (const auto sizes = kernel_block_sizes(saved.cache, backend))
    saved.kernel_block_sizes = *sizes;
}
void over_four_streams(SavedCase& saved) { saved.settings.emplace_back("num_streams", 4); }
void with_graphs(SavedCase& saved) {
  saved.settings.emplace_back("max_cudagraph_capture_size", 64);
}
void with_real_numbers(SavedCase& saved) { saved.settings.emplace_back("real_numbers", 1); }
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
void over_two_context_ranks(SavedCase& saved) {
  saved.engine.dcp = 2;
  saved.settings.emplace_back("cp_kv_cache_interleave_size", 4);
}
void flash(SavedCase& saved) { choose(saved, AttentionBackend::flash_attn); }

std::vector<Mutant> row_mutants() {
  const FeatureSet attention{full_attention};
  return {
      {.id = "drop-slot",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the K/V write leaves out the last scheduled token of every step",
       .exposed_by = "any step",
       .caught_by = {kWritten},
       .bias = on_device(attention, {states})},
      {.id = "wrong-stride",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the block stride of the attention views is one token row short",
       .exposed_by = "any block but the null block",
       .caught_by = {kWritten},
       .bias = on_device(attention, {states})},
      {.id = "write-past-page",
       .site = kBackend,
       .source = "this project",
       .mechanism =
           "the last part of a row starts one token late, so that a block ends past its page",
       .exposed_by = "any step; past the page: a full block",
       .caught_by = {kWritten},
       .bias = on_device(attention, {states})},
      {.id = "uninitialised-read",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the K/V rows of a step's last token are never computed",
       .exposed_by = "any step, in check mode",
       .caught_by = {kMemory, kWritten},
       .bias = on_device(attention, {states}, "check")},
      {.id = "race",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a second CTA writes the first token's row, with the last token's content",
       .exposed_by = "any step in check mode; two tokens or more in fast mode",
       .caught_by = {kMemory},
       .bias = on_device(attention, {states}, "check")},
      {.id = "zero-lost",
       .site = kBackend,
       .source = "vllm 35219, 43990",
       .mechanism = "blocks are not zeroed before use: bytes of another type stay in them",
       .exposed_by = "attention beside states, whose new blocks are zeroed",
       .caught_by = {kWritten},
       .bias = on_device({full_attention, states, several_groups}, {two_block_pool})},
      {.id = "stale-nan",
       .site = kBackend,
       .source = "vllm 35219, 43990",
       .mechanism =
           "attention reads its last block to the end: recycled bytes come in as numbers, or "
           "as NaN",
       .exposed_by = "a query that ends inside a block",
       .caught_by = {kOutput},
       .bias = on_device(attention, {states})},
      {.id = "hidden-flatten",
       .site = kBackend,
       .source = "vllm 39949",
       .mechanism = "extraction reads a padded, strided cache as if it were dense: padding comes "
                    "back as hidden states",
       .exposed_by = "hidden states of two blocks in padded pages",
       .caught_by = {kExtraction, kMemory},
       .bias = on_device({full_attention, hidden_state, several_groups, padded_pages},
                         {two_block_pool})},
      {.id = "hidden-chunk-save",
       .site = kBackend,
       .source = "vllm 39949",
       .mechanism = "states are saved after a chunk of a chunked prefill: fewer states than tokens",
       .exposed_by = "a request with hidden states that ends",
       .caught_by = {kExtraction},
       .bias = on_device({full_attention, hidden_state, several_groups}, {two_block_pool})},
  };
}

std::vector<Mutant> table_mutants() {
  return {
      {.id = "stale-table-entry",
       .site = kBackend,
       .source = "vllm-tt-plugin 103, vllm 42273",
       .mechanism = "a row keeps the entries of freed blocks past its length when it is used again",
       .exposed_by = "a row that is used again by a shorter table",
       .caught_by = {kTable},
       .bias = on_device({full_attention, long_prompts}, {states, two_block_pool})},
      {.id = "table-width",
       .site = kBackend,
       .source = "vllm-ascend 11466, vllm 41233",
       .mechanism =
           "rows are too narrow for the blocks of drafts' states: they spill into the next",
       .exposed_by = "a request as long as its row, with states and drafts",
       .caught_by = {kTable, kMemory},
       .bias = on_device({states, drafts}, {two_block_pool})},
      {.id = "table-async-upload",
       .site = kBackend,
       .source = "TensorRT-LLM 15546",
       .mechanism =
           "a staging buffer is used again before its copy has run: tables are appended to "
           "with another step's block ids",
       .exposed_by = "the second step that appends blocks",
       .caught_by = {kTable},
       .bias = on_device({full_attention}, {states, two_block_pool})},
      {.id = "table-late-clear",
       .site = kBackend,
       .source = "TensorRT-LLM 14423",
       .mechanism = "the row of a request that left is cleared after the next one has taken it",
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
       .mechanism = "padded rows of a captured graph reach the cache write: slot 0 and not PAD",
       .exposed_by = "a padded batch",
       .caught_by = {kSlots},
       .bias = on_device({full_attention}, {states})},
      {.id = "slot-stale-tail",
       .site = kBackend,
       .source = "vllm-tt-plugin 103, vllm 42273",
       .mechanism = "the tail of a padded batch keeps tokens of the step before: their slots are "
                    "looked up in rows that are others' by now",
       .exposed_by = "a step with fewer tokens than the one before, in a padded batch",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention, long_prompts}, {states, two_block_pool})},
      {.id = "slot-interleave-ignored",
       .site = kBackend,
       .source = "vllm 51031, 54679",
       .mechanism = "tokens are dealt out to the ranks of a context one by one, and not in runs: a "
                    "rank keeps others' tokens",
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

std::vector<Mutant> device_state_mutants() {
  const FeatureSet hybrid{full_attention, states, several_groups};
  return {
      {.id = "state-copy-lost",
       .site = kBackend,
       .source = "vllm 51766",
       .mechanism = "the state is not copied from the hit or the previous block into the new one",
       .exposed_by = "a block boundary or a hit in mode align",
       .caught_by = {kWritten},
       .bias = on_device(
           {full_attention, states, several_groups, prefix_caching, shared_prefixes, long_prompts},
           {two_block_pool})},
      {.id = "copy-unordered",
       .site = kBackend,
       .source = "vllm 46278, sglang 36738",
       .mechanism = "what reads a copied or loaded block does not wait for it, and a store does "
                    "not wait for what it stores",
       .exposed_by = "several streams, and copies of states from block to block",
       .caught_by = {kMemory, kWritten},
       .bias = on_device(
           {full_attention, states, several_groups, prefix_caching, shared_prefixes, long_prompts},
           {two_block_pool}),
       .reshape = over_four_streams},
      {.id = "state-pads-included",
       .site = kBackend,
       .source = "vllm 55178",
       .mechanism = "a padded prompt tail advances the state: h(N+k) saved as h(N)",
       .exposed_by = "any state update",
       .caught_by = {kWritten},
       .bias = on_device(hybrid, {two_block_pool})},
      {.id = "state-draft-reuse",
       .site = kBackend,
       .source = "vllm 57128",
       .mechanism = "a step goes on from a state that has seen rejected drafts",
       .exposed_by = "states with drafts, one of them rejected",
       .caught_by = {kWritten},
       .bias = on_device({states, drafts}, {two_block_pool})},
      {.id = "state-update-race",
       .site = kBackend,
       .source = "vllm 50729",
       .mechanism =
           "parallel copies inside one block overlap: two threads advance one word in place",
       .exposed_by = "any state update",
       .caught_by = {kMemory, kWritten},
       .bias = on_device(hybrid, {two_block_pool}, "check")},
      {.id = "state-stride-unpadded",
       .site = kBackend,
       .source = "vllm 38081 review",
       .mechanism =
           "states are strided by the real page and not by the padded page: block b drifts "
           "into b-1",
       .exposed_by = "states in padded pages",
       .caught_by = {kWritten},
       .bias = on_device({full_attention, states, several_groups, padded_pages}, {two_block_pool})},
      {.id = "state-offset-wrong-itemsize",
       .site = kBackend,
       .source = "vllm 38081 review",
       .mechanism = "the second state's offset is counted in items of the first",
       .exposed_by = "two states of different dtype",
       .caught_by = {kWritten},
       .bias = on_device(hybrid, {two_block_pool})},
  };
}

// slot-pad-rows shows in graphs as it does without: tests/cuda_backend/mutants_test.cpp.
std::vector<Mutant> graph_mutants() {
  return {
      {.id = "graph-stale-param",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a captured launch holds the number of tokens of the batch that it was "
                    "captured with, and does not read it from memory",
       .exposed_by = "two batches of different sizes that are padded to one",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention}, {states, two_block_pool}),
       .reshape = with_graphs},
      {.id = "graph-too-small",
       .site = kBackend,
       .source = "this project",
       .mechanism = "the graph of the next smaller size is replayed: the last tokens of the batch "
                    "are not in it",
       .exposed_by = "a batch between two captured sizes",
       .caught_by = {kSlots, kMemory},
       .bias = on_device({full_attention}, {states, two_block_pool}),
       .reshape = with_graphs},
      {.id = "graph-stale-pointer",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a buffer grows after a graph was captured, which goes on reading the old one",
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
  };
}

std::vector<Mutant> view_mutants() {
  return {
      {.id = "layout-not-updated",
       .site = kBackend,
       .source = "vllm 38081",
       .mechanism =
           "attention views keep all K before all V although the pages are shared with states",
       .exposed_by = "attention and states in one model, on a backend that puts the pair first",
       .caught_by = {kWritten, kMemory},
       .bias = on_device({full_attention, states, several_groups}, {two_block_pool}),
       .reshape = flash},
      {.id = "layout-equal-page",
       .site = kBackend,
       .source = "vllm 41657",
       .mechanism =
           "layers of one tensor are all shaped like its first one: equal bytes, other blocks",
       .exposed_by = "equal pages with different block sizes",
       .caught_by = {kWritten, kMemory, kDigest},
       .bias = on_device({full_attention, sliding_window, several_groups, different_block_sizes},
                         {two_block_pool, mla, chunked_local, states})},
      {.id = "layout-two-heads",
       .site = kBackend,
       .source = "LMCache 4467",
       .mechanism = "the pair is told from the heads by its size: [.., 2, heads] or [.., heads, 2]",
       .exposed_by = "two KV heads",
       .caught_by = {kWritten, kMemory},
       .bias = on_device({full_attention}, {states, mla, sliding_window, chunked_local})},
      {.id = "layout-order-lost",
       .site = kBackend,
       .source = "vllm 22663",
       .mechanism = "rows are laid out NHD where HND was asked for, or the other way round",
       .exposed_by = "two KV heads",
       .caught_by = {kWritten},
       .bias = on_device({full_attention}, {states, mla, sliding_window, chunked_local})},
      {.id = "pack-stride",
       .site = kBackend,
       .source = "vllm 35703 review",
       .mechanism = "strides of (num_blocks, 2) are put on a (2, num_blocks) view",
       .exposed_by = "packed attention, on a backend that puts the pair first",
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

}  // namespace

std::vector<Mutant> mutants_of_backend() {
  std::vector<Mutant> all;
  for (const auto& part : {row_mutants(), table_mutants(), device_state_mutants(), graph_mutants(),
                           number_mutants(), view_mutants()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace lockstep
