// The rows of the table. Their order is the order in which reasons are given.
#include <array>

#include "base/names.h"
#include "reference/plan/compatibility.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

using enum RunTrait;
using enum CompatibilityRow::Scope;
using enum CompatibilityRow::Reason;

template <bool EngineProfile::*has>
bool lacks(const EngineProfile& engine) {
  return !(engine.*has);
}
bool lacks_connectors(const EngineProfile& engine) { return !engine.release->models_connectors; }
bool lacks_layouts(const EngineProfile& engine) {
  return engine.release->page_format != PageFormat::overlaid;
}
bool places_states_in_worker(const EngineProfile& engine) {
  return engine.retire_basis == RetireBasis::scheduled;
}

constexpr std::string_view kHasNone = "{engine} has none";
constexpr std::string_view kModelled = "decisions of {engine} are not modelled; {modelled} are";
constexpr std::string_view kLoads =
    "how {engine} loads them is not modelled; leave one of them out";
constexpr std::string_view kOneRank = "what each rank holds is not modelled; use one rank";
constexpr std::string_view kPages =
    "how pages of HiSparse move with them is not modelled; leave one of them out";

constexpr CompatibilityRow row(std::string_view name, CompatibilityRow::Scope scope,
                               CompatibilityRow::Reason reason, RunTraits with,
                               std::string_view words, bool (*of)(const EngineProfile&) = nullptr,
                               RunTraits without = {}) {
  return {name, scope, reason, with, without, of, words};
}

constexpr std::array kRows = {
    // Kinds of layers.
    row("encoder-only", decisions, not_modelled, {encoder_only},
        "their blocks are not modelled; leave them out"),
    row("encoder-prefixes", decisions, engine, {cross_attention, prefix_caching},
        "no release caches these prefixes; use --no-prefix-caching"),
    row("encoder-chunks", decisions, engine, {cross_attention, chunked_prefill},
        "{engine} runs each prompt in one step; use --no-chunked-prefill"),
    row("special-connector", decisions, not_modelled, {special_attention, connector}, kLoads),
    row("encoder-release", decisions, not_modelled, {cross_attention}, kModelled, lacks_connectors),
    row("sinks-release", decisions, not_modelled, {sinks}, kModelled, lacks_connectors),
    row("sinks-start", decisions, engine, {sinks},
        "{engine} does not start with them (docs/findings.md, 38); use --engine "
        "{engine},without=38",
        lacks<&EngineProfile::starts_with_sinks>),
    row("reference-windows", decisions, engine, {reference_windows}, kHasNone,
        lacks<&EngineProfile::has_reference_windows>),
    row("replicated", decisions, engine, {replicated_caches, context_ranks},
        "{engine} shards the tokens of every layer", lacks<&EngineProfile::has_replicated_caches>),
    row("draft-modules", decisions, engine, {draft_modules}, kHasNone,
        lacks<&EngineProfile::has_draft_modules>),
    row("prefix-match-unit", decisions, engine, {prefix_match_unit}, kHasNone,
        lacks<&EngineProfile::has_prefix_match_unit>),
    row("checkpoints", decisions, engine, {checkpoints}, kHasNone,
        lacks<&EngineProfile::serves_checkpoints>),
    row("retained-windows", decisions, engine, {retained_windows}, kHasNone,
        lacks<&EngineProfile::has_draft_modules>),
    row("recomputed-windows", decisions, engine, {recomputed_windows}, kHasNone,
        lacks<&EngineProfile::has_recomputed_windows>),
    row("unequal-windows", decisions, engine, {unequal_windows}, "use one length"),
    row("rings", decisions, engine, {rings}, kHasNone, lacks<&EngineProfile::has_rings>),
    row("roles", decisions, not_modelled, {unknown_role},
        "their decisions are not modelled; leave them out"),
    row("hisparse", decisions, engine, {hisparse}, kHasNone, lacks<&EngineProfile::has_hisparse>),
    row("hisparse-states", decisions, not_modelled, {hisparse, states}, kPages),
    row("hisparse-context", decisions, not_modelled, {hisparse, context_ranks}, kOneRank),
    row("hisparse-hashes", decisions, not_modelled, {hisparse, engine_hashes},
        "cache events of its pages are not modelled; use --hash-algorithm content"),
    // Connectors.
    row("connector-release", decisions, not_modelled, {connector}, kModelled, lacks_connectors),
    row("connector-states", decisions, engine, {connector, states}, "{engine} loads no states",
        lacks<&EngineProfile::loads_states>),
    row("connector-rings", decisions, not_modelled, {connector, rings}, kLoads),
    row("connector-recomputed", decisions, not_modelled, {connector, recomputed_windows}, kLoads),
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
    row("simulated-states", run, not_modelled, {simulated_connector, states},
        "peers and host tiers load and store no states; leave --connector out"),
    row("workers-alone", run, impossible, {hisparse_workers},
        "the cache has no pages for them; leave hisparse out of --connector", nullptr, {hisparse}),
    row("hisparse-parts", run, not_modelled, {hisparse, other_parts},
        "use --connector hisparse, or hisparse and peers"),
    row("one-group", run, engine, {one_group_peers, several_groups},
        "one-group-peers take one KV cache group; use peers"),
    row("loaded-states", run, not_modelled, {states, connector, backend},
        "loads of states are not modelled; use --backend none"),
    row("other-transfers", run, not_modelled, {connector, other_engine, backend},
        "its transfers are not planned; use --backend none"),
    // Ranks.
    row("layout-release", run, engine, {overlaid_layout},
        "the memory of {engine} has no such order; use --layout NHD or HND, or --engine "
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
    row("pages-rings", memory, not_modelled, {hisparse, rings}, kPages),
    row("pages-compressed", memory, not_modelled, {hisparse, compressed_rows}, kPages),
    row("pages-recomputed", memory, not_modelled, {hisparse, recomputed_windows}, kPages),
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

constexpr auto kTraits = std::to_array<Named<RunTrait>>({
    {states, "states"},
    {states_in_mode_all, "states in cache mode all"},
    {checkpoints, "checkpoints of states (num_prefill_checkpoint_blocks)"},
    {rings, "rings (circular_buffer)"},
    {recomputed_windows, "recomputed windows (bounded_replay)"},
    {unequal_windows, "recomputed windows (bounded_replay) of different lengths"},
    {retained_windows, "longer windows (extra_retained_tokens)"},
    {cached_prefixes, "states, chunks or cached windows"},
    {compressed_rows, "compressed rows (tokens_per_state)"},
    {special_rows, "rings, recomputed windows or compressed rows"},
    {unshared_rows, "sharded rings, recomputed windows or rows of DeepSeek-V4"},
    {undivided_tokens, "sharded windows or rings, chunks, encoders or hidden states"},
    {encoder_only, "encoder_only groups"},
    {cross_attention, "cross attention (cross_attention)"},
    {sinks, "sinks (sink_len)"},
    {several_sinks, "sinks (sink_len) in several groups"},
    {reference_windows, "reference windows (rswa_window)"},
    {special_attention, "cross attention, sinks or reference windows"},
    {replicated_caches, "replicated caches (dcp_sharded)"},
    {hisparse, "HiSparse (hisparse_source)"},
    {unknown_role, "groups of another role than HiSparse's"},
    {several_groups, "several KV cache groups"},
    {untransferred, "states, chunks, rings or other special caches"},
    {prefix_caching, "prefix caching"},
    {chunked_prefill, "chunked prefill"},
    {async_scheduling, "asynchronous scheduling"},
    {drafts, "drafts"},
    {draft_modules, "several draft modules (num_prefill_lookahead_tokens)"},
    {prefix_match_unit, "prefix_match_unit"},
    {hits_inside_blocks, "hits inside blocks"},
    {engine_hashes, "block hashes of the engine (hash_algorithm)"},
    {context_ranks, "context parallelism"},
    {several_ranks, "several ranks"},
    {divided_model, "tensor or pipeline parallelism"},
    {data_parallel, "several engines (data_parallel_size)"},
    {enforce_eager, "--enforce-eager"},
    {connector, "a KV connector"},
    {simulated_connector, "a simulated KV connector"},
    {host_tier, "a host tier"},
    {one_group_peers, "peers of one group"},
    {hisparse_workers, "HiSparse's workers (--connector hisparse)"},
    {other_parts, "other parts of a connector"},
    {failing_loads, "failing loads (load_failed_percent)"},
    {other_engine, "another engine's decisions"},
    {model_inputs, "faults, block_order or mutants of the scheduler"},
    {pair, "prefill and decode apart"},
    {backend, "a backend"},
    {overlaid_layout, "a layout of overlaid memory (--layout)"},
    {captured_graphs, "captured graphs"},
    {real_numbers, "real numbers (--numbers real)"},
});
static_assert(kTraits.size() == kNumRunTraits);

}  // namespace

std::span<const CompatibilityRow> compatibility() { return kRows; }

std::string_view name_of(RunTrait trait) { return name_in(kTraits, trait); }

std::string_view name_of(CompatibilityRow::Scope scope) {
  return scope == run ? "every run" : scope == decisions ? "the model's decisions" : "a backend";
}

std::string_view name_of(CompatibilityRow::Reason reason) {
  return reason == engine         ? "refused by the engine"
         : reason == not_modelled ? "not modelled"
                                  : "impossible";
}

}  // namespace lockstep
