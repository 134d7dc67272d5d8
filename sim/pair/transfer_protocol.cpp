#include "sim/pair/transfer_protocol.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "reference/memory/content.h"

namespace lockstep {

namespace {

constexpr std::size_t kChecksumBytes = 8;

// Fields little-endian, one after the other.
template <class T>
void put(std::vector<std::uint8_t>& bytes, T value) {
  const auto word = static_cast<std::uint64_t>(value);
  for (std::size_t i = 0; i < sizeof(T); ++i)
    bytes.push_back(static_cast<std::uint8_t>(word >> (8 * i)));
}

template <class T>
bool take(std::span<const std::uint8_t>& bytes, T& value) {
  if (bytes.size() < sizeof(T)) return false;
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) word |= std::uint64_t{bytes[i]} << (8 * i);
  value = static_cast<T>(word);
  bytes = bytes.subspan(sizeof(T));
  return true;
}

// Each byte changes every later state, and no two bytes change it alike: a bit that has turned over
// always shows, since mix() is a bijection.
std::uint64_t checksum(std::span<const std::uint8_t> bytes) {
  std::uint64_t sum = bytes.size();
  for (const std::uint8_t byte : bytes) sum = mix(sum ^ byte);
  return sum;
}

}  // namespace

std::vector<std::uint8_t> encode(const TransferMessage& message) {
  std::vector<std::uint8_t> bytes;
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

namespace {

constexpr std::array kDefects = {
    TransferDefect::send_freed_early, TransferDefect::delivery_twice,
    TransferDefect::failed_marked_ok, TransferDefect::completion_stale,
    TransferDefect::stage_read_early, TransferDefect::load_before_arrival};

}  // namespace

std::span<const TransferDefect> transfer_defects() { return kDefects; }

std::string_view name_of(TransferDefect defect) {
  switch (defect) {
    case TransferDefect::none:
      return "none";
    case TransferDefect::send_freed_early:
      return "send-freed-early";
    case TransferDefect::delivery_twice:
      return "delivery-twice";
    case TransferDefect::failed_marked_ok:
      return "recv-failed-marked-ok";
    case TransferDefect::completion_stale:
      return "completion-stale";
    case TransferDefect::stage_read_early:
      return "stage-read-early";
    case TransferDefect::load_before_arrival:
      return "load-before-arrival";
  }
  return "none";
}

std::optional<TransferDefect> transfer_defect_from_name(std::string_view name) {
  const auto found = std::ranges::find(kDefects, name, [](TransferDefect d) { return name_of(d); });
  if (found == kDefects.end()) return std::nullopt;
  return *found;
}

}  // namespace lockstep
