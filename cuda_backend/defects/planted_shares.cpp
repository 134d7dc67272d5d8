// Defects planted in a context rank's share of a group's tokens.
#include <vector>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep::cuda {
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
