// The prefill engine's KV connector: holds the blocks of a computed prompt until the decode engine
// has read them, and answers its reads through a staging buffer in host memory. Source of the
// behaviour: vllm/distributed/kv_transfer/kv_connector/v1/nixl/scheduler.py and worker.py, where
// the decode engine reads and notifies, and a lease ends unread transfers.
//
// Invariants
// (1) Blocks are held from the end of their request to a `release` of the same transfer, or until a
//     lease passes without a message. They are then reported once in finished_sending.
// (2) Released blocks are never read: a `read` of them is answered with `gone`.
// (3) Every `release` is answered, also a repeated one.
// (4) The engine's next step stores a requested block to the buffer, in an empty step if needed,
//     and its bytes are sent when that step has completed. A step stores as many blocks as the
//     buffer holds, in request order, and the next step overwrites them.
// (5) A step's stores hold their blocks from the decision on, so neither an expired lease nor a
//     release lets a read see what the blocks are used for next.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference/schedule/scheduler.h"
#include "reference/types/kv_connector.h"
#include "sim/pair/transfer_protocol.h"

namespace lockstep {

class TransferSender final : public KVConnector, public TransferPlanner {
 public:
  // REQUIRES: the link's `self` is the prefill engine.
  TransferSender(const TransferLink& link, std::int32_t num_groups, std::int64_t staging_blocks,
                 ReadBlock read_block)
      : link_(link),
        num_groups_(num_groups),
        staging_blocks_(staging_blocks),
        read_block_(std::move(read_block)) {}
  KVConnectorTraits traits() const override {
    return {.is_kv_consumer = false, .requires_kv_delivery = true};
  }
  // It has the block tables that are sent. REQUIRES: before the first request finishes.
  void attach(const Scheduler& scheduler) { scheduler_ = &scheduler; }

  // The request is prefilled for this transfer, or not for any after all.
  void expect(const std::string& name, TransferId transfer) { expected_[name] = transfer; }
  void forget(const std::string& name) { expected_.erase(name); }

  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override { return {}; }
  bool request_finished(RequestId request, std::string_view name) override;

  void plan(const DecidedStep& step, StepTransfers& transfers) override;
  // The planned step has completed at `end_ns`: sends what it staged.
  Result<void> take_staged(std::int64_t end_ns);

  // Time passes: leases may end.
  void at(std::int64_t now_ns);
  void take(const TransferMessage& message);
  std::optional<std::int64_t> next_timer_ns() const;

  // What is to be reported with the next step.
  bool has_news() const { return !sent_.empty() || !asked_.empty(); }
  void report(KVConnectorOutput& report);
  // Those whose blocks `report` gave back since the last call.
  std::vector<TransferId> take_freed() { return std::exchange(freed_, {}); }

 private:
  struct Held {
    RequestId request{};
    std::int64_t num_tokens = 0;               // that were computed
    std::vector<std::vector<BlockId>> tables;  // per group
    std::int64_t expires_ns = 0;
    bool is_free = false;  // only with a planted defect: released and still read
  };
  struct Asked {
    TransferId transfer;
    BlockPlace place;
    bool operator==(const Asked&) const = default;
  };
  struct Staged {
    Asked what;
    BlockTransfer store;
    // Of a planted defect: what lay in the buffer before the step.
    std::optional<Result<std::vector<std::uint8_t>>> read_early;
  };
  struct Outgoing {
    std::int64_t at_ns = 0;
    TransferMessage message;
  };
  std::map<TransferId, Held>::iterator find(TransferId transfer);
  void answer_read(const TransferMessage& message);
  void say_gone(const Asked& asked);
  void say_block(const TransferMessage& message);
  void release(const TransferMessage& message);

  const TransferLink link_;
  const std::int32_t num_groups_;
  const std::int64_t staging_blocks_;
  const ReadBlock read_block_;
  const Scheduler* scheduler_ = nullptr;
  std::int64_t now_ns_ = 0;
  std::map<std::string, TransferId, std::less<>> expected_;
  std::map<TransferId, Held> held_;
  std::vector<Asked> asked_;    // and in no buffer yet
  std::vector<Staged> staged_;  // by the step in progress
  std::vector<Outgoing> leaving_;
  std::int64_t num_frees_delayed_ = 0;
  std::vector<std::pair<TransferId, RequestId>> sent_;
  std::vector<TransferId> freed_;
};

}  // namespace lockstep
