#include "reference/plan/rank_plan.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "base/check.h"
#include "reference/plan/capacity.h"
#include "reference/plan/page_size.h"
#include "reference/plan/planner.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {
namespace {

// The dimension of a state tensor that tensor parallelism cuts.
std::size_t cut_dimension(const std::vector<StateTensorSpec>& states, std::size_t index) {
  const std::size_t dims = states[index].dims.size();
  const bool last_of_several = states.size() > 1 && index + 1 == states.size();
  return dims >= 3 || last_of_several ? 0 : dims - 1;
}

Result<void> cut_states(const std::string& layer, std::int64_t tp,
                        std::vector<StateTensorSpec>& states) {
  for (std::size_t s = 0; s < states.size(); ++s) {
    std::int64_t& count = states[s].dims[cut_dimension(states, s)];
    if (count % tp != 0)
      return fail(
          "{}: {} channels or heads of state {} cannot be cut over tensor_parallel_size {}; use a "
          "divisor of it",
          layer, count, s, tp);
    count /= tp;
  }
  return {};
}

Result<void> cut_heads(const std::string& layer, std::int64_t tp, KVCacheSpec& spec) {
  const std::int64_t heads = spec.num_kv_heads;
  if (tp > heads ? tp % heads != 0 : heads % tp != 0)
    return fail(
        "{}: {} KV heads can neither be cut nor be replicated evenly over tensor_parallel_size {}; "
        "use a divisor or a multiple of them",
        layer, heads, tp);
  spec.num_kv_heads = std::max<std::int64_t>(1, heads / tp);
  return {};
}

// The numbers [first, last) of a stage.
struct Stage {
  std::int64_t first = 0;
  std::int64_t last = 0;
  bool holds(std::int64_t number) const { return number >= first && number < last; }
};

Result<Stage> stage_of(const KVCacheConfig& whole, const ParallelRank& rank) {
  std::int64_t count = 0;
  for (const KVCacheGroupSpec& group : whole.groups)
    for (const std::string& name : group.layer_names) {
      const auto number = layer_number(name);
      if (!number)
        return fail(
            "{}: a layer without a number in its name belongs to no stage of "
            "pipeline_parallel_size {}",
            name, rank.pp_size);
      count = std::max(count, *number + 1);
    }
  if (count < rank.pp_size)
    return fail("pipeline_parallel_size {}: the model has {} layers; use at most that",
                rank.pp_size, count);
  return Stage{stage_begin(count, rank.pp_size, rank.pp_rank),
               stage_begin(count, rank.pp_size, rank.pp_rank + 1)};
}

// The heads of a layer of the rank, of KV and of queries.
Result<LayerShare> share_of(const std::string& name, const KVCacheSpec& whole,
                            const KVCacheSpec& own, const ParallelRank& rank,
                            std::int64_t queries_per_kv) {
  LayerShare share{.queries_per_kv = static_cast<std::int32_t>(queries_per_kv)};
  if (rank.tp_size == 1) return share;
  if (is_state_kind(whole.kind)) {
    share.first_head = rank.tp_rank;
    return share;
  }
  if (is_hidden_state(whole.kind)) return share;
  const std::int64_t copies = has_single_rows(whole)
                                  ? rank.tp_size
                                  : std::max<std::int64_t>(1, rank.tp_size / whole.num_kv_heads);
  if (!has_single_rows(whole))
    share.first_head = static_cast<std::int32_t>(rank.tp_rank / copies * own.num_kv_heads);
  // Ranks that keep all tokens attend by themselves.
  const std::int32_t dcp_size = is_dealt_out(whole) ? rank.dcp_size : 1;
  if (copies % dcp_size != 0)
    return fail(
        "{}: decode_context_parallel_size {} shards the tokens over ranks that hold the same KV "
        "heads, and {} do; use a divisor of it",
        name, dcp_size, copies);
  const std::int64_t query_heads = whole.num_kv_heads * queries_per_kv;
  if (query_heads % rank.tp_size != 0)
    return fail(
        "{}: {} query heads ({} per KV head) cannot be cut over tensor_parallel_size {}; give more "
        "queries per KV head, or a divisor of them",
        name, query_heads, queries_per_kv, rank.tp_size);
  const std::int64_t of_rank = query_heads / rank.tp_size;
  share.queries_per_kv = static_cast<std::int32_t>(of_rank * dcp_size / own.num_kv_heads);
  share.first_query_head = static_cast<std::int32_t>(rank.tp_rank / dcp_size * dcp_size * of_rank);
  return share;
}

std::int64_t own_page(const KVCacheGroupSpec& group) {
  return unpadded_page_size_bytes(group.spec) * group.layers_per_page;
}
std::int64_t largest_page(const std::vector<KVCacheGroupSpec>& groups) {
  std::int64_t largest = 0;
  for (const KVCacheGroupSpec& group : groups) largest = std::max(largest, own_page(group));
  return largest;
}
void pad_to(std::int64_t page, std::vector<KVCacheGroupSpec>& groups) {
  for (KVCacheGroupSpec& group : groups)
    if (own_page(group) != page) group.spec.page_size_padded = page;
}

// Pages of all groups made equal again, whatever the cut has left of each.
Result<void> equalize_pages(const KVCacheConfig& whole, std::vector<KVCacheGroupSpec>& groups) {
  const std::int64_t beyond =
      pool_page_size_bytes(whole.groups.front()) - largest_page(whole.groups);
  const std::int64_t page = largest_page(groups) + std::max<std::int64_t>(0, beyond);
  for (const KVCacheGroupSpec& group : groups)
    if (group.layers_per_page > 1 && own_page(group) != page)
      return fail(
          "{}: {} layers share a page of {} bytes, and a rank's pages have {}; packed layers must "
          "stay the largest",
          group.layer_names.empty() ? "a group" : group.layer_names.front(), group.layers_per_page,
          own_page(group), page);
  pad_to(page, groups);
  return {};
}

Result<void> cut_spec(const std::string& name, const ParallelRank& rank, KVCacheSpec& spec) {
  if (rank.is_whole()) return {};
  spec.page_size_padded.reset();
  if (is_state_kind(spec.kind)) return cut_states(name, rank.tp_size, spec.states);
  return has_single_rows(spec) ? Result<void>() : cut_heads(name, rank.tp_size, spec);
}

}  // namespace

std::optional<std::int64_t> layer_number(std::string_view name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    std::int64_t number = 0;
    const auto read = std::from_chars(name.data() + begin, name.data() + end, number);
    if (read.ec == std::errc() && read.ptr == name.data() + end && number >= 0) return number;
    begin = end + 1;
  }
  return std::nullopt;
}

std::int64_t stage_begin(std::int64_t count, std::int64_t pp, std::int64_t stage) {
  // Of the stages before the last one, the latest `rest` have one layer more.
  const std::int64_t rest = count % pp;
  return stage * (count / pp) + std::clamp<std::int64_t>(stage - (pp - 1 - rest), 0, rest);
}

std::int64_t num_layers(const LayerSpecs& layers, const PlanOptions& options) {
  std::int64_t count = options.num_hidden_layers;
  if (count > 0) return count;
  for (const NamedSpec& layer : layers)
    if (!layer.is_draft) count = std::max(count, layer_number(layer.name).value_or(-1) + 1);
  return count;
}

std::vector<std::int64_t> layer_stages(const LayerSpecs& layers, const PlanOptions& options) {
  const std::int64_t count = num_layers(layers, options);
  std::vector<std::int64_t> stages;
  for (const NamedSpec& layer : layers) {
    const auto number = layer.is_draft ? std::nullopt : layer_number(layer.name);
    std::int64_t stage = options.pp - 1;
    while (number && stage > 0 && *number < stage_begin(count, options.pp, stage)) --stage;
    stages.push_back(stage);
  }
  return stages;
}

Result<RankPlan> rank_plan(const KVCacheConfig& whole, const ParallelRank& rank,
                           std::int64_t queries_per_kv) {
  RankPlan cut;
  std::vector<KVCacheGroupSpec> groups;
  Stage stage;
  if (rank.pp_size > 1) {
    LS_ASSIGN_OR_RETURN(stage, stage_of(whole, rank));
  }
  std::int32_t number = 0;  // of the layer in the whole
  for (const KVCacheGroupSpec& all : whole.groups) {
    KVCacheGroupSpec& own = groups.emplace_back(all);
    own.layer_names.clear();
    own.layer_specs.clear();
    LS_RETURN_IF_ERROR(
        cut_spec(all.layer_names.empty() ? "a group" : all.layer_names.front(), rank, own.spec));
    for (std::size_t i = 0; i < all.layer_names.size(); ++i, ++number) {
      const std::string& name = all.layer_names[i];
      KVCacheSpec spec = all.layer_spec(i);
      LS_RETURN_IF_ERROR(cut_spec(name, rank, spec));
      LS_ASSIGN_OR_RETURN(auto share,
                          share_of(name, all.layer_spec(i), spec, rank, queries_per_kv));
      if (rank.pp_size > 1 && !stage.holds(*layer_number(name))) continue;
      share.layer = number;
      cut.layers.push_back(share);
      own.layer_names.push_back(name);
      if (all.is_uniform_type())
        own.layer_specs.push_back(rank.is_whole() ? spec : with_alignment_padding(spec));
    }
    if (!own.layer_specs.empty()) own.spec = own.layer_specs.front();
  }
  if (rank.is_whole()) {
    cut.plan = whole;
    return cut;
  }
  if (cut.layers.empty())
    return fail("pipeline_parallel_size {}: stage {} has no layer with a cache", rank.pp_size,
                rank.pp_rank);
  if (!all_uniform_type(groups)) LS_RETURN_IF_ERROR(equalize_pages(whole, groups));
  PlanOptions options;
  options.num_gpu_blocks_override = whole.num_blocks;
  cut.plan = kv_cache_config(std::move(groups), 0, options);
  return cut;
}

KVCacheConfig whole_plan(const KVCacheConfig& rank, const LayerSpecs& layers,
                         std::int32_t tp_size) {
  if (tp_size == 1) return rank;
  const auto whole = [&](const std::string& name, KVCacheSpec& spec) {
    const auto layer = std::ranges::find(layers, name, &NamedSpec::name);
    LS_CHECK(layer != layers.end(), "{} is no layer of the model", name);
    if (!has_single_rows(spec)) spec.num_kv_heads = layer->spec.num_kv_heads;
    for (std::size_t s = 0; s < spec.states.size(); ++s)
      spec.states[s].dims[cut_dimension(spec.states, s)] *= tp_size;
    spec.page_size_padded.reset();
  };
  std::vector<KVCacheGroupSpec> groups = rank.groups;
  for (KVCacheGroupSpec& group : groups) {
    for (std::size_t i = 0; i < group.layer_specs.size(); ++i) {
      whole(group.layer_names[i], group.layer_specs[i]);
      group.layer_specs[i] = with_alignment_padding(group.layer_specs[i]);
    }
    if (group.is_uniform_type())
      group.spec = group.layer_specs.front();
    else
      whole(group.layer_names.front(), group.spec);
  }
  if (!all_uniform_type(groups)) pad_to(largest_page(groups), groups);
  PlanOptions options;
  options.num_gpu_blocks_override = rank.num_blocks;
  return kv_cache_config(std::move(groups), 0, options);
}

bool keeps(const ContextRank& at, std::int64_t position) {
  return position / at.interleave % at.num_ranks == at.rank;
}

ContextRank rank_in(const ContextRank& at, const KVCacheSpec& spec) {
  return is_dealt_out(spec) ? at : ContextRank{};
}

std::int64_t num_kept(const ContextRank& at, std::int64_t position) {
  LS_CHECK(position >= 0 && at.rank < at.num_ranks, "position {} on rank {} of {}", position,
           at.rank, at.num_ranks);
  const std::int64_t round = std::int64_t{at.interleave} * at.num_ranks;
  const std::int64_t into_own = position % round - std::int64_t{at.rank} * at.interleave;
  return position / round * at.interleave + std::clamp<std::int64_t>(into_own, 0, at.interleave);
}

std::int32_t num_context_ranks(const EngineConfig& config, const KVCacheSpec& spec) {
  const EngineProfile* profile = find_engine_profile(config.engine);
  if (profile == nullptr) return 1;
  if (profile->shards_by_pcp) return config.dcp * config.pcp;
  return is_dealt_out(spec) ? config.dcp : 1;
}

}  // namespace lockstep
