// What both ends of a transfer between engines agree on: how long they wait, what goes wrong on
// purpose, what they count.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "sim/connectors/transfer_planner.h"
#include "sim/pair/network.h"
#include "sim/pair/transfer_message.h"

namespace lockstep {

struct TransferTimes {
  std::int64_t retry_ns = 20'000'000;  // what has no answer by then is said again, later each time
  std::int32_t retries_max = 6;        // in a row without anything new
  std::int64_t lease_ns = 2'000'000'000;  // that blocks are kept for a decode engine not heard of
  bool operator==(const TransferTimes&) const = default;
};

// Mistakes that can be planted in the protocol; docs/mutants.md tells their stories.
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
  std::int64_t stale = 0;            // messages of transfers that are over
  std::int64_t damaged = 0;          // messages whose checksum is wrong
  std::int64_t loads = 0;
  std::int64_t loads_failed = 0;
  std::int64_t blocks_lost = 0;  // for good
  std::int64_t gone = 0;         // reads of what is not held any more
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
  // Waiting for an answer to what was said `tries` times before.
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
