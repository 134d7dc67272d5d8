// A KV connector for generated traffic: peers have a prefix of some prompts, and a network delivers
// it late, out of order, in part or not at all.
//
// Invariants
// (1) For each request, its behaviour depends only on the seed, the request's name and its queries,
//     in order. Other requests change nothing.
// (2) The prefix that it has of a prompt is fixed; it may take a few queries to report it.
// (3) Every load and every send ends: a dead peer is detected after `timeout_steps`, and none of
//     its data has arrived.
// (4) A finished request with a load in flight into its blocks is not sent, nor is one whose load
//     within the step lost blocks. It must be notified of loads by other connectors.
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
  std::int32_t block_size = 16;            // tokens; it knows prefixes of whole blocks
  std::int32_t num_groups = 1;             // with several, nothing is ever reported invalid
  std::int32_t known_percent = 60;         // of the requests a prefix is known elsewhere
  std::int32_t undetermined_percent = 30;  // share of requests that need more than one query
  std::int32_t async_percent = 60;         // of the loads take longer than a step
  std::int32_t lossy_percent = 10;         // of the loads lose blocks
  std::int32_t dead_percent = 3;           // of the longer loads are from a peer that has died
  std::int32_t kept_percent = 25;          // of the finished requests are sent
  std::int32_t delay_steps_max = 6;        // of a load or a sending
  std::int32_t timeout_steps = 20;
  bool async_scheduling = false;  // the engine receives a report one step late
};

class SimulatedConnector final : public WorkerConnector {
 public:
  explicit SimulatedConnector(const SimulatedConnectorOptions& options)
      : options_(options), unheard_(options.async_scheduling) {}

  // Asked of a request that finishes: another connector loads into its blocks.
  void ask_about_loads(std::function<bool(RequestId)> loads_elsewhere) {
    loads_elsewhere_ = std::move(loads_elsewhere);
  }

  // Like one that hands blocks on to another engine.
  KVConnectorTraits traits() const override { return {.requires_kv_delivery = true}; }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  bool request_finished(RequestId request, std::string_view name) override;

  KVConnectorOutput report() override;
  bool is_busy() const override { return !transfers_.empty() || owes_answer_; }

 private:
  struct Knowledge {
    SeededRandom random;
    std::int64_t num_tokens = 0;  // known elsewhere, from the first token on
    std::int32_t num_silent = 0;  // questions that get no answer first
    bool is_async = false;
  };
  struct Transfer {
    std::int64_t due_step = 0;
    RequestId request{};
    bool is_load = false;
    std::vector<BlockId> lost;
  };
  struct Question {
    std::string name;
    std::int32_t num_local_tokens = 0;
    bool is_async = false;
  };
  Knowledge& knowledge_of(const ExternalQuery& query);

  SimulatedConnectorOptions options_;
  std::function<bool(RequestId)> loads_elsewhere_;  // null: there is no other connector
  std::int64_t step_ = 0;
  bool owes_answer_ = false;
  std::map<std::string, Knowledge, std::less<>> known_;
  std::map<RequestId, Question> asked_;  // the last question of each
  std::vector<Transfer> transfers_;      // in the order begun
  std::vector<BlockId> invalid_;         // of loads within the step
  std::vector<RequestId> losing_;        // have lost them
  UnheardLoads unheard_;                 // completed or lost
};

// The blocks in which positions [first, last) of a request lie, in every group; null ones left out.
// Host blocks are for the caller to choose.
std::vector<BlockTransfer> blocks_of(const DecidedStep& step, RequestId request, std::int64_t first,
                                     std::int64_t last);

// Transfers of a KV connector with unknown peers: they send the rows that the request would have
// computed, and receive what they are sent. Wraps the connector and reads its answers.
//
// Invariants
// (1) A load within the step runs in the step, a longer one in the step whose report completes it.
//     Invalid blocks are not loaded, nor are those of a request whose whole load failed.
// (2) What a request sends is stored in the step whose report completes the send: the last one in
//     which it holds its blocks.
// (3) Peers that take one KV cache group move blocks of the first group.
// (4) A block's position in the host tier equals its id, so the tier is as large as the pool.
//     The host pool precedes them; loads into its blocks are stored there.
// (5) In groups of host pages, peers fill host blocks of the source, which are `brought` under
//     their own ids and loaded by no step; peers do not see its device pages. What they take from
//     the host pool is not tracked.
class PeerTransfers final : public KVConnector, public TransferPlanner {
 public:
  // `connector` outlives this.
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
    std::int64_t first = 0, last = 0;  // tokens
    bool is_async = false;
  };
  // A load that begins with the next plan.
  void begin(const Load& load) { begun_.push_back(load); }
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  std::vector<BlockTransfer> moved(std::vector<BlockTransfer> blocks) const;
  void carry_out(const std::vector<BlockTransfer>& blocks, StepTransfers& transfers);
  void send(const DecidedStep& step, RequestId request, StepTransfers& transfers);
  std::int64_t num_computed(const DecidedStep& step, RequestId request) const;
  bool is_left(const BlockTransfer& block, std::int64_t block_tokens) const;

  KVConnector& connector_;
  // The block's place in the host tier.
  HostBlockId host_of(const BlockTransfer& block) const;

  const bool takes_several_groups_;
  const std::int64_t num_pool_blocks_;   // of the host pool
  std::int32_t source_group_ = -1;       // of host pages
  std::set<std::int32_t> device_pages_;  // groups of host pages
  struct Window {
    std::int64_t size = 0, chunk = 0;  // tokens; 0: none
  };
  std::vector<Window> windows_;                     // per group
  std::map<RequestId, std::int64_t> scheduled_to_;  // token; where another engine decides
  std::map<RequestId, Load> asked_;                 // the last question of each
  std::vector<Load> begun_;                         // since the last plan
  std::map<RequestId, std::vector<BlockTransfer>> loading_;
  std::set<BlockId> lost_;  // of loads in flight
  std::int64_t num_frees_delayed_ = 0;
};

}  // namespace lockstep
