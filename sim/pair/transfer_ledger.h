// The books of everything that passes between two engines, kept by somebody who sees both and knows
// nothing of how they talk: requests and their ends, loads, blocks read, delivered and given back.
//
// (1) What is read is what the prefill engine computed for that request, in a block that it holds.
// (2) What is delivered goes, once, to the block that the load was given for that place, while the
//     load is open, and is what was to be sent.
// (3) When a load is over, every block of it was delivered or is reported invalid, or its request
//     has left or is about to.
// (4) Held blocks are given back once: after the load that reads them is over, or was not needed,
//     or when a lease has passed.
// (5) Every request ends, once: it finishes, its client leaves, or it is refused with a reason.
//
// The first rule that is broken is the finding; the run ends there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/memory/content.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// What a block is on the network: the content ids of its slots, where both engines run without a
// backend, or else the bytes of all its layers, as a host block has them (sim/protocol/backend.h,
// rule 12), on each tensor parallel rank, one after the other.
//
// Both stand for the contents of the slots, so whoever knows the tokens can tell whether what was
// sent, or has come, is theirs: by the model's rows, not by anything a backend computed.

// Whether the first slots of a block of `group` hold `contents` in `bytes`. What lies in the slots
// behind is not looked at: nobody may read it.
using HoldsContents = std::function<bool(std::int32_t group, std::span<const ContentId> contents,
                                         std::span<const std::uint8_t> bytes)>;

HoldsContents content_id_payloads(std::span<const KVCacheGroupSpec> groups);
// Refused: what the memory model refuses. REQUIRES: tensor parallel ranks alone.
Result<HoldsContents> page_payloads(const BackendConfig& device);

struct TransferFinding {
  std::string check;  // "transfer.delivered_twice", ...
  std::string what;   // one sentence
  bool operator==(const TransferFinding&) const = default;
};

enum class RequestEnd : std::uint8_t { finished, aborted, refused };

class TransferLedger {
 public:
  // `groups` of both engines.
  TransferLedger(std::span<const KVCacheGroupSpec> groups, std::int64_t lease_ns,
                 HoldsContents holds_contents)
      : groups_(groups), lease_ns_(lease_ns), holds_contents_(std::move(holds_contents)) {}

  void arrived(std::uint64_t request, const std::string& name);
  void ended(std::uint64_t request, RequestEnd how);

  // The prefill engine keeps what it computed of a prompt.
  void held(TransferId transfer, std::int64_t now_ns, std::vector<ContentId> contents);
  void read(TransferId transfer, BlockPlace place, std::span<const std::uint8_t> bytes);
  void given_back(TransferId transfer, std::int64_t now_ns);

  // The decode engine has blocks for tokens up to `last`; the load of them is over.
  void loading(TransferId transfer, std::int32_t last, const std::vector<LoadPiece>& pieces);
  void delivered(TransferId transfer, BlockPlace place, BlockId block,
                 std::span<const std::uint8_t> bytes);
  void load_over(TransferId transfer, std::span<const BlockId> invalid, bool request_has_left);
  // Nothing has to be loaded for it, or not any more.
  void not_needed(TransferId transfer);

  // What belongs into the slots of a block that is sent; nothing of a transfer that is over.
  std::span<const ContentId> contents(TransferId transfer, BlockPlace place) const;

  // Any other finding of the run.
  void found(std::string check, std::string what);
  // The run is over, and nobody waits for ever.
  void finish();

  const std::optional<TransferFinding>& finding() const { return finding_; }
  std::int64_t num_deliveries() const { return num_deliveries_; }
  std::int64_t num_open() const;  // requests that have not ended

 private:
  struct Sending {
    std::vector<ContentId> contents;
    std::int64_t since_ns = 0;
    bool is_held = false;
    bool is_done = false;  // nobody will read it any more
  };
  struct Loading {
    std::int32_t last = 0;  // token behind those that it brings
    std::map<BlockPlace, BlockId> missing;
    std::map<BlockPlace, BlockId> there;
  };
  struct Journey {
    std::string name;
    bool has_ended = false;
  };
  std::string name_of(TransferId transfer) const;
  // Those of the slots of `place` that are below token `last`.
  std::span<const ContentId> contents_at(const Sending& sending, BlockPlace place,
                                         std::int64_t last) const;
  void forget_if_over(TransferId transfer);

  const std::span<const KVCacheGroupSpec> groups_;
  const std::int64_t lease_ns_;
  const HoldsContents holds_contents_;
  std::map<std::uint64_t, Journey> journeys_;
  std::map<TransferId, Sending> sendings_;
  std::map<TransferId, Loading> loadings_;
  std::int64_t num_deliveries_ = 0;
  std::optional<TransferFinding> finding_;
};

}  // namespace lockstep
