// Defects planted in plans: in a rank's share of layers, heads and tokens, and in the addresses
// that kernels receive.
#include <algorithm>
#include <utility>
#include <vector>

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
    const auto specs =
        by_layer(model.plan, [](const auto& group, std::size_t i) { return &group.layer_spec(i); });
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
  for (const auto& [tokens_first, heads_first] :
       {std::pair(NHD, HND), {LBNHC, LBHNC}, {LBNHC, LHBNC}, {BLNHC, BLHNC}, {BLNHC, BHLNC}}) {
    if (layout == tokens_first) return heads_first;
    if (layout == heads_first) return tokens_first;
  }
  return layout;
}

template <ViewDefect kDefect>
Seams in_views(const BackendConfig&) {
  return {.views = [](const BackendConfig& config) {
    return planted_views(config.plan, view_options(config), {kDefect});
  }};
}
// Slots as if a replicated block had the tokens of all ranks' blocks.
Seams whole_block_of_all(const BackendConfig& config) {
  return in_elements(kTables, [num_ranks = config.context.num_ranks](GroupTable& table) {
    if (table.is_whole) table.slot_block_size *= num_ranks;
  });
}
// Reads of replicated layers end where the rank's share of a sharded layer ends.
Seams whole_read_in_part(const BackendConfig& config) {
  const auto is_whole =
      by_layer(config.plan, [](const auto& group, std::size_t) { return !group.spec.dcp_sharded; });
  return in_program([is_whole, num_ranks = config.context.num_ranks](StepProgram& program) {
    const auto cut = [&](auto& reads) {
      for (auto& read : reads) {
        if (!is_whole.at(static_cast<std::size_t>(read.layer))) continue;
        read.first /= num_ranks;
        read.last /= num_ranks;
      }
    };
    cut(program.probes);
    cut(program.queries);
  });
}

const PlantedDefect kOfPlans[] = {
    {"wrong-stride", in_row_views([](LayerViews& layer) {
       auto& stride = layer.tensors.front().stride;
       stride[layer.block_dim] -= stride[layer.token_dim];
     })},
    {"write-past-page", in_row_views([](LayerViews& layer) {
       TensorView& view = layer.tensors.front();
       std::int64_t& begin = layer.kv_dim >= 0 ? view.stride[layer.kv_dim] : view.storage_offset;
       begin += view.stride[layer.token_dim];
     })},
    {"layout-order-lost", Seams{.views =
                                    [](const BackendConfig& config) {
                                      ViewOptions options = view_options(config);
                                      options.layout = heads_elsewhere(options.layout);
                                      return derive_views(config.plan, options);
                                    }}},
    {"table-width", table_width},
    {"tp-head-offset",
     in_first_heads([](std::int64_t ranks, std::int64_t heads) { return ranks <= heads; })},
    {"tp-heads-not-replicated",
     in_first_heads([](std::int64_t ranks, std::int64_t heads) { return ranks > heads; })},
    {"pp-layer-offset", Seams{.share =
                                  [](const BackendConfig& model, RankShare& share) {
                                    if (model.parallel.pp_rank == 0) return;
                                    for (LayerOfModel& layer : share.layers) ++layer.number;
                                  }}},
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

    // Replicated groups are sharded like the others.
    {"whole-dealt-out", in_elements(kTables, [](GroupTable& table) { table.is_whole = false; })},
    // Sharded groups are replicated.
    {"dealt-out-whole", in_elements(kTables, [](GroupTable& table) { table.is_whole = true; })},
    {"whole-block-of-all", whole_block_of_all},
    {"whole-read-in-part", whole_read_in_part, Needs::words},
};

}  // namespace

std::span<const PlantedDefect> defects_of_plans() { return kOfPlans; }

}  // namespace lockstep::cuda
