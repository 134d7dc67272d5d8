// Options of the engine, ranks, backend modes and KV connectors. Combinations that an engine
// refuses at start are never generated.
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
  // The newest release, or the oldest that is modelled with connectors.
  const std::string* const engines[] = {&engine_profiles().back().name, &connector_profile().name};
  engine.engine = *engines[choices.below(std::ssize(engines))];
  if (!draw.options.engine.empty()) engine.engine = draw.options.engine;
  engine.block_size =
      static_cast<std::int32_t>(draw.runs_kernels() ? 16 : choices.one_of({4, 2, 4, 8, 16, 3}));
  // max_model_len is block_size + 1 to 5 blocks, or to 11 with long prompts: several blocks, so
  // that tables grow, and few enough for a tight pool.
  const std::int64_t blocks_max = draw.has(Feature::long_prompts) ? 10 : 4;
  engine.max_model_len = static_cast<std::int32_t>(
      engine.block_size + choices.between(1, blocks_max * engine.block_size));
  // One request then needs exactly one block, besides the null block.
  if (draw.has(Feature::two_block_pool)) engine.max_model_len = engine.block_size;
  // SGLang refuses prompts that are not several tokens shorter: managers/scheduler.py,
  // max_req_input_len.
  if (draw.options.one_pool_per_kind) engine.max_model_len += 8;
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
  // A worker may not have drafts with a step in flight.
  if (draw.options.worker && !draw.options.worker->drafts_in_flight && engine.num_spec_tokens > 0)
    engine.async_scheduling = false;
  engine.scheduler_reserve_full_isl = draw.as_served(Feature::no_full_isl_reserve)
                                          ? defaults.scheduler_reserve_full_isl
                                          : !draw.has(Feature::no_full_isl_reserve);
}

// Generates context parallel ranks for one group of full attention. Releases differ in how the
// ranks share other groups, and the audit follows one group.
void draw_ranks(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine) {
  if (!draw.has(Feature::context_parallel) || draw.has(Feature::two_block_pool)) return;
  const CacheKind kind = groups.front().spec.kind;
  if (groups.size() > 1 || !attends_to_all(kind)) return;
  engine.dcp = draw.choices.one_of({2, 2, 3, 4, 1});
  engine.pcp = draw.choices.one_of({1, 1, 2});
}

void fit_engine(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine) {
  ChoiceSource& choices = draw.choices;
  // Every request needs its decode token and its drafts, and a chunk must be able to reach the next
  // state boundary. A budget below that lets a request wait forever.
  std::int64_t least = engine.max_num_seqs * (1 + engine.num_spec_tokens) + 1;
  std::int64_t scheduler_block = 1;
  for (const KVCacheGroupSpec& group : groups) {
    scheduler_block = std::max(scheduler_block, group.spec.block_size);
    if (engine.mamba_cache_mode == MambaCacheMode::align && is_state_kind(group.spec.kind))
      least = std::max(least, group.spec.block_size + engine.max_num_seqs);
  }
  engine.enable_chunked_prefill =
      !draw.has(Feature::no_chunked_prefill) || draw.as_served(Feature::no_chunked_prefill);
  // SGLang 0.5.23 cuts a chunk to whole pages (srt/managers/schedule_policy.py,
  // _select_prefill_admission()), so a budget below one block would schedule nothing.
  if (draw.options.one_pool_per_kind) least = std::max(least, scheduler_block);
  // vLLM 0.33.0 refuses a smaller budget without chunked prefill: config/scheduler.py,
  // verify_max_model_len().
  if (!engine.enable_chunked_prefill)
    least = std::max<std::int64_t>(least, engine.max_model_len + engine.max_num_seqs);
  engine.max_num_batched_tokens = static_cast<std::int32_t>(least + choices.one_of({0, 3, 16, 64}));
  if (draw.has(Feature::long_prefill_threshold)) {
    // In mode align a chunk below one block cannot end at a block boundary, so the threshold is at
    // least one block. vLLM also refuses a threshold above max_model_len (verify_max_model_len()).
    const std::int64_t low = engine.mamba_cache_mode == MambaCacheMode::align ? scheduler_block : 1;
    engine.long_prefill_token_threshold = static_cast<std::int32_t>(
        std::min<std::int64_t>(low + choices.below(16), engine.max_model_len));
  }
  draw_ranks(draw, groups, engine);
  // The interval must be a multiple of the scheduler's block. 0 retains only the states and windows
  // where a prompt or a shared prefix ends (vLLM 0.33.0, config/cache.py).
  if (draw.as_served(Feature::sparse_retention))
    engine.prefix_cache_retention_interval =
        serving_defaults(engine).prefix_cache_retention_interval;
  else if (engine_profile(engine.engine).retains_sparsely && draw.has(Feature::sparse_retention) &&
           engine.enable_prefix_caching)
    engine.prefix_cache_retention_interval =
        static_cast<std::int32_t>(choices.below(4) * scheduler_block);
}

// Ranks of every kind, few of each: more ranks only cost time.

// Plans the groups again after their heads and states have changed. Pages of all groups are padded
// to the largest. False: there is no such plan, and `saved` is unchanged.
static bool plan_with(SavedCase& saved, std::vector<KVCacheGroupSpec> groups) {
  for (KVCacheGroupSpec& group : groups) group.spec.page_size_padded.reset();
  auto plan = plan_for_groups(std::move(groups), saved.cache.num_blocks);
  if (!plan) return false;
  saved.cache = std::move(*plan);
  return true;
}

// Generates tensor parallelism. Cut: heads and channels are multiples of tp. Replicated: a model
// has fewer KV heads than ranks, so tp / heads ranks store the same head (1 or 2 heads for tp 4).
static void draw_tensor_parallel(Draw& draw, SavedCase& saved) {
  const std::int32_t tp = draw.choices.one_of({2, 2, 4});
  const bool replicated = draw.has(Feature::replicated_heads);
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  for (KVCacheGroupSpec& group : groups) {
    KVCacheSpec& spec = group.spec;
    // MLA rows and hidden states have no heads to cut; every rank stores them.
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

void draw_ranks(Draw& draw, SavedCase& saved) {
  if (draw.runs_kernels() && std::ranges::none_of(saved.cache.groups, has_pages_of_its_own)) {
    if (draw.has(Feature::tensor_parallel)) draw_tensor_parallel(draw, saved);
    if (draw.has(Feature::pipeline_parallel)) saved.pipeline_parallel_size = 2;
  }
  if (!draw.has(Feature::data_parallel)) return;
  saved.data_parallel_size = static_cast<std::int32_t>(draw.choices.between(2, 3));
  // With eager execution the data parallel ranks agree on no captured graph.
  saved.enforce_eager = draw.choices.below(2) != 0;
}

// Generates prefill checkpoints and hits inside blocks. In an engine no option enables them; the
// kernels of its state layers do.
void draw_states_as_served(Draw& draw, SavedCase& saved) {
  EngineConfig& engine = saved.engine;
  if (!release_takes(engine, {RunTrait::checkpoints}) || !engine.enable_prefix_caching ||
      engine.mamba_cache_mode != MambaCacheMode::align)
    return;
  std::vector<KVCacheGroupSpec>& groups = saved.cache.groups;
  // A worker exports no states with drafts, or where a state block spans several attention blocks:
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
  // Each group needs one more block for a checkpoint.
  const std::int64_t spare = exports ? num_states : 0;
  const bool is_larger = set_num_blocks(saved, saved.cache.num_blocks + spare);
  LS_CHECK(is_larger, "a plan of broken pages");
  if (draw.has(Feature::hits_inside_blocks)) set_match_unit(saved);
}

static bool is_group_of_states(const KVCacheGroupSpec& group) {
  return is_state_kind(group.spec.kind);
}

void set_match_unit(SavedCase& saved) {
  EngineConfig& engine = saved.engine;
  const auto num_states = std::ranges::count_if(saved.cache.groups, is_group_of_states);
  if (num_states == 0 || saved.cache.groups.size() == 1 || !engine.enable_prefix_caching ||
      engine.prefix_match_unit != 0)
    return;
  // An odd block has no half: the unit is then the block itself.
  engine.prefix_match_unit = engine.block_size / (engine.block_size % 2 == 0 ? 2 : 1);
  // docs/findings.md, 18: the engine plans the pool without them, and a request could wait forever
  const bool is_larger = set_num_blocks(saved, saved.cache.num_blocks + 2 * num_states + 1);
  LS_CHECK(is_larger, "a plan of broken pages");
}

void tighten_encoder_pool(Draw& draw, SavedCase& saved) {
  if (!has_cross_attention(saved.cache.groups) || draw.options.never.has(Feature::same_instant))
    return;
  const bool is_planned =
      set_num_blocks(saved, 1 + planned_blocks_of_request(saved.engine, saved.cache.groups));
  LS_CHECK(is_planned, "a plan of broken pages");
  // Requests that arrive within a step compete for the pool; some then arrive at once.
  for (TraceRecord& record : saved.trace.records)
    if (std::int64_t* t_ns = time_of(record)) *t_ns /= 64;
}

// Backend modes: captured graphs and real numbers. They never change a decision, so one case may
// run in all of them.

// Returns true if the group's rows cannot hold real numbers. Scales after the rows are 4-byte
// floats and must be aligned in every page.
static bool has_no_real_rows(const SavedCase& saved, const KVCacheGroupSpec& group) {
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

void draw_device_modes(Draw& draw, SavedCase& saved) {
  if (draw.has(Feature::captured_graphs))
    saved.max_cudagraph_capture_size = draw.choices.one_of({8, 16, 64});
  const auto cannot = [&](const KVCacheGroupSpec& group) { return has_no_real_rows(saved, group); };
  if (!draw.has(Feature::real_numbers) || std::ranges::any_of(saved.cache.groups, cannot)) return;
  saved.numbers = Numbers::real;
}

// KV connectors of generated cases: peers that have prefixes of some prompts, a host tier with few
// or many blocks, fast or late transfers, loads that fail, and several connectors behind one.

// Returns true if the case may have a simulated connector. A step in flight is added later, by
// draw_async_connector().
static bool takes_connector(const Draw& draw, const SavedCase& saved) {
  RunTraits more = {RunTrait::connector, RunTrait::simulated_connector};
  more.add_if(draw.options.any_release_connects, RunTrait::other_engine);
  return takes(saved, more) && !saved.engine.async_scheduling &&
         resolve_block_sizes(beside_connector(saved.engine), saved.cache.groups).has_value();
}

// Sizes the host tier: as large as the pool, so small that it evicts at once, or with room for
// everything.
static void draw_host_tier(Draw& draw, SavedCase& saved) {
  saved.connector.num_host_blocks = draw.choices.one_of<std::int64_t>(
      {saved.cache.num_blocks, draw.choices.between(1, 8), 4 * saved.cache.num_blocks});
  saved.connector.delay_steps_max = draw.choices.one_of({3, 0, 1, 8});
}

void draw_connector(Draw& draw, SavedCase& saved) {
  if (!takes_connector(draw, saved)) return;
  // A host tier finds blocks by their hashes, which exist only with prefix caching.
  const bool is_host = draw.has(Feature::host_tier) && saved.engine.enable_prefix_caching;
  if (!is_host && !draw.has(Feature::connector_peers)) return;
  saved.connector.parts = {is_host ? ConnectorKind::host : ConnectorKind::peers};
  if (is_host) draw_host_tier(draw, saved);
  // vLLM 0.33.0 unpacks the block ids of one group: v1/core/sched/scheduler.py,
  // _update_requests_with_invalid_blocks(). With several groups the engine would raise. Below 100
  // percent some loads succeed; a request whose loads all fail would query forever.
  if (draw.has(Feature::failing_loads) && saved.cache.groups.size() == 1)
    saved.connector.load_failed_percent = draw.choices.one_of({20, 50, 80});
  if (draw.has(Feature::load_failure_fails))
    saved.connector.load_failure_policy = KVLoadFailurePolicy::fail;
  draw_aborted_load(draw, saved);
}

void draw_aborted_load(Draw& draw, SavedCase& saved) {
  if (draw.has(Feature::faults) && draw.choices.chance(50))
    saved.faults.push_back(
        faults_of(FaultPlan({{.kind = FaultKind::abort_loading, .step = draw.choices.below(8)}}))
            .front());
}

void draw_further_connectors(Draw& draw, SavedCase& saved) {
  std::vector<ConnectorKind>& parts = saved.connector.parts;
  if (parts.empty() || !draw.has(Feature::several_connectors)) return;
  // A connector without support for hybrid groups can serve only a case of one group.
  const bool takes_one_group = saved.cache.groups.size() == 1;
  for (std::int64_t more = draw.choices.between(1, 2); more > 0; --more) {
    const bool had_host = std::ranges::count(parts, ConnectorKind::host) > 0;
    ConnectorKind kind = ConnectorKind::peers;
    if (saved.engine.enable_prefix_caching && draw.choices.chance(60))
      kind = ConnectorKind::host;
    else if (takes_one_group && draw.choices.chance(30))
      kind = ConnectorKind::one_group_peers;
    // All host tiers of a case have the size and the delay of the first one.
    if (kind == ConnectorKind::host && !had_host) draw_host_tier(draw, saved);
    parts.insert(parts.begin() + draw.choices.below(std::ssize(parts) + 1), kind);
  }
}

// Puts a step in flight into a case with a connector. With a backend, no load fails: the engine
// continues a step after lost blocks (docs/findings.md, 15), which the memory comparison would
// report.
void draw_async_connector(Draw& draw, SavedCase& saved) {
  if (saved.connector.parts.empty() || saved.connector.has(ConnectorKind::host)) return;
  if (!draw.has(Feature::async_connectors) || draw.options.worker) return;
  saved.engine.async_scheduling = true;
  // Some releases plan a window's blocks with the tokens of every concurrent batch.
  const std::int64_t num_blocks = 1 + planned_blocks_of_request(saved.engine, saved.cache.groups);
  const bool is_planned = num_blocks <= saved.cache.num_blocks || set_num_blocks(saved, num_blocks);
  LS_CHECK(is_planned, "a plan of broken pages");
  if (saved.backend != "none") saved.connector.load_failed_percent = 0;
}

// The algorithm replaces content hashes only where hashes exist at all.
void draw_hashes(Draw& draw, SavedCase& saved) {
  if (!saved.engine.enable_prefix_caching || !draw.has(Feature::engine_hashes)) return;
  saved.engine.hash_algorithm =
      draw.choices.one_of({HashAlgorithm::sha256_cbor, HashAlgorithm::xxhash_cbor});
}

// Lets the n-gram speculator propose fewer drafts. With a step in flight the scheduler reserves all
// drafts before it receives them, so the option would not apply.
void draw_short_drafts(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::short_drafts) || saved.engine.async_scheduling ||
      saved.engine.spec_method != SpecMethod::ngram)
    return;
  saved.short_drafts_percent = draw.choices.one_of({30, 60, 90});
}

}  // namespace lockstep
