#include "properties/generate/generator.h"

#include <fmt/core.h>

#include <array>

#include "base/check.h"
#include "properties/generate/generator_parts.h"
#include "reference/memory/model_placement.h"
#include "reference/plan/block_sizes.h"
#include "reference/plan/layout.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"
#include "reference/profiles/releases.h"
#include "sim/session/session.h"
#include "traces/formats/run_fields.h"

namespace lockstep {
namespace {

constexpr int kAttempts = 8;

// Those of `first` up to `end`, added to `features`.
void draw_features(ChoiceSource& choices, const GeneratorOptions& options, Feature first,
                   std::size_t end, FeatureSet& features) {
  choices.enter(CasePart::features);
  for (auto i = static_cast<std::size_t>(first); i < end; ++i) {
    const auto feature = static_cast<Feature>(i);
    const bool drawn = choices.chance(kFeatures[i].percent);
    if ((drawn || options.always.has(feature)) && !options.never.has(feature))
      features.add(feature);
  }
}

// A case without any kind of cache has full attention, and a hidden state needs another group.
void settle_kinds(FeatureSet& features) {
  bool any = false;
  for (const Feature kind : {Feature::full_attention, Feature::mla, Feature::sliding_window,
                             Feature::chunked_local, Feature::states})
    any |= features.has(kind);
  if (!any) features.add(Feature::full_attention);
}

// Of its connector and what decides it: with a connector that the model does not know, another
// engine.
RunTraits traits_of(const SavedCase& saved) {
  RunTraits traits;
  if (saved.connector.parts.empty()) return traits;
  traits.add(RunTrait::connector);
  traits.add_if(!engine_profile(saved.engine.engine).release->models_connectors,
                RunTrait::other_engine);
  return traits;
}

// Whether every rank's plan can be cut out and laid out.
bool ranks_are_accepted(const SavedCase& saved) {
  const LockstepConfig config = config_of(saved);
  if (!check_setup(config, traits_of(saved))) return false;
  for (std::int32_t rank = 0; rank < num_ranks(config.backend); ++rank) {
    const auto plan = rank_plan(saved.cache, config_of_rank(config.backend, rank).parallel,
                                config.backend.queries_per_kv);
    if (!plan) return false;
    const bool is_laid_out =
        is_overlaid(saved.layout)
            ? placed_layout(plan->plan, saved.attention_backend, saved.layout).has_value()
            : pool_views(plan->plan, saved.attention_backend, saved.layout, saved.layout_rule)
                  .has_value();
    if (!is_laid_out) return false;
  }
  return true;
}

}  // namespace

bool takes(const SavedCase& saved, RunTraits more) {
  return is_supported(facts_of(saved.engine, saved.cache.groups).with(more));
}

bool release_takes(const EngineConfig& engine, RunTraits traits) {
  return is_supported({&engine_profile(engine.engine), traits});
}

// The areas of nvfp4 take a block that is dense in its layer.
static bool has_room_for_areas(const SavedCase& saved) {
  const auto has_areas = [](const KVCacheGroupSpec& group) {
    return group.spec.kv_quant_mode == KVQuantMode::nvfp4;
  };
  if (saved.numbers == Numbers::words || std::ranges::none_of(saved.cache.groups, has_areas))
    return true;
  const CacheLayout order = config_of(saved).backend.layout;
  return is_overlaid(order) && order != CacheLayout::LHBNC && order != CacheLayout::BHLNC;
}

bool is_accepted(const SavedCase& saved) {
  if (!has_room_for_areas(saved) || !takes(saved, traits_of(saved))) return false;
  const auto sizes = resolve_block_sizes(saved.engine, saved.cache.groups);
  // Hits inside blocks are their own feature; block sizes alone do not enable them.
  if (!sizes || (sizes->hits_parts_of_blocks && saved.engine.prefix_match_unit == 0)) return false;
  return saved.backend == "none" || ranks_are_accepted(saved);
}

namespace {

// A cache, an engine and a pool; false: the engine or the layout refuses them.
bool draw_configuration(ChoiceSource& choices, const GeneratorOptions& options,
                        const FeatureSet& features, int attempt, SavedCase& saved) {
  Draw draw{choices, options, features};
  saved.engine = {};
  choices.enter(CasePart::engine, attempt);
  draw_engine(draw, saved.engine);
  choices.enter(CasePart::groups, attempt);
  std::vector<KVCacheGroupSpec> groups = draw_groups(draw, saved.engine);
  choices.enter(CasePart::engine, attempt);
  fit_engine(draw, groups, saved.engine);
  choices.enter(CasePart::pool, attempt);
  draw_pool(draw, std::move(groups), saved);
  return is_accepted(saved);
}

// One of the orders that the engine and this cache take, or the engine's own choice.
void draw_order(Draw& draw, SavedCase& saved) {
  if (!draw.runs_kernels() || !is_overlaid(config_of(saved).backend.layout)) return;
  std::vector<CacheLayout> orders = {saved.layout};
  for (const CacheLayout order : kOverlaidLayouts) {
    SavedCase in_order = saved;
    in_order.layout = order;
    if (is_accepted(in_order)) orders.push_back(order);
  }
  saved.layout = orders[static_cast<std::size_t>(draw.choices.below(std::ssize(orders)))];
}

// Several rows per token in every group of K and V, as an encoder that pools its tokens has them.
void draw_several_rows(Draw& draw, SavedCase& saved) {
  const TokensPerState drawn{.tokens = 1, .rows = draw.choices.one_of<std::int64_t>({4, 2, 3, 8})};
  if (!draw.has(Feature::several_rows) || draw.options.worker ||
      !saved.cache.draft_modules.empty() ||
      !overlays_groups(*engine_profile(saved.engine.engine).release))
    return;
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  bool is_drawn = false;
  for (KVCacheGroupSpec& group : groups) {
    KVCacheSpec with_rows = group.spec;
    with_rows.tokens_per_state = drawn;
    with_rows.page_size_padded.reset();
    if (!keeps_pairs(with_rows) || !why_no_rows(with_rows).empty()) continue;
    is_drawn = true;
    group.spec = with_rows;
    for (KVCacheSpec& spec : group.layer_specs) {
      spec.tokens_per_state = drawn;
      spec.page_size_padded.reset();
    }
  }
  SavedCase next;
  if (is_drawn && lay_out_again(saved, std::move(groups), saved.engine, next))
    saved = std::move(next);
}

// Caches that are generated last, in this order: a case with none of a row's features is the same
// with and without the row. A new cache is a row at the end, and so are its features.
struct LastCache {
  Feature first;  // of its features, which follow one another
  void (*draw_cache)(Draw& draw, SavedCase& saved);
};
constexpr std::array kLast = {
    LastCache{Feature::cross_attention, draw_encoders_and_sinks},
    LastCache{Feature::drafter_cache, draw_drafter_cache},
    LastCache{kHostPages, draw_host_pages},
    LastCache{Feature::whole_caches, draw_whole_caches},
    LastCache{Feature::several_rows, draw_several_rows},
};

}  // namespace

// What bugs of real workers needed together: half of a worker's cases have one of these.
constexpr FeatureSet kRare[] = {
    {},
    {},
    {Feature::full_attention, Feature::states, Feature::several_groups, Feature::prefix_caching,
     Feature::shared_prefixes, Feature::different_block_sizes},
    {Feature::tight_pool, Feature::bursts, Feature::no_full_isl_reserve, Feature::long_prompts}};

namespace {

// The features from `first` up to `end`; the choices that follow are of `part`.
void draw_features(Draw& draw, Feature first, Feature end, CasePart part) {
  draw_features(draw.choices, draw.options, first, static_cast<std::size_t>(end), draw.features);
  draw.choices.enter(part);
}

// Changes the case, unless nothing accepts it then.
void try_change(Draw& draw, void (*change)(Draw& draw, SavedCase& saved), SavedCase& saved) {
  SavedCase changed = saved;
  change(draw, changed);
  if (is_accepted(changed)) saved = std::move(changed);
}

// Ranks, modes of the backend and connectors come last: a case that has none of them is the same
// with and without these lines.
void draw_ranks_and_modes(Draw& draw, SavedCase& saved) {
  draw_features(draw, Feature::tensor_parallel, Feature::captured_graphs, CasePart::ranks);
  try_change(draw, draw_ranks, saved);
  if (!draw.options.device_modes || !draw.runs_kernels()) return;
  draw_features(draw, Feature::captured_graphs, Feature::connector_peers, CasePart::ranks);
  try_change(draw, draw_device_modes, saved);
}

void draw_connectors(Draw& draw, SavedCase& saved) {
  draw_features(draw, Feature::connector_peers, Feature::several_connectors, CasePart::connector);
  draw_connector(draw, saved);
  draw_features(draw, Feature::several_connectors, Feature::prefill_checkpoints,
                CasePart::connector);
  draw_further_connectors(draw, saved);
  draw_features(draw, Feature::prefill_checkpoints, Feature::async_connectors, CasePart::connector);
  try_change(draw, draw_states_as_served, saved);
  draw_order(draw, saved);
  draw_features(draw, Feature::async_connectors, Feature::short_drafts, CasePart::connector);
  draw_async_connector(draw, saved);
  draw_hashes(draw, saved);
}

void draw_caches(Draw& draw, SavedCase& saved) {
  draw_features(draw, Feature::short_drafts, Feature::bounded_replay, CasePart::caches);
  draw_short_drafts(draw, saved);
  if (draw.has(Feature::rising_priorities)) raise_priorities(draw, saved);
  draw_features(draw, Feature::bounded_replay, Feature::equal_requests, CasePart::caches);
  draw_further_caches(draw, saved);
  draw_features(draw, Feature::equal_requests, Feature::mapped_tables, CasePart::caches);
  if (draw.has(Feature::equal_requests)) try_change(draw, make_equals, saved);
  draw_features(draw, Feature::mapped_tables, kLast.front().first, CasePart::caches);
  if (draw.has(Feature::mapped_tables)) map_tables(saved);
  for (std::size_t i = 0; i < kLast.size(); ++i) {
    const std::size_t end =
        i + 1 < kLast.size() ? static_cast<std::size_t>(kLast[i + 1].first) : kNumFeatures;
    draw_features(draw.choices, draw.options, kLast[i].first, end, draw.features);
    draw.choices.enter(CasePart::caches);
    kLast[i].draw_cache(draw, saved);
  }
  split_blocks(draw, saved);
}

}  // namespace

SavedCase generate_case(ChoiceSource& choices, const GeneratorOptions& asked) {
  GeneratorOptions options = asked;
  if (options.worker) options.always.add(kRare[choices.below(std::ssize(kRare))]);
  SavedCase saved;
  saved.name = "generated";
  saved.backend = options.backend;
  using enum CheckMode;
  if (options.check.empty())
    saved.check = choices.one_of({fast, fast, fast, fast, fast, fast, fast, check, check, hunt});
  else
    run_field("check").set_text(saved, options.check);
  saved.seed = static_cast<std::uint64_t>(choices.below(1 << 16));
  constexpr auto kFirstOfRanks = Feature::tensor_parallel;
  FeatureSet features;
  draw_features(choices, options, Feature::several_groups, static_cast<std::size_t>(kFirstOfRanks),
                features);
  settle_kinds(features);
  if (options.worker && features.has(Feature::mla)) {  // no model has both
    constexpr FeatureSet kOthers = {Feature::full_attention, Feature::sliding_window,
                                    Feature::chunked_local};
    features.remove(choices.chance(50) ? kOthers : FeatureSet{Feature::mla});
    settle_kinds(features);
  }
  bool accepted = false;
  for (int attempt = 0; attempt < kAttempts && !accepted; ++attempt)
    accepted = draw_configuration(choices, options, features, attempt, saved);
  if (!accepted) {
    features = {Feature::full_attention, Feature::prefix_caching};
    accepted = draw_configuration(choices, options, features, kAttempts, saved);
    LS_CHECK(accepted, "full attention alone is refused");
  }
  Draw draw{choices, options, features};
  draw_traffic(draw, saved);
  draw_fault_plan(draw, saved);
  draw_ranks_and_modes(draw, saved);
  draw_connectors(draw, saved);
  draw_caches(draw, saved);
  return saved;
}

SavedCase generate_case(std::uint64_t seed, const GeneratorOptions& options) {
  SeededChoices choices(seed);
  SavedCase saved = generate_case(choices, options);
  saved.name = fmt::format("seed-{}", seed);
  return saved;
}

}  // namespace lockstep
