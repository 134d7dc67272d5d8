// Defects planted in the parameters of launches, in how launches are ordered and captured, and in
// what the host uploads: descriptors of tables and regions, scales, targets.
#include <algorithm>
#include <optional>
#include <vector>

#include "cuda_backend/defects/backend_mutants.h"
#include "cuda_backend/defects/planted_seams.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {
namespace {

// Seams that change the parameters of one kind of launch: edit(Params&).
template <class Params, class Edit>
Seams in_launches(Edit edit) {
  return on_device({.launch = [edit](LaunchParams params, Operation&, Device&) mutable {
    if (auto** own = std::get_if<Params*>(&params)) edit(**own);
  }});
}

// Seams that change how many tokens' rows are written: change(made) of those that were made for the
// layer. Its inputs are filled right before.
template <class Change>
Seams in_rows_written(Change change, KernelDefect kernel = KernelDefect::none) {
  return on_device(
      {.launch =
           [change, made = std::int32_t{0}](LaunchParams params, Operation&, Device&) mutable {
             if (auto** fill = std::get_if<FillRowsParams*>(&params)) made = (*fill)->num_tokens;
             if (auto** write = std::get_if<WriteRowsParams*>(&params))
               (*write)->num_tokens = change(made);
             if (auto** write = std::get_if<WritePartsParams*>(&params))
               (*write)->num_tokens = change(made);
           },
       .kernel = kernel});
}

// Rows are cleared behind the appends of the step.
class LateClear {
 public:
  void launch(LaunchParams params, Device& behind) {
    if (auto** clear = std::get_if<TableClearParams*>(&params)) {
      held_back_ = **clear;
      (*clear)->num_rows = 0;
    }
    if (!std::holds_alternative<TableEditParams*>(params) || !held_back_) return;
    behind.launch(behind.kernels().clear_rows, *held_back_);
    held_back_.reset();
  }

 private:
  std::optional<TableClearParams> held_back_;
};

// Behind a step's tokens lie those of the step before, and are looked up as well.
class StaleTail {
 public:
  void begin_step(const StepProgram& program) {
    const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
    num_staged_ = std::max(num_tokens, std::min(num_staged_, program.num_padded_tokens));
    is_looked_up_ = false;
  }
  // Extractions look up tokens of their own later in the step.
  void launch(SlotMappingParams& params) {
    if (!is_looked_up_ && params.num_live_tokens == nullptr) params.num_tokens = num_staged_;
    is_looked_up_ = true;
  }

 private:
  std::int32_t num_staged_ = 0;
  bool is_looked_up_ = false;
};

bool brings_blocks(const Operation& operation) {
  return operation.name == "copy_blocks" || operation.name == "load_blocks";
}

Seams drop_slot(const BackendConfig&) {
  return in_rows_written([](std::int32_t made) { return std::max(0, made - 1); });
}
Seams race(const BackendConfig&) {
  return in_rows_written([](std::int32_t made) { return made; }, KernelDefect::write_race);
}
Seams uninitialised_read(const BackendConfig&) {
  return in_launches<FillRowsParams>(
      [](FillRowsParams& params) { params.num_tokens = std::max(0, params.num_tokens - 1); });
}
Seams table_late_clear(const BackendConfig&) {
  return on_device(
      {.launch = [late = LateClear{}](LaunchParams params, Operation&, Device& behind) mutable {
        late.launch(params, behind);
      }});
}
Seams slot_pad_rows(const BackendConfig&) {
  return in_launches<SlotMappingParams>([](SlotMappingParams& params) { params.pad_slot = 0; });
}
Seams dp_idle_writes(const BackendConfig&) {
  return in_launches<SlotMappingParams>([](SlotMappingParams& params) {
    if (params.num_tokens == 0) params.pad_slot = 0;
  });
}
Seams slot_interleave_ignored(const BackendConfig&) {
  return in_launches<SlotMappingParams>([](SlotMappingParams& params) { params.interleave = 1; });
}
Seams slot_stale_tail(const BackendConfig&) {
  auto tail = std::make_shared<StaleTail>();
  Seams seams =
      in_launches<SlotMappingParams>([tail](SlotMappingParams& params) { tail->launch(params); });
  seams.program = [tail](StepProgram& program) { tail->begin_step(program); };
  return seams;
}
Seams graph_stale_param(const BackendConfig&) {
  return in_launches<SlotMappingParams>(
      [](SlotMappingParams& params) { params.num_live_tokens = nullptr; });
}
Seams graph_too_small(const BackendConfig&) { return on_device({.smaller_graphs = true}); }
Seams graph_stale_pointer(const BackendConfig&) { return on_device({.keeps_graphs = true}); }
// Blocks as far apart as their rows are long.
Seams hidden_flatten(const BackendConfig&) {
  return in_launches<GatherRowsParams>([](GatherRowsParams& params) {
    params.cache.block_stride = params.cache.token_stride * params.cache.block_size.value;
  });
}
Seams hidden_chunk_save(const BackendConfig&) {
  return in_launches<GatherRowsParams>(
      [](GatherRowsParams& params) { params.num_tokens = (params.num_tokens + 1) / 2; });
}
Seams scale_of_other_head(const BackendConfig&) {
  return on_device({.launch = [](LaunchParams params, Operation&, Device&) {
    if (auto** write = std::get_if<WritePartsParams*>(&params))
      for (PartWrite& part : (*write)->parts) reverse_scales(part.to);
    if (auto** attention = std::get_if<SplitAttentionParams*>(&params)) {
      reverse_scales((*attention)->key);
      reverse_scales((*attention)->value);
    }
  }});
}
// Areas of nvfp4, and of rows of MLA, told otherwise, in writes (of V alone, or of both) and where
// rows are read.
template <class Change>
Seams in_areas(bool of_keys, bool of_reads, Change change) {
  return on_device({.launch = [=](LaunchParams params, Operation&, Device&) {
    const auto in = [&](PartLayout& part) {
      if (part.scaling == Scaling::fp4_groups || part.scaling == Scaling::latent_fp8_areas)
        change(part);
    };
    if (auto** write = std::get_if<WritePartsParams*>(&params))
      for (int i = of_keys ? 0 : 1; i < 2; ++i) in((*write)->parts[i].to);
    auto** attention = std::get_if<SplitAttentionParams*>(&params);
    if (attention == nullptr || !of_reads) return;
    if (of_keys) in((*attention)->key);
    in((*attention)->value);
  }});
}
// V's scales as kernels for another GPU read them; of rows that its shape allows it for.
Seams scales_swizzled(const BackendConfig&) {
  return in_areas(false, false, [](PartLayout& part) {
    if (part.scaling != Scaling::fp4_groups) return;
    part.swizzled_scales = part.head_size % 64 == 0 && part.block_size.value % 4 == 0;
  });
}
// Each row's scales behind its own elements.
Seams scales_behind_rows(const BackendConfig&) {
  return in_areas(true, true, [](PartLayout& part) {
    const bool is_fp4 = part.scaling == Scaling::fp4_groups;
    const std::int64_t data = is_fp4 ? part.head_size / 2 : part.token_stride;
    const std::int64_t row = data + (is_fp4 ? part.head_size / 16 : part.scale_token_stride);
    part.token_stride = part.scale_token_stride = part.token_stride / data * row;
    part.head_stride = part.scale_head_stride = part.head_stride / data * row;
    part.scales = part.base + data;
  });
}
Seams window_off_by_one(const BackendConfig&) {
  return in_launches<SplitAttentionParams>(widen_window);
}
// Nothing waits for a copy or a load of blocks, and a store of blocks waits for nothing.
Seams copy_unordered(const BackendConfig&) {
  return {.graph = [](std::span<const Operation> operations, StepGraph& graph) {
    for (std::size_t i = 0; i < graph.size(); ++i)
      std::erase_if(graph[i], [&](int before) {
        return operations[i].name == "store_blocks" || brings_blocks(operations[before]);
      });
  }};
}

// What the host uploads.

constexpr std::string_view kTables = "block table descriptors";

// Seams that change the elements uploaded to one allocation: edit(span<T>).
template <class T, class Edit>
Seams in_uploads(std::string_view allocation, Edit edit) {
  return on_device(
      {.upload = [allocation, edit](const std::string& name, std::span<std::byte> bytes, Device&) {
        if (name == allocation) edit(elements_of<T>(bytes));
      }});
}

// Slots are looked up through descriptors of their own, made by edit(span<GroupTable>).
template <class Edit>
Seams in_slot_lookup(Edit edit) {
  struct Lookup {
    std::optional<DeviceArray<GroupTable>> tables;
  };
  auto lookup = std::make_shared<Lookup>();
  return on_device(
      {.launch =
           [lookup](LaunchParams params, Operation& operation, Device&) {
             auto** slots = std::get_if<SlotMappingParams*>(&params);
             if (slots == nullptr) return;
             (*slots)->groups = lookup->tables->data();
             operation.read(lookup->tables->range());
           },
       .upload =
           [lookup, edit](const std::string& name, std::span<std::byte> bytes, Device& behind) {
             if (name != kTables) return;
             const auto tables = elements_of<GroupTable>(bytes);
             std::vector<GroupTable> edited(tables.begin(), tables.end());
             edit(std::span(edited));
             lookup->tables.emplace(behind, "block table descriptors for slots");
             lookup->tables->upload(edited);
           }});
}

// Launches of one kind see regions of their own, made by edit(span<BlockRegion>).
template <class Params, class Edit>
Seams in_regions_of(Edit edit) {
  auto regions = std::make_shared<std::optional<DeviceArray<BlockRegion>>>();
  return on_device(
      {.launch =
           [regions](LaunchParams params, Operation& operation, Device&) {
             auto** own = std::get_if<Params*>(&params);
             if (own == nullptr) return;
             (*own)->regions = (*regions)->data();
             operation.read((*regions)->range());
           },
       .upload =
           [regions, edit](const std::string& name, std::span<std::byte> bytes, Device& behind) {
             if (name != "block regions") return;
             const auto given = elements_of<BlockRegion>(bytes);
             std::vector<BlockRegion> edited(given.begin(), given.end());
             edit(std::span(edited));
             regions->emplace(behind, "block regions of one kernel");
             (*regions)->upload(edited);
           }});
}

Seams zero_stride(const BackendConfig&) {
  return in_regions_of<ZeroBlocksParams>([](std::span<BlockRegion> regions) {
    for (BlockRegion& region : regions) region.block_stride -= region.unit_bytes;
  });
}
// Of several views that begin at one address the shortest is copied for all of them.
Seams copy_first_view(const BackendConfig&) {
  return in_regions_of<CopyBlocksParams>([](std::span<BlockRegion> regions) {
    const std::vector<BlockRegion> all(regions.begin(), regions.end());
    for (BlockRegion& region : regions)
      for (const BlockRegion& other : all)
        if (other.base == region.base && other.size_bytes < region.size_bytes)
          region.size_bytes = other.size_bytes / region.unit_bytes * region.unit_bytes;
  });
}

// The block size of another group, or the manager's instead of the kernel's; where all are equal,
// half.
std::int32_t other_block_size(std::span<const GroupTable> tables, std::size_t g,
                              std::int64_t manager_block_size) {
  const std::int32_t own = tables[g].kernel_block_size;
  const std::int32_t other = tables[(g + 1) % tables.size()].kernel_block_size;
  const auto manager = static_cast<std::int32_t>(manager_block_size);
  if (other != own) return other;
  if (manager != own) return manager;
  return std::max(2, own) / 2 + (own == 1 ? 1 : 0);
}

Seams slot_wrong_block_size(const BackendConfig& config) {
  std::vector<std::int64_t> sizes;
  for (const KVCacheGroupSpec& group : config.plan.groups) sizes.push_back(group.spec.block_size);
  return in_uploads<GroupTable>(kTables, [sizes](std::span<GroupTable> tables) {
    for (std::size_t g = 0; g < tables.size(); ++g)
      tables[g].slot_block_size = other_block_size(tables, g, sizes[g]);
  });
}
Seams slot_past_row(const BackendConfig&) {
  return in_slot_lookup([](std::span<GroupTable> tables) {
    const std::int32_t widest = std::ranges::max(tables, {}, &GroupTable::width).width;
    for (GroupTable& table : tables) table.width = widest;
  });
}
// Windows that are computed again are taken for what a hit holds.
Seams replay_window_kept(const BackendConfig&) {
  return in_uploads<GroupTable>(kTables, [](std::span<GroupTable> tables) {
    for (GroupTable& table : tables) table.is_replayed = false;
  });
}
Seams replay_overwrites_hit(const BackendConfig&) {
  return in_launches<SlotMappingParams>(
      [](SlotMappingParams& params) { params.num_replayed_tokens = 0; });
}
Seams ring_not_clipped(const BackendConfig&) {
  return in_uploads<RowReach>("reach of rows", [](std::span<RowReach> rows) {
    for (RowReach& row : rows) row.end = 0;
  });
}
// Slots as if the ring went on in the next entry of its table.
Seams ring_taken_for_table(const BackendConfig&) {
  return in_uploads<GroupTable>(kTables, [](std::span<GroupTable> tables) {
    for (GroupTable& table : tables) table.is_ring = false;
  });
}
// Written as a ring and read from the second half of its rows.
Seams ring_read_shifted(const BackendConfig&) {
  return in_uploads<RowCache>("layer caches", [](std::span<RowCache> layers) {
    for (RowCache& layer : layers)
      if (layer.is_ring) layer.block_size = make_divisor(std::max(1u, layer.block_size.value / 2));
  });
}
// The last row of an encoder is not written. Its slots lie in an array of their own.
Seams cross_row_lost(const BackendConfig&) {
  return on_device({.launch = [slots = static_cast<const Slot*>(nullptr),
                               end = static_cast<const Slot*>(nullptr)](
                                  LaunchParams params, Operation&, Device&) mutable {
    if (auto** map = std::get_if<SlotMappingParams*>(&params); map && (*map)->of_encoders) {
      slots = (*map)->slots;
      end = slots + (*map)->slots_stride * (*map)->num_groups;
    }
    if (auto** write = std::get_if<WriteRowsParams*>(&params))
      if ((*write)->slots >= slots && (*write)->slots < end)
        (*write)->num_tokens = std::max(0, (*write)->num_tokens - 1);
  }});
}
// Sinks are written from the null block on.
Seams sink_block_shifted(const BackendConfig&) {
  return in_uploads<Slot>("slots of sinks", [](std::span<Slot> slots) {
    const Slot first = slots.empty() ? 0 : slots.front();
    for (Slot& slot : slots) slot -= first;
  });
}
// Attention begins with the request's own tokens.
Seams sinks_not_read(const BackendConfig&) {
  return in_uploads<RowCache>("layer caches", [](std::span<RowCache> layers) {
    for (RowCache& layer : layers) layer.sink_blocks = 0;
  });
}
Seams compressed_other_ratio(const BackendConfig&) {
  return in_launches<WriteRowsParams>([](WriteRowsParams& params) {
    Divisor& tokens = params.cache.tokens_per_row;
    if (tokens.value > 1) tokens = make_divisor(2 * tokens.value);
  });
}
// Hidden states are looked up in the table of the next group.
Seams hidden_slot_mapping(const BackendConfig& config) {
  std::vector<bool> hidden;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    hidden.push_back(group.spec.kind == CacheKind::hidden_state);
  return in_slot_lookup([hidden](std::span<GroupTable> tables) {
    const std::vector<GroupTable> own(tables.begin(), tables.end());
    for (std::size_t g = 0; g < tables.size(); ++g) {
      if (!hidden[g]) continue;
      const GroupTable& other = own[(g + 1) % own.size()];
      tables[g].entries = tables[g].kernel_entries = other.entries;
      tables[g].width = other.width;
    }
  });
}
// Blocks of the source as far apart as what is copied of them.
Seams transfer_flatten(const BackendConfig&) {
  return on_device({.upload = [](const std::string& name, std::span<std::byte> bytes, Device&) {
    if (name != "load_blocks: regions" && name != "store_blocks: regions") return;
    for (PageRegion& region : elements_of<PageRegion>(bytes))
      region.source_stride = region.size_bytes;
  }});
}
// Rule (13): 0.0081, 0.0085, 0.0089 and 0.0093 in turn.
Seams scale_of_other_layer(const BackendConfig&) {
  return in_uploads<float>("scales of layers", [](std::span<float> scales) {
    constexpr float kScales[] = {0.0081f, 0.0085f, 0.0089f, 0.0093f, 0.0081f};
    for (float& scale : scales) scale = *(std::ranges::find(kScales, scale) + 1);
  });
}
Seams state_targets_last(const BackendConfig& config) {
  auto updates = std::make_shared<std::vector<StateUpdate>>();  // of the step
  const std::size_t num_groups = config.plan.groups.size();
  Seams seams = in_uploads<std::int32_t>(
      "targets of states", [updates, num_groups](std::span<std::int32_t> targets) {
        const std::size_t tokens = targets.size() / num_groups;
        RecurrentItem item{};
        for (std::size_t first = 0, last = 0; first < updates->size(); first = last) {
          const StateUpdate& start = (*updates)[first];
          item = {.source = 0, .first_token = start.first_token, .num_tokens = 0};
          for (; last < updates->size() && (*updates)[last].row == start.row &&
                 (*updates)[last].group == start.group;
               ++last)
            item.num_tokens += (*updates)[last].num_tokens;
          // The kernels for chunks go by pieces and know one target.
          if (start.num_drafts > 0)
            target_last(item, targets.subspan(start.group * tokens, tokens));
        }
      });
  seams.program = [updates](StepProgram& program) { *updates = program.state_updates; };
  return seams;
}

Seams checkpoint_last_inputs(const BackendConfig&) {
  return in_uploads<ConvItem>("convolutions", [](std::span<ConvItem> items) {
    for (ConvItem& item : items) item.checkpoint_tokens = item.keep_from;
  });
}

template <KernelDefect kDefect>
Seams in_kernel(const BackendConfig&) {
  return on_device({.kernel = kDefect});
}

constexpr PlantedDefect kOfLaunches[] = {
    {"drop-slot", drop_slot},
    {"uninitialised-read", uninitialised_read},
    {"zero-stride", zero_stride},
    {"copy-first-view", copy_first_view},
    {"race", race, Needs::words},
    {"slot-wrong-block-size", slot_wrong_block_size},
    {"slot-pad-rows", slot_pad_rows},
    {"slot-stale-tail", slot_stale_tail},
    {"slot-interleave-ignored", slot_interleave_ignored},
    {"offset-int32", in_kernel<KernelDefect::write_offset_int32>, Needs::words},
    {"state-pads-included", in_kernel<KernelDefect::state_pads_included>, Needs::words},
    {"kernel-block-unsplit", in_kernel<KernelDefect::table_unsplit>},
    {"copy-unordered", copy_unordered, Needs::streams},
    {"transfer-flatten", transfer_flatten},
    {"hidden-flatten", hidden_flatten},
    {"hidden-chunk-save", hidden_chunk_save},
    {"hidden-slot-mapping", hidden_slot_mapping},
    {"slot-past-row", slot_past_row},
    {"table-late-clear", table_late_clear},
    {"state-update-race", in_kernel<KernelDefect::state_update_race>, Needs::words},
    {"graph-stale-param", graph_stale_param, Needs::graphs},
    {"graph-too-small", graph_too_small, Needs::graphs},
    {"graph-stale-pointer", graph_stale_pointer, Needs::graphs},
    {"combine-unscaled", in_kernel<KernelDefect::combine_unscaled>, Needs::numbers},
    {"window-off-by-one", window_off_by_one, Needs::numbers},
    {"scale-of-other-layer", scale_of_other_layer, Needs::numbers},
    {"scale-of-other-head", scale_of_other_head, Needs::numbers},
    {"scales-swizzled", scales_swizzled, Needs::numbers},
    {"scales-behind-rows", scales_behind_rows, Needs::numbers},
    {"scale-not-stored", in_kernel<KernelDefect::scale_not_stored>, Needs::numbers},
    {"state-targets-last", state_targets_last, Needs::numbers},
    {"checkpoint-last-inputs", checkpoint_last_inputs, Needs::numbers},
    {"chunk-carry-undecayed", in_kernel<KernelDefect::chunk_carry_undecayed>, Needs::numbers},
    {"dp-idle-writes", dp_idle_writes},
    {"replay-window-kept", replay_window_kept},
    {"replay-overwrites-hit", replay_overwrites_hit},
    {"ring-not-clipped", ring_not_clipped},
    {"ring-taken-for-table", ring_taken_for_table},
    {"ring-read-shifted", ring_read_shifted},
    {"compressed-other-ratio", compressed_other_ratio, Needs::words},
    {"cross-row-lost", cross_row_lost},
    {"sink-block-shifted", sink_block_shifted},
    {"sinks-not-read", sinks_not_read},
};

}  // namespace

std::span<const PlantedDefect> defects_of_launches() { return kOfLaunches; }

void reverse_scales(PartLayout& part) {
  if (part.scaling == Scaling::none || part.scaling == Scaling::per_tensor) return;
  part.scales += (part.num_heads - 1) * part.scale_head_stride;
  part.scale_head_stride = -part.scale_head_stride;
}
void widen_window(SplitAttentionParams& params) {
  if (params.window > 0) ++params.window;
}
void target_last(const RecurrentItem& item, std::span<std::int32_t> state_targets) {
  const auto own = state_targets.subspan(item.first_token, item.num_tokens);
  if (!own.empty()) std::ranges::fill(own, own.back());
}

}  // namespace lockstep::cuda
