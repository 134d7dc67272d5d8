// Parts of the scheduler with their own state: the queue of waiting requests, the encoder's inputs,
// the state for a KV connector, and the rule that ends prefill chunks of models with states.
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

// The queue of waiting requests: first come first served, or by priority. Source:
// vllm/v1/core/sched/request_queue.py.
//
// Invariants
// (1) A request is in the queue at most once.
// (2) A request's priority, arrival and name do not change while it is in the queue: ordered_
//     compares them.
class RequestQueue {
 public:
  explicit RequestQueue(SchedulingPolicy policy) : policy_(policy) {}

  bool empty() const { return size() == 0; }
  std::size_t size() const { return fifo_.size() + ordered_.size(); }
  // Adds a request at the back. O(1), or O(log n) by priority.
  void add(RequestId id, const Request& request);
  // Adds a resumed or passed-over request at the front. By priority its position depends only on
  // the request, so there is no front.
  void prepend(RequestId id, const Request& request);
  RequestId peek() const;  // REQUIRES: not empty
  void pop();
  // No effect if the request is not in the queue. O(n) for fcfs.
  void remove(RequestId id, const Request& request);
  // The requests in the order in which peek() returns them, valid until the queue changes.
  std::span<const RequestId> in_order() const;

 private:
  // Requests that compare equal are ordered by id, so that the set holds both.
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
  std::set<Place> ordered_;               // one of the two is empty
  mutable std::vector<RequestId> order_;  // what in_order() returned last
  mutable bool is_changed_ = false;       // since then
};

// The encoder of an encoder-decoder model: which items it computes in which step. The rows of a
// step and of the encoder cache are limited. Source of the rules: _try_schedule_encoder_inputs of
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

  // The budget is per step, the cache's rows are not.
  void begin_step() { budget_ = num_rows_max_; }
  // Sets `items`, by number, and request.num_encoder_rows. False: an item has more rows than are
  // left. Takes nothing. REQUIRES: none of the request's tokens is computed, and num_tokens will
  // be.
  bool ask(Request& request, std::int32_t num_tokens, std::vector<std::int32_t>& items) const;
  // Subtracts the items' rows: the step computes them.
  void take(const Request& request, const std::vector<std::int32_t>& items);
  // Releases the rows of all of the request's items, allocated or not: invariant (2).
  void let_go(const Request& request);
  // Collects the identifiers of the items whose rows the worker drops: those that the previous step
  // computed.
  void take_dropped(std::vector<std::string>& dropped);

  std::int32_t num_free_rows() const { return num_free_rows_; }

 private:
  std::int32_t num_rows_max_;  // rows per step
  std::int32_t budget_ = 0;    // rows left in this step
  std::int32_t num_free_rows_;
  std::vector<std::string> computed_, to_drop_;
};

// The scheduler's state for a KV connector: requests that wait for a load, requests whose load
// failed, and finished requests that keep blocks.
//
// Invariants
// (1) A request in `skipped` waits. It holds blocks only while it loads, or after a load while the
//     pool lacks the blocks of its next step. If the release has a separate queue for requests with
//     blocks, they are in `holding`, and the others return to the waiting queue.
// (2) A request in `received` waits for remote KVs and its load has completed. The scheduler checks
//     it when the queue reaches it, not before.
// (3) A request in `failed` waits for remote KVs; num_computed_tokens counts the tokens that
//     arrived.
// (4) A request in `held` has finished and its blocks are not free: a send or a load into them is
//     in flight.
// (5) A request in `deserted` runs and lacks the window before the lost block that it went back to:
//     it restarts in the next step. Empty unless the profile restarts before windows.
// (6) A request in `prefilling` loads, or is admitted and has not yet been scheduled to the end of
//     its prompt.
// (7) A request in `deferred` waits and has been passed over.
// (8) Blocks in `freed_late` have no request and are not free: an in-flight step may write them.
//     The output of the step of that number frees them.
// (9) steps_over <= steps_decided, and the difference is the number of non-empty steps in flight.

struct RemoteCaches {
  // REQUIRES: transfer.connector is not null and outlives this.
  RemoteCaches(const KVTransfer& transfer, SchedulingPolicy policy)
      : connector(*transfer.connector),
        fails_requests(transfer.kv_load_failure_policy == KVLoadFailurePolicy::fail),
        traits(connector.traits()),
        skipped(policy),
        holding(policy) {}

  // True if the request's load has not been reported complete.
  bool is_loading(RequestId id, const Request& request) const {
    return request.status == RequestStatus::waiting_for_remote_kvs && !received.contains(id);
  }

  bool any_passed_over() const { return !holding.empty() || !skipped.empty(); }
  // Both queues, in the order in which the scheduler serves them.
  std::vector<RequestId> passed_over() const {
    const auto first = holding.in_order(), others = skipped.in_order();
    std::vector<RequestId> ids(first.begin(), first.end());
    ids.insert(ids.end(), others.begin(), others.end());
    return ids;
  }
  // True if blocks of a finished request are being sent.
  bool is_sending() const {
    return std::ranges::any_of(held,
                               [](const auto& request) { return !request.second.is_loading; });
  }
  // Removes the request from every queue of this struct.
  void remove(RequestId id, const Request& request) {
    holding.remove(id, request);
    skipped.remove(id, request);
    deferred.erase(id);
  }

  KVConnector& connector;
  bool fails_requests;  // a failed load ends its request; false: missing tokens are computed
  const KVConnectorTraits traits;
  bool defers_frees = false;       // blocks wait for the steps in flight before they are free
  std::int64_t steps_decided = 0;  // non-empty steps
  std::int64_t steps_over = 0;     // of these, those whose output was processed
  RequestQueue skipped;
  RequestQueue holding;
  std::set<RequestId> received;
  std::set<RequestId> failed;
  std::set<RequestId> deserted;
  std::set<RequestId> prefilling;
  std::set<RequestId> deferred;
  // Loads that start when all steps decided before them have completed, in order, with their
  // tokens. Empty unless the engine has host pages, which it reads after they were freed.
  struct LateLoad {
    RequestId id{};
    std::int64_t step = 0;
    std::int32_t num_tokens = 0;
  };
  std::deque<LateLoad> late_loads;
  // Blocks to free when step number `step` has completed.
  struct FreedLate {
    std::int64_t step = 0;
    std::vector<BlockId> blocks;  // in the order of their next allocation
    std::vector<BlockId> host_blocks = {};
  };
  std::deque<FreedLate> freed_late;
  struct Held {
    bool is_loading = false;   // false: its blocks are being sent
    bool is_reported = false;  // true: a decision has reported its end; only its blocks remain
  };
  std::map<RequestId, Held> held;
};

// The end of a prefill chunk of a model with states in mode align, chosen so that states worth
// keeping are saved. Source of the rules: vllm/v1/core/sched/scheduler.py,
// _mamba_block_aligned_split.
//
// Invariants
// (1) A state is saved at the end of a chunk, under the hash of the block that the chunk fills. A
//     chunk that ends anywhere else saves nothing.
// (2) A rule never lengthens a chunk.
//
// If the kernels export a state from inside the last chunk of a prefill, that chunk need not end at
// it (group_manager.h).
//
// Example with blocks of 16 tokens, a prompt of 50 and a budget of 40 tokens per step: the chunks
// end at 32 (a block boundary), 48 (the last state that a resend can hit) and 50.

class StateChunkRule {
 public:
  StateChunkRule(const EngineConfig& config, const EngineProfile& profile,
                 std::span<const KVCacheGroupSpec> groups, BlockSizes sizes);

  // The tokens of the next chunk, at most num_new. num_hit: tokens of the prefix hit that the
  // request has just found. num_shared: tokens past it that only some groups hold. 0: the budget is
  // too small for a chunk that ends well, and the request waits.
  std::int32_t clip(const Request& request, std::int32_t num_new, std::int32_t num_hit,
                    std::int32_t num_shared) const;

 private:
  // The last position at which a chunk must end, under the two rules of whole blocks.
  std::int32_t last_whole_block(const Request& request) const;
  // Chunks of whole blocks up to last_whole_block(), wherever they begin.
  std::int32_t clip_to_whole_blocks(const Request& request, std::int32_t num_new,
                                    std::int32_t computed) const;
  // Chunks that end at block boundaries, and at the earliest position worth a state.
  std::int32_t clip_at_block_boundary(const Request& request, std::int32_t num_new,
                                      std::int32_t computed) const;
  // True if the kernel exports the last state of the prefill from inside the chunk [computed, end).
  bool exports_state(std::int32_t computed, std::int32_t end, std::int32_t prefill_end) const;

  StateChunks rule_;
  BlockSizes sizes_;
  std::int32_t block_size_;
  std::int32_t max_chunk_;  // tokens; the longest chunk that the options allow
  HitEnd hit_end_;
  bool saves_one_earlier_;   // last_whole_block(): EAGLE drops the last block of a hit
  bool cuts_without_parts_;  // ends a chunk at the last hash also where no hit can end
  bool exports_states_;      // every state group has a checkpoint block
  std::int32_t checkpoint_alignment_ = 0;
};

}  // namespace lockstep
