#include "reference/memory/model_placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"
#include "reference/placement/cache_spec.h"
#include "reference/plan/grouping.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"

namespace lockstep {
namespace {

// The model's rings of keys that are not yet compressed; in V4 they are windows.
enum class RingsOf : std::uint8_t { nobody, deepseek_v41, glm_indexer };
RingsOf rings_of(const LayerSpecs& layers) {
  const auto any = [&](auto holds) {
    return std::ranges::any_of(layers, [&](const NamedSpec& layer) { return holds(layer.spec); });
  };
  if (!any([](const KVCacheSpec& spec) { return is_ring(spec); })) return RingsOf::nobody;
  const bool is_v41 = any([](const KVCacheSpec& spec) {
    return spec.model_version == "deepseek_v4" || (is_ring(spec) && spec.dcp_sharded);
  });
  return is_v41 ? RingsOf::deepseek_v41 : RingsOf::glm_indexer;
}

// The backend of a layer where that of the model's attention is `chosen`.
std::string backend_for(const NamedSpec& layer, AttentionBackend chosen, RingsOf rings) {
  const KVCacheSpec& spec = layer.spec;
  if (is_state_kind(spec.kind)) return "mamba2";  // backends of states ask for the same
  if (is_hidden_state(spec.kind)) return "cache_only";
  if (spec.model_version == "minimax_m3")
    return has_single_rows(spec) ? "indexer_m3" : "minimax_m3_sparse";
  if (has_single_rows(spec)) {
    const bool is_window = is_sliding_window(spec.kind);
    const bool is_v41 = rings == RingsOf::deepseek_v41;
    if (is_ring(spec)) return is_v41 ? "compressor_v41" : "kpool_tail";
    if (spec.model_version == "deepseek_v4") {
      if (is_window) return "sparse_swa";
      return is_v41 ? "v41_flashmla" : "v4_flashmla";
    }
    if (is_window) return "compressor_v4";
    if (is_v41) return "indexer_v41";
    if (shares_rows(spec.tokens_per_state))
      return rings == RingsOf::glm_indexer ? "indexer_kpool" : "indexer_v4";
    if (layer.name.ends_with("indexer")) return "indexer_v32";
    if (spec.cache_dtype_str == "fp8_ds_mla") return "flashmla_sparse";
    if (layer.index_topk > 0) return "flash_attn_mla_sparse";
  } else if (const auto reader = only_reader({layer})) {
    return std::string(name_of(*reader));
  } else if (spec.dtype == DType::fp8_e5m2 && chosen == AttentionBackend::flash_attn) {
    return "triton_attn";  // FlashAttention does not read e5m2 (flash_attn.py)
  }
  const auto backend = layer_backend(spec, chosen);
  LS_CHECK(backend.has_value(), "{} has no backend", layer.name);
  return std::string(name_of(*backend));
}

// What the model says of the layer.
Result<PlacementLayer> facts_of(const NamedSpec& named, const PlanOptions& options, RingsOf rings) {
  const KVCacheSpec& given = named.spec;
  if (keeps_nothing(given.kind) || keeps_pages(given.kind))
    return fail("{}: layers of kind {} are planned only from recordings", named.name,
                name_of(given.kind));
  PlacementLayer layer{.name = named.name, .spec = given, .backend = named.backend};
  if (layer.backend.empty()) layer.backend = backend_for(named, options.backend, rings);
  layer.is_unquantized = keeps_pairs(given) && given.dtype != options.kv_dtype;
  layer.fixed_block_size = given.block_size;
  KVCacheSpec& spec = *layer.spec;
  forget_plan(spec);
  spec.extra_retained_tokens = 0;
  spec.dcp_sharded = is_dealt_out(given);
  spec.plan.is_draft.value = named.is_draft;
  spec.head_size_v = keeps_pairs(given) ? head_size_v(given) : 0;
  if (is_hidden_state(given.kind))
    spec.plan.state_content_bytes = given.head_size * itemsize_bytes(given.dtype);
  return layer;
}

std::string format_name(const PlanOptions& options, const LayerSpecs& layers) {
  const auto in_bytes = std::ranges::find_if(layers, [](const NamedSpec& layer) {
    return layer.spec.cache_dtype_str.ends_with("_ds_mla");
  });
  if (in_bytes != layers.end()) return in_bytes->spec.cache_dtype_str;
  const KVQuantMode mode = options.kv_quant_mode;
  if (is_per_token_head(mode) || mode == KVQuantMode::nvfp4) return std::string(name_of(mode));
  switch (options.kv_dtype) {
    case DType::int8:
    case DType::fp8_e4m3:
      return "fp8";
    case DType::fp8_e5m2:
      return "fp8_e5m2";
    case DType::fp16:
      return "float16";
    default:
      return "auto";
  }
}

PlacementOptions placement_options(const PlanOptions& given, const LayerSpecs& layers,
                                   DType model_dtype, const std::string& order) {
  PlacementOptions options;
  static_cast<PlanOptions&>(options) = given;
  options.draft_dcp = given.dcp;
  options.format = format_name(given, layers);
  options.model_dtype = model_dtype;
  options.device = DeviceFamily::sm90;
  options.prefix_caching = given.mamba_cache_mode != MambaCacheMode::none;
  if (given.num_spec > 0) options.spec_method = "mtp";
  if (!order.empty() && order != "NHD") options.order = order;
  return options;
}

Result<std::vector<WorkerShare>> stages_of(const LayerSpecs& layers, const PlanOptions& options) {
  if (const std::int64_t count = num_layers(layers, options); options.pp > 1 && count < options.pp)
    return fail("--pp {}: the model has {} layers; use at most that", options.pp, count);
  const std::vector<std::int64_t> of_layers = layer_stages(layers, options);
  std::vector<WorkerShare> stages(static_cast<std::size_t>(options.pp),
                                  {.layer_names = {}, .memory_bytes = options.memory_bytes});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const NamedSpec& layer = layers[i];
    std::vector<std::string>& names = stages[static_cast<std::size_t>(of_layers[i])].layer_names;
    names.push_back(layer.name);
    if (options.host_pool_bytes == 0 || layer.index_topk == 0) continue;
    for (const std::string_view suffix : {kResidentSuffix, kHotSuffix})
      names.push_back(layer.name + std::string(suffix));
  }
  return stages;
}

// Sparse attention and its indexers, for host pages. Each layer with an indexer of its own leads.
void mark_sparse(const LayerSpecs& layers, std::vector<PlacementLayer>& facts) {
  std::set<std::optional<std::int64_t>> indexed;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    KVCacheSpec& spec = *facts[i].spec;
    spec.plan.is_indexer = facts[i].backend.starts_with("indexer");
    if (spec.plan.is_indexer) indexed.insert(layer_number(layers[i].name));
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].index_topk == 0) continue;
    facts[i].spec->plan.topk_buffer_width = layers[i].index_topk;
    facts[i].spec->plan.is_index_group_leader = indexed.contains(layer_number(layers[i].name));
  }
}

// `own` as the plan has it.
KVCacheSpec planned(KVCacheSpec own, const KVCacheSpec& spec) {
  own.block_size = spec.block_size;
  own.page_size_padded.reset();
  if (page_bytes(spec) != unpadded_page_bytes(spec)) own.page_size_padded = page_bytes(spec);
  own.block_stride_alignment = stride_alignment_bytes(spec);
  // Windows of V4 are rows of bytes only where the cache is; in 0.22.1 they always are.
  if (is_sliding_window(own.kind) && own.cache_dtype_str.empty()) own.model_version.clear();
  if (spec.kind == CacheKind::full_attention) {
    own.kind = spec.kind;
    settle_full_attention(own);
  }
  if (!is_state_kind(spec.kind)) {
    own.extra_retained_tokens = spec.extra_retained_tokens;
    own.dcp_sharded = spec.dcp_sharded;
    return own;
  }
  own.mamba_cache_mode = spec.mamba_cache_mode;
  own.num_speculative_blocks = spec.num_speculative_blocks;
  return own;
}

}  // namespace

Result<ModelPlacement> place_model(const LayerSpecs& layers, DType model_dtype,
                                   const PlanOptions& options, const std::string& order) {
  if (options.attn_pack > 1)
    return fail(
        "--attn-pack {}: a release whose groups overlay one allocation has no such packing; "
        "releases before vllm-0.33.0 do (--engine)",
        options.attn_pack);
  ModelPlacement model;
  model.options = placement_options(options, layers, model_dtype, order);
  std::vector<PlacementLayer> facts;
  const RingsOf rings = rings_of(layers);
  for (const NamedSpec& named : layers) {
    LS_ASSIGN_OR_RETURN(auto layer, facts_of(named, options, rings));
    facts.push_back(std::move(layer));
  }
  if (options.host_pool_bytes > 0) {
    if (std::ranges::all_of(layers, [](const NamedSpec& layer) { return layer.index_topk == 0; }))
      return fail("host pages: no layer of the model says index_topk, the rows that it chooses");
    mark_sparse(layers, facts);
  }
  LS_ASSIGN_OR_RETURN(const auto stages, stages_of(layers, options));
  model.stages = plan_stages(facts, false, stages, model.options);
  if (model.stages.workers.empty())
    return fail("refused by the engine core ({}): {}", model.stages.refused_stage,
                model.stages.refused.message);
  for (std::size_t w = 0; w < model.stages.workers.size(); ++w) {
    auto pages = worker_pages(model.stages.workers[w], model.stages.layers, model.options);
    if (!pages)
      return fail("the engine core accepts this plan, but the worker {}crashes: {}",
                  options.pp > 1 ? fmt::format("of stage {} ", w) : "", pages.error().message);
    model.pages.push_back(std::move(*pages));
  }
  return model;
}

Result<ModelPlacement> place_served_model(const ModelSpec& model, const PlanOptions& options,
                                          std::string_view release, const std::string& order,
                                          const LayerSpecs& extra) {
  LS_ASSIGN_OR_RETURN(LayerSpecs layers, layer_specs(model, options));
  const auto state_block = [&](const LayerSpecs& states) -> Result<std::int64_t> {
    LS_ASSIGN_OR_RETURN(const auto placed, place_model(states, model.dtype, options, order));
    return placed.stages.alignment->mamba_block_size;
  };
  LS_RETURN_IF_ERROR(take_served_checkpoints(release, model, options, layers, state_block));
  layers.insert(layers.end(), extra.begin(), extra.end());
  return place_model(layers, model.dtype, options, order);
}

Result<KVCacheConfig> replay_plan(const Placement& placement, const LayerSpecs& layers) {
  const auto own = [&](const std::string& name, const KVCacheSpec& spec) -> Result<KVCacheSpec> {
    const auto layer = std::ranges::find(layers, name, &NamedSpec::name);
    LS_CHECK(layer != layers.end(), "{} is no layer of the model", name);
    KVCacheSpec result = planned(layer->spec, spec);
    if (page_size_bytes(result) != page_bytes(spec))
      return fail(
          "{}: entries of {} would take pages of {} bytes, but the release has pages of {}; it has "
          "no such cache format",
          name, name_of(result.dtype), page_size_bytes(result), page_bytes(spec));
    return result;
  };
  KVCacheConfig plan;
  plan.num_blocks = placement.num_blocks;
  for (const KVCacheGroupSpec& placed : placement.groups) {
    KVCacheGroupSpec& group = plan.groups.emplace_back();
    group.layer_names = placed.layer_names;
    group.is_eagle_group = placed.is_eagle_group;
    group.role = placed.role;
    if (!has_layer_views(placed.spec.kind)) {  // host pages
      KVCacheSpec& spec = group.spec;
      spec.kind = placed.spec.kind;
      spec.block_size = placed.spec.block_size;
      spec.page_copy_bytes = page_bytes(placed.spec);
      spec.blocks_per_request = placed.spec.blocks_per_request;
      continue;
    }
    for (std::size_t i = 0; i < placed.layer_names.size(); ++i) {
      LS_ASSIGN_OR_RETURN(auto spec, own(placed.layer_names[i], placed.layer_spec(i)));
      group.layer_specs.push_back(std::move(spec));
    }
    LS_CHECK(!group.layer_specs.empty(), "a group without layers");
    group.spec = group.layer_specs.front();
    const bool is_alike = std::ranges::all_of(
        group.layer_specs, [&](const KVCacheSpec& spec) { return spec == group.spec; });
    if (!placed.is_uniform_type() || is_alike) group.layer_specs.clear();
  }
  return plan;
}

std::map<std::string, std::int64_t> mapped_kernel_blocks(const KVCacheConfig& plan,
                                                         AttentionBackend chosen) {
  std::map<std::string, std::int64_t> mapped;
  if (chosen == AttentionBackend::any_size) return mapped;
  const LayerSpecs layers = layers_of(plan.groups);
  const RingsOf rings = rings_of(layers);
  for (const NamedSpec& layer : layers) {
    if (!shares_rows(layer.spec.tokens_per_state) || !is_full_of_latents(layer.spec.kind)) continue;
    const CacheBackend* backend = find_cache_backend(backend_for(layer, chosen, rings));
    LS_CHECK(backend != nullptr, "{} has no backend", layer.name);
    const auto tokens = common_kernel_block(
        layer.spec.block_size, {kernel_sizes(*backend, DeviceFamily::sm90, layer.spec)});
    if (tokens && *tokens != layer.spec.block_size) mapped[layer.name] = *tokens;
  }
  return mapped;
}

bool has_unlike_pages(const KVCacheConfig& plan) {
  return by_page_size(layers_of(plan.groups), page_size_bytes).size() > 1;
}

}  // namespace lockstep
