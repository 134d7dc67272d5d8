#include "sim/pair/transfer_protocol.h"

#include <algorithm>
#include <array>

#include "base/names.h"
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

// Each byte changes every later state, and no two bytes change it equally: a flipped bit always
// shows, since mix() is a bijection.
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

constexpr auto kTransferDefects = std::to_array<Named<TransferDefect>>({
    {TransferDefect::send_freed_early, "send-freed-early"},
    {TransferDefect::delivery_twice, "delivery-twice"},
    {TransferDefect::failed_marked_ok, "recv-failed-marked-ok"},
    {TransferDefect::completion_stale, "completion-stale"},
    {TransferDefect::stage_read_early, "stage-read-early"},
    {TransferDefect::load_before_arrival, "load-before-arrival"},
});
constexpr auto kDefects = values_in(kTransferDefects);

}  // namespace

std::span<const TransferDefect> transfer_defects() { return kDefects; }

std::string_view name_of(TransferDefect defect) {
  return name_in(kTransferDefects, defect, "none");
}

std::optional<TransferDefect> transfer_defect_from_name(std::string_view name) {
  return value_in(kTransferDefects, name);
}

}  // namespace lockstep
