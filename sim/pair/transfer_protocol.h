// What both ends of a transfer between engines agree on: how long they wait, what goes wrong on
// purpose, what they count.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "sim/engine/workload.h"
#include "sim/pair/network.h"

namespace lockstep {

// The messages about blocks between a prefill engine and a decode engine, as bytes of a packet.
//
//   read      decode to prefill: send block (group, index) of this transfer
//   block     prefill to decode: here are its bytes
//   gone      prefill to decode: nothing is held for this transfer
//   release   decode to prefill: no further reads, free its blocks
//   released  prefill to decode: they are free; do not repeat the release
//
// Invariants
// (1) Every message may be repeated any number of times: each names its transfer and its position,
//     so a duplicate is recognised.
// (2) decode(encode(m)) is m; decode() rejects a message with a flipped bit.
//
// Not here: which message is sent when (transfer_sender.h, transfer_receiver.h).

// One attempt to transfer one request's blocks. A failed request is prefilled again under its old
// name; messages in flight from the previous attempt are ignored by the next one.
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

struct TransferTimes {
  // an unanswered message is repeated after this time, later each time
  std::int64_t retry_ns = 20'000'000;
  std::int32_t retries_max = 6;           // in a row without anything new
  std::int64_t lease_ns = 2'000'000'000;  // that blocks are kept for a decode engine not heard of
  bool operator==(const TransferTimes&) const = default;
};

// Defects that can be planted in the protocol; docs/reference/mutants.md describes them.
enum class TransferDefect : std::uint8_t {
  none,
  send_freed_early,
  delivery_twice,
  failed_marked_ok,
  completion_stale,
  stage_read_early,
  load_before_arrival,
};
// "send-freed-early", ...
std::string_view name_of(TransferDefect defect);
std::optional<TransferDefect> transfer_defect_from_name(std::string_view name);
std::span<const TransferDefect> transfer_defects();  // all but `none`

struct TransferCounts {
  std::int64_t reads = 0;
  std::int64_t reads_again = 0;
  std::int64_t blocks_sent = 0;
  std::int64_t blocks_received = 0;  // each once
  std::int64_t duplicates = 0;       // blocks that were there already
  std::int64_t stale = 0;            // messages of completed transfers
  std::int64_t damaged = 0;          // messages whose checksum is wrong
  std::int64_t loads = 0;
  std::int64_t loads_failed = 0;
  std::int64_t blocks_lost = 0;  // for good
  std::int64_t gone = 0;         // reads of released blocks
  std::int64_t releases = 0;
  std::int64_t releases_again = 0;
  std::int64_t leases_expired = 0;
  std::int64_t full_hits = 0;  // transfers of which nothing had to be read
  bool operator==(const TransferCounts&) const = default;
};

// One end of the network, for one of the two.
struct TransferLink {
  Network& network;
  Endpoint self{};
  Endpoint peer{};
  TransferTimes times;
  TransferDefect defect = TransferDefect::none;
  TransferCounts& counts;

  void say(std::int64_t now_ns, const TransferMessage& message) const {
    network.send(now_ns, {self, peer, encode(message)});
  }
  // Time of the next repetition of a message sent `tries` times.
  std::int64_t next_try_ns(std::int64_t now_ns, std::int32_t tries) const {
    return now_ns + (times.retry_ns << (tries < 4 ? tries : 4));
  }
};

// A block that a load brings: what it is of the request, and where it is to lie.
struct LoadPiece {
  BlockPlace place;
  BlockId block{};
};

// The bytes of a block that has been stored to the staging buffer.
using ReadBlock = std::function<Result<std::vector<std::uint8_t>>(TransferId, BlockPlace,
                                                                  const BlockTransfer& staged)>;
// Bytes that have come for a block, each once.
using TakeBlock =
    std::function<void(TransferId, BlockPlace, BlockId, std::span<const std::uint8_t>)>;

}  // namespace lockstep
