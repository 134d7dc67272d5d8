// What a prefill engine and a decode engine say to one another about blocks, as bytes of a packet.
//
//   read      decode to prefill: send block (group, index) of this transfer
//   block     prefill to decode: here are its bytes
//   gone      prefill to decode: nothing is held for this transfer (any more)
//   release   decode to prefill: nothing more will be read, free its blocks
//   released  prefill to decode: they are free; no need to say it again
//
// (1) Every message but `read` may be said any number of times, and a `read` too: each names its
//     transfer and the place it is about, so that a second copy can be told from news.
// (2) decode(encode(m)) is m; of a message in which a bit has turned over, decode() gives nothing.
//
// Not here: who says what when (transfer_sender.h, transfer_receiver.h).
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace lockstep {

// One attempt to bring one request's blocks across. A request that fails is prefilled again, under
// its old name, and what is still under way of the attempt before means nothing to the next one.
struct TransferId {
  std::uint64_t request = 0;  // counts the requests of a run
  std::uint32_t attempt = 0;
  auto operator<=>(const TransferId&) const = default;
};

// A block's place in a request's block tables.
struct BlockPlace {
  std::int32_t group = 0;
  std::int32_t index = 0;  // entry of the group's table
  auto operator<=>(const BlockPlace&) const = default;
};

struct TransferMessage {
  enum class Kind : std::uint8_t { read, block, gone, release, released };
  Kind kind = Kind::read;
  TransferId transfer;
  BlockPlace place;                 // read, block
  std::vector<std::uint8_t> bytes;  // block
  bool operator==(const TransferMessage&) const = default;
};

std::vector<std::uint8_t> encode(const TransferMessage& message);
std::optional<TransferMessage> decode(std::span<const std::uint8_t> bytes);

}  // namespace lockstep
