// A KV connector as the scheduler sees it: it can load blocks of this pool from caches elsewhere,
// and send blocks away. Its answers and its workers' reports are inputs; the scheduler decides what
// follows from them. Source of the interface: vllm/distributed/kv_transfer/kv_connector/v1/base.py.
//
// Invariants
// (1) A load in the same step (is_async false) has written its tokens when attention reads them, or
//     the output of that step reports its blocks as invalid.
// (2) An asynchronous load completes when finished_recving reports its request, exactly once.
// (3) A request that the connector keeps (request_finished() returned true) is reported in
//     finished_sending, exactly once.
//
// Not modelled: what a connector does with the blocks, the metadata of its workers, events.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "reference/types/host_pages.h"

namespace lockstep {

// Tokens past the local prefix hit that the connector can load. Absent: unknown yet, query again in
// a later step. The request is passed over until then and does not block the queue.
struct ExternalHit {
  std::optional<std::int32_t> num_tokens = 0;
  bool is_async = false;  // the load outlasts the step. REQUIRES: num_tokens > 0
};

// The request as the scheduler describes it to the connector.
struct ExternalQuery {
  RequestId request{};
  std::string_view name;
  std::int32_t num_tokens = 0;        // of the request; a load within the step leaves at least one
  std::int32_t num_local_tokens = 0;  // of the local prefix hit
  std::span<const BlockKey> block_keys{};  // of its hash blocks; empty without prefix caching
  std::int32_t hash_block_size = 1;        // tokens
};

// Properties that a connector declares once, when the engine starts.
struct KVConnectorTraits {
  bool is_kv_producer = true;  // of kv_role: the connector sends
  bool is_kv_consumer = true;  // ... loads
  // Drops the in-flight output of a preempted request: the blocks that the connector would forward
  // are free (vLLM 0.33.0, v1/core/sched/scheduler.py, _preempt_request()).
  bool requires_kv_delivery = false;
  // True if its loads bring the states of a local hit that attention holds further than the states
  // (supports_divergent_local_hybrid_hits).
  bool completes_divergent_hits = false;
  // True if no request is preempted to free blocks while sends are in flight: the sends free blocks
  // soon (has_pending_block_frees).
  bool waits_for_sends = false;
};

// The interface that a simulated or recorded connector implements. Calls arrive in the order of the
// scheduler's decisions.
class KVConnector {
 public:
  virtual ~KVConnector() = default;
  virtual KVConnectorTraits traits() const { return {}; }
  // Called each time a request without computed tokens reaches the head of its queue, so several
  // times for a request that waits. REQUIRES of the answer: local and external tokens together
  // leave one token to compute, unless the load is asynchronous.
  virtual ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) = 0;
  // Reports that the request holds `blocks` (of the first group), those that num_external_tokens
  // will be loaded into included. Called also without external tokens.
  virtual void update_state_after_alloc(RequestId, std::span<const BlockId> /*blocks*/,
                                        std::int32_t /*num_external_tokens*/) {}
  // Sends the page work of the decided step to the workers.
  virtual void start_pages(const HostPageCommand&) {}
  // Reports the end of a request. True: its blocks stay allocated until finished_sending.
  virtual bool request_finished(RequestId request, std::string_view name) = 0;
  // Sorts requests that fail in one report into the order in which the engine ends them. vLLM
  // iterates a Python set there, so hash order decides which blocks are freed first. Passed in
  // queue order.
  virtual void order_failed_requests(std::vector<RequestId>&) {}
  // Sorts request names into the order in which the engine publishes their pages, also a set in
  // vLLM. Passed in completion order.
  virtual void order_published_requests(std::vector<std::string>&) {}
};

// The reports of a connector's workers that arrive with a step's output.
struct KVConnectorOutput {
  std::vector<RequestId> finished_recving{};
  std::vector<RequestId> finished_sending{};
  std::vector<BlockId> invalid_block_ids{};  // blocks whose load failed; their tokens are missing
  // Requests of finished_recving whose load brought nothing. Engines with several groups report
  // failures this way, since a block id alone does not identify a request's tokens.
  std::vector<RequestId> failed_recving{};
  // Transfers of host pages: submitted to, and completed by, that many workers.
  std::vector<TransferCount> enqueued{};
  std::vector<TransferCount> completed{};

  bool empty() const {
    return finished_recving.empty() && finished_sending.empty() && invalid_block_ids.empty() &&
           failed_recving.empty() && enqueued.empty() && completed.empty();
  }
  void clear() {
    finished_recving.clear();
    finished_sending.clear();
    invalid_block_ids.clear();
    failed_recving.clear();
    enqueued.clear();
    completed.clear();
  }
};

// What follows from a failed load: compute the missing tokens here, or end the request.
enum class KVLoadFailurePolicy : std::uint8_t { recompute, fail };

// vLLM's kv_transfer_config, as far as the scheduler reads it.
struct KVTransfer {
  KVConnector* connector = nullptr;  // null: none. Outlives the scheduler
  KVLoadFailurePolicy kv_load_failure_policy = KVLoadFailurePolicy::recompute;
};

}  // namespace lockstep
