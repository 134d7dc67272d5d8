// The queue of waiting requests: first come first served, or by priority.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/cache/group_manager.h"
#include "reference/cache/request.h"
#include "reference/plan/block_sizes.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_connector.h"

namespace lockstep {

class RequestQueue {
 public:
  explicit RequestQueue(SchedulingPolicy policy) : policy_(policy) {}

  bool empty() const {
    return policy_ == SchedulingPolicy::fcfs ? fifo_.empty() : ordered_.empty();
  }
  std::size_t size() const {
    return policy_ == SchedulingPolicy::fcfs ? fifo_.size() : ordered_.size();
  }
  void add(RequestId id, const Request& request);
  // Puts a resumed request at the front. A priority queue orders it by priority instead.
  void prepend(RequestId id, const Request& request);
  RequestId peek() const;  // REQUIRES: not empty
  void pop();
  void remove(RequestId id, const Request& request);
  std::vector<RequestId> in_order() const;

 private:
  struct Place {
    const Request* request;
    RequestId id;
    bool operator<(const Place& other) const {
      if (request->before(*other.request)) return true;
      if (other.request->before(*request)) return false;
      return id < other.id;
    }
  };
  SchedulingPolicy policy_;
  std::deque<RequestId> fifo_;
  std::set<Place> ordered_;
};

// What the encoder of an encoder-decoder model computes in which step. The rows of a step and of
// the encoder cache are limited. Source of the rules: _try_schedule_encoder_inputs of
// vllm/v1/core/sched/scheduler.py and EncoderDecoderCacheManager of
// vllm/v1/core/encoder_cache_manager.py.
//
// Invariants
// (1) The step that computes a request's first token encodes all its items, and so does the first
//     step after a preemption: rows are in the request's own blocks and never shared.
// (2) Rows of the cache are counted as the engine counts them: released by every output, every
//     refusal and every end, allocated or not. After the first outputs they therefore limit nothing
//     (docs/findings.md, 39).

class EncoderInputs {
 public:
  explicit EncoderInputs(const EngineConfig& config);

  void begin_step() { budget_ = num_rows_max_; }
  // Sets `items`, by number, and request.num_encoder_rows. False: the rows of some item are more
  // than are left. REQUIRES: none of its tokens is computed, and num_tokens will be.
  bool ask(Request& request, std::int32_t num_tokens, std::vector<std::int32_t>& items) const;
  // The step computes them.
  void take(const Request& request, const std::vector<std::int32_t>& items);
  // Releases the rows of all of the request's items, allocated or not.
  void let_go(const Request& request);
  // Collects the requests whose rows the worker drops: those that the previous step computed.
  void take_dropped(std::vector<std::string>& dropped);

  std::int32_t num_free_rows() const { return num_free_rows_; }

 private:
  std::int32_t num_rows_max_;  // of a step
  std::int32_t budget_ = 0;    // what is left of them
  std::int32_t num_free_rows_;
  std::vector<std::string> computed_, to_drop_;
};

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

// The end of a prefill chunk of a model with states in mode `align`, chosen so that states worth
// keeping are saved. Source of the rules: vllm/v1/core/sched/scheduler.py,
// _mamba_block_aligned_split.
//
// Invariants
// (1) A state is saved at the end of a chunk, under the hash of the block that the chunk fills. A
//     chunk that ends anywhere else saves nothing.
// (2) A rule never lengthens a chunk.
//
// Where the kernels export a state from inside the last chunk of a prefill, that chunk need not end
// at it (group_manager.h).

class StateChunkRule {
 public:
  StateChunkRule(const EngineConfig& config, const EngineProfile& profile,
                 std::span<const KVCacheGroupSpec> groups, BlockSizes sizes);

  // At most num_new tokens of the request, num_hit of whose tokens a prefix hit has just found, and
  // num_shared behind them that not all groups have; 0: the budget is too small for a chunk that
  // ends well.
  std::int32_t clip(const Request& request, std::int32_t num_new, std::int32_t num_hit,
                    std::int32_t num_shared) const;

 private:
  // Position of the last state that a chunk ends at, under the rules without hash lookahead.
  std::int32_t last_whole_block(const Request& request) const;
  std::int32_t clip_to_whole_blocks(const Request& request, std::int32_t num_new,
                                    std::int32_t computed) const;
  std::int32_t clip_at_block_boundary(const Request& request, std::int32_t num_new,
                                      std::int32_t computed) const;
  bool exports_state(std::int32_t computed, std::int32_t end, std::int32_t prefill_end) const;

  StateChunks rule_;
  BlockSizes sizes_;
  std::int32_t block_size_;
  std::int32_t max_chunk_;  // tokens
  HitEnd hit_end_;
  bool saves_one_earlier_;   // last_whole_block(): EAGLE drops the last block of a hit
  bool cuts_without_parts_;  // a prompt at its last hash also where no hit can end there
  bool exports_states_;      // every group of states has a block for one
  std::int32_t checkpoint_alignment_ = 0;
};

}  // namespace lockstep
