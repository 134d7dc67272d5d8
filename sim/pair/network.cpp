#include "sim/pair/network.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {

Network::Network(const NetworkOptions& options) : options_(options), random_(options.seed) {
  LS_CHECK(options.delay_ns_min >= 0 && options.delay_ns_min <= options.delay_ns_max,
           "delays from {} to {} ns", options.delay_ns_min, options.delay_ns_max);
  LS_CHECK(options.period_ns > 0, "a period of {} ns", options.period_ns);
}

// 0 .. 99, sampled per period: the lowest are dead, the next ones slow.
std::int64_t Network::state_of(Endpoint endpoint, std::int64_t now_ns) const {
  const auto period = static_cast<std::uint64_t>(now_ns / options_.period_ns);
  const auto place = static_cast<std::uint64_t>(index_of(endpoint));
  return static_cast<std::int64_t>(
      splitmix64(splitmix64(options_.seed + place) ^ splitmix64(period)) % 100);
}

bool Network::is_dead(Endpoint endpoint, std::int64_t now_ns) const {
  return state_of(endpoint, now_ns) < options_.dead_percent;
}

bool Network::is_slow(Endpoint endpoint, std::int64_t now_ns) const {
  const std::int64_t state = state_of(endpoint, now_ns);
  return state >= options_.dead_percent && state < options_.dead_percent + options_.slow_percent;
}

void Network::send(std::int64_t now_ns, Packet packet) {
  LS_CHECK(now_ns >= now_ns_, "sent at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  ++counts_.sent;
  const std::int64_t order = sent_on_[{packet.from, packet.to}]++;
  if (is_dead(packet.from, now_ns)) {
    ++counts_.swallowed;
    return;
  }
  const bool is_lost = random_.chance(options_.loss_percent);
  const bool is_twice = random_.chance(options_.duplicate_percent);
  if (is_lost)
    ++counts_.lost;
  else
    put_under_way(now_ns, packet, order);
  if (!is_twice) return;
  ++counts_.duplicated;
  put_under_way(now_ns, packet, order);
}

void Network::put_under_way(std::int64_t now_ns, const Packet& packet, std::int64_t order) {
  std::int64_t arrives_ns = now_ns + random_.between(options_.delay_ns_min, options_.delay_ns_max);
  if (random_.chance(options_.straggler_percent)) {
    ++counts_.straggled;
    arrives_ns += random_.below(options_.straggler_ns + 1);
  }
  if (is_slow(packet.from, now_ns) || is_slow(packet.to, now_ns)) {
    ++counts_.slowed;
    arrives_ns += options_.slow_ns;
  }
  Packet arriving = packet;
  if (random_.chance(options_.damage_percent) && !arriving.bytes.empty()) {
    ++counts_.damaged;
    const std::int64_t bit = random_.below(std::ssize(arriving.bytes) * 8);
    arriving.bytes[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
  }
  under_way_.emplace(arrives_ns, UnderWay{std::move(arriving), order});
}

std::optional<Packet> Network::deliver(std::int64_t now_ns) {
  LS_CHECK(now_ns >= now_ns_, "delivered at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  while (!under_way_.empty() && under_way_.begin()->first <= now_ns) {
    const std::int64_t arrived_ns = under_way_.begin()->first;
    UnderWay arriving = std::move(under_way_.begin()->second);
    under_way_.erase(under_way_.begin());
    if (is_dead(arriving.packet.to, arrived_ns)) {
      ++counts_.swallowed;
      continue;
    }
    ++counts_.delivered;
    const Way way{arriving.packet.from, arriving.packet.to};
    const auto [newest, is_first] = newest_delivered_.emplace(way, arriving.order);
    if (!is_first && arriving.order < newest->second) ++counts_.reordered;
    newest->second = std::max(newest->second, arriving.order);
    return std::move(arriving.packet);
  }
  return std::nullopt;
}

std::optional<std::int64_t> Network::next_due_ns() const {
  if (under_way_.empty()) return std::nullopt;
  return under_way_.begin()->first;
}

}  // namespace lockstep
