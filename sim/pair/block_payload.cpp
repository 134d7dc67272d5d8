#include "sim/pair/block_payload.h"

#include <algorithm>
#include <memory>

#include "reference/memory/memory_model.h"
#include "sim/engine/lockstep.h"
#include "sim/ranks/rank_model.h"

namespace lockstep {

HoldsContents content_id_payloads(std::span<const KVCacheGroupSpec> groups) {
  std::vector<std::int64_t> block_sizes;
  for (const KVCacheGroupSpec& group : groups) block_sizes.push_back(group.spec.block_size);
  return [block_sizes](std::int32_t group, std::span<const ContentId> contents,
                       std::span<const std::uint8_t> bytes) {
    if (std::ssize(bytes) != block_sizes[static_cast<std::size_t>(group)] * 8) return false;
    for (std::size_t slot = 0; slot < contents.size(); ++slot)
      for (std::size_t byte = 0; byte < 8; ++byte)
        if (bytes[slot * 8 + byte] != static_cast<std::uint8_t>(contents[slot] >> (8 * byte)))
          return false;
    return true;
  };
}

namespace {

// A rank's tier of one block, into which the rows are drawn over what was sent: nothing may change.
struct DrawnRank {
  MemoryModel model;
  WriterId writer;

  bool holds(std::int32_t group, std::span<const ContentId> contents,
             std::span<const std::uint8_t> bytes) {
    model.begin_step(0);
    model.fill_host_block(group, HostBlockId{0}, 0, contents, writer, bytes);
    const auto drawn = std::span(*model.host_block(HostBlockId{0}).bytes).first(bytes.size());
    return std::ranges::equal(drawn, bytes);
  }
};

}  // namespace

Result<HoldsContents> page_payloads(const BackendConfig& device) {
  const auto ranks = std::make_shared<std::vector<DrawnRank>>();
  BackendConfig of_one_block = device;
  of_one_block.num_host_blocks = 1;
  for (std::int32_t rank = 0; rank < num_ranks(device); ++rank) {
    auto one = rank_model(of_one_block, rank);
    if (!one) return tl::unexpected(one.error());
    ranks->push_back({std::move(one->model), {}});
    ranks->back().writer = ranks->back().model.add_writer("peer");
  }
  return [ranks](std::int32_t group, std::span<const ContentId> contents,
                 std::span<const std::uint8_t> bytes) {
    std::size_t begin = 0;
    for (DrawnRank& rank : *ranks) {
      const auto size = static_cast<std::size_t>(rank.model.host_bytes_of(group));
      if (begin + size > bytes.size() || !rank.holds(group, contents, bytes.subspan(begin, size)))
        return false;
      begin += size;
    }
    return begin == bytes.size();
  };
}

}  // namespace lockstep
