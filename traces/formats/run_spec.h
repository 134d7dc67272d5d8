// The description of a run: engine, cache, device, ranks, connector, seeds and faults. The command
// line, a trace's hints and a saved case all produce one RunSpec; sim/session/session.h makes the
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

inline constexpr std::string_view kPartsExpected =
    "peers, host, one-group-peers or hisparse, or up to 4 of them joined by +";

// What the elements of a K/V cache are called on the command line: a dtype, or how the cache is
// quantised where that says more than one.
struct ElementType {
  DType dtype = DType::bf16;
  KVQuantMode mode = KVQuantMode::none;  // of K/V pairs
};

std::optional<ElementType> element_type_from_name(std::string_view name);
std::string_view name_of(const ElementType& type);

// What is read back in one step beyond tables, slots and written pages, which are always compared.
struct CheckBudget {
  std::int64_t probe_rows = 16'384;  // cache rows (token, part, head) under attention digests
  std::int64_t query_rows = 4'096;   // under attention outputs
  std::int64_t untouched_pages = 64;
  bool operator==(const CheckBudget&) const = default;
};

// A named linear model of how long a step takes. Virtual time only orders events; no answer of
// Lockstep claims to be a prediction of a real machine.
struct StepTimeModel {
  std::string name = "linear";
  std::int64_t base_ns = 10'000'000;  // of every step that runs something
  std::int64_t per_token_ns = 20'000;
  std::int64_t step_ns(std::int64_t tokens) const { return base_ns + per_token_ns * tokens; }
  bool operator==(const StepTimeModel&) const = default;
};

enum class ConnectorKind : std::uint8_t {
  peers = 1,  // unknown ones that know prefixes of some prompts: simulated_connector.h
  host = 2,   // a host tier of this engine: offload_connector.h
  // Peers that take one KV cache group, as the connectors of vLLM without SupportsHMA do; of
  // several they move the first.
  one_group_peers = 3,
  page_workers = 4,  // that copy pages between a host pool and the device
};
std::string_view name_of(ConnectorKind kind);

inline constexpr std::size_t kConnectorPartsMax = 4;
// "peers+host": the parts in order. Absent: an unknown part, or too many.
std::optional<std::vector<ConnectorKind>> connector_parts_from_text(std::string_view text);
std::string connector_parts_text(const std::vector<ConnectorKind>& parts);  // none: "none"

// KV connectors in query order, and their options.
struct ConnectorSpec {
  std::vector<ConnectorKind> parts;  // none: no connector
  std::int64_t num_host_blocks = 0;  // of each host tier
  // Of the loads; absent: as many as each kind loses by itself, which a host tier does not.
  std::optional<std::int32_t> load_failed_percent;
  std::int32_t delay_steps_max = 3;  // of a host tier, and of HiSparse's workers
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;

  bool has(ConnectorKind kind) const;
  bool operator==(const ConnectorSpec&) const = default;
};

// Something that is made to go wrong at a step, by name, with its numbers.
struct Fault {
  std::string kind;
  std::int64_t step = 0;
  std::vector<std::pair<std::string, std::int64_t>> arguments;
  bool operator==(const Fault&) const = default;
};

// What the command line says of a run, and a plan, a list of faults or the trace then hold.
struct RunRecipe {
  std::string model;  // of the catalogue, or a file; empty: equal layers
  std::int32_t layers = 2;
  std::int32_t layers_per_group = 0;  // of a model: the first ones of each group; 0: all
  std::int32_t kv_heads = 0;  // 0: 2, or of mla 1
  std::int32_t head_size = 64;
  std::string dtype = "bf16";      // also "fp8_per_token_head" and the like
  std::string attention = "full";  // or "mla"
  // Several KV cache groups are handed to the connectors; absent: where all of them take several.
  bool disable_hybrid_kv_cache_manager = false;
  // Of a model: prefills export states from inside a chunk where the release's layers can.
  bool prefill_checkpoints = true;
  // HiSparse of a model with sparse attention: its host pool in GiB (0: none), and rows of a
  // request's hot region (0: as the engine chooses).
  std::int32_t hisparse_host_gib = 0;
  std::int32_t hisparse_device_buffer = 0;
  std::string faults;               // a list, or a seed of one
  std::int64_t limit_requests = 0;  // of the trace, the first ones; 0: all
  bool operator==(const RunRecipe&) const = default;
};

// Decisions on the inputs of a recording.
enum class Decides : std::uint8_t {
  model,      // the model's scheduler
  recording,  // the recorded decisions, unchanged
};

struct RunSpec {
  EngineConfig engine;

  // The cache.
  KVCacheConfig cache;
  CacheLayout layout = CacheLayout::NHD;
  AttentionBackend attention_backend = AttentionBackend::flash_attn;
  std::vector<std::int64_t> kernel_block_sizes;  // per group, tokens; none: the backend's choice
  LayoutRule layout_rule = LayoutRule::isolated;
  std::int32_t queries_per_kv = 1;  // query heads per KV head of the whole model
  std::uint64_t block_order = 0;    // shuffles the pool's first blocks; 0: the engine's order

  // The ranks. Those of context parallelism are the engine's.
  std::int32_t tensor_parallel_size = 1;
  std::int32_t pipeline_parallel_size = 1;
  std::int32_t data_parallel_size = 1;
  bool enforce_eager = false;  // of data parallel ranks
  std::int32_t cp_kv_cache_interleave_size = 1;

  ConnectorSpec connector;

  // The device.
  std::string backend = "simt";  // "simt", "cuda", "none", or a plugin's path
  CheckMode check = CheckMode::check;
  std::int32_t num_streams = 1;
  bool delay_streams = false;
  std::int32_t max_cudagraph_capture_size = 0;  // 0: no graphs
  Numbers numbers = Numbers::words;

  // The run.
  Decides decide = Decides::model;
  std::vector<std::string> mutants;
  std::uint64_t seed = 0;
  std::int32_t draft_acceptance_percent = 60;
  std::int32_t short_drafts_percent = 0;  // how often a drafter proposes fewer than it may
  StepTimeModel step_time;
  CheckBudget budget;
  std::vector<Fault> faults;

  RunRecipe recipe;
  bool operator==(const RunSpec&) const = default;
};

}  // namespace lockstep
