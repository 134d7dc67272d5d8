// The catalogue's defects between two engines, among connectors, and of a host tier. Their switches
// are in sim/pair/transfer_protocol.h, sim/connectors/ and cuda_backend/defects/; two need none:
// vllm-0.22.1 has them.
#include "properties/mutants/mutant_parts.h"
#include "properties/shrink/case_parts.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

using enum Feature;

// Blocks stored in host memory and found there again, in a release modelled with connectors.
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
  always.add({full_attention, prefix_caching, shared_prefixes, tight_pool});
  return {.engine = std::string(connector_profile().name),
          .always = always,
          .never = {states, two_block_pool, priority_policy, async_scheduling},
          .backend = "simt",
          .check = "fast"};
}

GeneratorOptions one_group(GeneratorOptions options) {
  options.never.add({several_groups, hidden_state, sliding_window, chunked_local, mla});
  return options;
}

}  // namespace

std::vector<Mutant> protocol_mutants() {
  return {
      {.id = "send-freed-early",
       .mechanism = "the prefill engine frees its blocks when it has sent the last of them, not "
                    "when they are known to have arrived",
       .exposed_by = "any load; a lost block makes it wrong data",
       .caught_by = {"transfer.freed_early"}},
      {.id = "delivery-twice",
       .mechanism = "a block that arrives twice is written and counted twice: the load counts as "
                    "complete with a block missing",
       .exposed_by = "a network that repeats packets, or a repeated read",
       .caught_by = {"transfer.delivered_twice"}},
      {.id = "recv-failed-marked-ok",
       .source = "dynamo 15079; vLLM 0.22.1's NIXL worker with several groups",
       .mechanism = "a failed load is reported as received, and none of its blocks as invalid",
       .exposed_by = "blocks lost for good",
       .caught_by = {"transfer.incomplete"}},
      {.id = "completion-stale",
       .mechanism = "the release of an earlier attempt counts as one of the current attempt: "
                    "its blocks are free before they are read",
       .exposed_by = "a failed load, prefilled again, and a release that comes late",
       .caught_by = {"transfer.freed_early"},
       .transfer = {.fails_requests = true}},
  };
}

// Content ids alone would not show these: they are about the bytes on their way.
std::vector<Mutant> staging_mutants() {
  return {
      {.id = "stage-read-early",
       .source = "vllm 46278, sglang 36738: the same race",
       .mechanism = "the bytes to send are read from the staging buffer before the step that "
                    "stores the blocks there has run",
       .exposed_by = "any load, and pages",
       .caught_by = {"transfer.read_content"},
       .transfer = {.has_pages = true}},
      {.id = "load-before-arrival",
       .source = "vllm 46278, sglang 36738: the same race",
       .mechanism = "blocks are loaded into pages before their bytes have arrived in the staging "
                    "buffer: pages receive its old content",
       .exposed_by = "any load, and pages",
       .caught_by = {"memory.divergence"},
       .transfer = {.has_pages = true}},
  };
}

std::vector<Mutant> holding_mutants() {
  return {
      {.id = "hold-head-of-line",
       .source = "vLLM 0.22.1 (connectors/connector_async/0014)",
       .mechanism = "a request that holds nothing and does not fit stands before fully loaded "
                    "ones: nothing runs again",
       .exposed_by = "a tight pool, and a load that received nothing",
       .caught_by = {"liveness.head_of_line"},
       .transfer = {.subject = TransferSubject::holds, .tight = true}},
      {.id = "hold-partial-deadlock",
       .source = "vLLM 0.22.1 (connectors/connector_failures_fail/0000)",
       .mechanism = "partly loaded requests each hold what the other needs to continue",
       .exposed_by = "a tight pool",
       .caught_by = {"liveness.partial_load"},
       .transfer = {.subject = TransferSubject::holds, .tight = true}},
  };
}

std::vector<Mutant> connector_mutants() {
  return {
      {.id = "hma-any",
       .source = "vllm 39949",
       .mechanism = "a MultiConnector reports support for several groups when any part has it",
       .exposed_by = "parts that differ in this",
       .caught_by = {"connector.hybrid_groups"},
       .transfer = {.subject = TransferSubject::connectors}},
      {.id = "hma-before-config",
       .source = "vllm 39949",
       .mechanism = "support for several groups is queried before the offloading backend has set "
                    "its connector: the engine does not start",
       .exposed_by = "offloading, and no other connector",
       .caught_by = {"connector.start"},
       .transfer = {.subject = TransferSubject::connectors}},
  };
}

std::vector<Mutant> host_tier_mutants() {
  return {
      {.id = "transfer-wrong-end",
       .source = "dynamo 8419, vllm 43996",
       .mechanism = "the last blocks of a transfer are moved in place of the first",
       .exposed_by = "a host tier, and two blocks of a group moved in one step",
       .caught_by = {kHost, kWritten},
       .bias = beside_host_tier({long_prompts}),
       .reshape = with_host_tier},
      {.id = "transfer-flatten",
       .source = "vllm 39949",
       .mechanism = "a transfer treats a cache as one long array and ignores padding and other "
                    "layers between its blocks",
       .exposed_by = "a host tier, and padded pages or several layers in a host block",
       .caught_by = {kHost, kWritten},
       .bias = beside_host_tier({several_groups, padded_pages}),
       .reshape = with_host_tier},
      {.id = "transfer-failed-marked-ok",
       .source = "dynamo 15079",
       .mechanism = "a failed load from the host tier is not reported: its blocks count as "
                    "computed",
       .exposed_by = "a host tier, and loads that fail",
       .caught_by = {"decide", "transfer"},
       .bias = one_group(beside_host_tier({})),
       .reshape = with_failing_loads},
      {.id = "free-send-in-flight",
       .source = "vllm 45357",
       .mechanism = "a finished request frees its blocks while stores of them are pending",
       .exposed_by = "a host tier, and stores that outlive their request",
       .caught_by = {"transfer"},
       .bias = beside_host_tier({}),
       .reshape = with_late_stores},
  };
}

}  // namespace lockstep
