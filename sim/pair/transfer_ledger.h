// Accounts for everything that passes between two engines. It observes both and does not depend on
// their protocol: requests and their ends, loads, blocks read, delivered and released.
//
// Invariants
// (1) What is read is what the prefill engine computed for that request, in a block that it holds.
// (2) A delivery goes, once, to the block that the load assigned to that position, while the load
//     is open, with the bytes that were to be sent.
// (3) When a load has completed, every block of it was delivered or is reported invalid, or its
//     request has ended or is about to.
// (4) Held blocks are released once: after the load that reads them has completed or was not
//     needed, or when a lease has expired.
// (5) Every request ends, once: it finishes, its client disconnects, or it is refused with a
//     reason.
//
// The first broken rule is the finding; the run ends there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/schedule/scheduler.h"
#include "reference/types/kv_connector.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/pair/transfer_receiver.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// What a block is on the network: the content ids of its slots, where both engines run without a
// backend, or else the bytes of all its layers, as a host block has them (sim/protocol/backend.h,
// rule 12), on each tensor parallel rank, one after the other.
//
// Both stand for the contents of the slots, so the tokens are enough to tell whether what was
// sent, or has come, is theirs: by the model's rows, not by anything a backend computed.

// True if the first slots of a block of `group` hold `contents` in `bytes`. The slots after them
// are not compared: they are never read.
using HoldsContents = std::function<bool(std::int32_t group, std::span<const ContentId> contents,
                                         std::span<const std::uint8_t> bytes)>;

HoldsContents content_id_payloads(std::span<const KVCacheGroupSpec> groups);
// Refused: what the memory model refuses. REQUIRES: tensor parallel ranks alone.
Result<HoldsContents> page_payloads(const BackendConfig& config);

struct TransferFinding {
  std::string check;  // "transfer.delivered_twice", ...
  std::string what;   // one line
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

  // The decode engine has blocks for tokens up to `last`; their load has completed.
  void loading(TransferId transfer, std::int32_t last, const std::vector<LoadPiece>& pieces);
  void delivered(TransferId transfer, BlockPlace place, BlockId block,
                 std::span<const std::uint8_t> bytes);
  void load_over(TransferId transfer, std::span<const BlockId> invalid, bool request_has_left);
  // Nothing needs to be loaded for it, or no longer.
  void not_needed(TransferId transfer);

  // Contents of the slots of a block that is sent; empty for a completed transfer.
  std::span<const ContentId> contents(TransferId transfer, BlockPlace place) const;

  // Any other finding of the run.
  void found(std::string check, std::string what);
  // The run has ended; no request waits forever.
  void finish();

  const std::optional<TransferFinding>& finding() const { return finding_; }
  std::int64_t num_deliveries() const { return num_deliveries_; }

 private:
  struct Sending {
    std::vector<ContentId> contents;
    std::int64_t since_ns = 0;
    bool is_held = false;
    bool is_done = false;  // no further reads
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

// Wraps the decode engine's connector for the ledger: every load that the engine starts, by the
// engine's own block tables, and every load that its workers report as completed. Independent of
// the receiver's own state.
class WatchedReceiver final : public KVConnector {
 public:
  // Which transfer brings a live request's blocks.
  using TransferOf = std::function<TransferId(std::string_view name)>;

  WatchedReceiver(TransferReceiver& receiver, TransferLedger& ledger,
                  std::span<const KVCacheGroupSpec> groups, TransferOf transfer_of)
      : receiver_(receiver),
        ledger_(ledger),
        groups_(groups),
        transfer_of_(std::move(transfer_of)) {}
  KVConnectorTraits traits() const override { return receiver_.traits(); }
  // REQUIRES: before the first request is admitted.
  void attach(const Scheduler& scheduler) { scheduler_ = &scheduler; }

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  bool request_finished(RequestId request, std::string_view name) override;

  // The receiver's report, appended.
  void report(KVConnectorOutput& report);

 private:
  struct Question {
    std::string name;
    std::int32_t num_tokens = 0;
    std::int32_t num_local_tokens = 0;
  };
  void begin(RequestId request, const Question& asked, std::int32_t num_external_tokens);

  TransferReceiver& receiver_;
  TransferLedger& ledger_;
  const std::span<const KVCacheGroupSpec> groups_;
  const TransferOf transfer_of_;
  const Scheduler* scheduler_ = nullptr;
  std::map<RequestId, Question> asked_;
  std::map<RequestId, TransferId> loading_;
};

}  // namespace lockstep
