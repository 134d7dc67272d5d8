// What the scheduler remembers because of a KV connector: who waits for a load, whose load failed,
// and who has finished and keeps its blocks.
//
// (1) A request in `skipped` waits. It holds blocks only while it loads, or when it has loaded and
//     found no room to go on.
// (2) A request in `received` waits for remote KVs, and its load is over; it is looked at when the
//     queue reaches it, and not before.
// (3) A request in `failed` waits for remote KVs, and num_computed_tokens says what did arrive.
// (4) A request in `held` has finished, and its blocks are not free: they are being sent, or a load
//     into them is under way.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "reference/ids.h"
#include "reference/kv_connector.h"
#include "reference/request_queue.h"

namespace lockstep {

struct RemoteCaches {
  RemoteCaches(const KVTransfer& transfer, SchedulingPolicy policy)
      : connector(*transfer.connector),
        fails_requests(transfer.kv_load_failure_policy == KVLoadFailurePolicy::fail),
        skipped(policy) {}

  bool is_loading(RequestId id, const Request& request) const {
    return request.status == RequestStatus::waiting_for_remote_kvs && !received.contains(id);
  }

  KVConnector& connector;
  bool fails_requests;  // on a failed load; otherwise they compute what is missing
  RequestQueue skipped;
  std::set<RequestId> received;
  std::set<RequestId> failed;
  struct Held {
    bool is_loading = false;   // otherwise its blocks are being sent
    bool is_reported = false;  // its end is known; only its blocks are left
  };
  std::map<RequestId, Held> held;
};

}  // namespace lockstep
