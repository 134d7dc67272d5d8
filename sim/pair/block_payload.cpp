#include "sim/pair/block_payload.h"

#include <algorithm>
#include <memory>

#include "reference/memory_model.h"

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

// A tier of one block, into which the rows are drawn over what was sent: nothing may change.
Result<HoldsContents> page_payloads(const BackendConfig& device) {
  auto created = MemoryModel::create(device.plan, device.attention_backend, device.layout,
                                     device.layout_rule, 1, device.numbers);
  if (!created) return tl::unexpected(created.error());
  const auto model = std::make_shared<MemoryModel>(std::move(*created));
  const WriterId writer = model->add_writer("peer");
  return [model, writer](std::int32_t group, std::span<const ContentId> contents,
                         std::span<const std::uint8_t> bytes) {
    if (std::ssize(bytes) != model->host_bytes_of(group)) return false;
    model->begin_step(0);
    model->fill_host_block(group, HostBlockId{0}, 0, contents, writer, bytes);
    const auto drawn = std::span(*model->host_block(HostBlockId{0}).bytes).first(bytes.size());
    return std::ranges::equal(drawn, bytes);
  };
}

}  // namespace lockstep
