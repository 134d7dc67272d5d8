// Defects planted in plans: in a rank's share, and in the addresses that kernels receive.
#include <algorithm>
#include <limits>
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

// Defects planted in the passes of a draft model: in their contents and in their slots.

namespace {

// Changes the contents of each row's passes: change(row, contents of the first pass, the rest).
template <class Change>
Seams in_contents(Change change) {
  return {.program = [change](StepProgram& program) {
    for (const DraftRow& row : program.draft_rows) {
      const auto all = std::span(program.draft_contents).subspan(row.first_content);
      change(row, all.first(row.num_tokens), all.subspan(row.num_tokens));
    }
  }};
}

Seams draft_token_unshifted(const BackendConfig&) {
  return in_contents([](const DraftRow&, std::span<std::uint64_t> first, auto) {
    std::shift_right(first.begin(), first.end(), 1);
  });
}
Seams draft_module_first(const BackendConfig& config) {
  if (config.drafter.shape != DraftShape::modules) return {};
  return in_contents([num_modules = config.drafter.num_drafts](const DraftRow& row,
                                                               std::span<std::uint64_t> first,
                                                               std::span<std::uint64_t> rest) {
    for (std::int32_t module = 1; module < num_modules; ++module)
      std::ranges::copy(first, rest.begin() + (module - 1) * row.num_tokens);
  });
}
// An accepted draft keeps the row that was written for it as a draft.
Seams draft_row_kept(const BackendConfig& config) {
  if (config.drafter.shape == DraftShape::modules) return {};
  return {.program = [](StepProgram& program) {
    for (DraftRow& row : program.draft_rows) {
      if (row.num_tokens < 2) continue;
      ++row.first_position;
      ++row.first_content;
      --row.num_tokens;
    }
  }};
}
Seams draft_rejected_counted(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    for (DraftRow& row : program.draft_rows) row.num_rejected = 0;
  }};
}
// Later modules do not rewrite the rows of rejected drafts.
Seams draft_not_run_again(const BackendConfig& config) {
  if (config.drafter.shape != DraftShape::modules) return {};
  return {.program = [num_modules = config.drafter.num_drafts](StepProgram& program) {
    for (std::size_t i = 0; i < program.draft_rows.size(); ++i) {
      DraftRow& row = program.draft_rows[i];
      const std::int32_t again = program.rows[i].first_position - row.first_position;
      if (again == 0) continue;
      std::vector<std::uint64_t> contents;
      for (std::int32_t module = 0; module < num_modules; ++module) {
        const auto of_module = program.draft_contents.begin() + row.first_content +
                               std::ptrdiff_t{module} * row.num_tokens;
        contents.insert(contents.end(), of_module + again, of_module + row.num_tokens);
      }
      row.first_position += again;
      row.num_tokens -= again;
      std::ranges::copy(contents, program.draft_contents.begin() + row.first_content);
    }
  }};
}

template <class Edit>
Seams in_slots(Edit edit) {
  return on_device({.launch = [edit](LaunchParams params, Operation&, Device&) {
    if (auto** slots = std::get_if<DraftSlotsParams*>(&params)) edit(**slots);
  }});
}
Seams draft_position_late(const BackendConfig&) {
  return in_slots([](DraftSlotsParams& params) { params.advance *= 2; });
}
Seams draft_position_stuck(const BackendConfig&) {
  return in_slots([](DraftSlotsParams& params) { params.advance = 0; });
}
Seams draft_unclamped(const BackendConfig&) {
  return in_slots([](DraftSlotsParams& params) {
    params.last_position = std::numeric_limits<std::int32_t>::max();
  });
}
// Every row seems as long as its table is wide.
Seams draft_past_table(const BackendConfig& config) {
  return in_lookups_of<DraftSlotsParams>(
      [rows = config.num_rows](std::span<GroupTable> tables, OwnTables& own, Device& behind) {
        std::vector<std::int32_t> lengths;
        for (const GroupTable& table : tables)
          lengths.insert(lengths.end(), static_cast<std::size_t>(rows), table.width);
        own.lengths.emplace(behind, "block table lengths of one kernel");
        std::int32_t* at = own.lengths->upload(lengths);
        for (GroupTable& table : tables) {
          table.lengths = at;
          at += rows;
        }
      });
}

constexpr PlantedDefect kOfDrafters[] = {
    {"draft-token-unshifted", draft_token_unshifted},
    {"draft-module-first", draft_module_first},
    {"draft-row-kept", draft_row_kept},
    {"draft-rejected-counted", draft_rejected_counted},
    {"draft-not-run-again", draft_not_run_again},
    {"draft-position-late", draft_position_late},
    {"draft-position-stuck", draft_position_stuck},
    {"draft-unclamped", draft_unclamped},
    {"draft-past-table", draft_past_table},
};

}  // namespace

std::span<const PlantedDefect> defects_of_drafters() { return kOfDrafters; }

// Defects planted in a context rank's share of a group's tokens.

namespace {

// Changes the descriptors of block tables on their way to the device.
template <class Edit>
Seams in_tables(Edit edit) {
  return on_device({.upload = [edit](const std::string& name, std::span<std::byte> bytes, Device&) {
    if (name == "block table descriptors")
      for (GroupTable& table : elements_of<GroupTable>(bytes)) edit(table);
  }});
}

// Replicated groups are sharded like the others.
Seams whole_dealt_out(const BackendConfig&) {
  return in_tables([](GroupTable& table) { table.is_whole = false; });
}
// Sharded groups are replicated.
Seams dealt_out_whole(const BackendConfig&) {
  return in_tables([](GroupTable& table) { table.is_whole = true; });
}
// Slots as if a replicated block had the tokens of all ranks' blocks.
Seams whole_block_of_all(const BackendConfig& config) {
  return in_tables([num_ranks = config.context.num_ranks](GroupTable& table) {
    if (table.is_whole) table.slot_block_size *= num_ranks;
  });
}
// Reads of replicated layers end where the rank's share of a sharded layer ends.
Seams whole_read_in_part(const BackendConfig& config) {
  std::vector<bool> is_whole;  // of each layer of the plan
  for (const KVCacheGroupSpec& group : config.plan.groups)
    is_whole.insert(is_whole.end(), group.layer_names.size(), !group.spec.dcp_sharded);
  return {.program = [is_whole, num_ranks = config.context.num_ranks](StepProgram& program) {
    const auto cut = [&](auto& reads) {
      for (auto& read : reads) {
        if (!is_whole.at(static_cast<std::size_t>(read.layer))) continue;
        read.first /= num_ranks;
        read.last /= num_ranks;
      }
    };
    cut(program.probes);
    cut(program.queries);
  }};
}

constexpr PlantedDefect kOfShares[] = {
    {"whole-dealt-out", whole_dealt_out},
    {"dealt-out-whole", dealt_out_whole},
    {"whole-block-of-all", whole_block_of_all},
    {"whole-read-in-part", whole_read_in_part, Needs::words},
};

}  // namespace

std::span<const PlantedDefect> defects_of_shares() { return kOfShares; }

}  // namespace lockstep::cuda
