#include "reference/profiles/compatibility.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "reference/profiles/releases.h"
#include "reference/types/engine_config.h"
#include "reference/types/host_pages.h"

namespace lockstep {
namespace {

using enum RunTrait;
using enum CompatibilityRow::Scope;
using enum CompatibilityRow::Reason;

using Profile = EngineProfile;

// True if the release lacks the capability: rows with it apply to older releases only.
template <bool Profile::*has>
bool lacks(const Profile& engine) {
  return !(engine.*has);
}
// Only some releases were recorded with connectors.
bool lacks_connectors(const Profile& engine) { return !engine.release->models_connectors; }
bool lacks_layouts(const Profile& engine) { return !overlays_groups(*engine.release); }
// Releases that count scheduled tokens keep the position of a running state only in the worker.
bool places_states_in_worker(const Profile& engine) {
  return engine.retire_basis == RetireBasis::scheduled;
}

// Reasons that several rows share.
constexpr std::string_view kHasNone = "{engine} has none that is modelled";
constexpr std::string_view kOtherRelease = "decisions of {engine} are not modelled; {modelled} are";
constexpr std::string_view kLoads =
    "how {engine} loads them is not modelled; leave one of them out";
constexpr std::string_view kOneRank = "what each rank holds is not modelled; use one rank";
constexpr std::string_view kPages =
    "how pages of HiSparse move with them is not modelled; leave one of them out";

// Rows read: name, scope, reason, traits, words, releases that lack something, traits that are
// absent.
constexpr CompatibilityRow row(std::string_view name, CompatibilityRow::Scope scope,
                               CompatibilityRow::Reason reason, RunTraits with,
                               std::string_view words, bool (*of)(const Profile&) = nullptr,
                               RunTraits without = {}) {
  return {name, scope, reason, with, without, of, words};
}

// In the order in which reasons are given: the more specific row comes first.
constexpr std::array kRows = {
    // Kinds of layers.
    row("encoder-only", decisions, not_modelled, {encoder_only},
        "their blocks are not modelled; leave them out"),
    row("encoder-prefixes", decisions, engine, {cross_attention, prefix_caching},
        "no release caches these prefixes; use --no-prefix-caching"),
    row("encoder-chunks", decisions, engine, {cross_attention, chunked_prefill},
        "{engine} runs each prompt in one step; use --no-chunked-prefill"),
    row("special-connector", decisions, not_modelled, {special_attention, connector}, kLoads),
    row("encoder-release", decisions, not_modelled, {cross_attention}, kOtherRelease,
        lacks_connectors),
    row("sinks-release", decisions, not_modelled, {sinks}, kOtherRelease, lacks_connectors),
    row("sinks-start", decisions, engine, {sinks},
        "{engine} does not start with them (docs/findings.md, 38); use --engine "
        "{engine},without=38",
        lacks<&Profile::starts_with_sinks>),
    row("reference-windows", decisions, not_modelled, {reference_windows}, kHasNone,
        lacks<&Profile::has_reference_windows>),
    row("replicated", decisions, not_modelled, {replicated_caches, context_ranks}, kHasNone,
        lacks<&Profile::has_replicated_caches>),
    row("draft-modules", decisions, not_modelled, {draft_modules}, kHasNone,
        lacks<&Profile::has_draft_modules>),
    row("prefix-match-unit", decisions, not_modelled, {prefix_match_unit}, kHasNone,
        lacks<&Profile::has_prefix_match_unit>),
    row("checkpoints", decisions, not_modelled, {checkpoints}, kHasNone,
        lacks<&Profile::serves_checkpoints>),
    row("retained-windows", decisions, not_modelled, {retained_windows}, kHasNone,
        lacks<&Profile::has_draft_modules>),
    row("recomputed-windows", decisions, not_modelled, {recomputed_windows}, kHasNone,
        lacks<&Profile::has_recomputed_windows>),
    row("unequal-windows", decisions, engine, {unequal_windows}, "use one length"),
    row("rings", decisions, not_modelled, {rings}, kHasNone, lacks<&Profile::has_rings>),
    row("roles", decisions, not_modelled, {unknown_role},
        "their decisions are not modelled; leave them out"),
    row("hisparse", decisions, not_modelled, {hisparse}, kHasNone, lacks<&Profile::has_host_pages>),
    row("hisparse-states", decisions, not_modelled, {hisparse, states}, kPages),
    row("hisparse-context", decisions, not_modelled, {hisparse, context_ranks}, kOneRank),
    row("hisparse-hashes", decisions, not_modelled, {hisparse, engine_hashes},
        "cache events of its pages are not modelled; use --hash-algorithm content"),
    // Connectors.
    row("connector-release", decisions, not_modelled, {connector}, kOtherRelease, lacks_connectors),
    row("connector-states", decisions, engine, {connector, states}, "{engine} loads no states",
        lacks<&Profile::loads_states>),
    row("connector-rings", decisions, not_modelled, {connector, rings}, kLoads),
    row("connector-recomputed", decisions, not_modelled, {connector, recomputed_windows}, kLoads),
    row("simulated-states", run, not_modelled, {simulated_connector, states},
        "peers and host tiers load and store no states; leave --connector out"),
    row("connector-checkpoints", decisions, not_modelled, {connector, checkpoints}, kLoads),
    row("connector-modules", decisions, not_modelled, {connector, draft_modules},
        "loads are not modelled; use one module"),
    row("hisparse-workers", decisions, impossible, {hisparse},
        "its workers move the pages; add --connector hisparse", nullptr, {connector}),
    row("host-hashes", run, impossible, {host_tier},
        "--connector host finds blocks by their hashes; leave --no-prefix-caching out", nullptr,
        {prefix_caching}),
    row("failing-groups", run, engine, {failing_loads, several_groups},
        "vLLM assigns the lost blocks to no request; use a cache of one group, or leave "
        "--load-failures out"),
    row("workers-alone", run, impossible, {hisparse_workers},
        "the cache has no pages for them; leave hisparse out of --connector", nullptr, {hisparse}),
    row("hisparse-parts", run, not_modelled, {hisparse, other_parts},
        "use --connector hisparse, or hisparse and peers"),
    row("hisparse-messages", run, not_modelled, {hisparse, live_engine},
        "the scheduler protocol has no messages about its pages; let the model decide"),
    row("one-group", run, engine, {one_group_peers, several_groups},
        "one-group-peers take one KV cache group; use peers"),
    row("loaded-states", run, not_modelled, {states, connector, backend},
        "loads of states are not modelled; use --backend none"),
    // Ranks.
    row("layout-release", run, engine, {overlaid_layout},
        "the memory of {engine} has no such layout; use --layout NHD or HND, or --engine "
        "vllm-0.33.0",
        lacks_layouts),
    row("hisparse-engines", run, not_modelled, {hisparse, data_parallel},
        "use one engine: --data-parallel-size 1"),
    row("eager-graphs", run, impossible, {enforce_eager, captured_graphs, data_parallel},
        "an eager engine runs no graphs; leave one of them out"),
    row("hisparse-ranks", run, not_modelled, {hisparse, several_ranks},
        "which rank writes the host pool is not modelled; use one rank"),
    row("special-ranks", run, not_modelled, {special_attention, several_ranks}, kOneRank),
    row("divided-rows", run, not_modelled, {special_rows, divided_model}, kOneRank),
    row("unshared-rows", run, not_modelled, {unshared_rows, several_ranks}, kOneRank),
    row("model-inputs", run, impossible, {other_engine, model_inputs},
        "only the model takes them; leave them out"),
    row("pair-kinds", run, not_modelled, {pair, untransferred},
        "only blocks of full attention, MLA and sliding windows are transferred"),
    row("pair-drafts", run, not_modelled, {pair, drafts},
        "draft tokens are not transferred; leave them out"),
    // Memory.
    row("pages-in-flight", memory, not_modelled, {hisparse, drafts, async_scheduling},
        "only the worker has the rows that a step mirrors; use --no-async-scheduling"),
    row("pages-special", memory, not_modelled, {special_rows, hisparse}, kPages),
    row("pages-numbers", memory, not_modelled, {hisparse, real_numbers},
        "its rows are moved and read as words; use --numbers words"),
    row("context-tokens", memory, not_modelled, {undivided_tokens, context_ranks}, kOneRank),
    row("context-attention", memory, not_modelled, {special_attention, context_ranks}, kOneRank),
    row("context-parts", memory, not_modelled, {hits_inside_blocks, context_ranks},
        "which ranks copy which part is not modelled; use one rank"),
    row("window-prefixes", memory, not_modelled, {reference_windows, prefix_caching},
        "rows of generated tokens depend on more than the tokens before them; use "
        "--no-prefix-caching, as the engine does"),
    row("states-in-flight", memory, not_modelled, {states, drafts, async_scheduling},
        "only the worker of {engine} has the position of a running state; use "
        "--no-async-scheduling",
        places_states_in_worker),
    row("states-mode-all", memory, not_modelled, {states_in_mode_all, drafts},
        "states of drafts have no blocks of their own; use --mamba-cache-mode align"),
    row("recomputed-prefixes", memory, not_modelled, {recomputed_windows, cached_prefixes},
        "a hit leaves them no tokens before the recomputed window; leave one of them out"),
    row("two-sinks", memory, not_modelled, {several_sinks},
        "the worker writes all sinks to the first group; use one group with sinks"),
};

// The traits' texts, from the same list as the enumerators.
#define LS_RUN_TRAIT(value, name) {RunTrait::value, name},
constexpr auto kTraits = std::to_array<Named<RunTrait>>({LS_RUN_TRAITS(LS_RUN_TRAIT)});
#undef LS_RUN_TRAIT

}  // namespace

std::span<const CompatibilityRow> compatibility() { return kRows; }

std::string_view name_of(RunTrait trait) {
  LS_CHECK(static_cast<std::size_t>(trait) < kTraits.size(), "trait {} of {}",
           static_cast<int>(trait), kTraits.size());
  return name_in(kTraits, trait);
}

std::string_view name_of(CompatibilityRow::Reason reason) {
  return reason == engine         ? "refused by the engine"
         : reason == not_modelled ? "not modelled"
                                  : "impossible";
}

// Rows that are neither plain nor cached: rings, recomputed windows, compressed rows. Pages of the
// host pool have rows of their own kind and do not count here.
static void add_special_rows(const KVCacheGroupSpec& group, RunTraits& traits) {
  const KVCacheSpec& spec = group.spec;
  const bool cacheable = is_prefix_cacheable(spec);
  if (keeps_pages(spec) || (cacheable && !has_compressed_rows(group))) return;
  traits.add(special_rows);
  traits.add_if(
      is_ring(spec) ? spec.dcp_sharded : !cacheable || spec.model_version == "deepseek_v4",
      unshared_rows);
}

// Traits of one group. Several groups add up.
static void add_kind(const KVCacheGroupSpec& group, RunTraits& traits) {
  const KVCacheSpec& spec = group.spec;
  const bool has_states = is_state_kind(spec.kind);
  const bool has_tokens = attends_to_all(spec.kind);
  const bool has_chunks = is_chunked(spec.kind);
  traits.add_if(has_states, states);
  traits.add_if(has_states && spec.mamba_cache_mode == MambaCacheMode::all, states_in_mode_all);
  traits.add_if(spec.num_prefill_checkpoint_blocks != 0, checkpoints);
  traits.add_if(is_ring(spec), rings);
  traits.add_if(spec.extra_retained_tokens != 0, retained_windows);
  traits.add_if(has_states || has_chunks || (is_sliding_window(spec.kind) && !spec.bounded_replay),
                cached_prefixes);
  traits.add_if(keeps_nothing(spec.kind), encoder_only);
  traits.add_if(is_cross_attention(spec), cross_attention);
  traits.add_if(spec.rswa_window > 0, reference_windows);
  traits.add_if(reads_beside_tokens(spec), special_attention);
  traits.add_if(!spec.dcp_sharded, replicated_caches);
  traits.add_if(!has_tokens && !is_sliding_window(spec.kind), untransferred);
  // Replicated windows and rings need no sharding; recomputed windows have their own row.
  const bool is_replicated =
      !spec.dcp_sharded && !spec.bounded_replay && (is_sliding_window(spec.kind) || is_ring(spec));
  traits.add_if(!has_tokens && !has_states && !is_replicated, undivided_tokens);
  traits.add_if(belongs_to_pages(group), hisparse);
  traits.add_if(
      !group.role.empty() && group.role != kPageSourceRole && group.role != kPageIndexerRole,
      unknown_role);
}

// Traits that depend on more than one group are collected here: several sinks, windows of different
// lengths.
RunFacts facts_of(const EngineConfig& config, std::span<const KVCacheGroupSpec> groups) {
  RunFacts facts{find_engine_profile(config.engine), {}};
  RunTraits& traits = facts.traits;
  std::int64_t recomputed = 0;  // tokens
  for (const KVCacheGroupSpec& group : groups) {
    add_kind(group, traits);
    add_special_rows(group, traits);
    traits.add_if(group.spec.sink_len > 0, traits.has(sinks) ? several_sinks : sinks);
    if (!group.spec.bounded_replay) continue;
    traits.add(recomputed_windows);
    traits.add_if(recomputed != 0 && recomputed != group.spec.sliding_window, unequal_windows);
    recomputed = group.spec.sliding_window;
  }
  traits.add_if(groups.size() > 1, several_groups);
  traits.add_if(config.enable_prefix_caching, prefix_caching);
  traits.add_if(config.enable_chunked_prefill, chunked_prefill);
  traits.add_if(config.async_scheduling, async_scheduling);
  traits.add_if(config.num_spec_tokens > 0, drafts);
  traits.add_if(config.num_prefill_lookahead_tokens > 1, draft_modules);
  traits.add_if(config.prefix_match_unit != 0, prefix_match_unit);
  traits.add_if(config.hash_algorithm != HashAlgorithm::content, engine_hashes);
  traits.add_if(config.dcp * config.pcp > 1, context_ranks);
  return facts;
}

namespace {

// A row that names releases does not apply to an engine without a profile.
bool applies(const CompatibilityRow& row, const RunFacts& facts) {
  return facts.traits.has_all_of(row.with) && !facts.traits.has_any_of(row.without) &&
         (row.of == nullptr || (facts.engine != nullptr && row.of(*facts.engine)));
}

// Null: the run is supported. Rows of decisions do not apply where another engine decides.
const CompatibilityRow* first_row(const RunFacts& facts, bool with_memory) {
  for (const CompatibilityRow& row : compatibility()) {
    if (row.scope == memory && !with_memory) continue;
    // Another engine refuses on its own what it does not support.
    if (row.scope == decisions && facts.traits.has(other_engine)) continue;
    if (applies(row, facts)) return &row;
  }
  return nullptr;
}

// Rows of memory do not refuse the decisions: a run without a backend is possible.
Result<void> answer(const RunFacts& facts, const CompatibilityRow* row) {
  if (row == nullptr) return {};
  LS_CHECK(applies(*row, facts), "row {} does not apply", row->name);
  LS_CHECK(!row->name.empty(), "a row without a name: {}", row->words);
  const std::string engine = facts.engine == nullptr ? "this engine" : facts.engine->name;
  return fail(text_of(*row, engine) + (row->scope == memory ? ", or --backend none" : ""));
}

}  // namespace

bool is_supported(const RunFacts& facts) { return first_row(facts, false) == nullptr; }

Result<void> supported(const RunFacts& facts) { return answer(facts, first_row(facts, false)); }

Result<void> supported_with_memory(const RunFacts& facts) {
  return answer(facts, first_row(facts, true));
}

// "A with B and C without D: words". Traits are named in the order of the enumerators.
std::string text_of(const CompatibilityRow& row, std::string_view engine) {
  std::string text;
  int num_named = 0;
  for (std::size_t i = 0; i < 2 * kTraits.size(); ++i) {
    const bool is_absent = i >= kTraits.size();
    const auto trait = static_cast<RunTrait>(i % kTraits.size());
    if (!(is_absent ? row.without : row.with).has(trait)) continue;
    constexpr std::string_view kWords[] = {"", " with ", " and "};
    text += is_absent ? " without " : kWords[std::min(num_named++, 2)];
    text += name_of(trait);
  }
  LS_CHECK(num_named > 0, "row {} names no trait", row.name);
  LS_CHECK(!row.words.empty() && !engine.empty(), "row {} of \"{}\" says nothing", row.name,
           engine);
  return fmt::format("{}: {}", text,
                     fmt::format(fmt::runtime(row.words), fmt::arg("engine", engine),
                                 fmt::arg("modelled", names_of_connector_releases())));
}

}  // namespace lockstep
