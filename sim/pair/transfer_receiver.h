// The decode engine's KV connector. Blocks that a prefill engine has computed are an external hit:
// the connector reads them one by one into the request's blocks, and then releases them. Source of
// the behaviour: vLLM 0.22.1, vllm/distributed/kv_transfer/kv_connector/v1/nixl/scheduler.py and
// worker.py. There a load is one read of remote memory; here it is one message each way per block.
//
// Invariants
// (1) An offer is used once, by the first admission of its request: vLLM clears do_remote_prefill
//     in update_state_after_alloc(). A preempted request recomputes what it lost.
// (2) A block is applied once, and only while its load is open. Duplicates, and answers to
//     completed attempts, change nothing.
// (3) Every load is reported in finished_recving once, in one of three cases. All its blocks have
//     arrived and a step has loaded them (StagedLoads). Or it has failed, because `retries_max`
//     reads in a row brought nothing or because the peer no longer holds the blocks: the missing
//     blocks are in invalid_block_ids. Or its request has ended.
// (4) Only an engine with one group that keeps all blocks (full attention, MLA) can recompute lost
//     blocks. For others nothing is reported invalid: take_failed() names the request, and the
//     caller removes it from the engine before it runs. vLLM 0.22.1 reports such a load as received
//     without invalid blocks (worker.py, _handle_failed_transfer()); the defect
//     recv-failed-marked-ok does the same.
// (5) Every offer ends in `release`, repeated until answered or `retries_max` times: when all
//     blocks have arrived, when nothing needs to be loaded, or with the report that a load has
//     ended.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reference/schedule/scheduler.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/kv_connector.h"
#include "sim/engine/workload.h"
#include "sim/pair/transfer_protocol.h"

namespace lockstep {

// Blocks received from the network, on their way through a staging buffer in host memory to their
// requests' pages: the loads of a decode engine's steps.
//
// Invariants
// (1) A step brings as many blocks into the buffer as fit and loads them before it computes; the
//     next step reuses the buffer.
// (2) Loads are served in the order in which they completed on the network, the blocks of each by
//     position. A load completes in the step that loads its last block, and is reported with it.
// (3) After its request has ended, no block of a load is loaded.
// (4) A load without any arrived block also waits its turn, and completes without a copy.
//
// Not checked: whether the buffer's bytes are right (TransferLedger, TransferStep).

// One block received from the network, with its bytes.
struct ArrivedBlock {
  BlockTransfer block;  // plan() sets `host`, its position in the buffer
  std::vector<std::uint8_t> bytes;
};

class StagedLoads final : public TransferPlanner {
 public:
  // `capacity`: blocks in the buffer. REQUIRES: at least 1.
  StagedLoads(std::int64_t capacity, TransferDefect defect);

  // Records that the step being decided allocated this block to a load.
  void begin(const BlockTransfer& block) { begun_.push_back(block); }
  // Queues the blocks of a load that has ended on the network. `invalid` lists its blocks that
  // never arrived; the report names them together with the request.
  void add(RequestId request, std::vector<ArrivedBlock> blocks, std::vector<BlockId> invalid);
  // Discards the queued blocks of a request that has ended. Returns false if it has none.
  bool drop(RequestId request);
  bool is_empty() const { return waiting_.empty(); }

  // Chooses the loads of the step just decided, and appends the loads that complete with it.
  // REQUIRES: plan() has run since the last call.
  void report(KVConnectorOutput& report);
  // Appends the chosen loads to the step: block i of the step uses position i of the buffer.
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  struct Waiting {
    RequestId request{};
    std::vector<ArrivedBlock> blocks;
    std::vector<BlockId> invalid;
    std::size_t num_loaded = 0;  // blocks already chosen for a step
  };
  std::vector<std::uint8_t> seen_by_loads(std::size_t host, std::vector<std::uint8_t> bytes);

  const std::size_t capacity_;
  const TransferDefect defect_;
  std::vector<BlockTransfer> begun_;  // since the last plan()
  std::deque<Waiting> waiting_;
  std::vector<ArrivedBlock> chosen_;                // for the step just decided
  std::vector<std::vector<std::uint8_t>> written_;  // for a planted defect: previous contents
};

// Returns true if an engine with these groups can recompute lost blocks: rule (4). With several
// groups a request cannot continue at the first lost block, since a window may no longer hold the
// tokens before it.
bool can_compute_lost_blocks(std::span<const KVCacheGroupSpec> groups);

class TransferReceiver final : public KVConnector {
 public:
  // REQUIRES: the link's `self` is the decode engine.
  TransferReceiver(const TransferLink& link, std::span<const KVCacheGroupSpec> groups,
                   std::int64_t staging_blocks, TakeBlock take_block)
      : link_(link),
        groups_(groups),
        take_block_(std::move(take_block)),
        staged_(staging_blocks, link.defect) {}
  KVConnectorTraits traits() const override { return {.is_kv_producer = false}; }
  // REQUIRES: before the first request is admitted.
  void attach(const Scheduler& scheduler) { scheduler_ = &scheduler; }

  // Announces that the first `num_tokens` tokens of the request can be read. A newer offer replaces
  // an unused one of the same request.
  void offer(const std::string& name, TransferId transfer, std::int32_t num_tokens) {
    offers_[name] = {transfer, num_tokens, 0, 0};
  }
  // Releases an unused offer: the request did not enter the engine, or ended before its admission.
  void withdraw(std::string_view name);

  // Returns the offered tokens after those that the engine has cached itself, as an asynchronous
  // load. May be called several times before the admission; the last call counts.
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  // Opens the load of an admitted request and sends its first reads. With no external tokens, every
  // offered token is cached locally and the offer is released.
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  // Ends an open load of the request. Always returns false, since a decode engine sends no blocks.
  bool request_finished(RequestId request, std::string_view name) override;

  // Advances the time and repeats unanswered messages.
  void at(std::int64_t now_ns);
  // Processes a message. Messages of completed transfers only count as stale.
  void take(const TransferMessage& message);
  // Returns when at() must be called next; absent: no message waits for an answer.
  std::optional<std::int64_t> next_timer_ns() const;

  // Returns true if the next step would report something, or if a failed request must be removed.
  bool has_news() const { return !received_.empty() || !failed_.empty() || !staged_.is_empty(); }
  // Appends the loads that complete with the step just decided, and releases the failed ones.
  void report(KVConnectorOutput& report);
  // Returns, once, the requests whose load failed and which the engine cannot recompute.
  std::vector<std::string> take_failed() { return std::exchange(failed_, {}); }
  // Returns the planner of the steps' loads.
  TransferPlanner& transfers() { return staged_; }

 private:
  struct Offer {
    TransferId transfer;
    std::int32_t num_tokens = 0;
    std::int32_t num_local_tokens = 0;    // cached by the engine, at the last query
    std::int32_t num_request_tokens = 0;  // of the whole request, at the last query
  };
  struct Load {
    RequestId request{};
    std::string name;
    std::int64_t num_tokens = 0;  // tokens of the request that its blocks hold after the load
    std::map<BlockPlace, BlockId> missing;     // blocks that have not arrived
    std::map<BlockPlace, ArrivedBlock> there;  // blocks that have
    std::int64_t num_left = 0;  // equals missing.size(), except with a planted defect
    std::int32_t tries = 0;     // rounds of reads without an arrival; 1 after an arrival
    std::int64_t retry_ns = 0;
  };
  struct Release {
    std::int32_t tries = 0;
    std::int64_t retry_ns = 0;
  };
  using Loads = std::map<TransferId, Load>;

  // Requests all missing blocks of the load, again if needed, and sets its timer.
  void read_missing(TransferId transfer, Load& load);
  static BlockTransfer transfer_of(const Load& load, BlockPlace place, BlockId block);
  // Applies a block to its open load, and closes the load with its last block.
  void take_block(const TransferMessage& message);
  // Queues the arrived blocks for the steps.
  void stage(const Load& load, std::vector<BlockId> invalid);
  // Ends a load on the network.
  void close(Loads::iterator load, bool has_failed);
  // Starts the release of a transfer; say_release() also repeats it.
  void release(TransferId transfer);
  void say_release(TransferId transfer, Release& release);

  const TransferLink link_;
  const std::span<const KVCacheGroupSpec> groups_;
  const TakeBlock take_block_;
  StagedLoads staged_;
  const Scheduler* scheduler_ = nullptr;
  std::int64_t now_ns_ = 0;
  std::map<std::string, Offer, std::less<>> offers_;  // unused, by request name
  std::map<RequestId, std::string> asked_;            // queried, not yet admitted
  Loads loads_;                                       // open on the network
  std::map<TransferId, Release> releases_;            // unanswered
  std::vector<RequestId> received_;                   // to report, with no blocks to load
  std::map<RequestId, TransferId> given_up_;          // failed or ended; released with the report
  std::vector<std::string> failed_;                   // for take_failed()
  std::set<RequestId> cancelled_;                     // failed requests not reported yet
};

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
  // Sets the scheduler whose block tables are sent. REQUIRES: before the first request finishes.
  void attach(const Scheduler& scheduler) { scheduler_ = &scheduler; }

  // Marks a request as prefilled for this transfer, so that its end holds its blocks.
  void expect(const std::string& name, TransferId transfer) { expected_[name] = transfer; }
  // Removes that mark: the request was aborted or refused, and its end frees its blocks.
  void forget(const std::string& name) { expected_.erase(name); }

  // A prefill engine loads nothing.
  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override { return {}; }
  // Holds the blocks of an expected request; returns true if it does. The tables are copied now,
  // since the engine drops them with the request.
  bool request_finished(RequestId request, std::string_view name) override;

  // Chooses the blocks that the decided step stores: at most staging_blocks of the requested ones.
  // REQUIRES: take_staged() has taken those of the previous step.
  void plan(const DecidedStep& step, StepTransfers& transfers) override;
  // Reads the blocks that the planned step has stored, and schedules their messages for `end_ns`,
  // the end of that step. The leases of requests that it finished start then. Errors: a backend
  // that cannot read its host blocks.
  Result<void> take_staged(std::int64_t end_ns);

  // Advances the time: sends what is due and frees transfers whose lease has expired.
  void at(std::int64_t now_ns);
  // Processes a message. A read only queues its block for the next step.
  void take(const TransferMessage& message);
  // Returns when at() must be called next; absent: no lease and no outgoing block.
  std::optional<std::int64_t> next_timer_ns() const;

  // Returns true if the engine needs a step to report freed blocks or to store requested ones.
  bool has_news() const { return !sent_.empty() || !asked_.empty(); }
  // Appends the requests whose blocks are no longer needed, in finished_sending.
  void report(KVConnectorOutput& report);
  // Returns the transfers whose blocks report() has freed since the last call.
  std::vector<TransferId> take_freed() { return std::exchange(freed_, {}); }

 private:
  static constexpr auto kNoLease = std::numeric_limits<std::int64_t>::max();  // its step still runs
  struct Held {
    RequestId request{};
    std::int64_t num_tokens = 0;               // computed tokens in the blocks
    std::vector<std::vector<BlockId>> tables;  // per group
    std::int64_t expires_ns = kNoLease;        // end of the lease, extended by each read
    bool is_free = false;                      // only with a planted defect: freed, but still read
  };
  // A block that a message has requested.
  struct Asked {
    TransferId transfer;
    BlockPlace place;
    bool operator==(const Asked&) const = default;
  };
  // A block in the buffer of the step in progress.
  struct Staged {
    Asked what;
    BlockTransfer store;
    // For a planted defect: content of the buffer before the step.
    std::optional<Result<std::vector<std::uint8_t>>> read_early;
  };
  // A message that leaves when its step has ended.
  struct Outgoing {
    std::int64_t at_ns = 0;
    TransferMessage message;
  };
  std::map<TransferId, Held>::iterator find(TransferId transfer);
  // Queues the requested block once, and extends the lease of its transfer.
  void answer_read(const TransferMessage& message);
  void say_gone(const Asked& asked);
  void say_block(const TransferMessage& message);
  // Frees the blocks of a transfer and confirms it, also if they were free already.
  void release(const TransferMessage& message);

  const TransferLink link_;
  const std::int32_t num_groups_;
  const std::int64_t staging_blocks_;
  const ReadBlock read_block_;
  const Scheduler* scheduler_ = nullptr;
  std::int64_t now_ns_ = 0;
  std::map<std::string, TransferId, std::less<>> expected_;  // by request name
  std::map<TransferId, Held> held_;                          // blocks not released yet
  std::vector<Asked> asked_;                                 // requested, not in the buffer yet
  std::vector<Staged> staged_;                               // stored by the step in progress
  std::vector<Outgoing> leaving_;
  std::int64_t num_frees_delayed_ = 0;  // requests whose blocks were held, since the start
  std::vector<std::pair<TransferId, RequestId>> sent_;  // to report as finished_sending
  std::vector<TransferId> freed_;                       // reported, for take_freed()
};

}  // namespace lockstep
