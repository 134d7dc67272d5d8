// What the scheduler remembers because of a KV connector: who waits for a load, whose load failed,
// and who has finished and keeps its blocks.
//
// (1) A request in `skipped` waits. It holds blocks only while it loads, or when it has loaded and
//     found no room to go on. Where the release keeps those that hold blocks apart, they are in
//     `holding`, and the others go back to the queue of those that wait.
// (2) A request in `received` waits for remote KVs, and its load is over; it is looked at when the
//     queue reaches it, and not before.
// (3) A request in `failed` waits for remote KVs, and num_computed_tokens says what did arrive.
// (4) A request in `held` has finished, and its blocks are not free: they are being sent, or a load
//     into them is under way.
// (5) A request in `deserted` runs, and has no window before the lost block that it went back to:
//     it starts again with the next step. None, unless the profile restarts behind windows.
// (6) A request in `prefilling` loads, or has entered and was not given the end of its prompt yet.
// (7) A request in `deferred` waits and has been passed over.
// (8) Blocks in `freed_late` belong to nobody and are not free: a step that is in flight may write
//     them. They are given back with the output of the step of that number.
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
  std::int64_t steps_decided = 0;  // that scheduled anybody
  std::int64_t steps_over = 0;     // of these, whose output has come in
  RequestQueue skipped;
  RequestQueue holding;
  std::set<RequestId> received;
  std::set<RequestId> failed;
  std::set<RequestId> deserted;
  std::set<RequestId> prefilling;
  std::set<RequestId> deferred;
  // Loads that begin once the steps decided before them are over, in order, and their tokens. None,
  // unless pages are read on after they have been let go.
  struct LateLoad {
    RequestId id{};
    std::int64_t step = 0;
    std::int32_t num_tokens = 0;
  };
  std::deque<LateLoad> late_loads;
  struct FreedLate {
    std::int64_t step = 0;
    std::vector<BlockId> blocks;  // next to be handed out first
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
