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
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/seeded_random.h"

namespace lockstep {

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

}  // namespace lockstep
