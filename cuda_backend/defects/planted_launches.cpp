// Defects planted in the parameters, order and capture of launches, and in uploads: descriptors of
// tables and regions, scales, targets.
#include <algorithm>
#include <memory>
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

Seams race(const BackendConfig&) {
  DevicePlant plant = in_rows_written([](std::int32_t made) { return made; });
  plant.launchers = [](KernelTable&, EngineKernels& engine, const DefectKernels& defects) {
    engine.write_parts = defects.write_twice;
  };
  return on_device(std::move(plant));
}
Seams slot_stale_tail(const BackendConfig&) {
  auto tail = std::make_shared<StaleTail>();
  Seams seams = in_launches([tail](SlotMappingParams& params) { tail->launch(params); });
  seams.program = [tail](StepProgram& program) { tail->begin_step(program); };
  return seams;
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
  return in_upload<GroupTable>(kTables, [sizes](std::span<GroupTable> tables) {
    for (std::size_t g = 0; g < tables.size(); ++g)
      tables[g].slot_block_size = other_block_size(tables, g, sizes[g]);
  });
}
// Of several rows per token, pieces of probes end as if each token had one.
Seams length_in_tokens(const BackendConfig& config) {
  const auto rows = by_layer(config.plan, [](const auto& group, std::size_t i) {
    return static_cast<std::int32_t>(group.layer_spec(i).tokens_per_state.rows);
  });
  return in_elements("probe pieces", [rows](DigestPiece& piece) {
    piece.last = piece.first + (piece.last - piece.first) / rows.at(piece.layer_index);
  });
}
// Hidden states use the next group's table.
Seams hidden_slot_mapping(const BackendConfig& config) {
  std::vector<bool> hidden;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    hidden.push_back(is_hidden_state(group.spec.kind));
  return in_copy_of(kTables, &SlotMappingParams::groups,
                    [hidden](std::span<GroupTable> tables, OwnCopy<GroupTable>&, Device&) {
                      const std::vector<GroupTable> own(tables.begin(), tables.end());
                      for (std::size_t g = 0; g < tables.size(); ++g) {
                        if (!hidden[g]) continue;
                        const GroupTable& other = own[(g + 1) % own.size()];
                        tables[g].entries = tables[g].kernel_entries = other.entries;
                        tables[g].width = other.width;
                      }
                    })(config);
}
Seams state_targets_last(const BackendConfig& config) {
  auto updates = std::make_shared<std::vector<StateUpdate>>();  // of the step
  const std::size_t num_groups = config.plan.groups.size();
  Seams seams = in_upload<std::int32_t>(
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

const PlantedDefect kOfLaunches[] = {
    {"drop-slot",
     on_device(in_rows_written([](std::int32_t made) { return std::max(0, made - 1); }))},
    {"uninitialised-read", in_launches([](FillRowsParams& params) {
       params.num_rows = std::max(0, params.num_rows - 1);
     })},
    // Zeroing sees its own regions, one access width short of their stride.
    {"zero-stride", in_copy_of("block regions", &ZeroBlocksParams::regions,
                               [](std::span<BlockRegion> regions, auto&, Device&) {
                                 for (BlockRegion& region : regions)
                                   region.block_stride -= region.unit_bytes;
                               })},
    // Views that start at the same address are all copied as long as the shortest of them.
    {"copy-first-view",
     in_upload<CopyRegion>(
         "copy regions",
         [](std::span<CopyRegion> regions) {
           const std::vector<CopyRegion> all(regions.begin(), regions.end());
           for (CopyRegion& region : regions)
             for (const CopyRegion& other : all)
               if (other.target == region.target && other.size_bytes < region.size_bytes)
                 region.size_bytes = other.size_bytes / region.unit_bytes * region.unit_bytes;
         })},
    {"race", race, Needs::words},
    {"slot-wrong-block-size", slot_wrong_block_size},
    {"slot-pad-rows", in_launches([](SlotMappingParams& params) { params.pad_slot = 0; })},
    {"slot-stale-tail", slot_stale_tail},
    {"slot-interleave-ignored",
     in_launches([](SlotMappingParams& params) { params.interleave = 1; })},
    {"offset-int32", in_launcher<&EngineKernels::write_parts, &DefectKernels::write_in_32_bits>(),
     Needs::words},
    // Kernel block ids are the manager's.
    {"kernel-block-unsplit",
     in_elements(kTables, [](GroupTable& table) { table.kernel_block_stride = 1; })},
    // No operation waits for a copy or load of blocks, and stores of blocks do not wait.
    {"copy-unordered",
     Seams{.graph =
               [](std::span<const Operation> operations, StepGraph& graph) {
                 for (std::size_t i = 0; i < graph.size(); ++i)
                   std::erase_if(graph[i], [&](int before) {
                     return operations[i].name == "store_blocks" ||
                            operations[before].name == "copy_blocks" ||
                            operations[before].name == "load_blocks";
                   });
               }},
     Needs::streams},
    // The source's block stride is the copied size.
    {"transfer-flatten",
     on_device({.upload =
                    [](const std::string& name, std::span<std::byte> bytes, Device&) {
                      if (name != "load_blocks: regions" && name != "store_blocks: regions") return;
                      for (CopyRegion& region : elements_of<CopyRegion>(bytes))
                        region.source_stride = region.size_bytes;
                    }})},
    // The block stride is the length of a block's rows.
    {"hidden-flatten", in_launches([](GatherRowsParams& params) {
       params.cache.block_stride = params.cache.token_stride * params.cache.block_size.value;
     })},
    {"hidden-chunk-save", in_launches([](GatherRowsParams& params) {
       params.num_tokens = (params.num_tokens + 1) / 2;
     })},
    {"hidden-slot-mapping", hidden_slot_mapping},
    {"slot-past-row", in_copy_of(kTables, &SlotMappingParams::groups,
                                 [](std::span<GroupTable> tables, auto&, Device&) {
                                   const std::int32_t widest =
                                       std::ranges::max(tables, {}, &GroupTable::width).width;
                                   for (GroupTable& table : tables) table.width = widest;
                                 })},
    {"table-late-clear",
     on_device({.launch = [late = LateClear{}](
                              LaunchParams params, Operation&,
                              Device& behind) mutable { late.launch(params, behind); }})},
    {"state-update-race", in_launcher<&KernelTable::update_states, &DefectKernels::update_twice>(),
     Needs::words},
    {"graph-stale-param",
     in_launches([](SlotMappingParams& params) { params.num_live_tokens = nullptr; }),
     Needs::graphs},
    {"graph-too-small", on_device({.smaller_graphs = true}), Needs::graphs},
    {"graph-stale-pointer", on_device({.keeps_graphs = true}), Needs::graphs},
    {"combine-unscaled",
     in_launcher<&EngineKernels::split_attention, &DefectKernels::combine_unscaled>(),
     Needs::numbers},
    {"window-off-by-one", in_launches([](SplitAttentionParams& params) { widen_window(params); }),
     Needs::numbers},
    // Rule (13): 0.81, 0.85, 0.89 and 0.93 in turn, in units of the format's largest number.
    {"scale-of-other-layer",
     in_elements("scales of layers",
                 [](float& scale) {
                   constexpr float kLargest[] = {0.81f, 0.85f, 0.89f, 0.93f, 0.81f};
                   for (const float unit : {127.0f, 448.0f, 2688.0f, 57344.0f})
                     for (int i = 0; i < 4; ++i)
                       if (scale == kLargest[i] / unit) {
                         scale = kLargest[i + 1] / unit;
                         return;
                       }
                 }),
     Needs::numbers},
    {"scale-of-other-head",
     on_device({.launch =
                    [](LaunchParams params, Operation&, Device&) {
                      if (auto** write = std::get_if<WritePartsParams*>(&params))
                        for (PartWrite& part : (*write)->parts) reverse_scales(part.to);
                      if (auto** attention = std::get_if<SplitAttentionParams*>(&params)) {
                        reverse_scales((*attention)->key);
                        reverse_scales((*attention)->value);
                      }
                    }}),
     Needs::numbers},
    // V's scales in the order of another GPU's kernels, where the shape allows it.
    {"scales-swizzled",
     in_areas(false, false,
              [](PartLayout& part) {
                if (part.scaling != Scaling::fp4_groups) return;
                part.swizzled_scales = part.head_size % 64 == 0 && part.block_size.value % 4 == 0;
              }),
     Needs::numbers},
    // Each row's scales follow its elements.
    {"scales-behind-rows",
     in_areas(true, true,
              [](PartLayout& part) {
                const bool is_fp4 = part.scaling == Scaling::fp4_groups;
                const std::int64_t data = is_fp4 ? part.head_size / 2 : part.token_stride;
                const std::int64_t row =
                    data + (is_fp4 ? part.head_size / 16 : part.scale_token_stride);
                part.token_stride = part.scale_token_stride = part.token_stride / data * row;
                part.head_stride = part.scale_head_stride = part.head_stride / data * row;
                part.scales = part.base + data;
              }),
     Needs::numbers},
    {"scale-not-stored", in_launcher<&EngineKernels::write_parts, &DefectKernels::lose_scales>(),
     Needs::numbers},
    {"state-targets-last", state_targets_last, Needs::numbers},
    {"checkpoint-last-inputs",
     in_elements("convolutions", [](ConvItem& item) { item.checkpoint_tokens = item.keep_from; }),
     Needs::numbers},
    {"chunk-carry-undecayed",
     on_device({.launchers =
                    [](KernelTable&, EngineKernels& engine, const DefectKernels& defects) {
                      engine.selective_chunks = defects.selective_undecayed;
                      engine.delta_chunks = defects.delta_undecayed;
                    }}),
     Needs::numbers},
    {"dp-idle-writes", in_launches([](SlotMappingParams& params) {
       if (params.num_tokens == 0) params.pad_slot = 0;
     })},
    // Recomputed windows are treated as part of the hit.
    {"replay-window-kept",
     in_elements(kTables, [](GroupTable& table) { table.is_replayed = false; })},
    {"replay-overwrites-hit",
     in_launches([](SlotMappingParams& params) { params.num_replayed_tokens = 0; })},
    {"ring-not-clipped", in_elements("reach of rows", [](RowReach& row) { row.end = 0; })},
    // Slots as if the ring continued in the table's next entry.
    {"ring-taken-for-table",
     in_elements(kTables, [](GroupTable& table) { table.is_ring = false; })},
    // Reads the ring with half its block size.
    {"ring-read-shifted", in_elements("layer caches",
                                      [](RowCache& layer) {
                                        if (layer.is_ring)
                                          layer.block_size = make_divisor(
                                              std::max(1u, layer.block_size.value / 2));
                                      })},
    {"compressed-other-ratio", in_launches([](WritePartsParams& params) {
       Divisor& tokens = params.token_rows.tokens_per_row;
       if (tokens.value > 1) tokens = make_divisor(2 * tokens.value);
     }),
     Needs::words},
    {"rows-counted-as-tokens", in_launches([](WritePartsParams& params) {
       params.num_rows /= static_cast<std::int32_t>(params.token_rows.rows_per_token.value);
     })},
    {"length-in-tokens", length_in_tokens},
    // The last row of an encoder is not written. Encoder slots are in their own array.
    {"cross-row-lost",
     on_device(
         {.launch =
              [slots = static_cast<const Slot*>(nullptr), end = static_cast<const Slot*>(nullptr)](
                  LaunchParams params, Operation&, Device&) mutable {
                if (auto** map = std::get_if<SlotMappingParams*>(&params);
                    map && (*map)->of_encoders) {
                  slots = (*map)->slots;
                  end = slots + (*map)->slots_stride * (*map)->num_groups;
                }
                if (auto** write = std::get_if<WritePartsParams*>(&params))
                  if ((*write)->slots >= slots && (*write)->slots < end)
                    (*write)->num_rows = std::max(0, (*write)->num_rows - 1);
              }})},
    // Sinks are written to the null block and the blocks after it.
    {"sink-block-shifted", in_upload<Slot>("slots of sinks",
                                           [](std::span<Slot> slots) {
                                             const Slot first = slots.empty() ? 0 : slots.front();
                                             for (Slot& slot : slots) slot -= first;
                                           })},
    // Attention skips the sinks.
    {"sinks-not-read", in_elements("layer caches", [](RowCache& layer) { layer.sink_blocks = 0; })},
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
