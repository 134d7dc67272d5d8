// The scheduler's state and its functions, by file: schedule_step.cpp decides a step,
// schedule_transfers.cpp processes the reports of a KV connector, scheduler.cpp the output of a
// step; scheduler.cpp also has the public interface. Virtual functions are those that planted
// defects replace (reference/defects/planted_cache.cpp).
//
// Invariants between two calls of the public interface
// (1) `running` lists exactly the requests with status running, in the order in which they were
//     admitted.
// (2) `in_flight` has one entry per decided step whose output is missing, oldest first.
// (3) `output` is the last decision. begin_step() overwrites it.
// (4) Request::num_in_flight_tokens is the sum of its rows in `in_flight`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "reference/cache/kv_cache_coordinator.h"
#include "reference/cache/request.h"
#include "reference/profiles/engine_profile.h"
#include "reference/schedule/scheduler.h"
#include "reference/schedule/scheduler_parts.h"

namespace lockstep {

// A scheduled request whose output has not been processed. The generation distinguishes the request
// from a later one with the same id.
struct InFlightRow {
  RequestId id{};
  std::uint32_t generation = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_spec = 0;
  std::int32_t num_preemptions = 0;  // of the request when the step was decided
  bool samples = false;              // false: a prefill chunk that is not the last
};

// The blocks of a scheduled request that the step reports to the worker.
enum class Handed : std::uint8_t { none, added, whole_table };

// The outcome of an allocation for a running request: it has its slots; it preempted itself; or no
// request may be preempted for it.
enum class SlotGrant : std::uint8_t { granted, self_preempted, refused };

// The outcome for the head of a waiting queue. `waits` also stops the requests after it: queues are
// served in order.
enum class Entry : std::uint8_t { enters, waits, is_passed_over };

// The live requests by id: O(1) access, ids are dense.
//
// Invariants
// (1) An id belongs to at most one request; ids of erased requests are used again.
// (2) A request's generation changes when it ends: a row in flight with another generation belongs
//     to an earlier request.
class RequestTable {
 public:
  // Gives the request the id that was freed last, or a new one.
  RequestId insert(RequestSpec spec, std::int32_t num_groups) {
    RequestId id{static_cast<std::uint32_t>(requests_.size())};
    if (free_ids_.empty()) {
      requests_.emplace_back();
      generations_.push_back(0);
    } else {
      id = free_ids_.back();
      free_ids_.pop_back();
    }
    LS_CHECK(!has(id), "request {} exists", index_of(id));
    requests_[index_of(id)] = std::make_unique<Request>(std::move(spec), num_groups);
    return id;
  }
  bool has(RequestId id) const {
    return index_of(id) < requests_.size() && requests_[index_of(id)] != nullptr;
  }
  // REQUIRES: the id is in use.
  Request& at(RequestId id) const {
    LS_CHECK(has(id), "request {} does not exist", index_of(id));
    return *requests_[index_of(id)];
  }
  std::uint32_t generation(RequestId id) const { return generations_[index_of(id)]; }
  // Invalidates the request's rows in flight. The request stays until erase().
  void end(RequestId id) { ++generations_[index_of(id)]; }
  // Destroys a finished request; its id may be used again.
  void erase(RequestId id) {
    LS_CHECK(at(id).status == RequestStatus::finished, "{} is forgotten before its end",
             at(id).name);
    requests_[index_of(id)].reset();
    free_ids_.push_back(id);
  }

 private:
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<std::uint32_t> generations_;
  std::vector<RequestId> free_ids_;
};

// The step under construction, and the waiting request under consideration.
struct StepState {
  // Tokens that the step may still schedule, and tokens that its input may still hold. The two
  // differ only if draft models take slots of the input (DraftSlots).
  std::int32_t budget = 0;
  std::int32_t input_budget = 0;
  std::int32_t long_prefill_threshold = 0;  // 0: none
  bool continues_prefill = false;           // true if it contains a chunk of an earlier prompt
  std::vector<RequestId> skipped;           // waiting requests passed over in this step
  std::vector<std::size_t> first_new;       // per group: first entry that the last allocation added
  std::vector<std::int32_t> to_encode;      // items of the request last asked for
  // The lookup of the waiting request under consideration.
  PrefixHit hit;
  // Tokens past the last looked-up hit that only some groups hold. A request that looks nothing up
  // uses the previous request's value.
  std::int32_t num_shared_of_last_lookup = 0;
};

// Public members: the functions of three files and the planted defects share them.
struct Scheduler::Impl {
  Impl(const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
       std::int64_t num_blocks, const KVTransfer& transfer, const CacheParts& parts);
  virtual ~Impl() = default;

  Request& at(RequestId id) { return requests.at(id); }
  const Request& at(RequestId id) const { return requests.at(id); }
  // True if any table of the request has entries, null ones included.
  bool holds_blocks(RequestId id) const {
    return std::ranges::any_of(at(id).groups,
                               [](const GroupBlocks& group) { return !group.blocks.empty(); });
  }

  // Queue and end of a request.
  virtual RequestId insert(RequestSpec spec);
  virtual void cancel(RequestId id);
  // schedule_step.cpp: decides a step, running requests first.
  void schedule();
  void begin_step();
  std::int32_t num_requests_with_blocks() const;
  void count_common_prefix();
  void schedule_running();
  void schedule_waiting();
  Entry enter(RequestId id, RequestQueue& queue, bool any_running);
  virtual void encode(Request& request);
  RequestQueue* next_queue();
  RequestQueue& queue_of_skipped(RequestId id);
  bool stands_aside(const RequestQueue& queue) const;
  bool enters_in_pause(const RequestQueue& queue) const;
  bool leaves_room(RequestId id);
  bool leaves_room_to_all(RequestId id);
  std::int32_t num_draft_slots() const;
  std::int64_t num_blocks_under_way() const;
  void preempt_deserted();
  void desert(const std::vector<RequestId>& late, const std::vector<RequestId>& voided);
  bool promote(RequestId id);
  bool find_computed_tokens(RequestId id);
  bool find_local_hit(Request& request);
  void take_external(const ExternalHit& external);
  bool may_be_freed(const Request& request) const;
  void give_back(Request& request);
  void take_copies();
  void step_is_over();
  SlotGrant allocate_or_preempt(RequestId id, std::int32_t num_new, std::size_t& index);
  bool may_preempt(RequestId victim);
  RequestId pick_victim() const;
  void preempt(RequestId victim, std::size_t& index);
  virtual void send_back(RequestId victim, bool drops_stale_output);
  void preempt_all_running();
  virtual void drop_from_output(RequestId id);
  std::int32_t num_tokens_of_running(const Request& request) const;
  // Tokens that the next request may get: its draft slots are subtracted from the input budget.
  std::int32_t num_available_tokens() const {
    return std::min(step.budget, step.input_budget - draft_slots);
  }
  // Computed tokens of a waiting request once `hit` is taken; replayed ones do not count.
  std::int32_t num_computed_with_hit(const Request& request) const {
    return request.num_computed_tokens + step.hit.num_tokens + step.hit.num_external_tokens -
           step.hit.num_replayed_tokens;
  }
  bool enters_as_decode(std::int32_t num_computed, std::int32_t num_new, bool any_running) const;
  bool has_room_for_drafts(std::int32_t num_computed) const;
  std::int32_t num_tokens_of_waiting(const Request& request, bool any_running, bool& padded) const;
  std::int32_t leave_lookahead(const Request& request, std::int32_t computed,
                               std::int32_t num_new) const;
  void hand_over(const Request& request, bool whole_table);
  virtual void emit(RequestId id, std::int32_t num_tokens, Handed handed, bool keeps_drafts);
  void take_drafts(Request& request, ScheduledRequest& row, bool keeps_drafts);
  void finish_step();
  bool append_tokens(Request& request, std::span<const std::int32_t> tokens, FinishReason& reason,
                     std::size_t& num_kept);
  // scheduler.cpp: processes the output of a step.
  void take_output(const ModelOutput& model);
  void count_output(Request& request, std::int32_t num_sampled, std::int32_t num_kept,
                    bool was_running);
  virtual void update_row(const InFlightRow& row, std::span<const std::int32_t> tokens);
  virtual void take_back_rejected(Request& request, std::int32_t num_rejected);
  void take_row(const InFlightRow& row, std::span<const std::int32_t> tokens);
  void update_drafts(const ModelOutput& output, std::span<const InFlightRow> rows);
  void retire(RequestId id);
  void forget(RequestId id);
  // schedule_transfers.cpp: blocks of finished requests, and the connector's reports.
  bool keeps_blocks(RequestId id);
  void release(RequestId id);
  void take_transfers(const KVConnectorOutput& report);
  void take_page_transfers(const KVConnectorOutput& report);
  void plan_page_transfers();
  void tell_connector(RequestId id);
  std::vector<RequestId> cut_at_invalid_blocks(const std::vector<RequestId>& candidates,
                                               const std::set<BlockId>& invalid,
                                               std::span<const InFlightRow> rows,
                                               std::vector<BlockId>* tails);
  std::vector<RequestId> take_invalid_blocks(const KVConnectorOutput& report,
                                             std::span<const InFlightRow> rows);
  std::vector<RequestId> take_failed_loads(const KVConnectorOutput& report);
  void fail_requests(std::vector<RequestId> ids);

  // Fixed after construction.
  EngineConfig config;
  const EngineProfile& profile;
  BlockSizes block_sizes;
  HashRule hash_rule;
  StateChunkRule state_chunks;
  std::int32_t num_lookahead = 0;
  bool splits_at_state_blocks = false;
  std::unique_ptr<KVCacheCoordinator> coordinator;
  KVCacheCoordinator& cache;  // *coordinator
  // Changes between steps.
  PauseState pause_state = PauseState::unpaused;

  RequestTable requests;
  std::vector<RequestId> running;
  RequestQueue waiting;
  std::unique_ptr<RemoteCaches> remote;  // null: no connector
  std::optional<EncoderInputs> encoder;  // present with cross attention groups
  std::vector<RequestId> finished;       // since the last schedule()
  std::vector<RequestId> sent_back;      // by resets; the next step reports them

  // The step under construction, the budgets of every step, and the steps in flight.
  SchedulerOutput output;
  std::int32_t token_budget = 0;  // tokens per step
  std::int32_t draft_slots = 0;   // slots of the input budget per scheduled request
  StepState step;
  std::deque<std::vector<InFlightRow>> in_flight;
  std::vector<std::vector<InFlightRow>> spare_rows;  // vectors to reuse
  // Results of the last take_output().
  std::vector<StoppedRequest> stopped;
  std::vector<StaleOutput> stale;
};

// Creates a scheduler from its parts. A planted defect replaces one part.
struct SchedulerParts : CacheParts {
  virtual std::unique_ptr<Scheduler::Impl> scheduler(const EngineConfig& engine,
                                                     const std::vector<KVCacheGroupSpec>& groups,
                                                     BlockSizes sizes, std::int64_t num_blocks,
                                                     const KVTransfer& transfer) const;
};

}  // namespace lockstep
