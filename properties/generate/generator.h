// Whole cases from choices: a cache, an engine, a pool and traffic, small enough that thousands run
// per second without a backend.
//
// Invariants
// (1) Same choices and options, same case.
// (2) What is generated is accepted by a reader, the engine and the memory layout. A refused
//     configuration is generated again, and after a few attempts a plain one is used.
// (3) A pool holds at least one request of max_model_len, as the engine requires at start: no
//     request needs to wait forever.
// (4) Swarm: every case enables or disables each kind of event and option as a whole, since what is
//     always slightly present hides what happens without it (Groce et al., Swarm Testing, 2012).
//
// Not generated: cross attention, several groups of uniform type or under context parallelism.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/names.h"
#include "properties/generate/choices.h"
#include "sim/engine/faults.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

enum class Feature : std::uint8_t {
  // Caches.
  several_groups,
  full_attention,
  mla,
  sliding_window,
  chunked_local,
  states,
  hidden_state,
  different_block_sizes,
  padded_pages,
  packed_pages,
  kernel_blocks,
  scaled_rows,
  uniform_type,
  two_block_pool,
  tight_pool,
  // Engines.
  prefix_caching,
  priority_policy,
  async_scheduling,
  drafts,
  no_chunked_prefill,
  long_prefill_threshold,
  no_full_isl_reserve,
  sparse_retention,
  context_parallel,
  served,  // a release's own defaults, where the search sets none
  // Traffic.
  shared_prefixes,
  bursts,
  same_instant,
  aborts,
  priorities,
  salts,
  sessions,
  resets,
  stop_tokens,
  long_prompts,
  // What goes wrong.
  faults,
  // Ranks.
  tensor_parallel,
  replicated_heads,
  pipeline_parallel,
  data_parallel,
  // How the backend works; where GeneratorOptions::device_modes asks for it.
  captured_graphs,
  real_numbers,
  // KV connectors.
  connector_peers,
  host_tier,
  failing_loads,
  load_failure_fails,
  several_connectors,
  // What 0.33.0 does with states as it is served.
  prefill_checkpoints,
  hits_inside_blocks,
  // Drawn last: cases that have neither are what they were without them.
  async_connectors,   // a step in flight with a connector
  engine_hashes,      // block hashes of the engine's own, and with them cache events
  short_drafts,       // a drafter that does not always find as many as it may
  rising_priorities,  // later arrivals are more important: victims that have had their turn
  // Caches of 2026, which replace others in a generated case.
  bounded_replay,
  rings,
  compressed_rows,
  equal_requests,  // one priority, one arrival, prompts too long for the pool to hold two
  mapped_tables,   // compressed rows whose kernels take parts of their group's blocks
  // At most one of these, with attention of a request's own tokens.
  cross_attention,
  sinks,
  reference_windows,
  drafter_cache,  // layers of a drafter, whose rows are written and read by its own passes
  hisparse,       // groups of HiSparse, and the workers of their pages, in place of the cache
  whole_caches,   // replicated over context parallel ranks, with sharded ones
};
inline constexpr std::size_t kNumFeatures = static_cast<std::size_t>(Feature::whole_caches) + 1;
std::string_view name_of(Feature feature);

using FeatureSet = EnumSet<Feature>;  // of one case: what the swarm may use

// Those that divide a case among several devices or engines.
inline constexpr FeatureSet kRankFeatures = {Feature::context_parallel, Feature::tensor_parallel,
                                             Feature::pipeline_parallel, Feature::data_parallel,
                                             Feature::whole_caches};

// What no engine but the model's is asked for: rows that are not those of a request's tokens, or
// not all of them, or that lie in two pools.
inline constexpr FeatureSet kBesideTokens = {Feature::cross_attention, Feature::sinks,
                                             Feature::reference_windows, Feature::hisparse};

// What a search wants of its cases. An open question is left to the choices.
struct GeneratorOptions {
  // `backend` is an engine's own worker. It takes blocks of every size, one order of pages and no
  // cuts into kernel blocks.
  struct Worker {
    std::vector<DType> dtypes = {};  // of attention; empty: all
    bool one_dtype = false;          // ... and all layers have the same
    bool drafts_in_flight = false;   // drafts with asynchronous scheduling
  };
  std::string engine = {};       // a profile's name; empty: any
  FeatureSet always = {};        // switched on in every case
  FeatureSet never = {};         // switched off; wins over `always`
  std::string backend = "simt";  // SavedCase::backend
  std::string check = {};  // SavedCase::check; empty: fast, and every few cases a stricter one
  std::int64_t requests_max = 10;
  bool device_modes = false;  // captured graphs and real numbers too
  std::optional<Worker> worker = {};
  // Another engine decides: also with a connector, whether its release is modelled with one or not.
  bool any_release_connects = false;
};

SavedCase generate_case(ChoiceSource& choices, const GeneratorOptions& options = {});
// The case of a seed, called "seed-17".
SavedCase generate_case(std::uint64_t seed, const GeneratorOptions& options = {});

// What a search for a defect of memory plans wants of the models that it draws.

struct PlanBias {
  bool states = false;          // Mamba layers with attention
  bool split_blocks = false;    // states so large that a block is several kernel blocks
  bool hidden_states = false;   // a layer of hidden states
  bool windows = false;         // sliding windows with full attention
  bool packed = false;          // several attention layers a page
  bool ranks = false;           // context parallelism
  bool aligned_states = false;  // kept for prefix hits: mode align
  bool many_requests = false;   // more requests at once than a small pool has state blocks
  std::int64_t num_blocks = 0;  // 0: two to four
};

// What the cases are like in which a mutant of a transfer is searched for.

enum class TransferSubject : std::uint8_t { pair, holds, connectors };

struct TransferBias {
  TransferSubject subject = TransferSubject::pair;
  bool fails_requests = false;  // a load that fails ends its request, which is prefilled again
  bool tight = false;           // the decode engine's pool holds one long request and a bit
  bool has_pages = false;       // both engines have backends: real pages are sent
};

struct FaultRoom {
  std::int64_t steps = 32;  // faults begin before this one
  std::int64_t faults_max = 6;
  std::int64_t blocks_of_request = 1;  // of the largest one: a pool pinched to them holds it alone
};
// A few faults, early enough that most of them meet a request. Every kind is generated; the traffic
// decides which take effect.
FaultPlan draw_faults(ChoiceSource& choices, const FaultRoom& room);

}  // namespace lockstep
