#include "reference/plan/serving_defaults.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "reference/plan/page_size.h"
#include "reference/plan/planner.h"

namespace lockstep {
namespace {

// The prefill kernel of FlashInfer for gated delta nets exports states at multiples of its chunk.
constexpr std::int64_t kGatedDeltaChunk = 64;

// Which drafters do not turn asynchronous scheduling off.
enum class AsyncDrafts : std::uint8_t { eagle, eagle_and_models, every };

struct ReleaseDefaults {
  std::string_view since;  // the first release
  AsyncDrafts async_drafts = AsyncDrafts::eagle;
  std::int32_t retention = kDenseRetention;
  bool mamba_in_mode_all = false;  // Mamba1 and Mamba2; other states in mode align
  bool mamba2_exports = false;
  bool gated_delta_exports = false;
};

// In the order of the releases; a row holds up to the next one.
constexpr ReleaseDefaults kDefaults[] = {
    {.since = "vllm-0.20.2", .mamba_in_mode_all = true},
    {.since = "vllm-0.28.0", .async_drafts = AsyncDrafts::eagle_and_models},
    {.since = "vllm-0.29.0", .async_drafts = AsyncDrafts::eagle_and_models, .retention = 0},
    {.since = "vllm-0.32.0",
     .async_drafts = AsyncDrafts::eagle_and_models,
     .retention = 0,
     .mamba2_exports = true},
    {.since = "vllm-0.33.0",
     .async_drafts = AsyncDrafts::every,
     .retention = 0,
     .mamba2_exports = true,
     .gated_delta_exports = true},
};

// Names of releases sort as their numbers do.
const ReleaseDefaults& defaults_of(std::string_view engine) {
  const auto behind = std::ranges::upper_bound(kDefaults, engine, {}, &ReleaseDefaults::since);
  return behind == std::begin(kDefaults) ? *behind : *std::prev(behind);
}

bool runs_async_with(SpecMethod method, AsyncDrafts drafts) {
  switch (method) {
    case SpecMethod::none:
    case SpecMethod::eagle:
      return true;
    case SpecMethod::draft_model:
      return drafts != AsyncDrafts::eagle;
    case SpecMethod::ngram:
      return drafts == AsyncDrafts::every;
  }
  return true;
}

bool is_mamba(StateFamily family) {
  return family == StateFamily::mamba1 || family == StateFamily::mamba2;
}

// Tokens between places where a layer of the kind can export a state; 0: nowhere.
std::int64_t exports_every(const ReleaseDefaults& defaults, const LayerKind& kind) {
  if (kind.prefill_checkpoint_alignment) return *kind.prefill_checkpoint_alignment;
  switch (kind.states.family) {
    case StateFamily::mamba2:
      return defaults.mamba2_exports ? 1 : 0;
    case StateFamily::gated_delta_net:
      return defaults.gated_delta_exports ? kGatedDeltaChunk : 0;
    default:
      return 0;
  }
}

}  // namespace

ServingDefaults serving_defaults(const EngineConfig& engine) {
  const ReleaseDefaults& defaults = defaults_of(engine.engine);
  const bool has_drafts = engine.num_spec_tokens > 0;
  return {
      .async_scheduling = !has_drafts || runs_async_with(engine.spec_method, defaults.async_drafts),
      .scheduler_reserve_full_isl = true,
      .prefix_cache_retention_interval = defaults.retention};
}

MambaCacheMode served_cache_mode(const EngineConfig& engine, const ModelSpec& model) {
  bool has_states = false;
  bool all_mamba = true;
  for (const LayerKind& kind : model.kinds) {
    if (!is_state_kind(kind.spec.kind)) continue;
    has_states = true;
    all_mamba &= is_mamba(kind.states.family);
  }
  if (!has_states || !engine.enable_prefix_caching) return MambaCacheMode::none;
  return all_mamba && defaults_of(engine.engine).mamba_in_mode_all ? MambaCacheMode::all
                                                                   : MambaCacheMode::align;
}

Result<void> take_served_checkpoints(std::string_view release, const ModelSpec& model,
                                     const PlanOptions& options, LayerSpecs& layers,
                                     const StateBlock& state_block) {
  if (options.mamba_cache_mode != MambaCacheMode::align) return {};
  const ReleaseDefaults& defaults = defaults_of(release);
  bool all_export = true;
  bool has_gated_delta = false;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!is_state_kind(layers[i].spec.kind)) continue;
    const std::int64_t every = exports_every(defaults, model.kinds[model.layers[i].kind]);
    layers[i].spec.num_prefill_checkpoint_blocks = every > 0 ? 1 : 0;
    layers[i].spec.prefill_checkpoint_alignment = every;
    all_export &= every > 0;
    has_gated_delta |=
        model.kinds[model.layers[i].kind].states.family == StateFamily::gated_delta_net;
  }
  // Gated delta nets emit states at one stride for the whole batch, so all of them must be asked
  // for on the grid of hits; and only where every layer can export.
  std::int64_t grid = 0;
  if (all_export && has_gated_delta && state_block) {
    LS_ASSIGN_OR_RETURN(grid, state_block(layers));
  } else if (all_export && has_gated_delta) {
    LS_ASSIGN_OR_RETURN(const auto sizes, aligned_sizes(layers, options));
    grid = sizes.mamba_block_size.value_or(0);
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerKind& kind = model.kinds[model.layers[i].kind];
    KVCacheSpec& spec = layers[i].spec;
    if (!is_state_kind(spec.kind) || kind.states.family != StateFamily::gated_delta_net) continue;
    spec.num_prefill_checkpoint_blocks = grid > 0 && spec.num_prefill_checkpoint_blocks > 0 ? 1 : 0;
    spec.prefill_checkpoint_alignment = spec.num_prefill_checkpoint_blocks > 0 ? grid : 0;
  }
  return {};
}

}  // namespace lockstep
