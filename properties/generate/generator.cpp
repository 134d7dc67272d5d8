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

// Attempts to generate a configuration with the same features. After that many refusals, a plain
// one is used.
constexpr int kAttempts = 8;

// Adds the features of [first, end) to `features`. Every feature takes one choice even if the
// options decide it, so that options do not shift the choices after it.
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

// Adds full attention if no kind of cache is enabled. A hidden state does not count: its layer
// needs another group.
void settle_kinds(FeatureSet& features) {
  bool any = false;
  for (const Feature kind : {Feature::full_attention, Feature::mla, Feature::sliding_window,
                             Feature::chunked_local, Feature::states})
    any |= features.has(kind);
  if (!any) features.add(Feature::full_attention);
}

// Returns the traits of the case's connector. If the release is modelled without connectors, the
// case is meant for another engine that has them.
RunTraits traits_of(const SavedCase& saved) {
  RunTraits traits;
  if (saved.connector.parts.empty()) return traits;
  traits.add(RunTrait::connector);
  traits.add_if(!engine_profile(saved.engine.engine).release->models_connectors,
                RunTrait::other_engine);
  return traits;
}

// Returns true if the plan of every rank can be derived and laid out.
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

// Returns true unless real numbers in nvfp4 lack a dense block. The scale areas of nvfp4 are at
// offsets within a block of one layer, so the heads of the block must be contiguous with it.
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
  // A configuration may permit hits inside blocks by its block sizes alone. They are a feature of
  // their own, which enlarges the pool (draw_states_as_served()).
  if (!sizes || (sizes->hits_parts_of_blocks && saved.engine.prefix_match_unit == 0)) return false;
  return saved.backend == "none" || ranks_are_accepted(saved);
}

namespace {

// Generates a cache, an engine and a pool. False: the engine or the layout refuses them, and
// `saved` is to be generated again. `attempt` selects fresh streams of choices.
bool draw_configuration(ChoiceSource& choices, const GeneratorOptions& options,
                        const FeatureSet& features, int attempt, SavedCase& saved) {
  Draw draw{choices, options, features};
  saved.engine = {};
  choices.enter(CasePart::engine, attempt);
  draw_engine(draw, saved.engine);
  choices.enter(CasePart::groups, attempt);
  std::vector<KVCacheGroupSpec> groups = draw_groups(draw, saved.engine);
  // Returns to the engine's stream, which continues after the choices of draw_engine().
  choices.enter(CasePart::engine, attempt);
  fit_engine(draw, groups, saved.engine);
  choices.enter(CasePart::pool, attempt);
  draw_pool(draw, std::move(groups), saved);
  return is_accepted(saved);
}

// Selects one of the layouts that the engine and this cache accept; the first is the engine's own
// choice. Only releases with overlaid groups have several.
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

// Gives every group of K and V several stored rows per token, as an encoder that pools its tokens
// has them. The number is chosen first: a case without the feature makes the same choices.
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

// Lets some resets of the prefix cache preempt all running requests first.
void draw_running_resets(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::running_resets)) return;
  for (TraceRecord& record : saved.trace.records)
    if (auto* control = std::get_if<TraceControl>(&record))
      control->preempts_running = draw.choices.chance(70);
}

// Pauses the engine at a record, for one to eight steps.
void draw_pauses(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::pauses)) return;
  std::vector<TraceRecord>& records = saved.trace.records;
  const auto place = records.begin() + draw.choices.below(std::ssize(records));
  TraceControl control{
      .kind = TraceControl::Kind::pause_state,
      .pause_state = draw.choices.chance(50) ? PauseState::paused_new : PauseState::paused_all};
  for (auto record = records.begin(); record <= place; ++record)
    if (const std::int64_t* t_ns = time_of(*record)) control.t_ns = *t_ns;
  auto next = records.insert(place + 1, control) + 1;
  control.t_ns += draw.choices.between(1, 16) * kStepNs / 2;
  control.pause_state = PauseState::unpaused;
  next = std::find_if(next, records.end(), [&](TraceRecord& record) {
    const std::int64_t* t_ns = time_of(record);
    return t_ns != nullptr && *t_ns > control.t_ns;
  });
  records.insert(next, control);
}

// What is generated last, in this order. A case without a row's features is the same with and
// without the row. A new cache is a row at the end, and its features are at the end of the table.
struct LastStage {
  Feature first;  // first of its features, which are consecutive
  void (*draw)(Draw& draw, SavedCase& saved);
};
constexpr std::array kLast = {
    LastStage{Feature::cross_attention, draw_encoders_and_sinks},
    LastStage{Feature::drafter_cache, draw_drafter_cache},
    LastStage{kHostPages, draw_host_pages},
    LastStage{Feature::whole_caches, draw_whole_caches},
    LastStage{Feature::several_rows, draw_several_rows},
    LastStage{Feature::running_resets, draw_running_resets},
    LastStage{Feature::pauses, draw_pauses},
};

}  // namespace

// Feature sets that bugs of real workers needed together. Two of four entries are empty, so half of
// a worker's cases have one of the others.
constexpr FeatureSet kRare[] = {
    {},
    {},
    {Feature::full_attention, Feature::states, Feature::several_groups, Feature::prefix_caching,
     Feature::shared_prefixes, Feature::different_block_sizes},
    {Feature::tight_pool, Feature::bursts, Feature::no_full_isl_reserve, Feature::long_prompts}};

namespace {

// Selects among the features of [first, end), then returns to `part`.
void draw_features(Draw& draw, Feature first, Feature end, CasePart part) {
  draw_features(draw.choices, draw.options, first, static_cast<std::size_t>(end), draw.features);
  draw.choices.enter(part);
}

// Applies a change if the changed case is still accepted. The choices of the change are consumed
// either way.
void try_change(Draw& draw, void (*change)(Draw& draw, SavedCase& saved), SavedCase& saved) {
  SavedCase changed = saved;
  change(draw, changed);
  if (changed != saved && is_accepted(changed)) saved = std::move(changed);
}

// Generates ranks and the backend's modes. Both come after traffic: a case without them is the same
// with and without this stage.
void draw_ranks_and_modes(Draw& draw, SavedCase& saved) {
  draw_features(draw, Feature::tensor_parallel, Feature::captured_graphs, CasePart::ranks);
  // The case is copied only where something may change.
  if (draw.runs_kernels() || draw.has(Feature::data_parallel)) try_change(draw, draw_ranks, saved);
  if (!draw.options.device_modes || !draw.runs_kernels()) return;
  draw_features(draw, Feature::captured_graphs, Feature::connector_peers, CasePart::ranks);
  try_change(draw, draw_device_modes, saved);
}

// Generates connectors, then what depends on them: states as served, the layout, a step in flight,
// hashes.
void draw_connectors(Draw& draw, SavedCase& saved) {
  draw_features(draw, Feature::connector_peers, Feature::several_connectors, CasePart::connector);
  draw_connector(draw, saved);
  draw_features(draw, Feature::several_connectors, Feature::prefill_checkpoints,
                CasePart::connector);
  draw_further_connectors(draw, saved);
  draw_features(draw, Feature::prefill_checkpoints, Feature::async_connectors, CasePart::connector);
  if (saved.engine.mamba_cache_mode == MambaCacheMode::align)
    try_change(draw, draw_states_as_served, saved);
  draw_order(draw, saved);
  draw_features(draw, Feature::async_connectors, Feature::short_drafts, CasePart::connector);
  draw_async_connector(draw, saved);
  draw_hashes(draw, saved);
}

// Generates everything that was added later, each stage after the features that it reads.
void draw_caches(Draw& draw, SavedCase& saved) {
  draw_features(draw, Feature::short_drafts, Feature::bounded_replay, CasePart::caches);
  draw_short_drafts(draw, saved);
  if (draw.has(Feature::rising_priorities)) raise_priorities(draw, saved);
  draw_features(draw, Feature::bounded_replay, Feature::equal_requests, CasePart::caches);
  draw_further_caches(draw, saved);
  draw_features(draw, Feature::equal_requests, Feature::mapped_tables, CasePart::caches);
  if (draw.has(Feature::equal_requests)) try_change(draw, make_equals, saved);
  draw_features(draw, Feature::mapped_tables, kLast.front().first, CasePart::caches);
  // Needs a ring and compressed rows, which draw_further_caches() may have added.
  if (draw.has(Feature::mapped_tables)) map_tables(saved);
  for (std::size_t i = 0; i < kLast.size(); ++i) {
    const std::size_t end =
        i + 1 < kLast.size() ? static_cast<std::size_t>(kLast[i + 1].first) : kNumFeatures;
    draw_features(draw.choices, draw.options, kLast[i].first, end, draw.features);
    draw.choices.enter(CasePart::caches);
    kLast[i].draw(draw, saved);
  }
  split_blocks(draw, saved);
}

// Gives the case a match unit, if hits then end inside blocks. A step in flight is left out: the
// larger pool would hide finding 5.
void hit_parts(const Draw& draw, SavedCase& saved) {
  if (draw.options.worker || saved.engine.async_scheduling || saved.engine.dcp > 1 ||
      draw.options.never.has(Feature::hits_inside_blocks))
    return;
  SavedCase changed = saved;
  set_match_unit(changed);
  const auto sizes = resolve_block_sizes(changed.engine, changed.cache.groups);
  if (sizes && sizes->hits_parts_of_blocks && is_accepted(changed)) saved = std::move(changed);
}

// Generates what is rare without it. Comes last, so all other choices keep their values.
void draw_rare(Draw& draw, SavedCase& saved) {
  draw_stop_lists(draw, saved);
  draw.choices.enter(CasePart::caches);
  if (draw.choices.chance(50)) hit_parts(draw, saved);
  if (draw.choices.chance(75) && has_cross_attention(saved.cache.groups))
    try_change(draw, tighten_encoder_pool, saved);
}

}  // namespace

SavedCase generate_case(ChoiceSource& choices, const GeneratorOptions& asked) {
  GeneratorOptions options = asked;
  // A worker's rare sets are added to `always` before anything else is chosen.
  if (options.worker) options.always.add(kRare[choices.below(std::ssize(kRare))]);
  SavedCase saved;
  saved.name = "generated";
  saved.backend = options.backend;
  using enum CheckMode;
  // fast in 7 of 10 cases, check in 2, hunt in 1.
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
  // No such model has both MLA and other attention.
  if (options.worker && features.has(Feature::mla)) {
    constexpr FeatureSet kOthers = {Feature::full_attention, Feature::sliding_window,
                                    Feature::chunked_local};
    features.remove(choices.chance(50) ? kOthers : FeatureSet{Feature::mla});
    settle_kinds(features);
  }
  bool accepted = false;
  for (int attempt = 0; attempt < kAttempts && !accepted; ++attempt)
    accepted = draw_configuration(choices, options, features, attempt, saved);
  // The plain configuration cannot be refused. It keeps its own stream of choices.
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
  draw_rare(draw, saved);
  return saved;
}

SavedCase generate_case(std::uint64_t seed, const GeneratorOptions& options) {
  SeededChoices choices(seed);
  SavedCase saved = generate_case(choices, options);
  saved.name = fmt::format("seed-{}", seed);
  return saved;
}

}  // namespace lockstep
