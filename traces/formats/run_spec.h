// The description of a run: engine, cache, device, ranks, connector, seeds and faults. The command
// line, a trace's hints and a saved case all produce one RunSpec; sim/session/session.h derives the
// configuration of a run from it. run_fields.h has a row for each of its options.
//
// Invariants
// (1) Plain data: every member has a default, and two equal specs are the same run of equal
//     requests.
// (2) `cache` is the plan. `recipe` describes how to make a plan where the input has none, and is
//     ignored with a plan.
//
// Not checked here: whether an engine supports the options together, and whether a backend, mutant
// or fault of that name exists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/kv_connector.h"
#include "reference/types/view_types.h"

namespace lockstep {

// For error messages about connectors.
inline constexpr std::string_view kPartsExpected =
    "peers, host, one-group-peers or hisparse, or up to 4 of them joined by +";

// Elements of a K/V cache as the command line names them: a dtype ("bf16"), or a quantization where
// that says more than its dtype does ("fp8_per_token_head", whose elements are fp8_e4m3).
struct ElementType {
  DType dtype = DType::bf16;
  KVQuantMode mode = KVQuantMode::none;  // of K/V pairs
};

// Absent: an unknown name. name_of() is its inverse.
std::optional<ElementType> element_type_from_name(std::string_view name);
std::string_view name_of(const ElementType& type);

// Number of items that are read back and compared in one step, in addition to tables, slots and
// written pages, which are always compared. A step with more of them checks a sample.
struct CheckBudget {
  // Cache rows (token, part, head) under attention digests.
  std::int64_t probe_rows = 16'384;
  // Rows under attention outputs.
  std::int64_t query_rows = 4'096;
  // Pages that the step must not change.
  std::int64_t untouched_pages = 64;
  bool operator==(const CheckBudget&) const = default;
};

// A named linear model of the duration of a step. Virtual time only orders events; no result of
// Lockstep is a prediction of a real machine.
//
// Example: 100 tokens take 10,000,000 + 100 * 20,000 ns = 12 ms.
struct StepTimeModel {
  std::string name = "linear";
  // Duration of a step that runs anything.
  std::int64_t base_ns = 10'000'000;
  std::int64_t per_token_ns = 20'000;
  std::int64_t step_ns(std::int64_t tokens) const { return base_ns + per_token_ns * tokens; }
  bool operator==(const StepTimeModel&) const = default;
};

// Values are those of older saved cases, which have one decimal digit per part.
enum class ConnectorKind : std::uint8_t {
  // Unknown peers that hold prefixes of some prompts: simulated_connector.h.
  peers = 1,
  // A host tier of this engine: offload_connector.h.
  host = 2,
  // Peers that transfer one KV cache group only, as the connectors of vLLM without SupportsHMA do;
  // the first, if the model has several.
  one_group_peers = 3,
  // Workers that copy pages between a host pool and the device.
  page_workers = 4,
};
std::string_view name_of(ConnectorKind kind);

inline constexpr std::size_t kConnectorPartsMax = 4;
// Parses "peers+host": the parts in query order. Absent: an unknown part, or more than
// kConnectorPartsMax.
std::optional<std::vector<ConnectorKind>> connector_parts_from_text(std::string_view text);
std::string connector_parts_text(const std::vector<ConnectorKind>& parts);  // none: "none"

// KV connectors in query order, and their options.
struct ConnectorSpec {
  // Empty: no connector.
  std::vector<ConnectorKind> parts;
  // Blocks of each host tier; 0: as many as the pool has.
  std::int64_t num_host_blocks = 0;
  // Loads that fail, in percent; absent: each kind's own rate (peers 10, a host tier 0).
  std::optional<std::int32_t> load_failed_percent;
  // Steps by which a transfer of a host tier, or a copy of HiSparse's workers, may take longer.
  std::int32_t delay_steps_max = 3;
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;

  bool has(ConnectorKind kind) const;
  bool operator==(const ConnectorSpec&) const = default;
};

// A fault that is injected at a step: its kind, and its numbers by name (docs/formats.md,
// "Faults"). {"kind":"pinch_pool","step":20,"arguments":{"steps":8,"blocks":10}}
struct Fault {
  std::string kind;
  std::int64_t step = 0;
  std::vector<std::pair<std::string, std::int64_t>> arguments;
  bool operator==(const Fault&) const = default;
};

// Options of the command line whose result a plan, a list of faults or the trace then contains.
// Saved cases store the result and not the option, so that a replay does not depend on the
// catalogue.
struct RunRecipe {
  // A name of the catalogue, or a file; empty: `layers` equal layers of the figures below.
  std::string model;
  std::int32_t layers = 2;
  // Of a model: the first N layers of each group; 0: all. Decisions do not depend on it.
  std::int32_t layers_per_group = 0;
  // 0: 2 heads, or 1 with MLA.
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 64;
  std::string dtype = "bf16";      // also "fp8_per_token_head" and the like
  std::string attention = "full";  // or "mla"
  // True if all layers form one KV cache group. As an option not given: only if a connector takes
  // one group.
  bool disable_hybrid_kv_cache_manager = false;
  // Of a model with states: prefills export states from inside a chunk where the release's layers
  // can.
  bool prefill_checkpoints = true;
  // HiSparse, for a model with sparse attention: its host pool in GiB (0: none), and rows of a
  // request's hot region (0: the engine's choice).
  std::int32_t hisparse_host_gib = 0;
  std::int32_t hisparse_device_buffer = 0;
  // A list of faults, or a seed from which some are generated; empty: none.
  std::string faults;
  // Only the first N requests of the trace; 0: all.
  std::int64_t limit_requests = 0;
  bool operator==(const RunRecipe&) const = default;
};

// Source of the decisions on the inputs of a recording.
enum class Decides : std::uint8_t {
  model,      // the model's scheduler
  recording,  // the recorded decisions, unchanged
};

// Everything that a replay depends on, besides its requests and recorded decisions.
struct RunSpec {
  EngineConfig engine{};

  // The cache.
  KVCacheConfig cache{};
  CacheLayout layout = CacheLayout::NHD;
  AttentionBackend attention_backend = AttentionBackend::flash_attn;
  // Tokens, one per group; empty: the backend's choice.
  std::vector<std::int64_t> kernel_block_sizes{};
  LayoutRule layout_rule = LayoutRule::isolated;
  // Query heads per KV head of the whole model, before tensor parallelism.
  std::int32_t queries_per_kv = 1;
  // Seed that shuffles the pool's first blocks; 0: the engine's order, ascending.
  std::uint64_t block_order = 0;

  // Ranks. Those of context parallelism (dcp, pcp) are options of the engine.
  std::int32_t tensor_parallel_size = 1;
  std::int32_t pipeline_parallel_size = 1;
  std::int32_t data_parallel_size = 1;
  // True if data parallel ranks run no graphs, so that none is padded to the largest batch.
  bool enforce_eager = false;
  // Consecutive tokens that one context parallel rank keeps.
  std::int32_t cp_kv_cache_interleave_size = 1;

  ConnectorSpec connector{};

  // The device.
  // "simt", "cuda", "none", the path of a plugin, or a real worker.
  std::string backend = "simt";
  CheckMode check = CheckMode::check;
  std::int32_t num_streams = 1;
  bool delay_streams = false;
  // Largest batch with a captured graph, in tokens; 0: no graphs.
  std::int32_t max_cudagraph_capture_size = 0;
  Numbers numbers = Numbers::words;

  // The run.
  Decides decide = Decides::model;
  std::vector<std::string> mutants{};
  // Seed of sampled tokens and of the thread schedule of --check hunt.
  std::uint64_t seed = 0;
  // Probability that the next draft is accepted, in percent.
  std::int32_t draft_acceptance_percent = 60;
  // Steps in which the speculator proposes fewer drafts than it may, in percent.
  std::int32_t short_drafts_percent = 0;
  StepTimeModel step_time{};
  CheckBudget budget{};
  std::vector<Fault> faults{};

  RunRecipe recipe{};
  bool operator==(const RunSpec&) const = default;
};

}  // namespace lockstep
