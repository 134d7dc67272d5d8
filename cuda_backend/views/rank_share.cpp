#include "cuda_backend/views/rank_share.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <utility>

#include "cuda_backend/views/views.h"

namespace lockstep::cuda {
namespace {

// The number between dots in a layer's name; -1: it has none.
std::int64_t model_layer(const std::string& name) {
  std::size_t at = 0;
  while (at < name.size()) {
    std::size_t digits = at;
    while (digits < name.size() && std::isdigit(static_cast<unsigned char>(name[digits])) != 0)
      ++digits;
    const bool whole_word = digits == name.size() || name[digits] == '.';
    if (digits > at && whole_word) return std::stoll(name.substr(at, digits - at));
    const std::size_t dot = name.find('.', at);
    at = dot == std::string::npos ? name.size() : dot + 1;
  }
  return -1;
}

class RankCutter {
 public:
  explicit RankCutter(const BackendConfig& config)
      : model_(config.plan),
        at_(config.parallel),
        queries_per_kv_(config.queries_per_kv),
        attention_(config.attention_backend) {}

  Result<RankShare> share() {
    if (at_.is_whole()) return whole();
    if (at_.pp_size > 1) LS_RETURN_IF_ERROR(count_layers());
    share_.plan.num_blocks = model_.num_blocks;
    share_.plan.draft_modules = model_.draft_modules;
    std::int32_t number = 0;
    for (const KVCacheGroupSpec& group : model_.groups) {
      LS_RETURN_IF_ERROR(take_group(group, number));
      number += static_cast<std::int32_t>(group.layer_names.size());
    }
    LS_RETURN_IF_ERROR(place_layers());
    return std::move(share_);
  }

 private:
  RankShare whole() const {
    RankShare share{.plan = model_, .layers = {}};
    for (const KVCacheGroupSpec& group : model_.groups)
      for (std::size_t i = 0; i < group.layer_names.size(); ++i)
        share.layers.push_back({.number = static_cast<std::int32_t>(share.layers.size()),
                                .queries_per_kv = queries_per_kv_});
    return share;
  }

  // Stages are equally long; what remains goes to those before the last, one each from behind.
  Result<void> count_layers() {
    std::set<std::int64_t> layers;
    for (const KVCacheGroupSpec& group : model_.groups)
      for (const std::string& name : group.layer_names) layers.insert(model_layer(name));
    if (layers.contains(-1)) return fail("layers without a number have no pipeline stage");
    const std::int64_t count = layers.empty() ? 0 : *layers.rbegin() + 1;
    if (count < at_.pp_size) return fail("{} layers for {} pipeline stages", count, at_.pp_size);
    std::vector<std::int64_t> lengths(at_.pp_size, count / at_.pp_size);
    for (std::int64_t i = 0; i < count % at_.pp_size; ++i) ++lengths[at_.pp_size - 2 - i];
    for (std::int32_t stage = 0; stage < at_.pp_rank; ++stage) first_layer_ += lengths[stage];
    end_layer_ = first_layer_ + lengths[at_.pp_rank];
    return {};
  }

  bool is_mine(const std::string& name) const {
    if (at_.pp_size == 1) return true;
    const std::int64_t layer = model_layer(name);
    return layer >= first_layer_ && layer < end_layer_;
  }

  Result<void> take_group(const KVCacheGroupSpec& group, std::int32_t number) {
    KVCacheGroupSpec& own = share_.plan.groups.emplace_back();
    own.layers_per_page = group.layers_per_page;
    LS_ASSIGN_OR_RETURN(own.spec, worker_spec(group.spec));
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      if (!is_mine(group.layer_names[i])) continue;
      LS_ASSIGN_OR_RETURN(auto layer_spec, worker_spec(group.layer_spec(i)));
      share_.layers.push_back(
          place_in_model(group.layer_spec(i), layer_spec, number + static_cast<std::int32_t>(i)));
      own.layer_names.push_back(group.layer_names[i]);
      if (!group.layer_specs.empty()) own.layer_specs.push_back(std::move(layer_spec));
    }
    if (!own.layer_specs.empty()) own.spec = own.layer_specs.front();
    return {};
  }

  // The spec as the layer on this rank would state it.
  Result<KVCacheSpec> worker_spec(KVCacheSpec spec) const {
    const std::int64_t tp = at_.tp_size;
    spec.page_size_padded.reset();
    if (keeps_pairs(spec)) {
      const std::int64_t per_rank = std::max<std::int64_t>(1, spec.num_kv_heads / tp);
      if (per_rank * tp % spec.num_kv_heads != 0 || (per_rank > 1 && spec.num_kv_heads % tp != 0))
        return fail("{} KV heads over {} tensor parallel ranks", spec.num_kv_heads, tp);
      spec.num_kv_heads = per_rank;
    }
    for (StateTensorSpec& state : spec.states) {
      const bool heads_in_front = state.dims.size() > 2 ||
                                  (&state == &spec.states.back() && &state != &spec.states.front());
      std::int64_t& cut = heads_in_front ? state.dims.front() : state.dims.back();
      if (cut % tp != 0) return fail("{} of a state over {} tensor parallel ranks", cut, tp);
      cut /= tp;
    }
    return spec;
  }

  LayerOfModel place_in_model(const KVCacheSpec& model, const KVCacheSpec& own,
                              std::int32_t number) const {
    LayerOfModel place{.number = number, .queries_per_kv = queries_per_kv_};
    if (at_.tp_size == 1 || is_hidden_state(model.kind)) return place;
    if (is_state_kind(model.kind)) {
      place.head_begin = at_.tp_rank;
      return place;
    }
    const std::int64_t heads = keeps_pairs(model) ? model.num_kv_heads : 1;
    if (keeps_pairs(model))
      place.head_begin = static_cast<std::int32_t>(at_.tp_rank * heads / at_.tp_size);
    // Ranks that share tokens gather their query heads.
    const std::int64_t queries = model.num_kv_heads * queries_per_kv_ / at_.tp_size;
    const std::int32_t gathered = model.dcp_sharded ? at_.dcp_size : 1;
    const std::int32_t leader = at_.tp_rank - at_.tp_rank % gathered;
    place.query_begin = static_cast<std::int32_t>(leader * queries);
    place.queries_per_kv = static_cast<std::int32_t>(queries * gathered / own.num_kv_heads);
    return place;
  }

  // One buffer for the i-th layer (or pack) of each group; where specs are layer by layer, one for
  // each layer of a group alone, or for the i-th of each page size.
  Result<void> place_layers() {
    std::vector<KVCacheGroupSpec>& groups = share_.plan.groups;
    const bool by_layer = std::ranges::any_of(
        model_.groups, [](const KVCacheGroupSpec& group) { return !group.layer_specs.empty(); });
    if (by_layer) return place_by_page();
    const std::int64_t page = pad_pages();
    for (const KVCacheGroupSpec& group : groups)
      for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
        const std::size_t tensor = i / static_cast<std::size_t>(group.layers_per_page);
        if (share_.plan.tensors.size() <= tensor) share_.plan.tensors.resize(tensor + 1);
        share_.plan.tensors[tensor].size_bytes = page * model_.num_blocks;
        share_.plan.tensors[tensor].shared_by.push_back(group.layer_names[i]);
      }
    return {};
  }

  // Every group's page as long as the longest, and as much longer as the model's are.
  std::int64_t pad_pages() {
    const auto longest = [&](const std::vector<KVCacheGroupSpec>& groups) {
      std::int64_t bytes = 0;
      for (const KVCacheGroupSpec& group : groups) {
        KVCacheSpec bare = group.spec;
        bare.page_size_padded.reset();
        bytes = std::max(bytes, page_bytes(bare, attention_) * group.layers_per_page);
      }
      return bytes;
    };
    const KVCacheGroupSpec& first = model_.groups.front();
    const std::int64_t spare =
        page_bytes(first.spec, attention_) * first.layers_per_page - longest(model_.groups);
    const std::int64_t page = longest(share_.plan.groups) + spare;
    for (KVCacheGroupSpec& group : share_.plan.groups)
      if (page_bytes(group.spec, attention_) * group.layers_per_page != page)
        group.spec.page_size_padded = page;
    return page;
  }

  // A buffer for each layer, which has a page of its own.
  Result<void> place_by_page() {
    if (share_.plan.groups.size() > 1)
      return fail("groups of layers with pages of their own, several of them: not cut into ranks");
    const KVCacheGroupSpec& group = share_.plan.groups.front();
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      share_.plan.tensors.push_back(
          {.size_bytes = page_bytes(group.layer_spec(i), attention_) * model_.num_blocks,
           .shared_by = {group.layer_names[i]}});
    return {};
  }

  const KVCacheConfig& model_;
  const ParallelRank& at_;
  const std::int32_t queries_per_kv_;
  const AttentionBackend attention_;
  std::int64_t first_layer_ = 0;
  std::int64_t end_layer_ = 0;
  RankShare share_;
};

}  // namespace

Result<RankShare> share_of_rank(const BackendConfig& config) { return RankCutter(config).share(); }

}  // namespace lockstep::cuda
