// A KV connector for generated traffic: peers have a prefix of some prompts, and a network delivers
// it late, out of order, in part or not at all.
//
// Invariants
// (1) For each request, its behaviour depends only on the seed, the request's name and its queries,
//     in order. Other requests change nothing.
// (2) The prefix that the peers have of a prompt is fixed; the connector may take a few queries to
//     report it.
// (3) Every load and every send ends: a dead peer is detected after `timeout_steps`, and none of
//     its data has arrived.
// (4) A finished request with a load in flight into its blocks is not sent, nor is one whose load
//     within the step lost blocks. The connector must be notified of loads by other connectors
//     (ask_about_loads()).
//
// Not here: the blocks and bytes that move (PeerTransfers below).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/seeded_random.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/kv_connector.h"
#include "sim/connectors/worker_connector.h"
#include "sim/engine/workload.h"

namespace lockstep {

struct SimulatedConnectorOptions {
  std::uint64_t seed = 0;
  std::int32_t block_size = 16;            // tokens; peers have prefixes of whole blocks
  std::int32_t num_groups = 1;             // KV cache groups; several: no block is reported invalid
  std::int32_t known_percent = 60;         // % of requests of which peers have a prefix
  std::int32_t undetermined_percent = 30;  // % of requests that need more than one query
  std::int32_t async_percent = 60;         // % of requests whose load takes longer than a step
  std::int32_t lossy_percent = 10;         // % of loads that lose blocks
  std::int32_t dead_percent = 3;           // % of the longer loads whose peer has died
  std::int32_t kept_percent = 25;          // % of finished requests that are sent
  std::int32_t delay_steps_max = 6;        // of a load or a send
  std::int32_t timeout_steps = 20;         // until a dead peer is detected
  bool async_scheduling = false;           // the engine receives a report one step late
};

class SimulatedConnector final : public WorkerConnector {
 public:
  explicit SimulatedConnector(const SimulatedConnectorOptions& options)
      : options_(options), unheard_(options.async_scheduling) {}

  // Sets the query for a finished request: true if another connector loads into its blocks. Without
  // it, no other connector exists.
  void ask_about_loads(std::function<bool(RequestId)> loads_elsewhere) {
    loads_elsewhere_ = std::move(loads_elsewhere);
  }

  // Requires delivery, like a connector that sends blocks to another engine: a preempted request's
  // output in flight is dropped, since its blocks are gone.
  KVConnectorTraits traits() const override { return {.requires_kv_delivery = true}; }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  // Starts the load of the last query: decides which blocks it loses and, if it takes longer than
  // the step, when it ends.
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  // True if the request is sent, so its blocks stay until the report that completes the send.
  // Forgets the name: a later request of that name is new to the peers.
  bool request_finished(RequestId request, std::string_view name) override;

  // Reports what ends with this step, then advances to the next step.
  KVConnectorOutput report() override;
  bool is_busy() const override { return !transfers_.empty() || owes_answer_; }

 private:
  // What the peers have of a request's prompt, decided at its first query.
  struct Knowledge {
    SeededRandom random;
    std::int64_t num_tokens = 0;  // tokens from the first one that the peers have
    std::int32_t num_silent = 0;  // queries to answer with "query again" first
    bool is_async = false;
  };
  // A load longer than a step, or a send.
  struct Transfer {
    std::int64_t due_step = 0;
    RequestId request{};
    bool is_load = false;
    std::vector<BlockId> lost;
  };
  // The query whose answer the scheduler acts on.
  struct Question {
    std::string name;
    std::int32_t num_local_tokens = 0;
    bool is_async = false;
  };
  Knowledge& knowledge_of(const ExternalQuery& query);

  SimulatedConnectorOptions options_;
  std::function<bool(RequestId)> loads_elsewhere_;  // null: there is no other connector
  std::int64_t step_ = 0;
  bool owes_answer_ = false;  // true if a query of this step was undecided
  std::map<std::string, Knowledge, std::less<>> known_;
  std::map<RequestId, Question> asked_;  // the last answered query of each request
  std::vector<Transfer> transfers_;      // in the order begun
  std::vector<BlockId> invalid_;         // lost by loads within the step
  std::vector<RequestId> losing_;        // requests whose load within the step lost blocks
  UnheardLoads unheard_;                 // loads that completed, or lost blocks within their step
};

// Returns the blocks that hold positions [first, last) of a request, in every group, without null
// blocks. The first and last block may hold other positions too. The caller sets the host blocks.
std::vector<BlockTransfer> blocks_of(const DecidedStep& step, RequestId request, std::int64_t first,
                                     std::int64_t last);

// The transfers of a KV connector with unknown peers: they send the rows that the request would
// have computed, and receive what they are sent. Wraps the connector and reads its answers.
//
// Invariants
// (1) A load within the step runs in the step, a longer one in the step whose report completes it.
//     Invalid blocks are not loaded, nor are those of a request whose whole load failed.
// (2) What a request sends is stored in the step whose report completes the send: the last one in
//     which it holds its blocks.
// (3) Peers that take one KV cache group move blocks of the first group.
// (4) A block's position in the host tier equals its id, so the tier is as large as the pool. The
//     host pool precedes them; loads into its blocks are stored there.
// (5) In groups of host pages, peers fill host blocks of the source, which are `brought` under
//     their own ids and loaded by no step; peers do not see its device pages. What they take from
//     the host pool is not tracked.
//
// Not here: whether the moved rows are the request's own (sim/step/transfer_step.h checks it).
class PeerTransfers final : public KVConnector, public TransferPlanner {
 public:
  // `connector` outlives this. `groups`: of the plan; empty: none has a window or host pages.
  // `num_pool_blocks`: of the host pool, 0 without host pages.
  explicit PeerTransfers(KVConnector& connector, bool takes_several_groups = true,
                         std::span<const KVCacheGroupSpec> groups = {},
                         std::int64_t num_pool_blocks = 0);

  KVConnectorTraits traits() const override { return connector_.traits(); }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  bool request_finished(RequestId request, std::string_view name) override;
  void order_failed_requests(std::vector<RequestId>& requests) override {
    connector_.order_failed_requests(requests);
  }
  void order_published_requests(std::vector<std::string>& names) override {
    connector_.order_published_requests(names);
  }

  struct Load {
    RequestId request{};
    // Tokens [first, last) are loaded: after the local hit, up to the end of the external one.
    std::int64_t first = 0, last = 0;
    bool is_async = false;
  };
  // Adds a load that begins with the next plan, when its request's block table exists.
  void begin(const Load& load) { begun_.push_back(load); }
  // Plans the step's loads and sends. Bookkeeping of loads in flight stays here until a report ends
  // them.
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  // Returns the blocks that these peers move: without other groups and device pages.
  std::vector<BlockTransfer> moved(std::vector<BlockTransfer> blocks) const;
  // Plans the load of blocks, except lost ones. Each lost id is used up by one block.
  void carry_out(const std::vector<BlockTransfer>& blocks, StepTransfers& transfers);
  // Plans the stores of a finished request's computed blocks.
  void send(const DecidedStep& step, RequestId request, StepTransfers& transfers);
  // Returns the tokens of the request whose rows are in the cache for certain.
  std::int64_t num_computed(const DecidedStep& step, RequestId request) const;
  bool is_left(const BlockTransfer& block, std::int64_t block_tokens) const;

  KVConnector& connector_;
  // Returns the block's position in the host tier: invariant (4).
  HostBlockId host_of(const BlockTransfer& block) const;

  const bool takes_several_groups_;
  const std::int64_t num_pool_blocks_;   // blocks of the host pool
  std::int32_t source_group_ = -1;       // group whose blocks are in the host pool; -1: none
  std::set<std::int32_t> device_pages_;  // resident and hot groups of host pages
  struct Window {
    std::int64_t size = 0, chunk = 0;  // tokens; 0: none
  };
  std::vector<Window> windows_;                     // per group
  std::map<RequestId, std::int64_t> scheduled_to_;  // end of the last step; foreign engines only
  std::map<RequestId, Load> asked_;                 // the last query of each request
  std::vector<Load> begun_;                         // since the last plan
  std::map<RequestId, std::vector<BlockTransfer>> loading_;
  std::set<BlockId> lost_;  // reported invalid, for loads in flight
  std::int64_t num_frees_delayed_ = 0;
};

}  // namespace lockstep
