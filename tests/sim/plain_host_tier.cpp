// The host tier of the plain backend: rule (12) of sim/protocol/backend.h, byte by byte.
#include <algorithm>

#include "tests/sim/plain_backend.h"

namespace lockstep {

// Where a block's bytes lie: layer after layer, within a layer in the order of the addresses.
std::vector<PlainBackend::Piece> PlainBackend::host_pieces(int group, std::int64_t block) const {
  std::vector<Piece> pieces;
  for (const Layer& layer : layers_) {
    if (layer.group != group) continue;
    const std::size_t first = pieces.size();
    for_real_bytes_of(layer, block, [&](int tensor, std::int64_t at, std::int64_t size) {
      pieces.push_back({tensor, at, size});
    });
    std::sort(pieces.begin() + static_cast<std::ptrdiff_t>(first), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.at < b.at; });
  }
  return pieces;
}

void PlainBackend::make_host_tier() {
  std::int64_t longest = 0;
  for (std::size_t g = 0; g < config_.plan.groups.size(); ++g) {
    std::int64_t bytes = 0;
    for (const Piece& piece : host_pieces(static_cast<int>(g), 0)) bytes += piece.size;
    longest = std::max(longest, bytes);
  }
  for (std::int64_t h = 0; h < config_.num_host_blocks; ++h) {
    std::vector<std::uint8_t>& host = host_blocks_.emplace_back();
    for (std::int64_t i = 0; i < longest; ++i)
      host.push_back(poison_of(0, std::uint64_t{1} << 31, static_cast<std::uint64_t>(h),
                               static_cast<std::uint64_t>(i)));
  }
}

void PlainBackend::transfer(std::span<const HostTransfer> transfers, bool to_host) {
  for (const HostTransfer& item : transfers) {
    std::uint8_t* host = host_blocks_.at(static_cast<std::size_t>(index_of(item.host))).data();
    for (const Piece& piece : host_pieces(item.group, index_of(item.block))) {
      std::uint8_t* device = tensors_[static_cast<std::size_t>(piece.tensor)].data() + piece.at;
      if (to_host)
        std::copy_n(device, piece.size, host);
      else
        std::copy_n(host, piece.size, device);
      host += piece.size;
    }
  }
}

Result<void> PlainBackend::fingerprint_host_blocks(std::span<const HostBlockId> hosts,
                                                   std::span<Fingerprint> fingerprints) {
  for (std::size_t i = 0; i < hosts.size(); ++i)
    fingerprints[i] = sum_of(host_blocks_.at(static_cast<std::size_t>(index_of(hosts[i]))));
  return {};
}

Result<std::vector<std::uint8_t>> PlainBackend::read_host_block(std::int32_t group,
                                                                HostBlockId host) {
  std::int64_t bytes = 0;
  for (const Piece& piece : host_pieces(group, 0)) bytes += piece.size;
  const std::vector<std::uint8_t>& all = host_blocks_.at(static_cast<std::size_t>(index_of(host)));
  return std::vector<std::uint8_t>(all.begin(), all.begin() + bytes);
}

Result<void> PlainBackend::write_host_block(std::int32_t, HostBlockId host,
                                            std::span<const std::uint8_t> bytes) {
  std::ranges::copy(bytes, host_blocks_.at(static_cast<std::size_t>(index_of(host))).begin());
  return {};
}

}  // namespace lockstep
