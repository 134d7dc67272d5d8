// A KV connector that is a host tier of this engine: stores full blocks by hash, and later requests
// find them. After vLLM's OffloadingConnector
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
// (5) For each request, everything left open here depends only on the seed, the request's name and
//     its queries, in order.
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

// Which hash lies in which block of a host tier: a map with a limit, the least recently used first
// to go (vllm/v1/kv_offload/cpu/manager.py).
//
// 1. A key has one host block at most, a host block one key at most.
// 2. A block that is pinned, or not ready, is never given to another key.

// A hash stands for a prefix; each group has its own blocks for it.
struct HostKey {
  std::uint64_t high = 0, low = 0;
  std::int32_t group = 0;
  auto operator<=>(const HostKey&) const = default;
};

class HostBlockPool {
 public:
  explicit HostBlockPool(std::int64_t num_blocks);

  bool is_ready(const HostKey& key) const;  // false also for a key that has none
  bool contains(const HostKey& key) const { return entries_.contains(key); }
  // REQUIRES: is_ready(key).
  HostBlockId use(const HostKey& key);  // now the most recently used
  void pin(HostBlockId host);
  void unpin(HostBlockId host);

  // A block for a key that has none, not ready yet. Nothing: all others are in use.
  std::optional<HostBlockId> take(const HostKey& key);
  void set_ready(HostBlockId host);
  void drop(HostBlockId host);  // its store is not carried out
  std::int64_t num_evicted() const { return num_evicted_; }

 private:
  struct Block {
    std::optional<HostKey> key;
    bool ready = false;
    std::int32_t pins = 0;
    std::int64_t used = 0;  // when; in by_use_ while the block is not pinned
  };
  Block& at(HostBlockId host);
  void allow_eviction(HostBlockId host);

  IdVector<HostBlockId, Block> blocks_;
  std::vector<HostBlockId> free_;
  std::map<HostKey, HostBlockId> entries_;
  std::map<std::int64_t, HostBlockId> by_use_;  // ready and not pinned
  std::int64_t clock_ = 0;
  std::int64_t num_evicted_ = 0;
};

// Planted in the connector, for tests of the harness.
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
  std::int32_t delay_steps_max = 3;  // of a store, and of a load that takes longer than its step
  std::int32_t async_percent = 60;   // of the loads take longer
  std::int32_t failed_percent = 0;   // of the loads fail
  bool async_scheduling = false;     // the engine receives a report one step late
  ConnectorDefect defect = ConnectorDefect::none;
};

class OffloadConnector final : public WorkerConnector, public TransferPlanner {
 public:
  // `num_ranks` of context parallelism share the tokens of a block.
  OffloadConnector(const OffloadOptions& options, const KVCacheConfig& plan,
                   std::int32_t num_ranks);

  // What it does not store is computed again.
  KVConnectorTraits traits() const override { return {.requires_kv_delivery = false}; }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  bool request_finished(RequestId request, std::string_view name) override;
  KVConnectorOutput report() override;
  bool is_busy() const override {
    return !loads_.empty() || !stores_.empty() || !finishing_.empty();
  }
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  struct Question {
    std::int64_t first = 0, last = 0;  // tokens to be loaded
    std::int64_t num_tokens = 0;       // of the request: the last one is computed here
    bool is_async = false;
    std::vector<BlockKey> keys;  // of the request's hash blocks
    std::int64_t hash_block_size = 1;
  };
  struct Load {
    RequestId request{};
    Question what;
    std::int64_t due_step = 0;
    std::vector<BlockId> lost;
    std::vector<HostBlockId> pinned;
    std::vector<BlockTransfer> blocks;  // from its first plan on
    bool has_begun = false;
  };
  struct Store {
    BlockTransfer block;
    std::int64_t due_step = 0;
    bool is_guarded = true;  // false: its request may have lost the block
  };

  HostKey key_of(const Question& what, std::int32_t group, std::int64_t entry) const;
  // Entries [begin, end) of the block table that a prefix of `last` tokens needs from here.
  struct Entries {
    std::int64_t begin = 0, end = 0;
  };
  Entries needed(const Question& what, std::int32_t group, std::int64_t last) const;
  std::int64_t longest_held(const Question& what, std::int64_t most) const;
  void begin(const DecidedStep& step, Load& load, StepTransfers& transfers);
  void carry_out(const Load& load, StepTransfers& transfers);
  bool is_needed(const Load& load, const BlockTransfer& block) const;
  void take_full_blocks(const DecidedStep& step, const ScheduledRequest& scheduled);
  bool take_full_blocks_of(const DecidedStep& step, RequestId request, std::int32_t group,
                           std::int64_t end);
  void carry_out_stores(const DecidedStep& step, StepTransfers& transfers);

  OffloadOptions options_;
  std::vector<KVCacheSpec> specs_;          // of the groups
  std::vector<std::int64_t> block_tokens_;  // likewise, that a block stands for
  std::int64_t alignment_ = 1;              // tokens; hits end at multiples of it
  HostBlockPool hosts_;
  UnheardLoads unheard_;
  std::int64_t step_ = 0;
  std::map<RequestId, SeededRandom> random_;  // per request queried
  std::map<RequestId, Question> asked_;
  std::vector<Load> loads_;                                  // in flight, in start order
  std::vector<Store> stores_;                                // likewise
  std::map<RequestId, std::vector<std::int64_t>> num_seen_;  // per group: blocks looked at to store
  std::int64_t num_frees_delayed_ = 0;
  std::vector<RequestId> finishing_;  // keep their blocks until their stores are carried out
};

// Page workers as a KV connector: they copy pages between the host pool and the device as
// each step requires, and report when a copy starts and completes. After vLLM's PageWorkers
// (reference/types/host_pages.h).
//
// Invariants
// (1) It has no prefixes and keeps no finished request's blocks. The scheduler itself holds what
//     must stay while a page is copied.
// (2) A page is restored in the step that names it. Any other page is copied when the next step
//     starts, after the forward pass of the step that names it.
// (3) A copy is reported as enqueued in the step that starts it, and as completed in that step or
//     up to delay_steps_max later.
// (4) There are one or two workers. Each makes every copy and reports its own completion.
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
  void start_pages(const HostPageCommand& command) override;
  KVConnectorOutput report() override;
  bool is_busy() const override { return !started_.empty() || !next_.empty() || !moving_.empty(); }
  // What moves is in the decision.
  void plan(const DecidedStep&, StepTransfers&) override {}

 private:
  const std::int32_t delay_steps_max_;
  SeededRandom random_;
  const std::int32_t num_workers_;
  std::int64_t step_ = 0;
  std::vector<std::int64_t> next_;                            // start with the next step
  std::vector<std::int64_t> started_;                         // in this one
  std::map<std::int64_t, std::vector<std::int64_t>> moving_;  // steps in which workers are done
};

}  // namespace lockstep
