// Defects of caches that are replicated over context parallel ranks, with other caches sharded.
#include "properties/mutants/mutant_parts.h"

namespace lockstep {
namespace {

using enum Feature;

constexpr auto kSource = "vllm 0.33.0, v1/worker/gpu/block_table.py (dcp_sharded)";

GeneratorOptions with_whole_caches(FeatureSet more = {}) {
  FeatureSet always{full_attention, whole_caches, long_prompts};
  always.add(more);
  return on_executor(always, {states, chunked_local, hidden_state, two_block_pool, cross_attention,
                              sinks, reference_windows, drafter_cache, bounded_replay});
}

}  // namespace

std::vector<Mutant> share_mutants() {
  return {
      {.id = "whole-dealt-out",
       .source = kSource,
       .mechanism = "a rank writes only its share of a replicated cache",
       .exposed_by = "a replicated cache and a sharded one",
       .caught_by = {kSlots},
       .bias = with_whole_caches()},
      {.id = "dealt-out-whole",
       .source = kSource,
       .mechanism =
           "every rank writes all tokens of a sharded cache, as if replicated: also where its "
           "table has no entries for them",
       .exposed_by = "a replicated cache and a sharded one",
       .caught_by = {kSlots, kMemory},
       .bias = with_whole_caches()},
      {.id = "whole-block-of-all",
       .source = kSource,
       .mechanism =
           "slots of a replicated cache are computed with the tokens that all ranks have in a "
           "block of a sharded one",
       .exposed_by = "a replicated cache and a sharded one",
       .caught_by = {kSlots},
       .bias = with_whole_caches()},
      {.id = "whole-read-in-part",
       .source = "vllm 0.33.0, v1/worker/gpu/spec_decode/speculator.py (dcp_local_seq_lens)",
       .mechanism = "attention over a replicated cache receives the length of "
                    "the rank's share",
       .exposed_by = "a replicated cache and a sharded one",
       .caught_by = {kDigest},
       .bias = with_whole_caches()},
  };
}

std::vector<Mutant> share_decision_mutants() {
  GeneratorOptions bias = with_whole_caches();
  bias.backend = "none";
  return {
      {.id = "whole-blocks-shared",
       .source = "vllm 0.33.0, v1/core/single_type_kv_cache_manager.py (dcp_world_size)",
       .mechanism = "blocks of a replicated cache are counted as if the ranks shared "
                    "its tokens: requests get a part of what they need",
       .exposed_by = "a replicated cache and a sharded one",
       .caught_by = {"invariant.table_covers"},
       .bias = bias},
  };
}

}  // namespace lockstep
