// Defects planted in what the host uploads: descriptors of tables and regions, scales, targets.
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "cuda_backend/defects/backend_mutants.h"
#include "cuda_backend/defects/planted_seams.h"
#include "cuda_backend/device/device_array.h"

namespace lockstep::cuda {
namespace {

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

}  // namespace

void target_last(const RecurrentItem& item, std::span<std::int32_t> state_targets) {
  const auto own = state_targets.subspan(static_cast<std::size_t>(item.first_token),
                                         static_cast<std::size_t>(item.num_tokens));
  if (!own.empty()) std::ranges::fill(own, own.back());
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
  Seams seams = in_uploads<std::int32_t>("targets of states", [updates, num_groups](
                                                                  std::span<std::int32_t> targets) {
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
        target_last(item, targets.subspan(static_cast<std::size_t>(start.group) * tokens, tokens));
    }
  });
  seams.program = [updates](StepProgram& program) { *updates = program.state_updates; };
  return seams;
}

}  // namespace lockstep::cuda
