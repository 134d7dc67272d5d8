// A KV connector that is a host tier of this engine: it stores full blocks by hash, and later
// requests load them. Modelled after vLLM's OffloadingConnector
// (vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
// vllm/v1/kv_offload/cpu/manager.py).
//
// Invariants
// (1) A hit is the longest prefix of which every group has all that it still reads: full attention
//     all blocks after the local hit, windows and chunks those that the next token reads.
// (2) A host block holds one hash of one group. A lookup finds it once its store has completed. It
//     is reused for another hash, least recently used first, only while no load and no store of it
//     is in flight.
// (3) A block is stored once it is full, at once or some steps later, after the step has written.
//     If its request frees it before, the store is dropped; a finished request keeps its blocks
//     until its stores have completed.
// (4) A load completes within the step or some steps later. A failed load fills the blocks before
//     the failure; the rest is reported invalid. In an engine of several groups no load fails,
//     since vLLM does not support that.
// (5) For each request, every choice that this connector makes depends only on the seed, the
//     request's name and its queries, in order.
//
// Differs from vLLM 0.22.1 and 0.33.0 in one respect: their request_finished() returns False, and a
// block that is reused while a store of it is pending flushes that store. Here the request keeps
// its blocks, which checks the engine's delayed free.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/names.h"
#include "base/seeded_random.h"
#include "reference/cache/block_hash.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/connectors/worker_connector.h"
#include "sim/engine/workload.h"

namespace lockstep {

// The hash that each block of a host tier holds: a map with a limit, which evicts the least
// recently used first (vllm/v1/kv_offload/cpu/policies/lru.py).
//
// 1. A key has at most one host block, a host block at most one key.
// 2. A block that is pinned, or not ready, is never given to another key.
// 3. by_use_ holds exactly the blocks that are ready and not pinned; free_ those without a key.
//
// States of a block: free -> take() -> not ready -> set_ready() -> ready, or drop() -> free. While
// ready it is pinned and unpinned any number of times. take() of another key evicts it.

// A hash identifies a prefix; each group has its own blocks for it.
struct HostKey {
  std::uint64_t high = 0, low = 0;  // the 128-bit hash of the prefix
  std::int32_t group = 0;
  auto operator<=>(const HostKey&) const = default;
};

class HostBlockPool {
 public:
  explicit HostBlockPool(std::int64_t num_blocks);

  bool is_ready(const HostKey& key) const;  // false also for a key that has none
  bool contains(const HostKey& key) const { return entries_.contains(key); }
  // Returns the key's block and marks it as most recently used. REQUIRES: is_ready(key).
  HostBlockId use(const HostKey& key);
  // Excludes a block from eviction while a load reads it. Pins are counted, since several requests
  // may load the same block. REQUIRES: the block is ready; to unpin, that it is pinned.
  void pin(HostBlockId host);
  void unpin(HostBlockId host);

  // Allocates a block for a key that has none; the block is not ready yet. Absent: every block is
  // pinned or waits for its store. May evict.
  std::optional<HostBlockId> take(const HostKey& key);
  // Completes the store of a block: lookups find it from now on.
  void set_ready(HostBlockId host);
  // Frees a block whose store is not carried out. REQUIRES: the block is not ready.
  void drop(HostBlockId host);
  // Keys that lost their block to another key, since the start.
  std::int64_t num_evicted() const { return num_evicted_; }

 private:
  struct Block {
    std::optional<HostKey> key;
    bool ready = false;
    std::int32_t pins = 0;
    std::int64_t used = 0;  // clock_ at the last use; its key in by_use_
  };
  // Returns the block. REQUIRES: a block of this pool.
  Block& at(HostBlockId host);
  // Adds the block to by_use_ as the most recently used.
  void allow_eviction(HostBlockId host);

  IdVector<HostBlockId, Block> blocks_;
  std::vector<HostBlockId> free_;
  std::map<HostKey, HostBlockId> entries_;
  std::map<std::int64_t, HostBlockId> by_use_;  // ready and not pinned
  std::int64_t clock_ = 0;
  std::int64_t num_evicted_ = 0;
};

// Defects planted in the connector, for tests of the harness.
enum class ConnectorDefect : std::uint8_t {
  none,
  transfer_failed_marked_ok,  // a load that failed is not reported invalid
  free_send_in_flight,        // a finished request's blocks are free while stores of them wait
};
template <>
inline constexpr char kWordJoint<ConnectorDefect> = '-';

struct OffloadOptions {
  std::uint64_t seed = 0;
  std::int64_t num_host_blocks = 0;
  std::int32_t delay_steps_max = 3;  // of a store, and of a load longer than its step
  std::int32_t async_percent = 60;   // % of queries whose load takes longer than the step
  std::int32_t failed_percent = 0;   // % of loads that fail, one KV cache group only
  bool async_scheduling = false;     // the engine receives a report one step late
  ConnectorDefect defect = ConnectorDefect::none;
};

class OffloadConnector final : public WorkerConnector, public TransferPlanner {
 public:
  // `num_ranks`: ranks of context parallelism that share the tokens of a block in sharded groups.
  OffloadConnector(const OffloadOptions& options, const KVCacheConfig& plan,
                   std::int32_t num_ranks);

  // A preempted request's output need not be delivered: what is not stored is computed again.
  KVConnectorTraits traits() const override { return {.requires_kv_delivery = false}; }
  // Returns the tokens that all groups can load after the local hit; 0 if the local hit is not a
  // multiple of the alignment. Never undecided.
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  // Starts the load of the last query: pins its host blocks and decides when it completes and which
  // blocks it loses. Also resets the record of stored blocks, since a resumed request has a new
  // table.
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  // True if stores of the request's blocks are pending: the blocks stay until they are carried out.
  // False while a load is in flight, which keeps the blocks itself.
  bool request_finished(RequestId request, std::string_view name) override;
  // Reports loads and finished requests that complete with this step. Does not change loads_ and
  // stores_: plan() of the same step carries them out.
  KVConnectorOutput report() override;
  bool is_busy() const override {
    return !loads_.empty() || !stores_.empty() || !finishing_.empty();
  }
  // Plans the loads and stores of the step, then advances to the next step.
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  // A query, and the part of its answer that the load needs.
  struct Question {
    std::int64_t first = 0, last = 0;  // tokens [first, last) to load
    std::int64_t num_tokens = 0;       // of the request: the last one is computed here
    bool is_async = false;
    std::vector<BlockKey> keys;  // of the request's hash blocks
    std::int64_t hash_block_size = 1;
  };
  // A load in flight, from the allocation to the step that carries it out.
  struct Load {
    RequestId request{};
    Question what;
    std::int64_t due_step = 0;
    std::vector<BlockId> lost;          // blocks of the first group that stay unfilled
    std::vector<HostBlockId> pinned;    // one per needed entry of every group
    std::vector<BlockTransfer> blocks;  // set by begin()
    bool has_begun = false;
  };
  // A store that waits for its step, or for the loss of its block.
  struct Store {
    BlockTransfer block;
    std::int64_t due_step = 0;
    bool is_guarded = true;  // false: stored even if its request has lost the block (defect)
  };

  // Returns the key of a table entry: the hash of the last hash block in it. REQUIRES: the request
  // has hashes up to the end of the entry.
  HostKey key_of(const Question& what, std::int32_t group, std::int64_t entry) const;
  // Entries [begin, end) of a group's block table that a prefix of `last` tokens needs from this
  // tier: not those before the local hit, nor those that the next token no longer reads.
  struct Entries {
    std::int64_t begin = 0, end = 0;
  };
  Entries needed(const Question& what, std::int32_t group, std::int64_t last) const;
  // Returns the end of the longest prefix, at most `most` tokens, that all groups can load. A
  // multiple of alignment_, or not above what.first if there is none.
  std::int64_t longest_held(const Question& what, std::int64_t most) const;
  // Resolves the table entries of a load to blocks and reports them in StepTransfers::begun.
  void begin(const DecidedStep& step, Load& load, StepTransfers& transfers);
  // Unpins the load's host blocks and plans the copies, except those of lost blocks.
  void carry_out(const Load& load, StepTransfers& transfers);
  bool is_needed(const Load& load, const BlockTransfer& block) const;
  // Allocates host blocks for the request's blocks that this step fills, and schedules their
  // stores.
  void take_full_blocks(const DecidedStep& step, const ScheduledRequest& scheduled);
  bool take_full_blocks_of(const DecidedStep& step, RequestId request, std::int32_t group,
                           std::int64_t end);
  // Plans the stores that are due and drops those whose request no longer holds the block.
  void carry_out_stores(const DecidedStep& step, StepTransfers& transfers);

  OffloadOptions options_;
  std::vector<KVCacheSpec> specs_;          // of the groups
  std::vector<std::int64_t> block_tokens_;  // per group: tokens of a block
  std::int64_t alignment_ = 1;              // tokens; hits end at multiples of it
  HostBlockPool hosts_;
  UnheardLoads unheard_;
  std::int64_t step_ = 0;
  std::map<RequestId, SeededRandom> random_;                 // per request queried
  std::map<RequestId, Question> asked_;                      // the last query of each request
  std::vector<Load> loads_;                                  // in flight, in start order
  std::vector<Store> stores_;                                // likewise
  std::map<RequestId, std::vector<std::int64_t>> num_seen_;  // per group: table entries processed
  std::int64_t num_frees_delayed_ = 0;
  std::vector<RequestId> finishing_;  // finished, blocks kept until stored
};

// Page workers as a KV connector: they copy pages between the host pool and the device as each step
// requires, and report when a copy starts and completes. Messages and their source in
// vLLM: reference/types/host_pages.h.
//
// Invariants
// (1) Page workers have no prefixes and keep no finished request's blocks. The scheduler itself
//     holds what must stay while a page is copied.
// (2) A page is restored in the step that names it. Any other page is copied when the next step
//     starts, after the forward pass of the step that names it.
// (3) A copy is reported as enqueued in the step that starts it, and as completed in that step or
//     up to delay_steps_max later.
// (4) There are one or two workers. Each makes every copy and reports its own completion, so a page
//     is complete only after num_workers_ reports.
// (5) Only the seed decides delays and the number of workers.
//
// Not here: the bytes, which a backend moves.

struct PageWorkerOptions {
  std::uint64_t seed = 0;
  std::int32_t delay_steps_max = 3;
};

class PageWorkers final : public WorkerConnector, public TransferPlanner {
 public:
  explicit PageWorkers(const PageWorkerOptions& options);

  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override { return {}; }
  bool request_finished(RequestId, std::string_view) override { return false; }
  // Starts the copies that the previous step named and the restores that this step names.
  void start_pages(const HostPageCommand& command) override;
  KVConnectorOutput report() override;
  bool is_busy() const override { return !started_.empty() || !next_.empty() || !moving_.empty(); }
  // Plans nothing: the decision's HostPageCommand already names every copy.
  void plan(const DecidedStep&, StepTransfers&) override {}

 private:
  const std::int32_t delay_steps_max_;
  SeededRandom random_;
  const std::int32_t num_workers_;
  std::int64_t step_ = 0;
  std::vector<std::int64_t> next_;                            // ids that start with the next step
  std::vector<std::int64_t> started_;                         // ids that started in this step
  std::map<std::int64_t, std::vector<std::int64_t>> moving_;  // id: last step of each worker
};

}  // namespace lockstep
