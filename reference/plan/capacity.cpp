#include "reference/plan/capacity.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "reference/plan/grouping.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/page_size.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {
namespace {

std::int64_t max_state_blocks(const KVCacheSpec& spec, const PlanOptions& options) {
  switch (options.mamba_cache_mode) {
    case MambaCacheMode::all:
      return cdiv(options.max_model_len, spec.block_size) + spec.num_speculative_blocks;
    case MambaCacheMode::align:
      return 2 + spec.num_speculative_blocks + spec.num_prefill_checkpoint_blocks;
    case MambaCacheMode::none:
      break;
  }
  return 1 + spec.num_speculative_blocks;
}

std::int64_t tokens_in_flight(const PlanOptions& options) {
  return options.max_num_batched_tokens * (options.async_scheduling ? options.pp + 1 : 1);
}

}  // namespace

std::int64_t max_blocks_per_request(const KVCacheSpec& spec, const PlanOptions& options) {
  const std::int64_t length = options.max_model_len;
  switch (traits_of(spec.kind).keeps) {
    case Keeps::pages:
      if (is_hot_pages(spec.kind)) return spec.blocks_per_request;
      [[fallthrough]];
    case Keeps::every_token:
      return cdiv(is_dealt_out(spec) ? cdiv(length, options.dcp * options.pcp) : length,
                  spec.block_size);
    case Keeps::window:
      // The window before a chunk, and the chunk; one block more, since the window may start inside
      // one.
      return cdiv(std::min(spec.sliding_window - 1 + spec.extra_retained_tokens +
                               tokens_in_flight(options),
                           length),
                  spec.block_size) +
             1;
    case Keeps::chunk:
      return cdiv(std::min(spec.attention_chunk_size + tokens_in_flight(options), length),
                  spec.block_size);
    case Keeps::states:
      return max_state_blocks(spec, options);
    case Keeps::encoder_rows:
      return cdiv(options.max_num_encoder_input_tokens != 0 ? options.max_num_encoder_input_tokens
                                                            : options.max_num_batched_tokens,
                  spec.block_size);
    case Keeps::ring:
      return 1;
    case Keeps::nothing:
      break;
  }
  return 0;
}

std::int64_t max_blocks_per_request(const KVCacheGroupSpec& group, const PlanOptions& options) {
  std::int64_t blocks = 0;
  for (const KVCacheSpec& spec : specs_of(group))
    blocks = std::max(blocks, max_blocks_per_request(spec, options));
  return blocks;
}

PlanOptions plan_options_of(const EngineConfig& engine) {
  PlanOptions options{.dcp = engine.dcp,
                      .mamba_cache_mode = engine.mamba_cache_mode,
                      .num_spec = engine.num_spec_tokens,
                      .max_model_len = engine.max_model_len,
                      .max_num_batched_tokens = engine.max_num_batched_tokens,
                      .max_num_encoder_input_tokens = max_encoder_rows(engine)};
  // Ranks of prefill context parallelism share out the tokens in 0.22.1 only.
  const EngineProfile* profile = find_engine_profile(engine.engine);
  if (profile == nullptr || profile->shards_by_pcp) options.pcp = engine.pcp;
  return options;
}

std::int64_t planned_blocks_of_request(const EngineConfig& engine,
                                       std::span<const KVCacheGroupSpec> groups) {
  PlanOptions options = plan_options_of(engine);
  options.async_scheduling = engine.async_scheduling;
  std::int64_t blocks = 0;
  for (const KVCacheGroupSpec& group : groups)
    if (!is_page_source(group)) blocks += max_blocks_per_request(group, options);
  return blocks + num_sink_blocks(groups);
}

std::int64_t num_sink_blocks(std::span<const KVCacheGroupSpec> groups) {
  std::int64_t blocks = 0;
  for (const KVCacheGroupSpec& group : groups)
    blocks += group.spec.sink_len / std::max<std::int64_t>(group.spec.block_size, 1);
  return blocks;
}

bool grows_with_length(const KVCacheSpec& spec) {
  return is_full_attention(spec.kind) ||
         (is_state_kind(spec.kind) && spec.mamba_cache_mode == MambaCacheMode::all);
}

bool all_uniform_type(std::span<const KVCacheGroupSpec> groups) {
  // A pipeline stage may hold no layer of a group; such a group says nothing.
  const auto says_nothing = [](const KVCacheGroupSpec& g) { return g.layer_names.empty(); };
  return std::ranges::any_of(groups, &KVCacheGroupSpec::is_uniform_type) &&
         std::ranges::all_of(groups, [&](const KVCacheGroupSpec& g) {
           return says_nothing(g) || g.is_uniform_type();
         });
}

std::vector<std::int64_t> page_sizes(const KVCacheGroupSpec& group) {
  std::vector<std::int64_t> sizes;
  for (const auto& [page, layers] : by_page_size(layers_of({&group, 1}), page_size_bytes))
    sizes.push_back(page);
  std::ranges::sort(sizes);
  return sizes;
}

std::int64_t tensors_per_pool(std::span<const KVCacheGroupSpec> groups) {
  std::int64_t tensors = 0;
  for (const KVCacheGroupSpec& group : groups) {
    const auto layers = static_cast<std::int64_t>(group.layer_names.size());
    tensors = std::max(tensors, group.is_uniform_type() ? num_layer_tuples(layers_of({&group, 1}))
                                                        : cdiv(layers, group.layers_per_page));
  }
  return tensors;
}

std::int64_t pool_bytes_per_block(std::span<const KVCacheGroupSpec> groups) {
  LS_CHECK(!groups.empty());
  if (!all_uniform_type(groups))
    return pool_page_size_bytes(groups.front()) * tensors_per_pool(groups);
  if (groups.size() == 1) return page_size_bytes(groups.front());
  std::int64_t tuple_bytes = 0;
  for (std::int64_t page : page_sizes(groups.front())) tuple_bytes += page;
  return tuple_bytes * tensors_per_pool(groups);
}

std::int64_t request_bytes(std::span<const KVCacheGroupSpec> groups, const PlanOptions& options) {
  if (groups.empty()) return 0;
  if (groups.size() == 1 && groups.front().is_uniform_type()) {
    std::int64_t bytes = 0;
    for (const KVCacheSpec& spec : groups.front().layer_specs)
      bytes += saturating_product(max_blocks_per_request(spec, options), page_size_bytes(spec));
    return bytes;
  }
  std::int64_t blocks = 0;
  for (const KVCacheGroupSpec& group : groups) blocks += max_blocks_per_request(group, options);
  return saturating_product(blocks, pool_bytes_per_block(groups));
}

std::int64_t largest_model_len(std::span<const KVCacheGroupSpec> groups, PlanOptions options,
                               std::int64_t memory_bytes) {
  return longest_that_fits(options.max_model_len, [&](std::int64_t length) {
    options.max_model_len = length;
    return request_bytes(groups, options) <= memory_bytes;
  });
}

namespace {

GroupCapacity group_capacity(const KVCacheGroupSpec& group, const KVCacheConfig& config,
                             const PlanOptions& options) {
  GroupCapacity capacity{.kind = group.spec.kind,
                         .block_size = group.spec.block_size,
                         .blocks_per_request = max_blocks_per_request(group, options),
                         .grows = grows_with_length(group.spec)};
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
      {"all_groups_tokens", fmt::format("num_blocks // all groups * smallest block size (older; "
                                        "wrong with state groups and windows): {}",
                                        c.all_groups_tokens)},
      {"slot_address_space", fmt::format("num_blocks * block_size of the group with most slots: {}",
                                         c.slot_address_space)},
  };
  // A block is taken from the whole pool, whatever part of it the group's layers fill.
  if (held != c.blocks_per_request)
    c.formulas.push_back(
        {"blocks held",
         fmt::format(
             "a request holds {} blocks of the pool, so that {:.2f} fit; the engine reports {:.2f}",
             sum, static_cast<double>(c.num_blocks) / static_cast<double>(held),
             c.max_concurrency)});
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

Capacity capacity_of(const KVCacheConfig& config, const PlanOptions& options) {
  LS_CHECK(!config.groups.empty() && config.num_blocks > 0, "{} groups, {} blocks",
           config.groups.size(), config.num_blocks);
  Capacity c{.num_blocks = config.num_blocks,
             .usable_blocks = config.num_blocks - 1,
             .blocks_per_request = blocks_per_request(config, options)};
  LS_CHECK(c.blocks_per_request > 0, "max_model_len {}", options.max_model_len);
  c.max_concurrency =
      static_cast<double>(config.num_blocks) / static_cast<double>(c.blocks_per_request);
  c.capacity_tokens =
      static_cast<std::int64_t>(c.max_concurrency * static_cast<double>(options.max_model_len));
  c.growing_groups_tokens = tokens_of_groups(config, options, true);
  c.all_groups_tokens = tokens_of_groups(config, options, false);
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
