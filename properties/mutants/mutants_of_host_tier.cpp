// The catalogue's defects of a host tier: what moves between the device and host memory, and the
// connector that decides it. Their switches are in cuda_backend/defect.h and
// sim/connectors/offload_connector.h.
#include "properties/mutants/mutant_catalogue.h"
#include "properties/mutants/mutants_on_device.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

using enum Feature;
constexpr auto kHost = "host_block";

// Blocks stored in host memory and found there again, in an engine whose connectors are modelled.
void with_host_tier(SavedCase& saved) {
  saved.connector.parts = {ConnectorKind::host};
  saved.connector.num_host_blocks = 8;
}
void with_failing_loads(SavedCase& saved) {
  with_host_tier(saved);
  saved.connector.load_failed_percent = 60;
}
void with_late_stores(SavedCase& saved) {
  with_host_tier(saved);
  saved.connector.delay_steps_max = 12;
}
GeneratorOptions beside_host_tier(FeatureSet always) {
  for (const Feature feature : {full_attention, prefix_caching, shared_prefixes, tight_pool})
    always.add(feature);
  return {.engine = "vllm-0.22.1",
          .always = always,
          .never = {states, two_block_pool, priority_policy, async_scheduling},
          .backend = "simt",
          .check = "fast"};
}

GeneratorOptions one_group(GeneratorOptions options) {
  options.never.add(several_groups);
  options.never.add(hidden_state);
  options.never.add(sliding_window);
  options.never.add(chunked_local);
  options.never.add(mla);
  return options;
}

}  // namespace

std::vector<Mutant> mutants_of_host_tier() {
  return {
      {.id = "transfer-wrong-end",
       .site = kBackend,
       .source = "dynamo 8419, vllm 43996",
       .mechanism = "the last blocks of a transfer are moved in place of the first",
       .exposed_by = "a host tier, and two blocks of a group moved in one step",
       .caught_by = {kHost, kWritten},
       .bias = beside_host_tier({long_prompts}),
       .reshape = with_host_tier},
      {.id = "transfer-flatten",
       .site = kBackend,
       .source = "vllm 39949",
       .mechanism = "a transfer treats a cache as one long array and ignores padding and other "
                    "layers between its blocks",
       .exposed_by = "a host tier, and padded pages or several layers in a host block",
       .caught_by = {kHost, kWritten},
       .bias = beside_host_tier({several_groups, padded_pages}),
       .reshape = with_host_tier},
      {.id = "transfer-failed-marked-ok",
       .site = kBackend,
       .source = "dynamo 15079",
       .mechanism = "a failed load from the host tier is not reported: its blocks count as "
                    "computed",
       .exposed_by = "a host tier, and loads that fail",
       .caught_by = {"decide", "transfer"},
       .bias = one_group(beside_host_tier({})),
       .reshape = with_failing_loads},
      {.id = "free-send-in-flight",
       .site = kBackend,
       .source = "vllm 45357",
       .mechanism = "a finished request gives its blocks back while stores of them are pending",
       .exposed_by = "a host tier, and stores that outlive their request",
       .caught_by = {"transfer"},
       .bias = beside_host_tier({}),
       .reshape = with_late_stores},
  };
}

}  // namespace lockstep
