#include "reference/placement/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "reference/plan/capacity.h"
#include "reference/plan/grouping.h"
#include "reference/plan/limits.h"

namespace lockstep {
namespace {

// The stride of blocks where layers lie outermost: the page up to its own alignment.
std::int64_t layer_block_stride(const KVCacheSpec& spec) {
  return round_up(page_bytes(spec), stride_alignment_bytes(spec));
}

Result<void> check_order(const std::vector<KVCacheGroupSpec>& groups, CacheLayout order) {
  std::set<std::int64_t> pages;
  for (const NamedSpec& layer : layers_of(groups)) pages.insert(page_bytes(layer.spec));
  if (pages.size() <= 1) return {};
  if (is_block_compact(order) && (groups.size() == 1 || is_block_outermost(order))) return {};
  return fail(
      "layout {} cannot hold pages of {} and {} bytes; choose a layout with blocks outermost, "
      "BLHNC",
      name_of(order), *pages.begin(), *pages.rbegin());
}

// Layers that the group keeps a spec for are planned even where the worker has none of the group's
// layers: the engine plans them too.
LayerSpecs planned_layers(const KVCacheGroupSpec& group) {
  LayerSpecs layers;
  for (const std::string& name : group.planned_layers())
    layers.push_back({name, group.layer_spec(layers.size())});
  return layers;
}

// Tensors of groups that share one allocation.
Result<void> place_tensors(const std::vector<KVCacheGroupSpec>& groups, CacheLayout order,
                           std::int64_t num_blocks, bool on_host, Placement& plan) {
  const std::int64_t block_bytes = bytes_per_block(groups, order);
  for (const KVCacheGroupSpec& group : groups) {
    std::int64_t offset = 0;
    for (const LayerSpecs& alike : by_equal_spec(planned_layers(group))) {
      const KVCacheSpec& spec = alike.front().spec;
      const std::int64_t count = std::ssize(alike);
      const std::int64_t page = page_bytes(spec);
      std::int64_t block_stride = is_block_outermost(order) ? block_bytes : 0;
      const std::vector<std::string> names = one_spec_group(alike, spec).layer_names;
      PlacedTensor tensor{
          block_bytes * num_blocks, names, spec, page, block_stride, offset, on_host};
      if (has_layer_views(spec.kind)) {
        if (block_stride == 0 && layer_block_stride(spec) != page) {
          if (!is_block_compact(order))
            return fail("layout {} cannot pad pages; choose LBNHC", name_of(order));
          block_stride = layer_block_stride(spec);
        }
        LS_ASSIGN_OR_RETURN(const OrderStrides strides,
                            order_strides(spec, num_blocks, count, order, 0, 0, block_stride));
        tensor.layer_stride = strides.layer;
        tensor.block_stride = strides.block;
      } else if (!is_block_outermost(order)) {
        return fail("a device pool of hot pages needs a layout with blocks outermost, BLHNC");
      }
      offset += count * (is_block_outermost(order) ? page : tensor.layer_stride);
      plan.tensors.push_back(std::move(tensor));
    }
  }
  return {};
}

Result<HostPool> host_pool_of(const KVCacheGroupSpec& group, const PlacementOptions& options) {
  HostPool pool;
  for (const KVCacheSpec& spec : group.layer_specs) pool.block_stride += page_bytes(spec);
  pool.num_blocks = options.host_pool_bytes / pool.block_stride;
  const std::int64_t block = group.spec.block_size;
  const std::int64_t needed = (options.max_model_len + block - 1) / block + 2;
  if (pool.num_blocks < needed)
    return fail(
        "the host pool holds {} blocks and a request of {} tokens needs {}; raise host_pool_gib",
        pool.num_blocks, options.max_model_len, needed);
  return pool;
}

// What a request of the longest length is bounded by: the tokens in flight (config/vllm.py,
// max_in_flight_tokens, with model runner V2).
PlanOptions request_options(const PlacementOptions& options) {
  PlanOptions request = options;
  request.max_num_batched_tokens *= options.pp + (options.async_scheduling ? 1 : 0);
  request.async_scheduling = false;  // counted
  request.max_num_encoder_input_tokens = options.max_num_batched_tokens;
  request.pcp = 1;
  return request;
}

// Blocks that a request takes of a cache. An Error: windows whose positions DCP shards.
Result<std::int64_t> blocks_of(const KVCacheSpec& spec, const PlanOptions& request) {
  if (is_sliding_window(spec.kind) && spec.dcp_sharded && request.dcp > 1)
    return fail("windows of {} tokens cannot be sharded over dcp {}; serve this model with dcp 1",
                spec.sliding_window, request.dcp);
  if (is_resident_pages(spec.kind))
    return cdiv(std::min(request.max_num_batched_tokens, request.max_model_len), spec.block_size);
  return max_blocks_per_request(spec, request);
}

Result<std::int64_t> device_blocks(const std::vector<KVCacheGroupSpec>& groups,
                                   const PlanOptions& request) {
  std::int64_t blocks = 0;
  for (const KVCacheGroupSpec& group : groups) {
    if (is_on_host(group)) continue;
    std::int64_t most = 0;
    for (const KVCacheSpec& spec : specs_of(group)) {
      LS_ASSIGN_OR_RETURN(const std::int64_t own, blocks_of(spec, request));
      most = std::max(most, own);
    }
    blocks += most;
  }
  return blocks;
}

std::vector<KVCacheGroupSpec> device_groups(const std::vector<KVCacheGroupSpec>& groups) {
  std::vector<KVCacheGroupSpec> device;
  std::ranges::copy_if(groups, std::back_inserter(device),
                       [](const KVCacheGroupSpec& group) { return !is_on_host(group); });
  return device;
}

// A request of the longest length and the null block fit.
Result<void> check_memory(const std::vector<KVCacheGroupSpec>& groups, std::int64_t block_bytes,
                          std::int64_t memory_bytes, const PlacementOptions& options) {
  PlanOptions request = request_options(options);
  const std::int64_t usable = memory_bytes - block_bytes;
  LS_ASSIGN_OR_RETURN(const std::int64_t blocks, device_blocks(groups, request));
  if (usable > 0 && blocks * block_bytes <= usable) return {};
  const std::int64_t fits = longest_that_fits(options.max_model_len, [&](std::int64_t length) {
    request.max_model_len = length;
    const auto fewer = device_blocks(groups, request);
    return fewer && *fewer * block_bytes <= usable;
  });
  return fail(
      "one request of {} tokens needs {} blocks of {} bytes and the null block, more than {} bytes "
      "hold; {}",
      options.max_model_len, blocks, block_bytes, memory_bytes,
      fits > 0 ? fmt::format("max_model_len {} would fit", fits)
               : "no length fits: give the cache more memory");
}

// The groups with one worker's layers.
std::vector<KVCacheGroupSpec> projected(const std::vector<KVCacheGroupSpec>& groups,
                                        const WorkerShare& worker) {
  const std::set<std::string> own(worker.layer_names.begin(), worker.layer_names.end());
  std::vector<KVCacheGroupSpec> result;
  for (const KVCacheGroupSpec& whole : groups) {
    KVCacheGroupSpec& group = result.emplace_back(
        with_layers(whole, [&](const std::string& name) { return own.contains(name); }));
    if (!whole.is_uniform_type() || !group.layer_specs.empty()) continue;
    group.layer_specs = whole.layer_specs;
    group.foreign_layers = whole.layer_names;
  }
  return result;
}

std::int64_t tp_replicas(const std::vector<KVCacheGroupSpec>& groups,
                         const PlacementOptions& options) {
  std::int64_t replicas = options.tp;
  for (const KVCacheGroupSpec& group : groups)
    for (const KVCacheSpec& spec : specs_of(group)) {
      const bool is_split = !is_attention(spec.kind) || spec.plan.max_tp_shards == 0 ||
                            (spec.dcp_sharded && options.dcp > 1);
      replicas = std::gcd(
          replicas, is_split ? 1 : std::max<std::int64_t>(1, options.tp / spec.plan.max_tp_shards));
    }
  return groups.empty() ? 1 : replicas;
}

}  // namespace

std::int64_t bytes_per_block(const std::vector<KVCacheGroupSpec>& groups, CacheLayout order) {
  std::int64_t widest = 0, alignment = 1;
  for (const KVCacheGroupSpec& group : groups) {
    std::int64_t bytes = 0;
    if (is_hot_pages(group.spec.kind)) alignment = std::lcm(alignment, page_bytes(group.spec));
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      const KVCacheSpec& spec = group.layer_spec(i);
      bytes += is_block_outermost(order) ? page_bytes(spec) : layer_block_stride(spec);
      if (is_block_outermost(order)) alignment = std::lcm(alignment, stride_alignment_bytes(spec));
    }
    widest = std::max(widest, bytes);
  }
  return round_up(widest, alignment);
}

Result<Placement> place_blocks(const std::vector<KVCacheGroupSpec>& groups, CacheLayout order,
                               std::int64_t num_blocks, const PlacementOptions& options) {
  Placement plan;
  plan.order = order;
  plan.groups = groups;
  plan.kv_tp_replicas = tp_replicas(groups, options);
  plan.num_blocks = groups.empty() ? 1 : num_blocks;
  if (groups.empty()) return plan;
  const std::vector<KVCacheGroupSpec> device = device_groups(groups);
  if (options.has_host_pages()) {
    for (const KVCacheGroupSpec& group : groups) {
      if (!is_on_host(group)) continue;
      LS_ASSIGN_OR_RETURN(plan.host, host_pool_of(group, options));
      LS_RETURN_IF_ERROR(
          place_tensors({group}, CacheLayout::LBNHC, plan.host->num_blocks, true, plan));
    }
  }
  LS_RETURN_IF_ERROR(check_order(device, order));
  LS_RETURN_IF_ERROR(place_tensors(device, order, num_blocks, false, plan));
  return plan;
}

Result<std::vector<Placement>> place_workers(const std::vector<KVCacheGroupSpec>& groups,
                                             CacheLayout order,
                                             const std::vector<WorkerShare>& workers,
                                             const PlacementOptions& options) {
  std::vector<std::vector<KVCacheGroupSpec>> shares;
  std::vector<std::int64_t> blocks;
  for (const WorkerShare& worker : workers) {
    shares.push_back(groups.empty() ? groups : projected(groups, worker));
    if (groups.empty()) {
      blocks.push_back(1);
      continue;
    }
    // The order is checked before memory: a pool of one block is planned first.
    if (!options.has_host_pages())
      LS_RETURN_IF_ERROR(place_blocks(shares.back(), order, 1, options));
    const std::int64_t block_bytes = bytes_per_block(device_groups(shares.back()), order);
    if (block_bytes == 0)
      return fail("a block of this worker's layers has no bytes; give it layers with rows");
    const std::int64_t memory = options.num_gpu_blocks_override
                                    ? *options.num_gpu_blocks_override * block_bytes
                                    : worker.memory_bytes;
    LS_RETURN_IF_ERROR(check_memory(shares.back(), block_bytes, memory, options));
    blocks.push_back(memory / block_bytes);
  }
  std::vector<Placement> plans;
  for (const auto& share : shares) {
    LS_ASSIGN_OR_RETURN(Placement plan,
                        place_blocks(share, order, *std::ranges::min_element(blocks), options));
    plans.push_back(std::move(plan));
  }
  return plans;
}

Result<std::int64_t> blocks_per_request(const std::vector<KVCacheGroupSpec>& groups,
                                        const PlacementOptions& options) {
  return device_blocks(groups, request_options(options));
}

Result<PlacementCapacity> capacity_of(const Placement& plan, const PlacementOptions& options) {
  const PlanOptions request = request_options(options);
  std::int64_t device = 0, host = 0;
  for (const KVCacheGroupSpec& group : plan.groups) {
    // The scheduler's view of a group: its first layer.
    LS_ASSIGN_OR_RETURN(const std::int64_t blocks, blocks_of(group.spec, request));
    (is_on_host(group) ? host : device) += blocks;
  }
  PlacementCapacity capacity;
  capacity.max_concurrency = static_cast<double>(plan.num_blocks) / static_cast<double>(device);
  if (host != 0 && plan.host)
    capacity.max_concurrency =
        std::min(capacity.max_concurrency,
                 static_cast<double>(plan.host->num_blocks) / static_cast<double>(host));
  capacity.tokens = static_cast<std::int64_t>(capacity.max_concurrency *
                                              static_cast<double>(options.max_model_len));
  return capacity;
}

bool needs_zeroing(const Placement& plan) {
  // The scheduler decides it, and sees only a group's first layer.
  std::set<std::pair<DType, KVQuantMode>> precisions;
  for (const KVCacheGroupSpec& group : plan.groups)
    if (is_attention(group.spec.kind) && !is_on_host(group))
      precisions.insert({group.spec.dtype, group.spec.kv_quant_mode});
  return has_states(plan.groups) || precisions.size() > 1;
}

std::int64_t cache_config_block(const Placement& plan) {
  std::int64_t smallest = 0, cacheable = 0;
  const auto lower = [](std::int64_t a, std::int64_t b) { return a == 0 ? b : std::min(a, b); };
  for (const KVCacheGroupSpec& group : plan.groups) {
    smallest = lower(smallest, group.spec.block_size);
    if (is_cacheable_by_class(group.spec)) cacheable = lower(cacheable, group.spec.block_size);
  }
  return cacheable != 0 ? cacheable : smallest;
}

Result<BlockSizes> hash_sizes(const Placement& plan, const PlacementOptions& options) {
  std::int64_t common = 1;
  for (const KVCacheGroupSpec& group : plan.groups)
    common = std::lcm(common, group.spec.block_size);
  if (options.dcp > kContextRanksMax || common > kTokensMax / options.dcp)
    return fail("blocks of {} tokens on {} ranks; expected at most {} tokens in all", common,
                options.dcp, kTokensMax);
  EngineConfig config{.block_size = static_cast<std::int32_t>(cache_config_block(plan)),
                      .dcp = static_cast<std::int32_t>(options.dcp)};
  config.enable_prefix_caching =
      options.prefix_caching || !options.connector.empty() || options.has_host_pages();
  config.prefix_match_unit = static_cast<std::int32_t>(options.prefix_match_unit.value_or(0));
  // States that are kept at no block boundary are not found: hits, if any, are whole common blocks.
  if (plan.groups.size() > 1)
    config.enable_prefix_caching &=
        std::ranges::none_of(plan.groups, [](const KVCacheGroupSpec& group) {
          return is_state_kind(group.spec.kind) &&
                 group.spec.mamba_cache_mode != MambaCacheMode::align;
        });
  LS_ASSIGN_OR_RETURN(BlockSizes sizes, planned_block_sizes(config, plan.groups));
  sizes.hits_parts_of_blocks &= options.prefix_caching;
  return sizes;
}

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
      return fail("layer {}: no backend {} is known", layer.name, layer.backend);
  plan.alignment = {options.block_size.value_or(16), options.max_model_len, {}, {}};
  if (!is_bare) {
    LS_ASSIGN_OR_RETURN(plan.alignment, align_blocks(layers, options));
    LS_ASSIGN_OR_RETURN(plan.layers, layers_with_specs(layers, *plan.alignment, options));
  }
  plan.refused_stage = "layout";
  std::vector<std::vector<CacheLayout>> declared;
  std::set<std::string> seen;
  LayerSpecs specs;
  bool is_declared = false;
  for (const PlacementLayer& layer : plan.layers) {
    if (layer.spec) specs.push_back({layer.name, *layer.spec});
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
  for (const NamedSpec& layer : layers_of(plan.groups)) {
    LS_RETURN_IF_ERROR(check_page(layer.name, layer.spec));
    if (stride_alignment_bytes(layer.spec) == 0)
      return fail(
          "layer {}: kernel blocks of up to {} tokens do not hold one KV entry of {} tokens; "
          "choose another --block-size",
          layer.name, layer.spec.plan.stride_kernel_tokens, text_of(layer.spec.tokens_per_state));
  }
  LS_ASSIGN_OR_RETURN(plan.workers,
                      place_workers(plan.groups, plan.order->order, workers, options));
  plan.refused_stage = {};
  return {};
}

}  // namespace

std::optional<CacheLayout> order_wish(const std::vector<PlacementLayer>& layers,
                                      const PlacementOptions& options) {
  if (options.has_host_pages()) return CacheLayout::BLHNC;
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
