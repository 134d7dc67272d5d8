// The scheduler's state for a KV connector: requests that wait for a load, requests whose load
// failed, and finished requests that keep blocks.
//
// Invariants
// (1) A request in `skipped` waits. It holds blocks only while it loads, or after a load while the
//     pool has no capacity for its next step. Where the release keeps requests with blocks apart,
//     they are in `holding`, and the others return to the waiting queue.
// (2) A request in `received` waits for remote KVs and its load has completed. The scheduler checks
//     it when the queue reaches it, not before.
// (3) A request in `failed` waits for remote KVs; num_computed_tokens counts what arrived.
// (4) A request in `held` has finished and its blocks are not free: a send or a load into them is
//     in flight.
// (5) A request in `deserted` runs and lacks the window before the lost block that it went back to:
//     it restarts in the next step. Empty unless the profile restarts before windows.
// (6) A request in `prefilling` loads, or is admitted and has not yet been scheduled to the end of
//     its prompt.
// (7) A request in `deferred` waits and has been passed over.
// (8) Blocks in `freed_late` have no holder and are not free: an in-flight step may write them. The
//     output of the step of that number frees them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "base/ids.h"
#include "reference/schedule/request_queue.h"
#include "reference/types/kv_connector.h"

namespace lockstep {

struct RemoteCaches {
  RemoteCaches(const KVTransfer& transfer, SchedulingPolicy policy)
      : connector(*transfer.connector),
        fails_requests(transfer.kv_load_failure_policy == KVLoadFailurePolicy::fail),
        traits(connector.traits()),
        skipped(policy),
        holding(policy) {}

  bool is_loading(RequestId id, const Request& request) const {
    return request.status == RequestStatus::waiting_for_remote_kvs && !received.contains(id);
  }

  bool any_passed_over() const { return !holding.empty() || !skipped.empty(); }
  // Both queues, in the order in which the scheduler looks at them.
  std::vector<RequestId> passed_over() const {
    std::vector<RequestId> ids = holding.in_order();
    const std::vector<RequestId> others = skipped.in_order();
    ids.insert(ids.end(), others.begin(), others.end());
    return ids;
  }
  bool is_sending() const {
    return std::ranges::any_of(held,
                               [](const auto& request) { return !request.second.is_loading; });
  }
  void remove(RequestId id, const Request& request) {
    holding.remove(id, request);
    skipped.remove(id, request);
    deferred.erase(id);
  }

  KVConnector& connector;
  bool fails_requests;  // on a failed load; otherwise they compute what is missing
  const KVConnectorTraits traits;
  bool defers_frees = false;
  std::int64_t steps_decided = 0;  // non-empty steps
  std::int64_t steps_over = 0;     // of these, steps whose output was processed
  RequestQueue skipped;
  RequestQueue holding;
  std::set<RequestId> received;
  std::set<RequestId> failed;
  std::set<RequestId> deserted;
  std::set<RequestId> prefilling;
  std::set<RequestId> deferred;
  // Loads that start once the steps decided before them have completed, in order, with their
  // tokens. Empty unless pages are read after they were freed.
  struct LateLoad {
    RequestId id{};
    std::int64_t step = 0;
    std::int32_t num_tokens = 0;
  };
  std::deque<LateLoad> late_loads;
  struct FreedLate {
    std::int64_t step = 0;
    std::vector<BlockId> blocks;  // in the order of their next allocation
    std::vector<BlockId> host_blocks = {};
  };
  std::deque<FreedLate> freed_late;
  struct Held {
    bool is_loading = false;   // otherwise its blocks are being sent
    bool is_reported = false;  // its end is known; only its blocks are left
  };
  std::map<RequestId, Held> held;
};

}  // namespace lockstep
