// Defects planted in plans: in a rank's share, and in the addresses that kernels receive.
#include <algorithm>

#include "cuda_backend/defects/planted_seams.h"
#include "cuda_backend/defects/planted_views.h"
#include "cuda_backend/views/layer_caches.h"

namespace lockstep::cuda {
namespace {

// Seams that change the view of each layer that keeps rows: edit(LayerViews&).
template <class Edit>
Seams in_row_views(Edit edit) {
  return {.views = [edit](const BackendConfig& config) {
    auto views = derive_views(config.plan, view_options(config));
    if (!views) return views;
    for (std::vector<LayerViews>& group : views->groups)
      for (LayerViews& layer : group)
        if (layer.kernel_block_size > 0) edit(layer);
    return views;
  }};
}

// Seams that change the first head of each layer that tensor parallelism cuts by heads: where
// applies(number of ranks, number of KV heads), it is the rank's number.
template <class Applies>
Seams in_first_heads(Applies applies) {
  return {.share = [applies](const BackendConfig& model, RankShare& share) {
    const ParallelRank& at = model.parallel;
    if (at.tp_size == 1) return;
    std::vector<const KVCacheSpec*> specs;  // of the model's layers
    for (const KVCacheGroupSpec& group : model.plan.groups)
      for (std::size_t i = 0; i < group.layer_names.size(); ++i)
        specs.push_back(&group.layer_spec(i));
    for (LayerOfModel& layer : share.layers) {
      const KVCacheSpec& spec = *specs[layer.number];
      if (keeps_pairs(spec) && applies(at.tp_size, spec.num_kv_heads))
        layer.head_begin = at.tp_rank;
    }
  }};
}

// Rows without room for the blocks of drafts' states.
Seams table_width(const BackendConfig& healthy) {
  std::int64_t spare_bytes = 0;
  for (const KVCacheGroupSpec& group : healthy.plan.groups)
    spare_bytes = std::max(spare_bytes, healthy.num_rows * group.spec.num_speculative_blocks *
                                            group.spec.block_size * std::int64_t{4});
  Seams seams = on_device({.spare_table_bytes = spare_bytes});
  seams.config = [](BackendConfig& config) {
    for (std::size_t g = 0; g < config.plan.groups.size(); ++g)
      config.max_blocks_per_row[g] -=
          static_cast<std::int32_t>(config.plan.groups[g].spec.num_speculative_blocks);
  };
  return seams;
}
// An order of the same blocks and layers in which heads and tokens are exchanged.
CacheLayout heads_elsewhere(CacheLayout layout) {
  using enum CacheLayout;
  switch (layout) {
    case NHD:
      return HND;
    case HND:
      return NHD;
    case LBNHC:
      return LBHNC;
    case LBHNC:
    case LHBNC:
      return LBNHC;
    case BLNHC:
      return BLHNC;
    case BLHNC:
    case BHLNC:
      return BLNHC;
  }
  return layout;
}
Seams layout_order_lost(const BackendConfig&) {
  return {.views = [](const BackendConfig& config) {
    ViewOptions options = view_options(config);
    options.layout = heads_elsewhere(options.layout);
    return derive_views(config.plan, options);
  }};
}
Seams wrong_stride(const BackendConfig&) {
  return in_row_views([](LayerViews& layer) {
    auto& stride = layer.tensors.front().stride;
    stride[layer.block_dim] -= stride[layer.token_dim];
  });
}
Seams write_past_page(const BackendConfig&) {
  return in_row_views([](LayerViews& layer) {
    TensorView& view = layer.tensors.front();
    std::int64_t& begin = layer.kv_dim >= 0 ? view.stride[layer.kv_dim] : view.storage_offset;
    begin += view.stride[layer.token_dim];
  });
}
Seams tp_head_offset(const BackendConfig&) {
  return in_first_heads([](std::int64_t ranks, std::int64_t heads) { return ranks <= heads; });
}
Seams tp_heads_not_replicated(const BackendConfig&) {
  return in_first_heads([](std::int64_t ranks, std::int64_t heads) { return ranks > heads; });
}
Seams pp_layer_offset(const BackendConfig&) {
  return {.share = [](const BackendConfig& model, RankShare& share) {
    if (model.parallel.pp_rank == 0) return;
    for (LayerOfModel& layer : share.layers) ++layer.number;
  }};
}

template <ViewDefect kDefect>
Seams in_views(const BackendConfig&) {
  return {.views = [](const BackendConfig& config) {
    return planted_views(config.plan, view_options(config), kDefect);
  }};
}

constexpr PlantedDefect kOfPlans[] = {
    {"wrong-stride", wrong_stride},
    {"write-past-page", write_past_page},
    {"layout-order-lost", layout_order_lost},
    {"table-width", table_width},
    {"tp-head-offset", tp_head_offset},
    {"tp-heads-not-replicated", tp_heads_not_replicated},
    {"pp-layer-offset", pp_layer_offset},
    {"layout-two-blocks", in_views<ViewDefect::layout_two_blocks>},
    {"layout-not-updated", in_views<ViewDefect::layout_not_updated>},
    {"layout-restride-hidden", in_views<ViewDefect::layout_restride_hidden>},
    {"layout-equal-page", in_views<ViewDefect::layout_equal_page>},
    {"layout-two-heads", in_views<ViewDefect::layout_two_heads>},
    {"state-stride-unpadded", in_views<ViewDefect::state_stride_unpadded>},
    {"state-offset-wrong-itemsize", in_views<ViewDefect::state_offset_wrong_itemsize>},
    {"pack-stride", in_views<ViewDefect::pack_stride>},
    {"pack-offset", in_views<ViewDefect::pack_offset>},
    {"order-layer-stride", in_views<ViewDefect::order_layer_stride>},
    {"order-head-stride", in_views<ViewDefect::order_head_stride>},
    {"mapped-dense", in_views<ViewDefect::mapped_dense>},
};

}  // namespace

std::span<const PlantedDefect> defects_of_plans() { return kOfPlans; }

}  // namespace lockstep::cuda
