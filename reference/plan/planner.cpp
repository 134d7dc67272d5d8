#include "reference/plan/planner.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "reference/plan/capacity.h"
#include "reference/plan/grouping.h"
#include "reference/plan/limits.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

struct HybridSizes {
  std::int64_t bytes_per_token = 0;  // of one attention layer
  std::int64_t state_page_bytes = 0;
  bool fp32_states = false;
  std::int64_t checkpoint_alignment = 1;  // tokens; 1 where not every state layer has one
};

// The sizes that alignment weighs: one token of an attention layer, one set of states.
Result<HybridSizes> hybrid_sizes(const LayerSpecs& layers) {
  HybridSizes sizes;
  bool all_export = true;
  std::int64_t exports_every = 1;
  for (const NamedSpec& layer : layers) {
    KVCacheSpec one_token = layer.spec;
    if (is_state_kind(one_token.kind)) {
      all_export &= one_token.prefill_checkpoint_alignment > 0;
      if (all_export)
        exports_every = std::lcm(exports_every, one_token.prefill_checkpoint_alignment);
      sizes.state_page_bytes = std::max(sizes.state_page_bytes, real_page_size_bytes(one_token));
      for (const StateTensorSpec& state : one_token.states)
        sizes.fp32_states |= state.dtype == DType::fp32;
      continue;
    }
    if (is_hidden_state(one_token.kind)) continue;  // its page follows the common one
    one_token.block_size = 1;
    one_token.page_size_padded.reset();
    const std::int64_t bytes = unpadded_page_size_bytes(one_token);
    if (sizes.bytes_per_token != 0 && sizes.bytes_per_token != bytes)
      return fail(
          "{}: one token takes {} bytes here and {} in the attention layers before it; a hybrid "
          "needs one size for all of them",
          layer.name, bytes, sizes.bytes_per_token);
    sizes.bytes_per_token = bytes;
  }
  if (all_export) sizes.checkpoint_alignment = exports_every;
  return sizes;
}

}  // namespace

bool is_hybrid(const LayerSpecs& layers) {
  const auto any = [&](auto&& matches) {
    return std::ranges::any_of(layers, [&](const NamedSpec& l) { return matches(l.spec.kind); });
  };
  return any(is_state_kind) &&
         any([](CacheKind kind) { return !is_state_kind(kind) && !is_hidden_state(kind); });
}

Result<AlignedSizes> aligned_sizes(const LayerSpecs& layers, const PlanOptions& options) {
  const bool hybrid = is_hybrid(layers);
  HybridSizes sizes;
  if (hybrid) {
    LS_ASSIGN_OR_RETURN(auto weighed, hybrid_sizes(layers));
    sizes = weighed;
  }
  // The backend that speaks for the model is that of its first attention layer.
  const auto attention = std::ranges::find_if(
      layers, [](const NamedSpec& layer) { return !is_state_kind(layer.spec.kind); });
  const AttentionBackend backend = attention == layers.end()
                                       ? options.backend
                                       : *layer_backend(attention->spec, options.backend);
  const KernelSizes supported = kernel_sizes(backend, sizes.fp32_states);

  AlignedSizes aligned;
  aligned.block_size = supported.takes(options.default_block_size) ? options.default_block_size
                                                                   : supported.smallest();
  if (options.block_size) {
    if (*options.block_size % supported.smallest() != 0)
      return fail("block_size {}: {} takes multiples of {}; the nearest that works is {}",
                  *options.block_size, name_of(backend), supported.smallest(),
                  round_up(*options.block_size, supported.smallest()));
    aligned.block_size = *options.block_size;
  }
  if (!hybrid || sizes.state_page_bytes == 0) return aligned;

  std::int64_t alignment = std::max(supported.smallest(), aligned.block_size);
  if (options.mamba_cache_mode == MambaCacheMode::align)
    alignment = std::lcm(alignment, sizes.checkpoint_alignment);
  const std::int64_t page_1_token = sizes.bytes_per_token * options.attn_pack;
  std::int64_t attn_block_size = 0;
  if (options.mamba_cache_mode == MambaCacheMode::all) {
    const std::int64_t chunk =
        std::lcm(options.mamba_block_size.value_or(options.mamba_chunk_size), alignment);
    attn_block_size = chunk * cdiv(cdiv(sizes.state_page_bytes, page_1_token), chunk);
    aligned.mamba_block_size = attn_block_size;
  } else {
    attn_block_size = alignment * cdiv(sizes.state_page_bytes, alignment * page_1_token);
  }
  aligned.block_size = std::max(aligned.block_size, attn_block_size);
  if (options.mamba_cache_mode == MambaCacheMode::align)
    aligned.mamba_block_size = aligned.block_size;
  const std::int64_t page = aligned.block_size * page_1_token;
  if (page != sizes.state_page_bytes) aligned.mamba_page_size_padded = page;
  return aligned;
}

LayerSpecs with_aligned_sizes(LayerSpecs layers, const AlignedSizes& sizes,
                              const PlanOptions& options) {
  for (NamedSpec& layer : layers) {
    KVCacheSpec& spec = layer.spec;
    if (is_state_kind(spec.kind)) {
      spec.block_size = sizes.mamba_block_size.value_or(options.max_model_len);
      spec.page_size_padded = sizes.mamba_page_size_padded;
      spec.mamba_cache_mode = options.mamba_cache_mode;
    } else if (spec.block_size == 0) {
      spec.block_size = sizes.block_size;
    }
    spec = with_alignment_padding(spec);
  }
  return layers;
}

std::string gib_text(std::int64_t bytes) {
  if (bytes < 1 << 20) return fmt::format("{} bytes", bytes);
  if (bytes < 1 << 30) return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / (1 << 20));
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

namespace {

using Groups = std::vector<KVCacheGroupSpec>;

// Far above any machine; below it no product of sizes leaves 63 bits.
constexpr std::int64_t kBytesMax = std::int64_t{1} << 44;

Result<void> check_sizes(const LayerSpecs& layers) {
  for (const NamedSpec& layer : layers) {
    if (is_ring(layer.spec) || layer.spec.bounded_replay)
      return fail("{}: a release without overlaid memory has no {}", layer.name,
                  is_ring(layer.spec) ? "rings" : "windows that are computed again");
    if (!fills_rows(layer.spec.tokens_per_state, layer.spec.block_size))
      return fail("{}: a block of {} tokens does not hold whole rows of {} tokens", layer.name,
                  layer.spec.block_size, text_of(layer.spec.tokens_per_state));
    if (!page_fits(layer.spec, kBytesMax))
      return fail("{}: a page of more than {} fits no machine", layer.name, gib_text(kBytesMax));
    if (layer.spec.page_size_padded &&
        unpadded_page_size_bytes(layer.spec) > *layer.spec.page_size_padded)
      return fail("{}: its content of {} bytes is larger than its page of {}", layer.name,
                  unpadded_page_size_bytes(layer.spec), *layer.spec.page_size_padded);
  }
  return {};
}

// The layers of each stage.
std::vector<LayerSpecs> pipeline_stages(const LayerSpecs& layers, const PlanOptions& options) {
  LS_CHECK(options.pp >= 1, "pp {}", options.pp);
  const std::vector<std::int64_t> of_layers = layer_stages(layers, options);
  std::vector<LayerSpecs> stages(static_cast<std::size_t>(options.pp));
  for (std::size_t i = 0; i < layers.size(); ++i)
    stages[static_cast<std::size_t>(of_layers[i])].push_back(layers[i]);
  return stages;
}

// The groups of the whole model with only the layers of one worker in them.
Groups projected_groups(const Groups& groups, const LayerSpecs& worker) {
  Groups projected;
  for (const KVCacheGroupSpec& group : groups)
    projected.push_back(with_layers(group, [&](const std::string& name) {
      return std::ranges::find(worker, name, &NamedSpec::name) != worker.end();
    }));
  return projected;
}

Result<void> check_memory(const Groups& groups, std::int64_t memory_bytes,
                          const PlanOptions& options) {
  if (memory_bytes <= 0)
    return fail("no memory for the cache: {} bytes; one block takes {} bytes", memory_bytes,
                pool_bytes_per_block(groups));
  if (memory_bytes < pool_bytes_per_block(groups))
    return fail("the cache has {} bytes and one block takes {}: room for no block", memory_bytes,
                pool_bytes_per_block(groups));
  const std::int64_t needed = request_bytes(groups, options);
  if (needed <= memory_bytes) return {};
  const std::int64_t longest = largest_model_len(groups, options, memory_bytes);
  const auto text = [&](std::int64_t bytes) {
    return options.num_gpu_blocks_override
               ? fmt::format("{} blocks", cdiv(bytes, pool_bytes_per_block(groups)))
               : gib_text(bytes);
  };
  const std::string remedy =
      longest > 0 ? fmt::format("a max_model_len of at most {} does, or {}", longest, text(needed))
                  : fmt::format("not even one token does; {} would", text(needed));
  return fail("one request of max_model_len {} needs {} and the cache has {}: it does not fit; {}",
              options.max_model_len, text(needed), text(memory_bytes), remedy);
}

Result<void> check_states(const Groups& groups, std::int64_t num_blocks,
                          const PlanOptions& options) {
  const bool states =
      std::ranges::any_of(groups, [](const auto& g) { return is_state_kind(g.spec.kind); });
  if (!states || !options.max_num_seqs || *options.max_num_seqs <= num_blocks) return {};
  return fail(
      "max_num_seqs {}: each running request needs a state block and the pool has {}; use at most "
      "{}, or more memory",
      *options.max_num_seqs, num_blocks, num_blocks);
}

std::vector<KVCacheTensor> uniform_type_tensors(const Groups& groups, std::int64_t num_blocks) {
  std::vector<KVCacheTensor> tensors;
  if (groups.size() == 1) {
    for (std::size_t i = 0; i < groups.front().layer_names.size(); ++i)
      tensors.push_back({page_size_bytes(groups.front().layer_specs[i]) * num_blocks,
                         {groups.front().layer_names[i]}});
    return tensors;
  }
  // One tensor per tuple and page size; each group gives its t-th layer of that size.
  const std::int64_t tuples = tensors_per_pool(groups);
  for (std::int64_t t = 0; t < tuples; ++t) {
    for (std::int64_t page : page_sizes(groups.front())) {
      KVCacheTensor& tensor = tensors.emplace_back();
      tensor.size_bytes = page * num_blocks;
      for (const KVCacheGroupSpec& group : groups) {
        std::int64_t place = 0;
        for (std::size_t i = 0; i < group.layer_names.size(); ++i)
          if (page_size_bytes(group.layer_specs[i]) == page && place++ == t)
            tensor.shared_by.push_back(group.layer_names[i]);
      }
    }
  }
  return tensors;
}

std::vector<KVCacheTensor> shared_tensors(const Groups& groups, std::int64_t num_blocks) {
  std::vector<KVCacheTensor> tensors(static_cast<std::size_t>(tensors_per_pool(groups)));
  for (KVCacheTensor& tensor : tensors)
    tensor.size_bytes = pool_page_size_bytes(groups.front()) * num_blocks;
  for (const KVCacheGroupSpec& group : groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      tensors[i / static_cast<std::size_t>(group.layers_per_page)].shared_by.push_back(
          group.layer_names[i]);
  return tensors;
}

void add_warnings(const LayerSpecs& layers, const Groups& groups, const PlanOptions& options,
                  std::int64_t num_blocks, std::vector<std::string>& warnings) {
  std::int64_t state_blocks = 0;
  std::int64_t request_blocks = 0;
  for (const KVCacheGroupSpec& group : groups) {
    request_blocks += max_blocks_per_request(group, options);
    if (is_state_kind(group.spec.kind) && !grows_with_length(group.spec))
      state_blocks += max_blocks_per_request(group, options);
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      const auto layer = std::ranges::find(layers, group.layer_names[i], &NamedSpec::name);
      const std::int64_t page = page_size_bytes(group.layer_spec(i));
      KVCacheSpec own = layer->spec;
      own.block_size = group.spec.block_size;
      own.page_size_padded.reset();
      if (unpadded_page_size_bytes(own) > page)
        warnings.push_back(
            fmt::format("{}: {} tokens take {} bytes and its page has {}: it was merged with "
                        "layers of shorter rows",
                        layer->name, own.block_size, unpadded_page_size_bytes(own), page));
    }
  }
  const auto longer = std::ranges::find_if(groups, [&](const KVCacheGroupSpec& group) {
    return is_state_kind(group.spec.kind) && group.spec.block_size > options.max_num_batched_tokens;
  });
  if (longer != groups.end() && options.mamba_cache_mode == MambaCacheMode::align)
    warnings.push_back(
        fmt::format("mode align: a block has {} tokens and a step at most {}: no state reaches a "
                    "block boundary in one step",
                    longer->spec.block_size, options.max_num_batched_tokens));
  if (request_blocks > num_blocks - 1)
    warnings.push_back(
        fmt::format("one request of max_model_len takes {} blocks and {} are left without the null "
                    "block: a request that long never runs",
                    request_blocks, num_blocks - 1));
  if (options.max_num_seqs && state_blocks * *options.max_num_seqs > num_blocks - 1)
    warnings.push_back(fmt::format(
        "max_num_seqs {} takes {} blocks only for states; {} requests have room for theirs at once",
        *options.max_num_seqs, state_blocks * *options.max_num_seqs,
        (num_blocks - 1) / state_blocks));
}

Result<void> check_context_parallel(const Groups& groups, const PlanOptions& options) {
  if (options.dcp * options.pcp == 1) return {};
  for (const KVCacheGroupSpec& group : groups)
    if (is_sliding_window(group.spec.kind))
      return fail(
          "dcp {} and pcp {}: sliding-window layers cannot be split over ranks; use 1 and 1",
          options.dcp, options.pcp);
  if (groups.size() > 1)
    return fail("dcp {} and pcp {}: a model with {} groups cannot be split over ranks; use 1 and 1",
                options.dcp, options.pcp, groups.size());
  return {};
}

}  // namespace

KVCacheConfig kv_cache_config(Groups groups, std::int64_t memory_bytes,
                              const PlanOptions& options) {
  KVCacheConfig config;
  if (groups.empty()) {
    config.num_blocks = 1;  // the null block
    return config;
  }
  config.num_blocks =
      options.num_gpu_blocks_override.value_or(memory_bytes / pool_bytes_per_block(groups));
  config.tensors = all_uniform_type(groups) ? uniform_type_tensors(groups, config.num_blocks)
                                            : shared_tensors(groups, config.num_blocks);
  config.groups = std::move(groups);
  return config;
}

Result<TensorPlan> plan_memory(LayerSpecs layers, PlanOptions options, const PoolSize& pool_size) {
  TensorPlan plan;
  const std::vector<LayerSpecs> stages = pipeline_stages(layers, options);
  // Releases with this planner shard the tokens of every layer.
  for (NamedSpec& layer : layers) layer.spec.dcp_sharded = true;
  LS_RETURN_IF_ERROR(check_sizes(layers));
  LS_ASSIGN_OR_RETURN(plan.aligned, aligned_sizes(layers, options));
  plan.layers = with_aligned_sizes(std::move(layers), plan.aligned, options);
  LS_RETURN_IF_ERROR(check_sizes(plan.layers));
  LS_ASSIGN_OR_RETURN(auto groups, kv_cache_groups(plan.layers, options));
  LS_RETURN_IF_ERROR(check_context_parallel(groups, options));
  if (pool_size) options.num_gpu_blocks_override = pool_size(groups);

  std::int64_t num_blocks = std::numeric_limits<std::int64_t>::max();
  for (const LayerSpecs& stage : stages) {
    Groups own = projected_groups(groups, stage);
    const bool empty =
        std::ranges::all_of(own, [](const auto& group) { return group.layer_names.empty(); });
    std::int64_t memory = options.memory_bytes;
    if (!empty) {
      if (options.num_gpu_blocks_override)
        memory = saturating_product(*options.num_gpu_blocks_override, pool_bytes_per_block(own));
      LS_RETURN_IF_ERROR(check_memory(own, memory, options));
    }
    plan.workers.push_back(kv_cache_config(empty ? Groups{} : std::move(own), memory, options));
    if (!empty) num_blocks = std::min(num_blocks, plan.workers.back().num_blocks);
  }
  for (KVCacheConfig& worker : plan.workers) {
    if (worker.groups.empty()) continue;
    for (KVCacheTensor& tensor : worker.tensors)
      tensor.size_bytes = tensor.size_bytes / worker.num_blocks * num_blocks;
    worker.num_blocks = num_blocks;
  }
  if (groups.empty()) return plan;
  LS_RETURN_IF_ERROR(check_states(groups, num_blocks, options));
  add_warnings(plan.layers, groups, options, num_blocks, plan.warnings);
  return plan;
}

}  // namespace lockstep
