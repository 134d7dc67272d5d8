// Defects planted in the parameters, order and capture of launches, and in uploads: descriptors of
// tables and regions, scales, targets.
#include <algorithm>
#include <optional>
#include <vector>

#include "cuda_backend/defects/backend_mutants.h"
#include "cuda_backend/defects/planted_seams.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {
namespace {

// Changes how many source rows are written: change(rows that the previous launch made).
template <class Change>
DevicePlant in_rows_written(Change change) {
  return {
      .launch = [change, made = std::int32_t{0}](LaunchParams params, Operation&, Device&) mutable {
        if (auto** fill = std::get_if<FillRowsParams*>(&params)) made = (*fill)->num_rows;
        if (auto** write = std::get_if<WritePartsParams*>(&params))
          (*write)->num_rows = change(made);
      }};
}

// Clears rows after the step's appends.
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

// Tokens of the previous step after the end of the current batch are looked up too.
class StaleTail {
 public:
  void begin_step(const StepProgram& program) {
    const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
    num_staged_ = std::max(num_tokens, std::min(num_staged_, program.num_padded_tokens));
    is_looked_up_ = false;
  }
  // Extractions map their own tokens later in the step.
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
  return on_device(in_rows_written([](std::int32_t made) { return std::max(0, made - 1); }));
}
Seams race(const BackendConfig&) {
  DevicePlant plant = in_rows_written([](std::int32_t made) { return made; });
  plant.launchers = [](KernelTable&, EngineKernels& engine, const DefectKernels& defects) {
    engine.write_parts = defects.write_twice;
  };
  return on_device(std::move(plant));
}
Seams uninitialised_read(const BackendConfig&) {
  return in_launches<FillRowsParams>(
      [](FillRowsParams& params) { params.num_rows = std::max(0, params.num_rows - 1); });
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
// The block stride is the length of a block's rows.
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
// Changes the areas of nvfp4 and of MLA rows: in writes, of V or of both parts, and in reads.
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
// V's scales in the order of another GPU's kernels, where the shape allows it.
Seams scales_swizzled(const BackendConfig&) {
  return in_areas(false, false, [](PartLayout& part) {
    if (part.scaling != Scaling::fp4_groups) return;
    part.swizzled_scales = part.head_size % 64 == 0 && part.block_size.value % 4 == 0;
  });
}
// Each row's scales follow its elements.
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
// No operation waits for a copy or load of blocks, and stores of blocks do not wait.
Seams copy_unordered(const BackendConfig&) {
  return {.graph = [](std::span<const Operation> operations, StepGraph& graph) {
    for (std::size_t i = 0; i < graph.size(); ++i)
      std::erase_if(graph[i], [&](int before) {
        return operations[i].name == "store_blocks" || brings_blocks(operations[before]);
      });
  }};
}

// Uploads.

// Seams that change the elements uploaded to one allocation: edit(span<T>).
template <class T, class Edit>
Seams in_uploads(std::string_view allocation, Edit edit) {
  return on_device(
      {.upload = [allocation, edit](const std::string& name, std::span<std::byte> bytes, Device&) {
        if (name == allocation) edit(elements_of<T>(bytes));
      }});
}

// Zeroing sees regions of its own, one access width short of their stride.
Seams zero_stride(const BackendConfig&) {
  auto regions = std::make_shared<std::optional<DeviceArray<BlockRegion>>>();
  return on_device(
      {.launch =
           [regions](LaunchParams params, Operation& operation, Device&) {
             auto** zero = std::get_if<ZeroBlocksParams*>(&params);
             if (zero == nullptr) return;
             (*zero)->regions = (*regions)->data();
             operation.read((*regions)->range());
           },
       .upload =
           [regions](const std::string& name, std::span<std::byte> bytes, Device& behind) {
             if (name != "block regions") return;
             const auto given = elements_of<BlockRegion>(bytes);
             std::vector<BlockRegion> edited(given.begin(), given.end());
             for (BlockRegion& region : edited) region.block_stride -= region.unit_bytes;
             regions->emplace(behind, "block regions of zeroing");
             (*regions)->upload(edited);
           }});
}
// Views that start at the same address are all copied as long as the shortest of them.
Seams copy_first_view(const BackendConfig&) {
  return in_uploads<CopyRegion>("copy regions", [](std::span<CopyRegion> regions) {
    const std::vector<CopyRegion> all(regions.begin(), regions.end());
    for (CopyRegion& region : regions)
      for (const CopyRegion& other : all)
        if (other.target == region.target && other.size_bytes < region.size_bytes)
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
  return in_lookups_of<SlotMappingParams>([](std::span<GroupTable> tables, OwnTables&, Device&) {
    const std::int32_t widest = std::ranges::max(tables, {}, &GroupTable::width).width;
    for (GroupTable& table : tables) table.width = widest;
  });
}
// Recomputed windows are treated as part of the hit.
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
// Slots as if the ring continued in the table's next entry.
Seams ring_taken_for_table(const BackendConfig&) {
  return in_uploads<GroupTable>(kTables, [](std::span<GroupTable> tables) {
    for (GroupTable& table : tables) table.is_ring = false;
  });
}
// Reads the ring with half its block size.
Seams ring_read_shifted(const BackendConfig&) {
  return in_uploads<RowCache>("layer caches", [](std::span<RowCache> layers) {
    for (RowCache& layer : layers)
      if (layer.is_ring) layer.block_size = make_divisor(std::max(1u, layer.block_size.value / 2));
  });
}
// The last row of an encoder is not written. Encoder slots are in their own array.
Seams cross_row_lost(const BackendConfig&) {
  return on_device({.launch = [slots = static_cast<const Slot*>(nullptr),
                               end = static_cast<const Slot*>(nullptr)](
                                  LaunchParams params, Operation&, Device&) mutable {
    if (auto** map = std::get_if<SlotMappingParams*>(&params); map && (*map)->of_encoders) {
      slots = (*map)->slots;
      end = slots + (*map)->slots_stride * (*map)->num_groups;
    }
    if (auto** write = std::get_if<WritePartsParams*>(&params))
      if ((*write)->slots >= slots && (*write)->slots < end)
        (*write)->num_rows = std::max(0, (*write)->num_rows - 1);
  }});
}
// Sinks are written to the null block and the blocks after it.
Seams sink_block_shifted(const BackendConfig&) {
  return in_uploads<Slot>("slots of sinks", [](std::span<Slot> slots) {
    const Slot first = slots.empty() ? 0 : slots.front();
    for (Slot& slot : slots) slot -= first;
  });
}
// Attention skips the sinks.
Seams sinks_not_read(const BackendConfig&) {
  return in_uploads<RowCache>("layer caches", [](std::span<RowCache> layers) {
    for (RowCache& layer : layers) layer.sink_blocks = 0;
  });
}
Seams compressed_other_ratio(const BackendConfig&) {
  return in_launches<WritePartsParams>([](WritePartsParams& params) {
    Divisor& tokens = params.token_rows.tokens_per_row;
    if (tokens.value > 1) tokens = make_divisor(2 * tokens.value);
  });
}
Seams rows_counted_as_tokens(const BackendConfig&) {
  return in_launches<WritePartsParams>([](WritePartsParams& params) {
    params.num_rows /= static_cast<std::int32_t>(params.token_rows.rows_per_token.value);
  });
}
// Of several rows per token, pieces of probes end as if each token had one.
Seams length_in_tokens(const BackendConfig& config) {
  std::vector<std::int32_t> rows;  // per token, of each layer
  for (const KVCacheGroupSpec& group : config.plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      rows.push_back(static_cast<std::int32_t>(group.layer_spec(i).tokens_per_state.rows));
  return in_uploads<DigestPiece>("probe pieces", [rows](std::span<DigestPiece> pieces) {
    for (DigestPiece& piece : pieces)
      piece.last = piece.first + (piece.last - piece.first) / rows.at(piece.layer_index);
  });
}
// Hidden states use the next group's table.
Seams hidden_slot_mapping(const BackendConfig& config) {
  std::vector<bool> hidden;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    hidden.push_back(is_hidden_state(group.spec.kind));
  return in_lookups_of<SlotMappingParams>(
      [hidden](std::span<GroupTable> tables, OwnTables&, Device&) {
        const std::vector<GroupTable> own(tables.begin(), tables.end());
        for (std::size_t g = 0; g < tables.size(); ++g) {
          if (!hidden[g]) continue;
          const GroupTable& other = own[(g + 1) % own.size()];
          tables[g].entries = tables[g].kernel_entries = other.entries;
          tables[g].width = other.width;
        }
      });
}
// The source's block stride is the copied size.
Seams transfer_flatten(const BackendConfig&) {
  return on_device({.upload = [](const std::string& name, std::span<std::byte> bytes, Device&) {
    if (name != "load_blocks: regions" && name != "store_blocks: regions") return;
    for (CopyRegion& region : elements_of<CopyRegion>(bytes))
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
          // The chunked kernels have one target per piece.
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

// Kernel block ids are the manager's.
Seams kernel_block_unsplit(const BackendConfig&) {
  return in_uploads<GroupTable>(kTables, [](std::span<GroupTable> tables) {
    for (GroupTable& table : tables) table.kernel_block_stride = 1;
  });
}
Seams chunk_carry_undecayed(const BackendConfig&) {
  return on_device(
      {.launchers = [](KernelTable&, EngineKernels& engine, const DefectKernels& defects) {
        engine.selective_chunks = defects.selective_undecayed;
        engine.delta_chunks = defects.delta_undecayed;
      }});
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
    {"offset-int32", in_launcher<&EngineKernels::write_parts, &DefectKernels::write_in_32_bits>,
     Needs::words},
    {"kernel-block-unsplit", kernel_block_unsplit},
    {"copy-unordered", copy_unordered, Needs::streams},
    {"transfer-flatten", transfer_flatten},
    {"hidden-flatten", hidden_flatten},
    {"hidden-chunk-save", hidden_chunk_save},
    {"hidden-slot-mapping", hidden_slot_mapping},
    {"slot-past-row", slot_past_row},
    {"table-late-clear", table_late_clear},
    {"state-update-race", in_launcher<&KernelTable::update_states, &DefectKernels::update_twice>,
     Needs::words},
    {"graph-stale-param", graph_stale_param, Needs::graphs},
    {"graph-too-small", graph_too_small, Needs::graphs},
    {"graph-stale-pointer", graph_stale_pointer, Needs::graphs},
    {"combine-unscaled",
     in_launcher<&EngineKernels::split_attention, &DefectKernels::combine_unscaled>,
     Needs::numbers},
    {"window-off-by-one", window_off_by_one, Needs::numbers},
    {"scale-of-other-layer", scale_of_other_layer, Needs::numbers},
    {"scale-of-other-head", scale_of_other_head, Needs::numbers},
    {"scales-swizzled", scales_swizzled, Needs::numbers},
    {"scales-behind-rows", scales_behind_rows, Needs::numbers},
    {"scale-not-stored", in_launcher<&EngineKernels::write_parts, &DefectKernels::lose_scales>,
     Needs::numbers},
    {"state-targets-last", state_targets_last, Needs::numbers},
    {"checkpoint-last-inputs", checkpoint_last_inputs, Needs::numbers},
    {"chunk-carry-undecayed", chunk_carry_undecayed, Needs::numbers},
    {"dp-idle-writes", dp_idle_writes},
    {"replay-window-kept", replay_window_kept},
    {"replay-overwrites-hit", replay_overwrites_hit},
    {"ring-not-clipped", ring_not_clipped},
    {"ring-taken-for-table", ring_taken_for_table},
    {"ring-read-shifted", ring_read_shifted},
    {"compressed-other-ratio", compressed_other_ratio, Needs::words},
    {"rows-counted-as-tokens", rows_counted_as_tokens},
    {"length-in-tokens", length_in_tokens},
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
