// Defects planted in what a rank of a context takes for its share of a group's tokens.
#include <vector>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep::cuda {
namespace {

// The descriptors of block tables, as they go to the device.
template <class Edit>
Seams in_tables(Edit edit) {
  return on_device({.upload = [edit](const std::string& name, std::span<std::byte> bytes, Device&) {
    if (name == "block table descriptors")
      for (GroupTable& table : elements_of<GroupTable>(bytes)) edit(table);
  }});
}

// One flag for all groups: what every rank keeps is dealt out as the rest is.
Seams whole_dealt_out(const BackendConfig&) {
  return in_tables([](GroupTable& table) { table.is_whole = false; });
}
// ... or the rest is kept as what every rank keeps.
Seams dealt_out_whole(const BackendConfig&) {
  return in_tables([](GroupTable& table) { table.is_whole = true; });
}
// Slots as if a block of what every rank keeps had the tokens of all ranks' blocks.
Seams whole_block_of_all(const BackendConfig& config) {
  return in_tables([num_ranks = config.context.num_ranks](GroupTable& table) {
    if (table.is_whole) table.slot_block_size *= num_ranks;
  });
}
// Attention over what every rank keeps stops where the rank's share of the others ends.
Seams whole_read_in_part(const BackendConfig& config) {
  std::vector<bool> is_whole;  // [layer of the plan]
  for (const KVCacheGroupSpec& group : config.plan.groups)
    is_whole.insert(is_whole.end(), group.layer_names.size(), !group.spec.dcp_sharded);
  const auto cut = [is_whole, num_ranks = config.context.num_ranks](auto items) {
    for (auto& item : items) {
      if (item.row < 0 || !is_whole.at(static_cast<std::size_t>(item.layer_index))) continue;
      item.first /= num_ranks;
      item.last /= num_ranks;
    }
  };
  return on_device({.upload = [cut](const std::string& name, std::span<std::byte> bytes, Device&) {
    if (name == "probe pieces") cut(elements_of<DigestPiece>(bytes));
    if (name == "queries") cut(elements_of<QueryItem>(bytes));
  }});
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
