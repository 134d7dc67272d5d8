#include "sim/setup/planned_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/number_text.h"
#include "reference/memory/model_placement.h"
#include "reference/plan/capacity.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "reference/plan/rank_plan.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"
#include "sim/session/session.h"
#include "sim/step/backend_config.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

KVCacheGroupSpec group_of(const RunSpec& run) {
  const RunRecipe& recipe = run.recipe;
  KVCacheGroupSpec group;
  const bool mla = recipe.attention == "mla";
  group.spec.kind = mla ? CacheKind::mla : CacheKind::full_attention;
  group.spec.block_size = run.engine.block_size;
  group.spec.num_kv_heads = recipe.kv_heads != 0 ? recipe.kv_heads : (mla ? 1 : 2);
  group.spec.head_size = recipe.head_size;
  const ElementType type = *element_type_from_name(recipe.dtype);
  group.spec.dtype = type.dtype;
  group.spec.kv_quant_mode = type.mode;
  for (int i = 0; i < recipe.layers; ++i) group.layer_names.push_back(fmt::format("layers.{}", i));
  return group;
}

// Scales of K and of V rows need both.
Result<void> check_scales(const std::string& dtype, const KVCacheSpec& spec) {
  if (element_type_from_name(dtype)->mode == KVQuantMode::none || !has_single_rows(spec)) return {};
  return fail(
      "--dtype: {} has a scale for each K and each V row, and mla keeps one row for both; choose "
      "int8 or fp8_e4m3",
      dtype);
}

constexpr std::int64_t kAnyNumber = std::int64_t{1} << 30;

// A pool in which one request fits and two do not.
std::int64_t one_and_a_half(std::int64_t blocks_per_request, std::vector<std::string>& chosen) {
  const std::int64_t num_blocks = 1 + blocks_per_request + (blocks_per_request + 1) / 2;
  chosen.push_back(
      fmt::format("{} blocks, 1.5 times the longest request", with_commas(num_blocks)));
  return num_blocks;
}

// Such a pool for `groups` and requests of max_model_len.
std::int64_t tight_pool(const std::vector<KVCacheGroupSpec>& groups, const EngineConfig& engine,
                        std::vector<std::string>& chosen) {
  PlanOptions options{.max_model_len = engine.max_model_len,
                      .max_num_batched_tokens = engine.max_num_batched_tokens};
  options.max_num_encoder_input_tokens = max_encoder_rows(engine);
  std::int64_t blocks = num_sink_blocks(groups);
  for (const KVCacheGroupSpec& group : groups) blocks += max_blocks_per_request(group, options);
  return one_and_a_half(blocks, chosen);
}

// The layers of a model with states and prefix caching, and options.mamba_cache_mode.
Result<LayerSpecs> state_layers(const RunSpec& run, const ModelSpec& model,
                                const CacheWishes& wishes, PlanOptions& options,
                                std::vector<std::string>& chosen,
                                std::vector<ServedOption>& served) {
  MambaCacheMode by_default = MambaCacheMode::align;
  if (wishes.as_served) by_default = served_cache_mode(run.engine, model);
  options.mamba_cache_mode = wishes.says_cache_mode ? run.engine.mamba_cache_mode : by_default;
  LS_ASSIGN_OR_RETURN(LayerSpecs layers, layer_specs(model, options));
  if (!wishes.as_served) {
    chosen.push_back("states are kept in mode align, which prefix caching needs");
    return layers;
  }
  served.push_back({.name = "mamba_cache_mode",
                    .value = std::string(name_of(options.mamba_cache_mode)),
                    .by_default = std::string(name_of(by_default)),
                    .said_by = wishes.says_cache_mode ? "command line" : "release"});
  LayerSpecs exporting = layers;
  LS_RETURN_IF_ERROR(take_served_checkpoints(run.engine.engine, model, options, exporting));
  std::int64_t every = 0;  // tokens between states that prefills export; 0: none
  for (const NamedSpec& layer : exporting)
    every = std::max(every, layer.spec.prefill_checkpoint_alignment);
  const bool exports = run.recipe.prefill_checkpoints;
  served.push_back({.name = "prefill_checkpoint_alignment",
                    .value = fmt::format("{}", exports ? every : 0),
                    .by_default = fmt::format("{}", every),
                    .said_by = exports ? "release" : "command line"});
  return exports ? exporting : layers;
}

// The plan of the whole model: that of a rank has the groups and block sizes.
Result<KVCacheConfig> of_whole_model(const KVCacheConfig& rank, const ModelSpec& model,
                                     const LayerSpecs& layers, PlanOptions options) {
  const auto tp_size = static_cast<std::int32_t>(options.tp);
  options.tp = 1;
  LS_ASSIGN_OR_RETURN(auto whole, layer_specs(model, options));
  for (std::size_t i = 0; i < whole.size(); ++i) {
    whole[i].spec.num_prefill_checkpoint_blocks = layers[i].spec.num_prefill_checkpoint_blocks;
    whole[i].spec.prefill_checkpoint_alignment = layers[i].spec.prefill_checkpoint_alignment;
  }
  return whole_plan(rank, whole, tp_size);
}

// Of each group the first layers of each spec, as many as run.recipe says. A drafter's stay: its
// passes need all of them.
void keep_layers(const RunSpec& run, KVCacheConfig& plan, std::vector<std::string>& chosen) {
  const std::int64_t count = run.recipe.layers_per_group;
  if (count == 0) return;
  std::set<std::string> kept;
  std::size_t all = 0;
  for (const auto& module : plan.draft_modules) kept.insert(module.begin(), module.end());
  for (KVCacheGroupSpec& group : plan.groups) {
    all += group.layer_names.size();
    std::vector<std::string> names;
    std::vector<KVCacheSpec> specs;
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      const bool is_first = group.is_uniform_type()
                                ? std::ranges::count(specs, group.layer_specs[i]) < count
                                : std::ssize(names) < count * group.layers_per_page;
      if (!is_first && !kept.contains(group.layer_names[i])) continue;
      names.push_back(group.layer_names[i]);
      if (group.is_uniform_type()) specs.push_back(group.layer_specs[i]);
    }
    kept.insert(names.begin(), names.end());
    group.layer_names = std::move(names);
    group.layer_specs = std::move(specs);
  }
  for (KVCacheTensor& tensor : plan.tensors)
    std::erase_if(tensor.shared_by,
                  [&](const std::string& layer) { return !kept.contains(layer); });
  std::erase_if(plan.tensors, [](const KVCacheTensor& tensor) { return tensor.shared_by.empty(); });
  chosen.push_back(fmt::format("{} of {} layers have pages: {} of each group and spec", kept.size(),
                               all, count));
}

// As releases before the overlaid memory plan: a tensor for each place in a group.
Result<KVCacheConfig> plan_tensors(RunSpec& run, const CacheWishes& wishes, const ModelSpec& model,
                                   const LayerSpecs& layers, PlanOptions options,
                                   std::vector<std::string>& chosen) {
  const auto pool_size = [&](const std::vector<KVCacheGroupSpec>& groups) {
    return wishes.num_blocks ? *wishes.num_blocks : tight_pool(groups, run.engine, chosen);
  };
  LS_ASSIGN_OR_RETURN(const TensorPlan plan, plan_memory(layers, options, pool_size));
  run.engine.block_size = static_cast<std::int32_t>(plan.aligned.block_size);
  run.engine.mamba_block_size =
      static_cast<std::int32_t>(plan.aligned.mamba_block_size.value_or(0));
  // Prefills that end at whole blocks need a whole block per step (vllm/config/vllm.py of 0.22.1).
  const bool ends_at_blocks = options.mamba_cache_mode == MambaCacheMode::align &&
                              find_engine_profile(run.engine.engine)->state_chunks <=
                                  StateChunks::whole_blocks_and_shared_prefixes;
  std::int32_t longest = run.engine.max_num_batched_tokens;
  if (const auto threshold = run.engine.long_prefill_token_threshold; threshold > 0)
    longest = std::min(longest, threshold);
  if (ends_at_blocks && longest < run.engine.mamba_block_size)
    return fail(
        "--max-num-batched-tokens or --long-prefill-token-threshold {}: prefills of {} end at "
        "whole blocks of {} tokens in mode align; use at least that",
        longest, run.engine.engine, run.engine.mamba_block_size);
  LS_ASSIGN_OR_RETURN(auto whole, of_whole_model(plan.workers.front(), model, layers, options));
  keep_layers(run, whole, chosen);
  return whole;
}

// The drafter's layers by its modules, each of which has a layer of the model's numbers.
std::vector<std::vector<std::string>> draft_modules_of(const LayerSpecs& layers,
                                                       std::int64_t mtp_modules) {
  std::vector<std::vector<std::string>> modules;
  std::string last;
  for (const NamedSpec& layer : layers) {
    if (!layer.is_draft) continue;
    const std::string number = layer.name.substr(0, layer.name.find('.', layer.name.find('.') + 1));
    if (modules.empty() || (number != last && std::ssize(modules) < mtp_modules))
      modules.emplace_back();
    modules.back().push_back(layer.name);
    last = number;
  }
  return modules;
}

// Every stage of the release's own planner. Absent: a cache whose memory is not modelled, with no
// layout requested.
Result<std::optional<KVCacheConfig>> plan_overlaid(RunSpec& run, const CacheWishes& wishes,
                                                   const ModelSpec& model, const LayerSpecs& layers,
                                                   PlanOptions options,
                                                   std::vector<std::string>& chosen) {
  const auto unless_asked = [&](const Error& error) -> Result<std::optional<KVCacheConfig>> {
    if (!is_overlaid(run.layout)) return std::optional<KVCacheConfig>();
    return fail(error.message);
  };
  const std::string order(name_of(run.layout));
  const AttentionBackend backend = only_reader(layers).value_or(run.attention_backend);
  options.num_gpu_blocks_override = wishes.num_blocks.value_or(kAnyNumber);
  LS_ASSIGN_OR_RETURN(const ModelPlacement placed,
                      place_model(layers, model.dtype, options, order));
  Placement placement = placed.stages.workers.front();
  std::vector<std::string> told;
  if (!wishes.num_blocks) {
    LS_ASSIGN_OR_RETURN(const std::int64_t blocks,
                        blocks_per_request(placement.groups, placed.options));
    const std::int64_t num_blocks =
        one_and_a_half(blocks, told) + num_sink_blocks(placement.groups);
    LS_ASSIGN_OR_RETURN(
        placement, place_blocks(placement.groups, placement.order, num_blocks, placed.options));
  }
  auto plan = replay_plan(placement, layers);
  if (!plan) return unless_asked(plan.error());
  if (run.tensor_parallel_size * run.pipeline_parallel_size > 1 && has_unlike_pages(*plan))
    return fail(
        "--layout {}: pages of different sizes are adjacent in a block, which ranks cannot shard; "
        "choose LBNHC",
        order);
  const bool has_pages = options.host_pool_bytes > 0;
  if (!has_pages) {
    LS_ASSIGN_OR_RETURN(plan, of_whole_model(*plan, model, layers, options));
  }
  plan->draft_modules = draft_modules_of(layers, model.mtp_modules);
  keep_layers(run, *plan, chosen);
  const CacheLayout layout = placement.order;
  if (placement.host) run.engine.host_pool_num_blocks = placement.host->num_blocks;
  const auto in_memory = placed_layout(*plan, backend, layout);
  if (!in_memory && !has_pages) return unless_asked(in_memory.error());
  run.layout = layout;
  run.attention_backend = backend;
  run.engine.block_size = static_cast<std::int32_t>(cache_config_block(placement));
  const bool is_aligned = options.mamba_cache_mode == MambaCacheMode::align;
  run.engine.mamba_block_size =
      is_aligned ? static_cast<std::int32_t>(placed.stages.alignment->mamba_block_size) : 0;
  const std::string_view by = placed.stages.order->by;
  told.push_back(fmt::format("cache layout {}, chosen by {}", name_of(layout),
                             by == "option"    ? "--layout"
                             : by == "default" ? "the engine"
                                               : by));
  chosen.insert(chosen.end(), told.begin(), told.end());
  if (in_memory) return std::optional(with_placed_tensors(std::move(*plan), *in_memory));
  run.layout = CacheLayout::NHD;  // pages that are decided, and lie nowhere
  LS_ASSIGN_OR_RETURN(plan, plan_for_groups(std::move(plan->groups), plan->num_blocks));
  return std::optional(std::move(*plan));
}

// Options that vLLM disables with some kinds of layers (vllm/config/vllm.py, vllm/config/model.py,
// model_executor/models/config.py).
void serve_kinds(const LayerSpecs& layers, const CacheWishes& wishes, EngineConfig& engine,
                 std::vector<std::string>& chosen) {
  const auto has = [&](auto is) {
    return std::ranges::any_of(layers, [&](const NamedSpec& layer) { return is(layer.spec); });
  };
  const bool has_cross = has([](const KVCacheSpec& spec) { return is_cross_attention(spec); });
  if (engine.enable_prefix_caching && has(is_served_uncached)) {
    engine.enable_prefix_caching = false;
    chosen.push_back("no prefix caching, as the engine serves cross attention and R-SWA");
  }
  const bool wants_states =
      wishes.says_cache_mode && engine.mamba_cache_mode != MambaCacheMode::none;
  if (engine.enable_prefix_caching && wishes.as_served && !wants_states && has_states(layers) &&
      !is_hybrid(layers)) {
    engine.enable_prefix_caching = false;
    chosen.push_back(
        "no prefix caching, as the engine serves models without attention; --mamba-cache-mode "
        "align switches it on");
  }
  if (!engine.enable_prefix_caching && wants_states && has_states(layers))
    chosen.push_back(
        fmt::format("states are kept in mode none, not {}, as the engine does without prefix "
                    "caching",
                    name_of(engine.mamba_cache_mode)));
  if (engine.enable_chunked_prefill && has_cross) {
    engine.enable_chunked_prefill = false;
    chosen.push_back("no chunked prefill, as the engine serves cross attention");
  }
}

Result<KVCacheConfig> plan_model(RunSpec& run, const CacheWishes& wishes,
                                 std::vector<std::string>& chosen,
                                 std::vector<ServedOption>& served) {
  EngineConfig& engine = run.engine;
  LS_ASSIGN_OR_RETURN(const auto model, find_model(run.recipe.model));
  if (model.layers.empty())
    return fail("--model {}: an encoder; its layers keep no cache", model.name);
  for (const std::string& assumption : model.assumptions)
    chosen.push_back("assumed from the config.json: " + assumption);
  if (!model.kv_cache_dtype.empty())
    chosen.push_back(fmt::format("cache dtype {}, from --dtype; the checkpoint asks for {}",
                                 run.recipe.dtype, model.kv_cache_dtype));
  if (overlays_memory(run) && wishes.says_cache_mode &&
      engine.mamba_cache_mode == MambaCacheMode::all)
    return fail("--mamba-cache-mode all was removed; use align");
  PlanOptions options;
  options.backend = run.attention_backend;
  const ElementType type = *element_type_from_name(run.recipe.dtype);
  options.kv_dtype = type.dtype;
  options.kv_quant_mode = type.mode;
  options.max_model_len = engine.max_model_len;
  options.max_num_batched_tokens = engine.max_num_batched_tokens;
  options.mamba_chunk_size = model.mamba_chunk_size;
  options.tp = run.tensor_parallel_size;
  options.dcp = engine.dcp;
  options.pcp = engine.pcp;
  options.num_spec = engine.num_spec_tokens;
  options.overlays_groups = overlays_memory(run);
  options.async_scheduling = options.overlays_groups && engine.async_scheduling;
  options.has_drafter = engine.spec_method == SpecMethod::eagle && overlays_memory(run);
  options.mtp_modules = model.mtp_modules;
  // Of several modules each reads a token further ahead than the one before it.
  if (options.has_drafter &&
      std::min<std::int64_t>(model.mtp_modules, engine.num_spec_tokens) > 1) {
    engine.num_prefill_lookahead_tokens = engine.num_spec_tokens;
    chosen.push_back(fmt::format("{} modules of MTP read {} tokens after a chunk",
                                 model.mtp_modules, engine.num_spec_tokens));
  }
  options.disable_hybrid_kv_cache_manager = !wishes.hybrid_groups;
  if (wishes.says_block_size) options.block_size = engine.block_size;
  options.max_num_encoder_input_tokens = max_encoder_rows(engine);
  options.host_pool_bytes = std::int64_t{run.recipe.hisparse_host_gib} << 30;
  if (run.recipe.hisparse_device_buffer > 0)
    options.device_buffer_rows = run.recipe.hisparse_device_buffer;
  if (options.host_pool_bytes > 0 && !overlays_memory(run))
    return fail(
        "--hisparse-host-gib: {} with this backend has no HiSparse; it needs a release whose "
        "groups overlay one allocation",
        engine.engine);
  LS_ASSIGN_OR_RETURN(LayerSpecs layers, layer_specs(model, options));
  serve_kinds(layers, wishes, engine, chosen);
  for (const NamedSpec& layer : layers)
    LS_RETURN_IF_ERROR(check_scales(run.recipe.dtype, layer.spec));
  if (has_states(layers) && engine.enable_prefix_caching) {
    LS_ASSIGN_OR_RETURN(layers, state_layers(run, model, wishes, options, chosen, served));
  }
  if (!wishes.hybrid_groups)
    chosen.push_back("one KV cache group for all layers, as without the hybrid KV cache manager");
  engine.mamba_cache_mode = options.mamba_cache_mode;
  if (overlays_memory(run)) {
    LS_ASSIGN_OR_RETURN(auto plan, plan_overlaid(run, wishes, model, layers, options, chosen));
    if (plan) return std::move(*plan);
  }
  if (const std::int64_t drafts = num_draft_layers(model);
      drafts > 0 && engine.num_spec_tokens > 0 && !options.has_drafter)
    chosen.push_back(fmt::format("the plan of {}: the draft model's layers are left out ({})",
                                 kPlannerOfTensors, drafts));
  return plan_tensors(run, wishes, model, layers, options, chosen);
}

}  // namespace

Result<KVCacheConfig> plan_replay_cache(RunSpec& run, const CacheWishes& wishes,
                                        std::vector<std::string>& chosen,
                                        std::vector<ServedOption>& served) {
  if (!run.recipe.model.empty()) return plan_model(run, wishes, chosen, served);
  std::vector<KVCacheGroupSpec> groups = {group_of(run)};
  LS_RETURN_IF_ERROR(check_scales(run.recipe.dtype, groups.front().spec));
  const std::int64_t num_blocks =
      wishes.num_blocks ? *wishes.num_blocks : tight_pool(groups, run.engine, chosen);
  return plan_for_groups(std::move(groups), num_blocks);
}

}  // namespace lockstep
