// Generates whole cases from choices: a cache, an engine, a pool and traffic, small enough that
// thousands run per second without a backend.
//
// Invariants
// (1) The same choices and options give the same case.
// (2) Readers, the engine and the memory layout accept every generated case. A refused
//     configuration is generated again; after eight attempts a plain one is used.
// (3) A pool holds at least one request of max_model_len, as engines require at start. No request
//     waits forever because of the pool's size alone.
// (4) Swarm: every case enables or disables each kind of event and option as a whole. An event that
//     is always slightly present hides what happens without it (Groce et al., Swarm Testing, 2012).
// (5) Features are chosen in the order of the table, in stages, each after what it depends on. A
//     new feature goes to the end: cases without it keep their choices.
//
// Not generated: several groups of uniform type, or a group of uniform type under context
// parallelism.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/names.h"
#include "properties/generate/choices.h"
#include "sim/engine/faults.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// X(feature, percent of the cases that have it). A feature is a permission: the case may still lack
// what it allows, where the rest of the case excludes it.
#define LOCKSTEP_FEATURES(X)                                                                     \
  /* Caches. */                                                                                  \
  X(several_groups, 60)                                                                          \
  X(full_attention, 75)                                                                          \
  X(mla, 25)                                                                                     \
  X(sliding_window, 40)                                                                          \
  X(chunked_local, 25)                                                                           \
  X(states, 40)                                                                                  \
  X(hidden_state, 25)                                                                            \
  X(different_block_sizes, 30)                                                                   \
  X(padded_pages, 25)                                                                            \
  X(packed_pages, 20)                                                                            \
  X(kernel_blocks, 30)                                                                           \
  X(scaled_rows, 20)                                                                             \
  X(uniform_type, 20)                                                                            \
  X(two_block_pool, 4)                                                                           \
  X(tight_pool, 70)                                                                              \
  /* Engines. */                                                                                 \
  X(prefix_caching, 80)                                                                          \
  X(priority_policy, 25)                                                                         \
  X(async_scheduling, 30)                                                                        \
  X(drafts, 40)                                                                                  \
  X(no_chunked_prefill, 15)                                                                      \
  X(long_prefill_threshold, 25)                                                                  \
  X(no_full_isl_reserve, 50)                                                                     \
  X(sparse_retention, 15)                                                                        \
  X(context_parallel, 20)                                                                        \
  X(served, 40) /* a release's own defaults, where the search sets none */                       \
  /* Traffic. */                                                                                 \
  X(shared_prefixes, 75)                                                                         \
  X(bursts, 50)                                                                                  \
  X(same_instant, 25)                                                                            \
  X(aborts, 40)                                                                                  \
  X(priorities, 60)                                                                              \
  X(salts, 20)                                                                                   \
  X(sessions, 30)                                                                                \
  X(resets, 25)                                                                                  \
  X(stop_tokens, 25)                                                                             \
  X(long_prompts, 40)                                                                            \
  /* What goes wrong. */                                                                         \
  X(faults, 35)                                                                                  \
  /* Ranks. */                                                                                   \
  X(tensor_parallel, 10)                                                                         \
  X(replicated_heads, 40)                                                                        \
  X(pipeline_parallel, 10)                                                                       \
  X(data_parallel, 8)                                                                            \
  /* How the backend works; where GeneratorOptions::device_modes asks for it. */                 \
  X(captured_graphs, 15)                                                                         \
  X(real_numbers, 25)                                                                            \
  /* KV connectors. */                                                                           \
  X(connector_peers, 40)                                                                         \
  X(host_tier, 45)                                                                               \
  X(failing_loads, 60)                                                                           \
  X(load_failure_fails, 40)                                                                      \
  X(several_connectors, 25)                                                                      \
  /* What 0.33.0 does with states as it is served. */                                            \
  X(prefill_checkpoints, 60)                                                                     \
  X(hits_inside_blocks, 30)                                                                      \
  /* Generated last: a case without them is the same with and without these rows. */             \
  X(async_connectors, 40)  /* a step in flight with a connector */                               \
  X(engine_hashes, 10)     /* block hashes of the engine's own, and with them cache events */    \
  X(short_drafts, 50)      /* a drafter that finds fewer drafts than it may */                   \
  X(rising_priorities, 30) /* each arrival outranks the earlier ones */                          \
  /* Caches of 2026, which replace others in a generated case. */                                \
  X(bounded_replay, 70)                                                                          \
  X(rings, 25)                                                                                   \
  X(compressed_rows, 50)                                                                         \
  X(equal_requests, 20) /* one priority, one arrival, too long to run two at once */             \
  X(mapped_tables, 50)  /* compressed rows whose kernels take parts of their group's blocks */   \
  /* At most one of these, with attention of a request's own tokens. */                          \
  X(cross_attention, 10)                                                                         \
  X(sinks, 10)                                                                                   \
  X(reference_windows, 25)                                                                       \
  X(drafter_cache, 60) /* layers of a draft model, which its own passes write */                 \
  X(hisparse, 8) /* groups of HiSparse, and the workers of their pages, in place of the cache */ \
  X(whole_caches, 60)   /* replicated over context parallel ranks, with sharded ones */          \
  X(several_rows, 15)   /* several stored rows per token, of K and V */                          \
  X(running_resets, 40) /* resets of the prefix cache that first preempt all running requests */ \
  X(pauses, 15)         /* the engine pauses, for new requests or for all, and resumes */

enum class Feature : std::uint8_t {
#define LOCKSTEP_FEATURE_NAME(name, percent) name,
  LOCKSTEP_FEATURES(LOCKSTEP_FEATURE_NAME)
#undef LOCKSTEP_FEATURE_NAME
};
inline constexpr Feature kHostPages = Feature::hisparse;  // with the workers that copy its pages
// The name of a feature, as options and reports spell it, and its frequency.
struct FeatureInfo {
  std::string_view name;
  std::int64_t percent;  // of all cases
};
inline constexpr FeatureInfo kFeatures[] = {
#define LOCKSTEP_FEATURE_ROW(name, percent) {#name, percent},
    LOCKSTEP_FEATURES(LOCKSTEP_FEATURE_ROW)
#undef LOCKSTEP_FEATURE_ROW
};
inline constexpr std::size_t kNumFeatures = std::size(kFeatures);
constexpr std::string_view name_of(Feature feature) {
  return kFeatures[static_cast<std::size_t>(feature)].name;
}

using FeatureSet = EnumSet<Feature>;  // the features of one case

// Features that divide a case among several devices or engines.
inline constexpr FeatureSet kRankFeatures = {Feature::context_parallel, Feature::tensor_parallel,
                                             Feature::pipeline_parallel, Feature::data_parallel,
                                             Feature::whole_caches};

// Features that are never generated for other engines: rows that are not a request's tokens, rows
// of some tokens only, rows in two pools, or several rows per token.
inline constexpr FeatureSet kBesideTokens = {Feature::cross_attention, Feature::sinks,
                                             Feature::reference_windows, Feature::hisparse,
                                             Feature::several_rows};

// What a search requires of its cases. Everything left open is generated.
struct GeneratorOptions {
  // Limits of an engine's own worker, if `backend` is one. It takes blocks of every size and one
  // layout.
  struct Worker {
    std::vector<DType> dtypes = {};               // element types of attention; empty: all
    std::vector<std::int64_t> latent_sizes = {};  // elements of an MLA row; empty: all
    bool one_dtype = false;                       // true if all attention layers share one type
    // True if it takes drafts with asynchronous scheduling.
    bool drafts_in_flight = false;
  };
  std::string engine = {};       // name of a profile; empty: any modelled release
  FeatureSet always = {};        // enabled in every case, if the rest permits them
  FeatureSet never = {};         // disabled; takes precedence over `always`
  std::string backend = "simt";  // SavedCase::backend
  std::string check = {};        // SavedCase::check; empty: `fast`, in 3 of 10 cases stricter
  std::int64_t requests_max = 10;
  bool device_modes = false;  // true: also captured graphs and real numbers
  std::optional<Worker> worker = {};
  // True if another engine decides: connectors are generated even where its release is modelled
  // without.
  bool any_release_connects = false;
  std::vector<MambaCacheMode> state_modes = {};  // modes of states with a prefix cache; empty: all
  // True if each kind of group has its own pool (SGLang): full attention or MLA, with at most one
  // group of windows or states. All blocks have one size, which is one token with states.
  bool one_pool_per_kind = false;
};

// Generates a case. `choices` must be at its start. The name is "generated".
SavedCase generate_case(ChoiceSource& choices, const GeneratorOptions& options = {});
// Generates the case of a seed, named "seed-17".
SavedCase generate_case(std::uint64_t seed, const GeneratorOptions& options = {});

// What a search for a defect of memory plans requires of its models.

struct PlanBias {
  bool states = false;          // Mamba layers and attention
  bool split_blocks = false;    // states so large that a block spans several kernel blocks
  bool hidden_states = false;   // a layer of hidden states
  bool windows = false;         // sliding windows and full attention
  bool packed = false;          // several attention layers per page
  bool ranks = false;           // context parallelism
  bool aligned_states = false;  // states kept for prefix hits: mode align
  bool many_requests = false;   // more concurrent requests than a small pool has state blocks
  std::int64_t num_blocks = 0;  // blocks of the pool; 0: two to four
};

// The cases in which a mutant of a transfer is searched for.

enum class TransferSubject : std::uint8_t { pair, holds, connectors };

struct TransferBias {
  TransferSubject subject = TransferSubject::pair;
  bool fails_requests = false;  // a failed load ends its request, which is prefilled again
  bool tight = false;           // the decode engine's pool holds one long request and little more
  bool has_pages = false;       // true if both engines have backends, so real pages are sent
};

// Limits of a fault plan.
struct FaultRoom {
  std::int64_t steps = 32;  // every fault begins before this step
  std::int64_t faults_max = 6;
  // Blocks of the largest request; a pinched pool holds those, one less, or half.
  std::int64_t blocks_of_request = 1;
};
// Generates between one and `faults_max` faults, early enough that most of them meet a request. All
// kinds except abort_loading are generated; the traffic decides which take effect. REQUIRES:
// room.steps >= 1, room.faults_max >= 1.
FaultPlan draw_faults(ChoiceSource& choices, const FaultRoom& room);

}  // namespace lockstep
