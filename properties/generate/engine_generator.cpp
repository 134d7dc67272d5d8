// Options of the engine. Combinations that the engine refuses at start are never generated.
#include <algorithm>

#include "base/check.h"
#include "properties/generate/generator_parts.h"
#include "properties/shrink/case_parts.h"
#include "reference/plan/block_sizes.h"
#include "reference/plan/capacity.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/page_size.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"
#include "sim/connectors/connect.h"
#include "sim/engine/faults.h"
#include "sim/session/session.h"

namespace lockstep {

void draw_engine(Draw& draw, EngineConfig& engine) {
  ChoiceSource& choices = draw.choices;
  const std::string* const engines[] = {&engine_profiles().back().name, &connector_profile().name};
  engine.engine = *engines[choices.below(std::ssize(engines))];
  if (!draw.options.engine.empty()) engine.engine = draw.options.engine;
  engine.block_size =
      static_cast<std::int32_t>(draw.runs_kernels() ? 16 : choices.one_of({4, 2, 4, 8, 16, 3}));
  const std::int64_t blocks_max = draw.has(Feature::long_prompts) ? 10 : 4;
  engine.max_model_len = static_cast<std::int32_t>(
      engine.block_size + choices.between(1, blocks_max * engine.block_size));
  if (draw.has(Feature::two_block_pool)) engine.max_model_len = engine.block_size;
  engine.max_num_seqs = static_cast<std::int32_t>(choices.between(1, 5));
  engine.enable_prefix_caching =
      draw.has(Feature::prefix_caching) || draw.as_served(Feature::prefix_caching);
  engine.policy =
      draw.has(Feature::priority_policy) ? SchedulingPolicy::priority : SchedulingPolicy::fcfs;
  if (draw.has(Feature::drafts)) {
    engine.spec_method =
        choices.one_of({SpecMethod::ngram, SpecMethod::draft_model, SpecMethod::eagle});
    engine.num_spec_tokens = static_cast<std::int32_t>(choices.between(1, 3));
  }
  const ServingDefaults defaults = serving_defaults(engine);
  engine.async_scheduling = draw.as_served(Feature::async_scheduling)
                                ? defaults.async_scheduling
                                : draw.has(Feature::async_scheduling);
  if (draw.options.worker && !draw.options.worker->drafts_in_flight && engine.num_spec_tokens > 0)
    engine.async_scheduling = false;
  engine.scheduler_reserve_full_isl = draw.as_served(Feature::no_full_isl_reserve)
                                          ? defaults.scheduler_reserve_full_isl
                                          : !draw.has(Feature::no_full_isl_reserve);
}

// Ranks share out the tokens of full attention; the releases differ in which of them hold what. The
// audit follows one group of them.
void draw_ranks(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine) {
  if (!draw.has(Feature::context_parallel) || draw.has(Feature::two_block_pool)) return;
  const CacheKind kind = groups.front().spec.kind;
  if (groups.size() > 1 || !attends_to_all(kind)) return;
  engine.dcp = draw.choices.one_of({2, 2, 3, 4, 1});
  engine.pcp = draw.choices.one_of({1, 1, 2});
}

void fit_engine(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine) {
  ChoiceSource& choices = draw.choices;
  // A chunk must be able to reach the next state, and every request its decode and drafts.
  std::int64_t least = engine.max_num_seqs * (1 + engine.num_spec_tokens) + 1;
  std::int64_t scheduler_block = 1;
  for (const KVCacheGroupSpec& group : groups) {
    scheduler_block = std::max(scheduler_block, group.spec.block_size);
    if (engine.mamba_cache_mode == MambaCacheMode::align && is_state_kind(group.spec.kind))
      least = std::max(least, group.spec.block_size + engine.max_num_seqs);
  }
  engine.enable_chunked_prefill =
      !draw.has(Feature::no_chunked_prefill) || draw.as_served(Feature::no_chunked_prefill);
  if (draw.options.one_pool_per_kind) least = std::max(least, scheduler_block);
  if (!engine.enable_chunked_prefill)
    least = std::max<std::int64_t>(least, engine.max_model_len + engine.max_num_seqs);
  engine.max_num_batched_tokens = static_cast<std::int32_t>(least + choices.one_of({0, 3, 16, 64}));
  if (draw.has(Feature::long_prefill_threshold)) {
    const std::int64_t low = engine.mamba_cache_mode == MambaCacheMode::align ? scheduler_block : 1;
    engine.long_prefill_token_threshold = static_cast<std::int32_t>(
        std::min<std::int64_t>(low + choices.below(16), engine.max_model_len));
  }
  draw_ranks(draw, groups, engine);
  if (draw.as_served(Feature::sparse_retention))
    engine.prefix_cache_retention_interval =
        serving_defaults(engine).prefix_cache_retention_interval;
  else if (engine_profile(engine.engine).retains_sparsely && draw.has(Feature::sparse_retention) &&
           engine.enable_prefix_caching)
    engine.prefix_cache_retention_interval =
        static_cast<std::int32_t>(choices.below(4) * scheduler_block);
}

// Ranks of every kind, few of each: what grows with their number is the time alone.

namespace {

// The plan again, with other heads and states: pages of all groups as large as the largest.
bool plan_with(SavedCase& saved, std::vector<KVCacheGroupSpec> groups) {
  for (KVCacheGroupSpec& group : groups) group.spec.page_size_padded.reset();
  auto plan = plan_for_groups(std::move(groups), saved.cache.num_blocks);
  if (!plan) return false;
  saved.cache = std::move(*plan);
  return true;
}

// Groups whose pages follow from more than their heads and states.
bool is_special(const KVCacheGroupSpec& group) {
  return group.layers_per_page > 1 || group.is_uniform_type() ||
         group.spec.kv_quant_mode != KVQuantMode::none;
}

// Cut: heads and channels are multiples of tp. Replicated: fewer heads than ranks.
void draw_tensor_parallel(Draw& draw, SavedCase& saved) {
  const std::int32_t tp = draw.choices.one_of({2, 2, 4});
  const bool replicated = draw.has(Feature::replicated_heads);
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  for (KVCacheGroupSpec& group : groups) {
    KVCacheSpec& spec = group.spec;
    if (!is_state_kind(spec.kind) && !has_single_rows(spec))
      spec.num_kv_heads =
          replicated ? draw.choices.one_of({1, tp / 2}) : tp * draw.choices.between(1, 2);
    for (StateTensorSpec& state : spec.states)
      for (std::int64_t& dim : state.dims) dim = round_up(dim, tp);
  }
  if (!plan_with(saved, std::move(groups))) return;
  saved.tensor_parallel_size = tp;
  saved.queries_per_kv = tp * static_cast<std::int32_t>(draw.choices.between(1, 2));
}

}  // namespace

void draw_ranks(Draw& draw, SavedCase& saved) {
  if (draw.runs_kernels() && std::ranges::none_of(saved.cache.groups, is_special)) {
    if (draw.has(Feature::tensor_parallel)) draw_tensor_parallel(draw, saved);
    if (draw.has(Feature::pipeline_parallel)) saved.pipeline_parallel_size = 2;
  }
  if (!draw.has(Feature::data_parallel)) return;
  saved.data_parallel_size = static_cast<std::int32_t>(draw.choices.between(2, 3));
  saved.enforce_eager = draw.choices.below(2) != 0;
}

// What follows from no option of the command line, but from the kernels of the states' layers.
void draw_states_as_served(Draw& draw, SavedCase& saved) {
  EngineConfig& engine = saved.engine;
  if (!release_takes(engine, {RunTrait::checkpoints}) || !engine.enable_prefix_caching ||
      engine.mamba_cache_mode != MambaCacheMode::align)
    return;
  std::vector<KVCacheGroupSpec>& groups = saved.cache.groups;
  // An engine's own worker exports no states with drafts or in blocks of several of attention's:
  // docs/real_worker.md.
  const bool exports =
      draw.has(Feature::prefill_checkpoints) &&
      (!draw.options.worker || (engine.num_spec_tokens == 0 && engine.prefix_match_unit == 0));
  std::int64_t num_states = 0;
  const std::int64_t alignment = draw.choices.one_of<std::int64_t>({1, 1, 16, 4});
  for (KVCacheGroupSpec& group : groups) {
    if (!is_state_kind(group.spec.kind)) continue;
    ++num_states;
    if (!exports) continue;
    group.spec.num_prefill_checkpoint_blocks = 1;
    group.spec.prefill_checkpoint_alignment = alignment;
  }
  if (num_states == 0) return;
  std::int64_t spare = exports ? num_states : 0;
  if (draw.has(Feature::hits_inside_blocks) && groups.size() > 1 && engine.prefix_match_unit == 0) {
    engine.prefix_match_unit = engine.block_size / (engine.block_size % 2 == 0 ? 2 : 1);
    spare += 2 * num_states + 1;  // findings, 18: the pool is planned without them
  }
  const bool is_larger = set_num_blocks(saved, saved.cache.num_blocks + spare);
  LS_CHECK(is_larger, "a plan of broken pages");
}

// How the backend does its work: from captured graphs, and with real numbers. Nothing of it changes
// a decision.

namespace {

// Scales after rows must be at multiples of 4 bytes in every page.
bool has_no_real_rows(const SavedCase& saved, const KVCacheGroupSpec& group) {
  switch (group.spec.kv_quant_mode) {
    case KVQuantMode::none:
    case KVQuantMode::fp8_per_tensor:
    case KVQuantMode::nvfp4:
      return false;
    default:
      return group.spec.head_size % 4 != 0 ||
             std::ranges::any_of(saved.cache.tensors, [&](const KVCacheTensor& tensor) {
               return tensor.size_bytes / saved.cache.num_blocks % 4 != 0;
             });
  }
}

}  // namespace

void draw_device_modes(Draw& draw, SavedCase& saved) {
  if (draw.has(Feature::captured_graphs))
    saved.max_cudagraph_capture_size = draw.choices.one_of({8, 16, 64});
  const auto cannot = [&](const KVCacheGroupSpec& group) { return has_no_real_rows(saved, group); };
  if (!draw.has(Feature::real_numbers) || std::ranges::any_of(saved.cache.groups, cannot)) return;
  saved.numbers = Numbers::real;
}

// KV connectors of generated cases: peers that know prefixes of some prompts, or a host tier with a
// few blocks or many, quick or late transfers, and loads that fail; and several of them behind one.

namespace {

bool takes_connector(const Draw& draw, const SavedCase& saved) {
  RunTraits more = {RunTrait::connector, RunTrait::simulated_connector};
  more.add_if(draw.options.any_release_connects, RunTrait::other_engine);
  return takes(saved, more) && !saved.engine.async_scheduling &&
         resolve_block_sizes(beside_connector(saved.engine), saved.cache.groups).has_value();
}

void draw_host_tier(Draw& draw, SavedCase& saved) {
  saved.connector.num_host_blocks = draw.choices.one_of<std::int64_t>(
      {saved.cache.num_blocks, draw.choices.between(1, 8), 4 * saved.cache.num_blocks});
  saved.connector.delay_steps_max = draw.choices.one_of({3, 0, 1, 8});
}

}  // namespace

void draw_connector(Draw& draw, SavedCase& saved) {
  if (!takes_connector(draw, saved)) return;
  // A host tier finds blocks by their hashes.
  const bool is_host = draw.has(Feature::host_tier) && saved.engine.enable_prefix_caching;
  if (!is_host && !draw.has(Feature::connector_peers)) return;
  saved.connector.parts = {is_host ? ConnectorKind::host : ConnectorKind::peers};
  if (is_host) draw_host_tier(draw, saved);
  // vLLM assigns lost blocks of several groups to no request. Some loads succeed: a request that
  // never gets one would query forever.
  if (draw.has(Feature::failing_loads) && saved.cache.groups.size() == 1)
    saved.connector.load_failed_percent = draw.choices.one_of({20, 50, 80});
  if (draw.has(Feature::load_failure_fails))
    saved.connector.load_failure_policy = KVLoadFailurePolicy::fail;
  if (draw.has(Feature::faults) && draw.choices.chance(50))
    saved.faults.push_back(
        faults_of(FaultPlan({{.kind = FaultKind::abort_loading, .step = draw.choices.below(8)}}))
            .front());
}

void draw_further_connectors(Draw& draw, SavedCase& saved) {
  std::vector<ConnectorKind>& parts = saved.connector.parts;
  if (parts.empty() || !draw.has(Feature::several_connectors)) return;
  const bool takes_one_group = saved.cache.groups.size() == 1;
  for (std::int64_t more = draw.choices.between(1, 2); more > 0; --more) {
    const bool had_host = std::ranges::count(parts, ConnectorKind::host) > 0;
    ConnectorKind kind = ConnectorKind::peers;
    if (saved.engine.enable_prefix_caching && draw.choices.chance(60))
      kind = ConnectorKind::host;
    else if (takes_one_group && draw.choices.chance(30))
      kind = ConnectorKind::one_group_peers;
    if (kind == ConnectorKind::host && !had_host) draw_host_tier(draw, saved);
    parts.insert(parts.begin() + draw.choices.below(std::ssize(parts) + 1), kind);
  }
}

// With a backend a report of lost blocks is refused while a step is in flight: the engine continues
// after them (findings, 15).
void draw_async_connector(Draw& draw, SavedCase& saved) {
  if (saved.connector.parts.empty() || saved.connector.has(ConnectorKind::host)) return;
  if (!draw.has(Feature::async_connectors) || draw.options.worker) return;
  saved.engine.async_scheduling = true;
  // With a step in flight some releases plan more blocks for a window.
  const std::int64_t num_blocks = 1 + planned_blocks_of_request(saved.engine, saved.cache.groups);
  const bool is_planned = num_blocks <= saved.cache.num_blocks || set_num_blocks(saved, num_blocks);
  LS_CHECK(is_planned, "a plan of broken pages");
  if (saved.backend != "none") saved.connector.load_failed_percent = 0;
}

void draw_hashes(Draw& draw, SavedCase& saved) {
  if (!saved.engine.enable_prefix_caching || !draw.has(Feature::engine_hashes)) return;
  saved.engine.hash_algorithm =
      draw.choices.one_of({HashAlgorithm::sha256_cbor, HashAlgorithm::xxhash_cbor});
}

// With a step in flight the engine counts on all of them.
void draw_short_drafts(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::short_drafts) || saved.engine.async_scheduling ||
      saved.engine.spec_method != SpecMethod::ngram)
    return;
  saved.short_drafts_percent = draw.choices.one_of({30, 60, 90});
}

}  // namespace lockstep
