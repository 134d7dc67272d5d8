#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "reference/plan/context_share.h"
#include "reference/plan/kernel_blocks.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"
#include "sim/engine/lockstep.h"

namespace lockstep {

BackendConfig make_device_config(const EngineConfig& engine, KVCacheConfig plan,
                                 AttentionBackend attention_backend) {
  BackendConfig device;
  device.attention_backend = attention_backend;
  device.num_rows = engine.max_num_seqs;
  device.max_tokens_per_step = engine.max_num_batched_tokens;
  if (!plan.groups.empty())
    device.context.num_ranks = num_context_ranks(engine, plan.groups.front().spec);
  if (device.context.num_ranks > 1) device.parallel.dcp_size = engine.dcp;
  const bool fp32_states = has_fp32_states(plan);
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const KVCacheSpec& spec = plan.groups[g].spec;
    // A size that the attention backend cannot take is refused later, by whoever needs it.
    const auto kernel = kernel_block_size(plan.groups[g], attention_backend, fp32_states, g);
    device.kernel_block_sizes.push_back(kernel ? *kernel : spec.block_size);
    const std::int64_t tokens = engine.max_model_len + engine.num_spec_tokens;
    device.max_blocks_per_row.push_back(
        static_cast<std::int32_t>(cdiv(tokens, spec.block_size * num_context_ranks(engine, spec)) +
                                  spec.num_speculative_blocks));
  }
  device.plan = std::move(plan);
  return device;
}

namespace {

// Tensor parallel ranks of a stage; without any, those of decode context parallelism.
std::int32_t ranks_side_by_side(const BackendConfig& device) {
  return std::max(device.parallel.tp_size, device.parallel.dcp_size);
}
std::int32_t num_pcp_ranks(const BackendConfig& device) {
  return device.context.num_ranks / device.parallel.dcp_size;
}

}  // namespace

std::int32_t num_ranks(const BackendConfig& device) {
  return device.parallel.pp_size * num_pcp_ranks(device) * ranks_side_by_side(device);
}

BackendConfig device_of_rank(const BackendConfig& device, std::int32_t rank) {
  LS_CHECK(rank >= 0 && rank < num_ranks(device), "rank {} of {}", rank, num_ranks(device));
  BackendConfig own = device;
  const std::int32_t side_by_side = ranks_side_by_side(device);
  const std::int32_t dcp_size = device.parallel.dcp_size;
  const std::int32_t place = rank % side_by_side;
  const std::int32_t in_stage = rank / side_by_side;
  const std::int32_t pcp_rank = in_stage % num_pcp_ranks(device);
  own.context.rank = pcp_rank * dcp_size + place % dcp_size;
  own.max_tokens_per_step = static_cast<std::int32_t>(
      round_up(device.max_tokens_per_step, device.parallel.tp_size));  // sequence parallelism
  own.parallel.tp_rank = device.parallel.tp_size > 1 ? place : 0;
  own.parallel.pp_rank = in_stage / num_pcp_ranks(device);
  return own;
}

Result<void> check_ranks(const BackendConfig& device) {
  const ParallelRank& of = device.parallel;
  constexpr std::int32_t kDegreeMax = 64;
  for (const auto& [name, degree] :
       {std::pair{"tensor_parallel_size", of.tp_size}, {"pipeline_parallel_size", of.pp_size}})
    if (degree < 1 || degree > kDegreeMax)
      return fail(fmt::format("{} {}: expected 1 to {}", name, degree, kDegreeMax));
  for (const KVCacheGroupSpec& group : device.plan.groups)
    if (device.context.interleave < 1 ||
        (device.context.num_ranks > 1 && group.spec.block_size % device.context.interleave != 0))
      return fail(fmt::format("cp_kv_cache_interleave_size {}: it must divide the block size {}",
                              device.context.interleave, group.spec.block_size));
  if (of.tp_size > 1 && of.tp_size % of.dcp_size != 0)
    return fail(
        fmt::format("decode_context_parallel_size {}: it deals out tokens among the ranks "
                    "of tensor_parallel_size {} and must divide it",
                    of.dcp_size, of.tp_size));
  for (std::int32_t rank = 0; rank < num_ranks(device); ++rank) {
    const auto plan =
        rank_plan(device.plan, device_of_rank(device, rank).parallel, device.queries_per_kv);
    if (!plan) return tl::unexpected(plan.error());
  }
  return {};
}

Result<void> check_ranks(const LockstepConfig& config) {
  constexpr std::int32_t kEnginesMax = 64;
  const std::int32_t dp_size = config.data_parallel.dp_size;
  if (dp_size < 1 || dp_size > kEnginesMax)
    return fail(fmt::format("data_parallel_size {}: expected 1 to {}", dp_size, kEnginesMax));
  if (config.data_parallel.defect != DataParallelDefect::none && dp_size == 1)
    return fail(fmt::format("mutant: {} is planted in data parallel ranks, and there is one engine",
                            name_of(config.data_parallel.defect)));
  if (config.data_parallel.defect == DataParallelDefect::dp_graph_alone &&
      config.device.max_cudagraph_capture_size == 0)
    return fail("mutant: dp-graph-alone is of captured graphs, and none are captured");
  if (dp_size > 1 && config.data_parallel.enforce_eager &&
      config.device.max_cudagraph_capture_size > 0)
    return fail("enforce_eager with max_cudagraph_capture_size: it says that no graphs run");
  return check_ranks(config.device);
}

AttentionBackend attention_backend_for(const KVCacheConfig& plan) {
  return kernel_block_sizes(plan, AttentionBackend::flash_attn) ? AttentionBackend::flash_attn
                                                                : AttentionBackend::any_size;
}

Result<KVCacheConfig> plan_for_groups(std::vector<KVCacheGroupSpec> groups,
                                      std::int64_t num_blocks) {
  KVCacheConfig plan;
  plan.num_blocks = num_blocks;
  std::int64_t page = 0;
  std::size_t places = 0;
  for (const KVCacheGroupSpec& group : groups) {
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      page = std::max(page, page_size_bytes(group.layer_spec(i)));
    if (group.layers_per_page != 1)
      return fail(fmt::format("a group of {} layers a page: its plan must be given",
                              group.layers_per_page));
    places = std::max(places, group.layer_names.size());
  }
  const auto pad = [&](KVCacheSpec& spec) {
    if (page_size_bytes(spec) != page) spec.page_size_padded = page;
  };
  for (KVCacheGroupSpec& group : groups) {
    pad(group.spec);
    for (KVCacheSpec& spec : group.layer_specs) pad(spec);
  }
  for (std::size_t place = 0; place < places; ++place) {
    KVCacheTensor& tensor = plan.tensors.emplace_back();
    tensor.size_bytes = page * num_blocks;
    for (const KVCacheGroupSpec& group : groups)
      if (place < group.layer_names.size()) tensor.shared_by.push_back(group.layer_names[place]);
  }
  plan.groups = std::move(groups);
  return plan;
}

}  // namespace lockstep
