#include "reference/placement/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "reference/placement/cache_groups.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

// Runs the stages into `plan`; an Error ends the one that `plan.refused_stage` names.
Result<void> run_stages(const std::vector<PlacementLayer>& layers, bool is_bare,
                        const std::vector<WorkerShare>& workers, const PlacementOptions& options,
                        PlacementStages& plan) {
  plan.refused_stage = "options";
  if (options.mamba_cache_mode == MambaCacheMode::all)
    return fail("mamba_cache_mode all was removed; use align");
  plan.refused_stage = "specs";
  plan.layers = layers;
  for (const PlacementLayer& layer : layers)
    if (!layer.backend.empty() && find_cache_backend(layer.backend) == nullptr)
      return fail(fmt::format("layer {}: no backend {} is known", layer.name, layer.backend));
  plan.alignment = {options.block_size.value_or(16), options.max_model_len, {}, {}};
  if (!is_bare) {
    LS_ASSIGN_OR_RETURN(plan.alignment, align_blocks(layers, options));
    LS_ASSIGN_OR_RETURN(plan.layers, layers_with_specs(layers, *plan.alignment, options));
  }
  plan.refused_stage = "layout";
  std::vector<std::vector<CacheLayout>> declared;
  std::set<std::string> seen;
  NamedCacheSpecs specs;
  bool is_declared = false;
  for (const PlacementLayer& layer : plan.layers) {
    if (layer.spec) specs.emplace_back(layer.name, *layer.spec);
    const CacheBackend* backend = find_cache_backend(layer.backend);
    if (backend == nullptr || !seen.insert(layer.backend).second) continue;
    declared.push_back(declared_orders(*backend, options.device));
    is_declared |= !declared.back().empty();
  }
  LS_ASSIGN_OR_RETURN(plan.supported, supported_orders(declared));
  LS_ASSIGN_OR_RETURN(plan.order, choose_order(plan.supported, is_declared, specs, options.order,
                                               order_wish(plan.layers, options)));
  plan.refused_stage = "groups";
  LS_ASSIGN_OR_RETURN(plan.groups, cache_groups(specs, plan.order->order, options));
  plan.refused_stage = "plan";
  for (const PlacedGroup& group : plan.groups)
    for (const std::string& name : group.layer_names) {
      const KVCacheSpec& spec = group.layer_spec(name);
      LS_RETURN_IF_ERROR(check_page(name, spec));
      if (stride_alignment_bytes(spec) == 0)
        return fail(
            fmt::format("layer {}: kernel blocks of up to {} tokens do not hold one KV entry of "
                        "{} tokens; choose another --block-size",
                        name, spec.plan.stride_kernel_tokens, text_of(spec.tokens_per_state)));
    }
  LS_ASSIGN_OR_RETURN(plan.workers,
                      place_workers(plan.groups, plan.order->order, workers, options));
  plan.refused_stage = {};
  return {};
}

}  // namespace

std::optional<CacheLayout> order_wish(const std::vector<PlacementLayer>& layers,
                                      const PlacementOptions& options) {
  if (options.hisparse) return CacheLayout::BLHNC;
  if (options.connector == "OffloadingConnector") return CacheLayout::LBHNC;
  const bool has_mla = std::ranges::any_of(layers, [](const PlacementLayer& layer) {
    return layer.spec && is_full_of_latents(layer.spec->kind);
  });
  const bool is_remote =
      options.connector == "NixlConnector" || options.connector == "MooncakeConnector";
  if (is_remote && !has_mla) return CacheLayout::LBHNC;
  return std::nullopt;
}

PlacementStages plan_stages(const std::vector<PlacementLayer>& layers, bool is_bare,
                            const std::vector<WorkerShare>& workers,
                            const PlacementOptions& options) {
  PlacementStages plan;
  if (auto run = run_stages(layers, is_bare, workers, options, plan); !run)
    plan.refused = std::move(run).error();
  return plan;
}

}  // namespace lockstep
