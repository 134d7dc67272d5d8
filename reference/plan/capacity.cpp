#include "reference/plan/capacity.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "reference/plan/grouping.h"
#include "reference/plan/page_size.h"
#include "reference/plan/request_need.h"

namespace lockstep {
namespace {

GroupCapacity group_capacity(const KVCacheGroupSpec& group, const KVCacheConfig& config,
                             const PlanOptions& options) {
  GroupCapacity capacity;
  capacity.kind = group.spec.kind;
  capacity.block_size = group.spec.block_size;
  capacity.blocks_per_request = max_blocks_per_request(group, options);
  capacity.grows = grows_with_length(group.spec);
  for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
    const std::int64_t used = unpadded_page_size_bytes(group.layer_spec(i));
    capacity.used_bytes += used;
    capacity.padding_bytes += page_size_bytes(group.layer_spec(i)) - used;
  }
  capacity.pack_waste_bytes = empty_places(group) * page_size_bytes(group.spec);
  capacity.absent_layer_bytes = pool_bytes_per_block(config.groups) - capacity.used_bytes -
                                capacity.padding_bytes - capacity.pack_waste_bytes;
  if (!is_state_kind(group.spec.kind))
    capacity.slot_address_space = config.num_blocks * group.spec.block_size;
  return capacity;
}

std::int64_t blocks_per_request(const KVCacheConfig& config, const PlanOptions& options) {
  std::int64_t bytes = 0;
  for (const KVCacheGroupSpec& group : config.groups)
    bytes += max_blocks_per_request(group, options) * pool_page_size_bytes(group);
  return cdiv(bytes, pool_page_size_bytes(config.groups.front()));
}

void add_formulas(const PlanOptions& options, Capacity& c) {
  std::vector<std::string> terms;
  std::int64_t held = 0;
  for (const GroupCapacity& group : c.groups) {
    terms.push_back(fmt::format("{}", group.blocks_per_request));
    held += group.blocks_per_request;
  }
  const std::string sum = fmt::format("{} = {}", fmt::join(terms, " + "), held);
  c.formulas = {
      {"blocks_per_request",
       held == c.blocks_per_request
           ? fmt::format("sum over groups: {}", sum)
           : fmt::format("bytes of the groups' own layers over those of the first: {}",
                         c.blocks_per_request)},
      {"max_concurrency", fmt::format("num_blocks / blocks_per_request: {} / {} = {}", c.num_blocks,
                                      c.blocks_per_request, c.max_concurrency)},
      {"capacity_tokens", fmt::format("int(max_concurrency * max_model_len): {} * {} = {}",
                                      c.max_concurrency, options.max_model_len, c.capacity_tokens)},
      {"growing_groups_tokens",
       fmt::format("num_blocks // growing groups * smallest block size (40384): {}",
                   c.growing_groups_tokens)},
      {"all_groups_tokens",
       fmt::format(
           "num_blocks // all groups * smallest block size (older; state groups and windows "
           "divide it wrongly): {}",
           c.all_groups_tokens)},
      {"slot_address_space", fmt::format("num_blocks * block_size of the group with most slots: {}",
                                         c.slot_address_space)},
  };
  // A block is taken from the whole pool, whatever part of it the group's layers fill.
  if (held != c.blocks_per_request)
    c.formulas.push_back(
        {"blocks held",
         fmt::format("a request holds {} blocks of the pool, so that {:.2f} "
                     "fit; the engine reports {:.2f}",
                     sum, static_cast<double>(c.num_blocks) / static_cast<double>(held),
                     c.max_concurrency)});
}

std::int64_t tokens_of_groups(const KVCacheConfig& config, const PlanOptions& options,
                              bool growing_only) {
  std::int64_t groups = 0;
  std::int64_t smallest = 0;
  for (const KVCacheGroupSpec& group : config.groups) {
    if (growing_only && !grows_with_length(group.spec)) continue;
    ++groups;
    smallest = smallest == 0 ? group.spec.block_size : std::min(smallest, group.spec.block_size);
  }
  if (groups == 0) return tokens_of_groups(config, options, false);
  return config.num_blocks / groups * smallest * options.dcp * options.pcp;
}

// All groups must have the hit: it ends where a block of each of them ends. States in mode `none`
// are not kept for hits.
std::int64_t hit_step(const KVCacheConfig& config, const PlanOptions& options) {
  std::int64_t step = 1;
  for (const KVCacheGroupSpec& group : config.groups) {
    const bool is_state = is_state_kind(group.spec.kind);
    if (is_state && group.spec.mamba_cache_mode == MambaCacheMode::none) return 0;
    step = std::lcm(step, group.spec.block_size * (is_state ? 1 : options.dcp * options.pcp));
  }
  return step;
}

}  // namespace

std::int64_t resend_hit_tokens(std::int64_t hit_step_tokens, std::int64_t prompt_tokens) {
  LS_CHECK(prompt_tokens > 0, "a prompt of {} tokens", prompt_tokens);
  if (hit_step_tokens == 0) return 0;
  return (prompt_tokens - 1) / hit_step_tokens * hit_step_tokens;
}

std::string unfilled_block_text(std::int64_t hit_step_tokens, std::int64_t prompt_tokens_max,
                                std::string_view limit) {
  return fmt::format(
      "no prompt can fill a block and be hit: hits end at multiples of {} tokens, and {} is {}",
      hit_step_tokens, limit, prompt_tokens_max);
}

std::int64_t growing_groups_tokens(const KVCacheConfig& config, const PlanOptions& options) {
  return tokens_of_groups(config, options, true);
}

std::int64_t all_groups_tokens(const KVCacheConfig& config, const PlanOptions& options) {
  return tokens_of_groups(config, options, false);
}

Capacity capacity_of(const KVCacheConfig& config, const PlanOptions& options) {
  LS_CHECK(!config.groups.empty() && config.num_blocks > 0, "{} groups, {} blocks",
           config.groups.size(), config.num_blocks);
  Capacity c;
  c.num_blocks = config.num_blocks;
  c.usable_blocks = config.num_blocks - 1;
  c.blocks_per_request = blocks_per_request(config, options);
  LS_CHECK(c.blocks_per_request > 0, "max_model_len {}", options.max_model_len);
  c.max_concurrency =
      static_cast<double>(config.num_blocks) / static_cast<double>(c.blocks_per_request);
  c.capacity_tokens =
      static_cast<std::int64_t>(c.max_concurrency * static_cast<double>(options.max_model_len));
  c.growing_groups_tokens = growing_groups_tokens(config, options);
  c.all_groups_tokens = all_groups_tokens(config, options);
  c.hit_step_tokens = hit_step(config, options);
  const std::int64_t block_bytes = pool_bytes_per_block(config.groups);
  c.pool_bytes = block_bytes * config.num_blocks;
  for (const KVCacheGroupSpec& group : config.groups) {
    c.groups.push_back(group_capacity(group, config, options));
    const GroupCapacity& last = c.groups.back();
    c.slot_address_space = std::max(c.slot_address_space, last.slot_address_space);
    if (last.grows)
      c.bytes_per_token += static_cast<double>(block_bytes) /
                           static_cast<double>(last.block_size * options.dcp * options.pcp);
    else
      c.fixed_bytes_per_request += last.blocks_per_request * block_bytes;
  }
  add_formulas(options, c);
  return c;
}

}  // namespace lockstep
