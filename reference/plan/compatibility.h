// What may meet in one run. One table has a row for each combination that an engine refuses, that
// Lockstep does not model, or that makes no sense. Every command, the generator and
// docs/reference/compatibility.md read it.
//
// Invariants
// (1) A row reads the traits of a run and the profile of its engine, nothing else.
// (2) The first row that applies gives the reason.
// (3) Rows of decisions apply where the model decides, rows of memory where a backend runs.
//
// Not here: limits of single values (limits.h), sizes that must divide each other (block_sizes.h),
// the shape of a plan (hisparse_plan.h, rank_plan.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/enum_set.h"
#include "base/result.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

enum class RunTrait : std::uint8_t {
  // Caches.
  states,
  states_in_mode_all,
  checkpoints,
  rings,
  recomputed_windows,
  unequal_windows,   // recomputed windows of several lengths
  retained_windows,  // extra_retained_tokens
  cached_prefixes,   // states, chunks and windows that hits end in
  compressed_rows,
  special_rows,      // compressed rows and groups without prefix hits
  unshared_rows,     // ... that context parallel ranks do not hold together either
  undivided_tokens,  // groups whose tokens context parallel ranks do not divide
  encoder_only,
  cross_attention,
  sinks,
  several_sinks,
  reference_windows,
  special_attention,  // one of the last four: attention of rows beyond a request's own tokens
  replicated_caches,
  hisparse,
  unknown_role,
  several_groups,
  untransferred,  // kinds whose blocks `pair` does not send
  // Engines.
  prefix_caching,
  chunked_prefill,
  async_scheduling,
  drafts,
  draft_modules,
  prefix_match_unit,
  hits_inside_blocks,
  engine_hashes,
  // Ranks.
  context_ranks,
  several_ranks,  // of memory
  divided_model,  // tensor or pipeline parallel ranks
  data_parallel,
  enforce_eager,
  // Connectors.
  connector,
  simulated_connector,
  host_tier,
  one_group_peers,
  hisparse_workers,
  other_parts,  // parts that HiSparse's workers are not combined with
  failing_loads,
  // What decides, and what runs.
  other_engine,
  model_inputs,  // faults, an order of free blocks, a defect of the scheduler
  pair,
  backend,
  overlaid_layout,
  captured_graphs,
  real_numbers,
};
inline constexpr std::size_t kNumRunTraits = static_cast<std::size_t>(RunTrait::real_numbers) + 1;
using RunTraits = EnumSet<RunTrait>;
std::string_view name_of(RunTrait trait);

struct RunFacts {
  const EngineProfile* engine = nullptr;  // null: it has no profile
  RunTraits traits;

  RunFacts with(RunTraits more) const {
    RunFacts facts = *this;
    facts.traits.add(more);
    return facts;
  }
};

struct CompatibilityRow {
  enum class Scope : std::uint8_t { run, decisions, memory };
  enum class Reason : std::uint8_t {
    engine,        // the engine refuses it
    not_modelled,  // by Lockstep
    impossible
  };
  std::string_view name;
  Scope scope;
  Reason reason;
  RunTraits with;                              // all of them
  RunTraits without;                           // none of them
  bool (*of)(const EngineProfile&) = nullptr;  // null: every release
  std::string_view words;  // why, and what to do; {engine}: the profile, {modelled}: releases that
                           // are modelled with connectors
};
std::span<const CompatibilityRow> compatibility();
std::string_view name_of(CompatibilityRow::Scope scope);
std::string_view name_of(CompatibilityRow::Reason reason);

// What an engine's options and groups say.
RunFacts facts_of(const EngineConfig& engine, std::span<const KVCacheGroupSpec> groups);

// Refused, in one sentence: a row that applies to the run as a whole or to the model's decisions.
Result<void> supported(const RunFacts& facts);
bool is_supported(const RunFacts& facts);
// Also what a backend's memory cannot be compared in; its decisions may be supported.
Result<void> supported_with_memory(const RunFacts& facts);
// "rings with a KV connector: ...", of a release by name.
std::string text_of(const CompatibilityRow& row, std::string_view engine);

}  // namespace lockstep
