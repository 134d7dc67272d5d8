// Combinations that a run may not have. One table has a row for each combination that an engine
// refuses, that Lockstep does not model, or that makes no sense. Every command, the generator and
// docs/reference/compatibility.md read it, so all of them refuse the same runs for the same reason.
//
// Invariants
// (1) A row reads the traits of a run and the profile of its engine, nothing else.
// (2) The first row that applies gives the reason.
// (3) Rows of decisions apply if the model decides, rows of memory if a backend runs.
//
// Not here: limits of single values (limits.h), sizes that must divide each other (block_sizes.h),
// the shape of a plan (page_groups.h, rank_plan.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/names.h"
#include "base/result.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// Traits of a run: of its caches, engine, ranks, connector, decision source and backend. The text
// is what messages call the trait. Three need more than their text:
// - cached_prefixes: caches in which a hit may end, so the tokens before it are not computed again.
// - unshared_rows: rows that context parallel ranks do not hold together.
// - other_parts: connector parts that cannot run next to the workers of host pages.
#define LS_RUN_TRAITS(X)                                                             \
  X(states, "states")                                                                \
  X(states_in_mode_all, "states in cache mode all")                                  \
  X(checkpoints, "checkpoints of states (num_prefill_checkpoint_blocks)")            \
  X(rings, "rings (circular_buffer)")                                                \
  X(recomputed_windows, "recomputed windows (bounded_replay)")                       \
  X(unequal_windows, "recomputed windows (bounded_replay) of different lengths")     \
  X(retained_windows, "longer windows (extra_retained_tokens)")                      \
  X(cached_prefixes, "states, chunks or cached windows")                             \
  X(special_rows, "rings, recomputed windows or compressed rows")                    \
  X(unshared_rows, "sharded rings, recomputed windows or rows of DeepSeek-V4")       \
  X(undivided_tokens, "sharded windows or rings, chunks, encoders or hidden states") \
  X(encoder_only, "encoder_only groups")                                             \
  X(cross_attention, "cross attention (cross_attention)")                            \
  X(sinks, "sinks (sink_len)")                                                       \
  X(several_sinks, "sinks (sink_len) in several groups")                             \
  X(reference_windows, "reference windows (rswa_window)")                            \
  X(special_attention, "cross attention, sinks or reference windows")                \
  X(replicated_caches, "replicated caches (dcp_sharded)")                            \
  X(hisparse, "HiSparse (hisparse_source)")                                          \
  X(unknown_role, "groups of another role than HiSparse's")                          \
  X(several_groups, "several KV cache groups")                                       \
  X(untransferred, "states, chunks, rings or other special caches")                  \
  X(prefix_caching, "prefix caching")                                                \
  X(chunked_prefill, "chunked prefill")                                              \
  X(async_scheduling, "asynchronous scheduling")                                     \
  X(drafts, "drafts")                                                                \
  X(draft_modules, "several draft modules (num_prefill_lookahead_tokens)")           \
  X(prefix_match_unit, "prefix_match_unit")                                          \
  X(hits_inside_blocks, "hits inside blocks")                                        \
  X(engine_hashes, "block hashes of the engine (hash_algorithm)")                    \
  X(context_ranks, "context parallelism")                                            \
  X(several_ranks, "several ranks")                                                  \
  X(divided_model, "tensor or pipeline parallelism")                                 \
  X(data_parallel, "several engines (data_parallel_size)")                           \
  X(enforce_eager, "--enforce-eager")                                                \
  X(connector, "a KV connector")                                                     \
  X(simulated_connector, "a simulated KV connector")                                 \
  X(host_tier, "a host tier")                                                        \
  X(one_group_peers, "peers of one group")                                           \
  X(hisparse_workers, "HiSparse's workers (--connector hisparse)")                   \
  X(other_parts, "other parts of a connector")                                       \
  X(failing_loads, "failing loads (load_failed_percent)")                            \
  X(other_engine, "another engine's decisions")                                      \
  X(model_inputs, "faults, block_order or mutants of the scheduler")                 \
  X(pair, "disaggregated prefill")                                                   \
  X(backend, "a backend")                                                            \
  X(overlaid_layout, "a layout of overlaid memory (--layout)")                       \
  X(captured_graphs, "captured graphs")                                              \
  X(real_numbers, "real numbers (--numbers real)")                                   \
  X(live_engine, "an engine that decides (--decisions)")
#define LS_RUN_TRAIT(value, name) value,
enum class RunTrait : std::uint8_t { LS_RUN_TRAITS(LS_RUN_TRAIT) };
#undef LS_RUN_TRAIT
using RunTraits = EnumSet<RunTrait>;
std::string_view name_of(RunTrait trait);

// The traits of one run, and its engine.
struct RunFacts {
  const EngineProfile* engine = nullptr;  // null: an engine without a profile
  RunTraits traits;

  // The same run with more traits.
  RunFacts with(RunTraits more) const {
    RunFacts facts = *this;
    facts.traits.add(more);
    return facts;
  }
};

// One combination. `name` identifies it in tests and in the page of combinations.
struct CompatibilityRow {
  enum class Scope : std::uint8_t { run, decisions, memory };
  enum class Reason : std::uint8_t {
    engine,        // the engine refuses it
    not_modelled,  // Lockstep does not model it
    impossible
  };
  std::string_view name;
  Scope scope;
  Reason reason;
  // Applies to runs with all traits of `with`, none of `without`, on the releases that `of`
  // accepts.
  RunTraits with;                              // all of them
  RunTraits without;                           // none of them
  bool (*of)(const EngineProfile&) = nullptr;  // null: every release
  // The reason and what to do. {engine}: the profile's name; {modelled}: the releases that are
  // modelled with connectors.
  std::string_view words;
};
// All rows, in the order in which they are checked.
std::span<const CompatibilityRow> compatibility();
std::string_view name_of(CompatibilityRow::Reason reason);

// The traits that follow from an engine's options and groups. The caller adds those of the run
// (connector, ranks, backend).
RunFacts facts_of(const EngineConfig& engine, std::span<const KVCacheGroupSpec> groups);

// Refuses a run to which a row of scope `run` or `decisions` applies; the error is text_of() the
// first one.
Result<void> supported(const RunFacts& facts);
bool is_supported(const RunFacts& facts);
// Also refuses runs whose memory a backend cannot be compared in; their decisions may be supported,
// so the error names --backend none.
Result<void> supported_with_memory(const RunFacts& facts);
// The error message of a row for a release: "rings with a KV connector: ...".
std::string text_of(const CompatibilityRow& row, std::string_view engine);

}  // namespace lockstep
