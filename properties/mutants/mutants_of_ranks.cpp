// The catalogue's defects of ranks: which heads and layers a rank takes itself for, and how data
// parallel ranks meet. Their switches are in cuda_backend/defect.h and sim/ranks/dp_step.h.
#include "properties/mutants/mutant_catalogue.h"
#include "properties/mutants/mutants_on_device.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

using enum Feature;

// No graphs, two tensor parallel ranks: an idle rank's single token stays as it is.
void eagerly_over_two(SavedCase& saved) {
  saved.enforce_eager = true;
  saved.tensor_parallel_size = 2;
  saved.queries_per_kv = 2;
}

// The smallest graphs: whoever has more than one chunk of a prompt in its step has none.
void over_small_graphs(SavedCase& saved) {
  saved.enforce_eager = false;
  saved.max_cudagraph_capture_size = 4;
}

}  // namespace

std::vector<Mutant> mutants_of_ranks() {
  return {
      {.id = "tp-head-offset",
       .site = kBackend,
       .source = "this project",
       .mechanism = "a rank's first KV head is its own number instead of its number times its "
                    "heads",
       .exposed_by = "two KV heads or more on a tensor parallel rank",
       .caught_by = {kWritten},
       .bias =
           on_device({full_attention, tensor_parallel}, {replicated_heads, packed_pages, states})},
      {.id = "tp-heads-not-replicated",
       .site = kBackend,
       .source = "vllm config/model.py, get_num_kv_heads",
       .mechanism = "KV heads are numbered consecutively over ranks where they should be "
                    "replicated",
       .exposed_by = "more tensor parallel ranks than KV heads",
       .caught_by = {kWritten},
       .bias =
           on_device({full_attention, tensor_parallel, replicated_heads}, {packed_pages, states})},
      {.id = "pp-layer-offset",
       .site = kBackend,
       .source = "this project",
       .mechanism = "every stage but the first takes the layers one further on",
       .exposed_by = "two pipeline stages",
       .caught_by = {kWritten},
       .bias = on_device({full_attention, pipeline_parallel, several_groups}, {packed_pages})},
      {.id = "dp-idle-writes",
       .site = kBackend,
       .source = "vllm 13418, in the dummy batch",
       .mechanism = "the tokens of an idle rank's batch have slot 0 where they should have none",
       .exposed_by = "an idle data parallel rank",
       .caught_by = {kSlots},
       .bias = on_device({full_attention, data_parallel}, {states})},
      {.id = "dp-sync-shape",
       .site = kBackend,
       .source = "vllm 39949, follow-up",
       .mechanism = "an idle rank reports its tokens to the others in a tensor of another shape",
       .exposed_by = "an idle data parallel rank beside a busy one",
       .caught_by = {"collective"},
       .bias = on_device({full_attention, data_parallel})},
      {.id = "sp-padding",
       .site = kBackend,
       .source = "vllm 39949, follow-up",
       .mechanism = "the tokens of an idle rank are not padded to a multiple of tp",
       .exposed_by = "sequence parallelism without graphs, and an idle rank",
       .caught_by = {"collective"},
       .bias = on_device({full_attention, data_parallel}, {several_groups, states, packed_pages,
                                                           mla, sliding_window, chunked_local}),
       .reshape = eagerly_over_two},
      {.id = "dp-idle-skips",
       .site = kBackend,
       .source = "vllm v1/engine/core.py, execute_dummy_batch",
       .mechanism = "an idle rank skips the step, and the others wait for it",
       .exposed_by = "an idle data parallel rank beside a busy one",
       .caught_by = {"liveness"},
       .bias = on_device({full_attention, data_parallel})},
      {.id = "dp-graph-alone",
       .site = kBackend,
       .source = "vllm v1/worker/dp_utils.py, _post_process_cudagraph_mode",
       .mechanism = "a rank replays its graph, with the collectives of equal ranks, beside a rank "
                    "without a graph for its tokens",
       .exposed_by = "a data parallel rank with more tokens than the largest graph takes",
       .caught_by = {"collective"},
       .bias = on_device({full_attention, data_parallel}),
       .reshape = over_small_graphs},
  };
}

}  // namespace lockstep
