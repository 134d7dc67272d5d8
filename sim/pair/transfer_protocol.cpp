#include "sim/pair/transfer_protocol.h"

#include "base/check.h"
#include "reference/memory/content.h"

namespace lockstep {

Network::Network(const NetworkOptions& options) : options_(options), random_(options.seed) {
  LS_CHECK(options.delay_ns_min >= 0 && options.delay_ns_min <= options.delay_ns_max,
           "delays from {} to {} ns", options.delay_ns_min, options.delay_ns_max);
  LS_CHECK(options.period_ns > 0, "a period of {} ns", options.period_ns);
}

// Returns a number from 0 to 99 for the endpoint and period: below dead_percent it is dead, in the
// slow_percent values after that it is slow. Hashed, not taken from the generator, so that the
// outages of a seed do not depend on the packets.
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
  // A dead sender samples nothing: the packet never reaches the network.
  if (is_dead(packet.from, now_ns)) {
    ++counts_.swallowed;
    return;
  }
  // Loss and duplication are independent. A lost packet may still have a duplicate, which arrives.
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

// Puts one copy of a packet in flight. Each copy has its own delay and its own damage, so a
// duplicate may overtake the original.
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
  // The destination's state at the arrival time counts, not at `now_ns`: deliver() may be called
  // later.
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
    // A duplicate has the order of its original and is not reordered against it.
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

namespace {

constexpr std::size_t kChecksumBytes = 8;

// Appends an integer, little-endian.
template <class T>
void put(std::vector<std::uint8_t>& bytes, T value) {
  const auto word = static_cast<std::uint64_t>(value);
  for (std::size_t i = 0; i < sizeof(T); ++i)
    bytes.push_back(static_cast<std::uint8_t>(word >> (8 * i)));
}

// Reads an integer that put() wrote and removes it from the span. Returns false if too few bytes
// remain.
template <class T>
bool take(std::span<const std::uint8_t>& bytes, T& value) {
  if (bytes.size() < sizeof(T)) return false;
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) word |= std::uint64_t{bytes[i]} << (8 * i);
  value = static_cast<T>(word);
  bytes = bytes.subspan(sizeof(T));
  return true;
}

// Returns a 64-bit checksum that always detects a single changed byte: mix() is a bijection, so two
// states that differ stay different through all later bytes. Its purpose is the network's flipped
// bit, not an adversary.
std::uint64_t checksum(std::span<const std::uint8_t> bytes) {
  std::uint64_t sum = bytes.size();
  for (const std::uint8_t byte : bytes) sum = mix(sum ^ byte);
  return sum;
}

}  // namespace

std::vector<std::uint8_t> encode(const TransferMessage& message) {
  std::vector<std::uint8_t> bytes;
  // 21 bytes of fields and 8 of the checksum.
  bytes.reserve(32 + message.bytes.size());
  put(bytes, static_cast<std::uint8_t>(message.kind));
  put(bytes, message.transfer.request);
  put(bytes, message.transfer.attempt);
  put(bytes, message.place.group);
  put(bytes, message.place.index);
  bytes.insert(bytes.end(), message.bytes.begin(), message.bytes.end());
  put(bytes, checksum(bytes));
  return bytes;
}

// The checksum comes first: fields of a damaged packet must not be interpreted.
std::optional<TransferMessage> decode(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < kChecksumBytes) return std::nullopt;
  std::span<const std::uint8_t> tail = bytes.last(kChecksumBytes);
  std::span<const std::uint8_t> body = bytes.first(bytes.size() - kChecksumBytes);
  std::uint64_t sum = 0;
  take(tail, sum);
  if (sum != checksum(body)) return std::nullopt;
  TransferMessage message;
  std::uint8_t kind = 0;
  const bool is_whole = take(body, kind) && take(body, message.transfer.request) &&
                        take(body, message.transfer.attempt) && take(body, message.place.group) &&
                        take(body, message.place.index);
  if (!is_whole || kind > static_cast<std::uint8_t>(TransferMessage::Kind::released))
    return std::nullopt;
  message.kind = static_cast<TransferMessage::Kind>(kind);
  message.bytes.assign(body.begin(), body.end());
  return message;
}

}  // namespace lockstep
