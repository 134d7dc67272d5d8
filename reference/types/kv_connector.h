// A KV connector as the scheduler sees it: it has access to caches elsewhere, loads them into
// blocks of this pool and sends blocks away. Its answers and its workers' reports are inputs; the
// scheduler decides what follows from them. Source of the interface:
// vllm/distributed/kv_transfer/kv_connector/v1/base.py.
//
// Invariants
// (1) A load in the same step (is_async false) has written its tokens when attention reads them, or
//     its blocks are reported invalid with that step's output.
// (2) A longer load completes when its request is reported in finished_recving, once.
// (3) A request that the connector keeps (request_finished() returned true) is reported in
//     finished_sending, once.
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

// Tokens past the local prefix hit that the connector can load. Absent: not known yet; query again.
struct ExternalHit {
  std::optional<std::int32_t> num_tokens = 0;
  bool is_async = false;  // the load takes longer than the step. REQUIRES: num_tokens > 0
};

struct ExternalQuery {
  RequestId request{};
  std::string_view name;
  std::int32_t num_tokens = 0;        // of the request; a hit within the step leaves at least one
  std::int32_t num_local_tokens = 0;  // that the prefix cache holds
  std::span<const BlockKey> block_keys{};  // of its hash blocks; none without prefix caching
  std::int32_t hash_block_size = 1;        // tokens
};

// What a connector says of itself when the engine starts.
struct KVConnectorTraits {
  bool is_kv_producer = true;  // of kv_role: it sends
  bool is_kv_consumer = true;  // ... loads
  // A preempted request's output in flight is dropped: the blocks that it would forward are gone.
  bool requires_kv_delivery = false;
  // Its loads complete local hits that are deeper in attention than in states
  // (supports_divergent_local_hybrid_hits).
  bool completes_divergent_hits = false;
  // While blocks are being sent no request is preempted to free blocks (has_pending_block_frees).
  bool waits_for_sends = false;
};

class KVConnector {
 public:
  virtual ~KVConnector() = default;
  virtual KVConnectorTraits traits() const { return {}; }
  // Asked whenever a request without computed tokens is considered, so more than once for many.
  virtual ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) = 0;
  // The request has been given `blocks` (of the first group), also those that num_external_tokens
  // are to be loaded into.
  virtual void update_state_after_alloc(RequestId, std::span<const BlockId> /*blocks*/,
                                        std::int32_t /*num_external_tokens*/) {}
  // What the step that has just been decided tells the workers of host pages.
  virtual void start_pages(const HostPageCommand&) {}
  // The request has finished. True: its blocks are kept until finished_sending.
  virtual bool request_finished(RequestId request, std::string_view name) = 0;
  // Requests that one report fails are ended in the order of a Python set, an accident of hashed
  // names that decides which blocks are free first. Given in the order of the queues.
  virtual void order_failed_requests(std::vector<RequestId>&) {}
  // So are the pages published that one report completes, request by request. Given as completed.
  virtual void order_published_requests(std::vector<std::string>&) {}
};

// What the connector's workers report with a step's output.
struct KVConnectorOutput {
  std::vector<RequestId> finished_recving{};
  std::vector<RequestId> finished_sending{};
  std::vector<BlockId> invalid_block_ids{};  // tokens to be loaded there did not arrive
  // Received requests of which nothing arrived, as an engine of several groups reports it.
  std::vector<RequestId> failed_recving{};
  // Transfers of host pages.
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

enum class KVLoadFailurePolicy : std::uint8_t { recompute, fail };

// vLLM's kv_transfer_config, as far as the scheduler reads it.
struct KVTransfer {
  KVConnector* connector = nullptr;  // null: none. Outlives the scheduler
  KVLoadFailurePolicy kv_load_failure_policy = KVLoadFailurePolicy::recompute;
};

}  // namespace lockstep
