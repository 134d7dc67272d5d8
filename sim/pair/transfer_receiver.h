// The decode engine's KV connector: blocks that a prefill engine has computed are an external hit,
// are read one by one into the request's blocks, and then released. Source of the behaviour:
// vllm/distributed/kv_transfer/kv_connector/v1/nixl/scheduler.py and worker.py; there a load is one
// read of remote memory, here it is one message each way per block.
//
// Invariants
// (1) An offer is used once: by the first admission of its request. A preempted request recomputes
//     what it lost.
// (2) A block is applied once, and only while its load is open. Duplicates, and answers to
//     completed attempts, change nothing.
// (3) Every load is reported in finished_recving, once: when all its blocks have arrived and a step
//     has loaded them (staged_loads.h); when `retries_max` reads in a row brought nothing, or the
//     peer no longer holds the blocks, with the missing blocks in invalid_block_ids; or when its
//     request has ended.
// (4) Only an engine with one group that keeps all blocks (full attention, MLA) can recompute lost
//     blocks. For others nothing is reported invalid: take_failed() names the request, and the
//     caller removes it from the engine before it runs.
// (5) Every offer ends in `release`, repeated until answered or `retries_max` times: when all
//     blocks have arrived, nothing needs to be loaded, or with the report that a load has ended.
#pragma once

#include <cstdint>
#include <deque>
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

struct ArrivedBlock {
  BlockTransfer block;  // its place in the buffer is chosen by the step that loads it
  std::vector<std::uint8_t> bytes;
};

class StagedLoads final : public TransferPlanner {
 public:
  // REQUIRES: room for a block.
  StagedLoads(std::int64_t capacity, TransferDefect defect);

  // A request was given the block for a load, in the step being decided.
  void begin(const BlockTransfer& block) { begun_.push_back(block); }
  // The load has ended on the network with these blocks. `invalid` never came.
  void add(RequestId request, std::vector<ArrivedBlock> blocks, std::vector<BlockId> invalid);
  // The request has ended. False: no block of it was waiting here.
  bool drop(RequestId request);
  bool is_empty() const { return waiting_.empty(); }

  // Chooses the loads of the step just decided; appends the loads that complete with it.
  void report(KVConnectorOutput& report);
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  struct Waiting {
    RequestId request{};
    std::vector<ArrivedBlock> blocks;
    std::vector<BlockId> invalid;
    std::size_t num_loaded = 0;
  };
  std::vector<std::uint8_t> seen_by_loads(std::size_t host, std::vector<std::uint8_t> bytes);

  const std::size_t capacity_;
  const TransferDefect defect_;
  std::vector<BlockTransfer> begun_;  // since the last plan
  std::deque<Waiting> waiting_;
  std::vector<ArrivedBlock> chosen_;                // for the step that was decided
  std::vector<std::vector<std::uint8_t>> written_;  // of a planted defect: last, by place
};

// Rule (4).
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

  // The first `num_tokens` of the request can be read.
  void offer(const std::string& name, TransferId transfer, std::int32_t num_tokens) {
    offers_[name] = {transfer, num_tokens, 0, 0};
  }
  // The request did not enter the engine.
  void withdraw(std::string_view name);

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  bool request_finished(RequestId request, std::string_view name) override;

  // Advances the time: repeats unanswered messages.
  void at(std::int64_t now_ns);
  void take(const TransferMessage& message);
  std::optional<std::int64_t> next_timer_ns() const;

  bool has_news() const { return !received_.empty() || !failed_.empty() || !staged_.is_empty(); }
  void report(KVConnectorOutput& report);
  std::vector<std::string> take_failed() { return std::exchange(failed_, {}); }
  // What the steps load.
  TransferPlanner& transfers() { return staged_; }

 private:
  struct Offer {
    TransferId transfer;
    std::int32_t num_tokens = 0;
    std::int32_t num_local_tokens = 0;  // when last asked
    std::int32_t num_request_tokens = 0;
  };
  struct Load {
    RequestId request{};
    std::string name;
    std::int64_t num_tokens = 0;  // of the request, up to which blocks are filled
    std::map<BlockPlace, BlockId> missing;
    std::map<BlockPlace, ArrivedBlock> there;
    std::int64_t num_left = 0;  // blocks to come
    std::int32_t tries = 0;     // since the last one came
    std::int64_t retry_ns = 0;
  };
  struct Release {
    std::int32_t tries = 0;
    std::int64_t retry_ns = 0;
  };
  using Loads = std::map<TransferId, Load>;

  void read_missing(TransferId transfer, Load& load);
  static BlockTransfer transfer_of(const Load& load, BlockPlace place, BlockId block);
  void take_block(const TransferMessage& message);
  void stage(const Load& load, std::vector<BlockId> invalid);
  void close(Loads::iterator load, bool has_failed);
  void release(TransferId transfer);
  void say_release(TransferId transfer, Release& release);

  const TransferLink link_;
  const std::span<const KVCacheGroupSpec> groups_;
  const TakeBlock take_block_;
  StagedLoads staged_;
  const Scheduler* scheduler_ = nullptr;
  std::int64_t now_ns_ = 0;
  std::map<std::string, Offer, std::less<>> offers_;
  std::map<RequestId, std::string> asked_;
  Loads loads_;
  std::map<TransferId, Release> releases_;
  std::vector<RequestId> received_;           // with nothing left to load
  std::map<RequestId, TransferId> given_up_;  // released once the load is reported
  std::vector<std::string> failed_;
  std::set<RequestId> cancelled_;  // of `failed_`: not reported yet
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
