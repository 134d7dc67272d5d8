// What both ends of a transfer between engines agree on: how long they wait, what goes wrong on
// purpose, what they count.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/names.h"
#include "base/result.h"
#include "base/seeded_random.h"
#include "sim/engine/workload.h"

namespace lockstep {

// A network between endpoints, in virtual time: packets are late, overtake each other, are lost,
// duplicated or corrupted; endpoints are slow for a while, or dead, and recover.
//
// Invariants
// (1) Its behaviour depends only on the seed and on what is sent, in order.
// (2) A packet arrives at its destination, after `delay_ns_min` at the earliest, at most twice.
// (3) Only the seed and the time decide whether an endpoint is slow or dead. Packets from and to a
//     dead endpoint are lost.
// (4) sent + duplicated = lost + swallowed + delivered + in flight.
//
// Not simulated: bandwidth, connection set-up. A dead endpoint keeps its memory: it is an
// unreachable machine.

enum class Endpoint : std::int32_t {};
constexpr std::int32_t index_of(Endpoint endpoint) { return static_cast<std::int32_t>(endpoint); }

struct NetworkOptions {
  std::uint64_t seed = 0;
  std::int64_t delay_ns_min = 100'000;
  std::int64_t delay_ns_max = 1'000'000;
  std::int32_t loss_percent = 0;
  std::int32_t duplicate_percent = 0;
  std::int32_t damage_percent = 0;        // one bit of a packet turns over
  std::int32_t straggler_percent = 0;     // packets that others overtake
  std::int64_t straggler_ns = 5'000'000;  // how much later they are
  // In each period an endpoint is dead, or slow, or well.
  std::int64_t period_ns = 100'000'000;
  std::int32_t dead_percent = 0;
  std::int32_t slow_percent = 0;
  std::int64_t slow_ns = 10'000'000;  // how much later packets from and to a slow one are
  bool operator==(const NetworkOptions&) const = default;
};

struct Packet {
  Endpoint from{};
  Endpoint to{};
  std::vector<std::uint8_t> bytes;
};

struct NetworkCounts {
  std::int64_t sent = 0;
  std::int64_t delivered = 0;  // copies included
  std::int64_t lost = 0;
  std::int64_t swallowed = 0;  // by a dead endpoint
  std::int64_t duplicated = 0;
  std::int64_t damaged = 0;
  std::int64_t straggled = 0;
  std::int64_t slowed = 0;
  std::int64_t reordered = 0;  // delivered after one that was sent later on the same way
  bool operator==(const NetworkCounts&) const = default;
};

class Network {
 public:
  explicit Network(const NetworkOptions& options);

  // REQUIRES: times never decrease, over both calls.
  void send(std::int64_t now_ns, Packet packet);
  // The next packet that has arrived by then; none: nothing more.
  std::optional<Packet> deliver(std::int64_t now_ns);

  // Arrival time of the next packet; absent: nothing is in flight.
  std::optional<std::int64_t> next_due_ns() const;
  const NetworkCounts& counts() const { return counts_; }
  bool is_dead(Endpoint endpoint, std::int64_t now_ns) const;
  bool is_slow(Endpoint endpoint, std::int64_t now_ns) const;

 private:
  struct UnderWay {
    Packet packet;
    std::int64_t order = 0;  // in which it was sent on its way
  };
  using Way = std::pair<Endpoint, Endpoint>;

  std::int64_t state_of(Endpoint endpoint, std::int64_t now_ns) const;
  void put_under_way(std::int64_t now_ns, const Packet& packet, std::int64_t order);

  const NetworkOptions options_;
  SeededRandom random_;
  std::multimap<std::int64_t, UnderWay> under_way_;  // by the time of arrival, ties as sent
  std::map<Way, std::int64_t> sent_on_;
  std::map<Way, std::int64_t> newest_delivered_;
  std::int64_t now_ns_ = 0;
  NetworkCounts counts_;
};

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
// Not here: which message is sent when (transfer_receiver.h).

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
  recv_failed_marked_ok,
  completion_stale,
  stage_read_early,
  load_before_arrival,
};
template <>
inline constexpr char kWordJoint<TransferDefect> = '-';

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
