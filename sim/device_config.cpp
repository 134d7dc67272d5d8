#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "reference/check.h"
#include "reference/context_share.h"
#include "reference/kernel_blocks.h"
#include "reference/page_size.h"
#include "sim/lockstep.h"

namespace lockstep {

BackendConfig make_device_config(const EngineConfig& engine, KVCacheConfig plan,
                                 AttentionBackend attention_backend) {
  BackendConfig device;
  device.attention_backend = attention_backend;
  device.num_rows = engine.max_num_seqs;
  device.max_tokens_per_step = engine.max_num_batched_tokens;
  if (!plan.groups.empty())
    device.context.num_ranks = num_context_ranks(engine, plan.groups.front().spec);
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

BackendConfig device_of_rank(const BackendConfig& device, std::int32_t rank) {
  BackendConfig own = device;
  own.context.rank = rank;
  return own;
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
