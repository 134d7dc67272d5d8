// Accounts for everything that passes between two engines: requests and their ends, loads, blocks
// read, delivered and released. It observes both engines and does not depend on their protocol.
//
// Invariants
// (1) A block that is read holds what the prefill engine computed for that request, and is held for
//     it.
// (2) A delivery goes, once, to the block that the load assigned to that position, while the load
//     is open, with the bytes that were to be sent.
// (3) When a load has completed, each of its blocks was delivered or is reported invalid, or its
//     request has ended or is about to.
// (4) Held blocks are released once: after the load that reads them has completed or was not
//     needed, or when a lease has expired.
// (5) Every request ends, once: it finishes, its client disconnects, or it is refused with a
//     reason.
//
// Only the first broken rule is kept as the finding; the run ends there. Not checked: how long
// anything takes, retries, the decode engine's pages after the delivery (TransferStep, the
// comparer).
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

// A block's payload on the network. Without backends: the content ids of its slots. With backends:
// the bytes of all its layers, as a host block has them (sim/protocol/backend.h, rule 12), of each
// tensor parallel rank in rank order. Both follow from the tokens, so the ledger derives what a
// payload must be from the reference's memory model. It uses nothing that a backend computed.

// Returns true if the first slots of a block of `group` hold `contents` in `bytes`. Slots after
// them are not compared: no request reads them.
using HoldsContents = std::function<bool(std::int32_t group, std::span<const ContentId> contents,
                                         std::span<const std::uint8_t> bytes)>;

// For runs without backends: 8 bytes per slot, as EngineMemory::read_block() returns them.
HoldsContents content_id_payloads(std::span<const KVCacheGroupSpec> groups);
// For runs with backends: pages of each tensor parallel rank. Errors: configurations that the
// memory model refuses. REQUIRES: only tensor parallel ranks.
Result<HoldsContents> page_payloads(const BackendConfig& config);

// A broken rule. The prefix of `check` names the part of the run: transfer, memory.
struct TransferFinding {
  std::string check;  // "transfer.delivered_twice", ...
  std::string what;   // one line
  bool operator==(const TransferFinding&) const = default;
};

enum class RequestEnd : std::uint8_t { finished, aborted, refused };

// REQUIRES, for all methods: the calls follow the order of events, with times that never decrease.
class TransferLedger {
 public:
  // `groups`: of both engines. `lease_ns`: time after which unread blocks may be released.
  TransferLedger(std::span<const KVCacheGroupSpec> groups, std::int64_t lease_ns,
                 HoldsContents holds_contents)
      : groups_(groups), lease_ns_(lease_ns), holds_contents_(std::move(holds_contents)) {}

  // A request starts and ends once; its attempts are not counted here. REQUIRES: `request` is new.
  void arrived(std::uint64_t request, const std::string& name);
  void ended(std::uint64_t request, RequestEnd how);

  // The prefill engine: holds blocks with the `contents` of the first tokens of a prompt, answers a
  // read of one block, and frees all blocks of the transfer.
  void held(TransferId transfer, std::int64_t now_ns, std::vector<ContentId> contents);
  void read(TransferId transfer, BlockPlace place, std::span<const std::uint8_t> bytes);
  void given_back(TransferId transfer, std::int64_t now_ns);

  // The decode engine: has allocated `pieces` for tokens below `last`, receives one of them, and
  // ends the load with the missing blocks in `invalid`.
  void loading(TransferId transfer, std::int32_t last, const std::vector<LoadPiece>& pieces);
  void delivered(TransferId transfer, BlockPlace place, BlockId block,
                 std::span<const std::uint8_t> bytes);
  void load_over(TransferId transfer, std::span<const BlockId> invalid, bool request_has_left);
  // Declares that no further read follows. Held blocks may now be released at any time.
  void not_needed(TransferId transfer);

  // Returns the contents of a block's slots; shorter than a block at the end of the prompt, empty
  // for a completed transfer.
  std::span<const ContentId> contents(TransferId transfer, BlockPlace place) const;

  // Records a finding that another part of the run has made.
  void found(std::string check, std::string what);
  // Checks at the end of a run that nothing is left open. REQUIRES: the run is complete, and no
  // request waits forever.
  void finish();

  const std::optional<TransferFinding>& finding() const { return finding_; }
  std::int64_t num_deliveries() const { return num_deliveries_; }

 private:
  // One transfer, seen from the prefill engine. Erased when it is done, freed, and not being
  // loaded.
  struct Sending {
    std::vector<ContentId> contents;
    std::int64_t since_ns = 0;
    bool is_held = false;
    bool is_done = false;  // no further reads
  };
  // The same transfer, seen from the decode engine, from its allocation to its report.
  struct Loading {
    std::int32_t last = 0;                  // position after the last loaded token
    std::map<BlockPlace, BlockId> missing;  // not delivered yet
    std::map<BlockPlace, BlockId> there;    // delivered
  };
  struct Journey {
    std::string name;
    bool has_ended = false;
  };
  std::string name_of(TransferId transfer) const;
  // Returns the contents of the slots of `place` that hold tokens below `last`.
  std::span<const ContentId> contents_at(const Sending& sending, BlockPlace place,
                                         std::int64_t last) const;
  // Erases a transfer that can no longer break a rule.
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

// Wraps the decode engine's connector for the ledger. It reports every load that the engine starts,
// derived from the engine's own block tables, and every load that the workers report as completed.
// It shares no state with the receiver, so an error of the receiver cannot hide itself.
class WatchedReceiver final : public KVConnector {
 public:
  // Returns the transfer that supplies a live request's blocks.
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

  // Appends the receiver's report and checks each completed load.
  void report(KVConnectorOutput& report);

 private:
  // The last query for a request that is not admitted yet.
  struct Question {
    std::string name;
    std::int32_t num_tokens = 0;
    std::int32_t num_local_tokens = 0;
  };
  // Reports the load of an admitted request: the blocks that it must receive.
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
