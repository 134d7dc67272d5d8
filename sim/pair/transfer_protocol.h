// What both ends of a transfer between engines share: the simulated network, the messages and their
// encoding, timeouts, planted defects and counters.
#pragma once

#include <algorithm>
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

// A network between endpoints, in virtual time. Packets are late, overtake each other, are lost,
// duplicated or corrupted. Endpoints are slow or dead for a while, and recover.
//
// Invariants
// (1) Its behaviour depends only on the seed and on what is sent, in order.
// (2) A packet arrives at its destination, after `delay_ns_min` at the earliest, at most twice.
// (3) Only the seed and the time decide whether an endpoint is slow or dead. Packets from and to a
//     dead endpoint are lost.
// (4) sent + duplicated = lost + swallowed + delivered + in flight.
// (5) Packets that arrive at the same time are delivered in the order in which they were sent.
//
// Not simulated: bandwidth, connection set-up. A dead endpoint keeps its memory: it is an
// unreachable machine.
enum class Endpoint : std::int32_t {};
constexpr std::int32_t index_of(Endpoint endpoint) { return static_cast<std::int32_t>(endpoint); }

// Properties of the network. Percentages apply to each packet or period independently; the defaults
// describe a network without faults.
struct NetworkOptions {
  std::uint64_t seed = 0;
  std::int64_t delay_ns_min = 100'000;  // of every packet, sampled uniformly up to the maximum
  std::int64_t delay_ns_max = 1'000'000;
  std::int32_t loss_percent = 0;
  std::int32_t duplicate_percent = 0;
  std::int32_t damage_percent = 0;        // packets with one flipped bit
  std::int32_t straggler_percent = 0;     // packets that arrive later and are overtaken
  std::int64_t straggler_ns = 5'000'000;  // their additional delay at most
  // Time is divided into periods. In each period an endpoint is dead, slow or normal throughout.
  // dead_percent + slow_percent is at most 100.
  std::int64_t period_ns = 100'000'000;
  std::int32_t dead_percent = 0;
  std::int32_t slow_percent = 0;
  std::int64_t slow_ns = 10'000'000;  // additional delay of packets from and to a slow endpoint
  bool operator==(const NetworkOptions&) const = default;
};

// Bytes in flight. The network does not interpret them.
struct Packet {
  Endpoint from{};
  Endpoint to{};
  std::vector<std::uint8_t> bytes;
};

// Packets by outcome. A packet may count as straggled, slowed and damaged at once.
struct NetworkCounts {
  std::int64_t sent = 0;
  std::int64_t delivered = 0;  // copies included
  std::int64_t lost = 0;
  std::int64_t swallowed = 0;  // by a dead endpoint
  std::int64_t duplicated = 0;
  std::int64_t damaged = 0;
  std::int64_t straggled = 0;
  std::int64_t slowed = 0;
  std::int64_t reordered = 0;  // delivered after a packet sent later between the same endpoints
  bool operator==(const NetworkCounts&) const = default;
};

// Lowers the time of the next event to `at_ns`; absent: no such event.
inline void take_sooner(std::optional<std::int64_t>& next, std::optional<std::int64_t> at_ns) {
  if (at_ns) next = std::min(next.value_or(*at_ns), *at_ns);
}

class Network {
 public:
  explicit Network(const NetworkOptions& options);

  // Sends a packet and samples its outcome. REQUIRES: times never decrease, over send() and
  // deliver().
  void send(std::int64_t now_ns, Packet packet);
  // Removes and returns the earliest packet that has arrived by `now_ns`. Absent: no further packet
  // has. Call until absent: several packets may have arrived.
  std::optional<Packet> deliver(std::int64_t now_ns);

  // Arrival time of the next packet; absent: nothing is in flight.
  std::optional<std::int64_t> next_due_ns() const;
  const NetworkCounts& counts() const { return counts_; }
  // State of an endpoint at a time, past or future: a pure function of the seed and the period.
  bool is_dead(Endpoint endpoint, std::int64_t now_ns) const;
  bool is_slow(Endpoint endpoint, std::int64_t now_ns) const;

 private:
  struct UnderWay {
    Packet packet;
    std::int64_t order = 0;  // counts the packets sent between the same endpoints
  };
  using Way = std::pair<Endpoint, Endpoint>;

  std::int64_t state_of(Endpoint endpoint, std::int64_t now_ns) const;
  void put_under_way(std::int64_t now_ns, const Packet& packet, std::int64_t order);

  const NetworkOptions options_;
  SeededRandom random_;
  std::multimap<std::int64_t, UnderWay> under_way_;  // by arrival time, ties as sent
  std::map<Way, std::int64_t> sent_on_;              // packets sent so far
  std::map<Way, std::int64_t> newest_delivered_;     // highest UnderWay::order delivered
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

// One attempt to transfer one request's blocks. A failed request is prefilled again under the same
// name. The attempt number lets each side ignore messages that are still in flight from the
// previous attempt.
struct TransferId {
  std::uint64_t request = 0;  // index of the request in its run
  std::uint32_t attempt = 0;  // 1: the first
  auto operator<=>(const TransferId&) const = default;
};

// Position of a block in its request's block tables. Both engines use the same groups and block
// sizes, so a position means the same tokens in both, whereas their block ids differ.
struct BlockPlace {
  std::int32_t group = 0;
  std::int32_t index = 0;  // entry of the group's table
  auto operator<=>(const BlockPlace&) const = default;
};

struct TransferMessage {
  enum class Kind : std::uint8_t { read, block, gone, release, released };
  Kind kind = Kind::read;
  TransferId transfer;
  BlockPlace place;                 // of read, block and gone
  std::vector<std::uint8_t> bytes;  // payload of block; else empty
  bool operator==(const TransferMessage&) const = default;
};

// Returns the message as bytes: kind (1), request (8), attempt (4), group (4), index (4), the
// payload, then a checksum (8), all little-endian.
std::vector<std::uint8_t> encode(const TransferMessage& message);
// Returns the message. Absent: wrong checksum, short packet or unknown kind.
std::optional<TransferMessage> decode(std::span<const std::uint8_t> bytes);

// Timeouts of the protocol. The defaults are scaled to the simulated network: vLLM 0.22.1 holds
// blocks for 30 seconds (nixl/scheduler.py, kv_lease_duration).
struct TransferTimes {
  // Time until an unanswered message is repeated. It doubles with each repetition, up to 16 times
  // (TransferLink::next_try_ns()).
  std::int64_t retry_ns = 20'000'000;
  std::int32_t retries_max = 6;  // repetitions without a new block before a load fails
  // How long the prefill engine holds blocks after the last message that reads them.
  std::int64_t lease_ns = 2'000'000'000;
  bool operator==(const TransferTimes&) const = default;
};

// Defects that can be planted in the protocol; docs/reference/mutants.md describes them. The
// comment of each names the check that finds it.
enum class TransferDefect : std::uint8_t {
  none,
  send_freed_early,       // transfer.freed_early
  delivery_twice,         // transfer.delivered_twice
  recv_failed_marked_ok,  // transfer.incomplete
  completion_stale,       // transfer.freed_early
  stage_read_early,       // transfer.read_content, with pages
  load_before_arrival,    // memory.divergence, with pages
};
template <>
inline constexpr char kWordJoint<TransferDefect> = '-';

// Events of all transfers of a run, counted at both ends. They show whether a run exercised
// retries, duplicates and leases at all.
struct TransferCounts {
  std::int64_t reads = 0;            // blocks requested for the first time
  std::int64_t reads_again = 0;      // repeated requests
  std::int64_t blocks_sent = 0;      // answers to reads, repeated ones included
  std::int64_t blocks_received = 0;  // distinct blocks, per load
  std::int64_t duplicates = 0;       // blocks of an open load received again
  std::int64_t stale = 0;            // messages without an open load or held blocks
  std::int64_t damaged = 0;          // packets that decode() rejects
  std::int64_t loads = 0;
  std::int64_t loads_failed = 0;  // loads that ended with blocks missing
  std::int64_t blocks_lost = 0;   // blocks missing when their load failed
  std::int64_t gone = 0;          // reads answered with `gone`
  std::int64_t releases = 0;
  std::int64_t releases_again = 0;  // repeated releases
  std::int64_t leases_expired = 0;
  std::int64_t full_hits = 0;  // offers whose tokens were all cached locally
  bool operator==(const TransferCounts&) const = default;
};

// One endpoint's access to the network, with what both ends of the protocol configure and count.
struct TransferLink {
  Network& network;
  Endpoint self{};
  Endpoint peer{};
  TransferTimes times;
  TransferDefect defect = TransferDefect::none;
  TransferCounts& counts;

  // Sends a message to the peer.
  void say(std::int64_t now_ns, const TransferMessage& message) const {
    network.send(now_ns, {self, peer, encode(message)});
  }
  // Returns when to repeat a message that was sent `tries` times: exponential backoff, at most 16 *
  // retry_ns, so that a short outage does not exhaust retries_max.
  std::int64_t next_try_ns(std::int64_t now_ns, std::int32_t tries) const {
    return now_ns + (times.retry_ns << (tries < 4 ? tries : 4));
  }
};

// A block that a load must fill: its position in the request, and its block id in the decode
// engine.
struct LoadPiece {
  BlockPlace place;
  BlockId block{};
};

// Returns the bytes of a block that a step has stored to the staging buffer.
using ReadBlock = std::function<Result<std::vector<std::uint8_t>>(TransferId, BlockPlace,
                                                                  const BlockTransfer& staged)>;
// Receives the bytes of a block that a load is missing, once per block.
using TakeBlock =
    std::function<void(TransferId, BlockPlace, BlockId, std::span<const std::uint8_t>)>;

}  // namespace lockstep
