// The scheduler's state, and its parts by file: schedule_step.cpp decides a step,
// schedule_transfers.cpp processes the reports of a KV connector, scheduler.cpp the output of a
// step; scheduler.cpp also has the public interface.
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

// A scheduled request whose output was not processed yet. The generation tells a finished request
// from a later one with the same id.
struct InFlightRow {
  RequestId id{};
  std::uint32_t generation = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_spec = 0;
  std::int32_t num_preemptions = 0;  // of the request, until then
  bool samples = false;              // not a chunk of a prompt
};

// Which of a scheduled request's blocks the step reports to the worker.
enum class Handed : std::uint8_t { none, added, whole_table };

// Whether a running request gets slots: yes, no because it preempted itself, or no because no
// request may be preempted for it.
enum class SlotGrant : std::uint8_t { granted, self_preempted, refused };

// The outcome for the head of a waiting queue; `waits` also stops the requests after it.
enum class Entry : std::uint8_t { enters, waits, is_passed_over };

// The live requests by id.
//
// Invariants
// (1) An id belongs to at most one request; ids of erased requests are used again.
// (2) A request's generation changes when it ends: a row in flight with another one is of an
//     earlier request.
class RequestTable {
 public:
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
  Request& at(RequestId id) const {
    LS_CHECK(has(id), "request {} does not exist", index_of(id));
    return *requests_[index_of(id)];
  }
  std::uint32_t generation(RequestId id) const { return generations_[index_of(id)]; }
  void end(RequestId id) { ++generations_[index_of(id)]; }
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

// What is known of the step under construction, and of the waiting request that is looked at.
struct StepState {
  // Tokens that are left. They part only while drafts take slots of the input.
  std::int32_t budget = 0;
  std::int32_t input_budget = 0;
  std::int32_t long_prefill_threshold = 0;  // 0: none
  bool continues_prefill = false;           // it holds a chunk of a prompt begun earlier
  std::vector<RequestId> skipped;           // waiting requests passed over
  std::vector<std::size_t> first_new;       // per group, of the last allocation
  std::vector<std::int32_t> to_encode;      // items of the request that has asked last
  PrefixHit hit;
  // Tokens past the last looked-up hit that some group holds. Also used for a request that looks
  // nothing up.
  std::int32_t num_shared_of_last_lookup = 0;
};

struct Scheduler::Impl {
  Impl(const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
       std::int64_t num_blocks, const KVTransfer& transfer, const CacheParts& parts);
  virtual ~Impl() = default;

  Request& at(RequestId id) { return requests.at(id); }
  const Request& at(RequestId id) const { return requests.at(id); }
  bool holds_blocks(RequestId id) const {
    return std::ranges::any_of(at(id).groups,
                               [](const GroupBlocks& group) { return !group.blocks.empty(); });
  }

  virtual RequestId insert(RequestSpec spec);
  virtual void cancel(RequestId id);
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
  std::int32_t num_available_tokens() const {
    return std::min(step.budget, step.input_budget - draft_slots);
  }
  // Tokens of a waiting request that are computed once `hit` is taken.
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
  void take_output(const ModelOutput& model);
  void count_output(Request& request, std::int32_t num_sampled, std::int32_t num_kept,
                    bool was_running);
  virtual void update_row(const InFlightRow& row, std::span<const std::int32_t> tokens);
  virtual void take_back_rejected(Request& request, std::int32_t num_rejected);
  void take_row(const InFlightRow& row, std::span<const std::int32_t> tokens);
  void update_drafts(const ModelOutput& output, std::span<const InFlightRow> rows);
  void retire(RequestId id);
  void forget(RequestId id);
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

  EngineConfig config;
  const EngineProfile& profile;
  BlockSizes block_sizes;
  HashRule hash_rule;
  StateChunkRule state_chunks;
  std::int32_t num_lookahead = 0;
  bool splits_at_state_blocks = false;
  std::unique_ptr<KVCacheCoordinator> coordinator;
  KVCacheCoordinator& cache;  // *coordinator
  PauseState pause_state = PauseState::unpaused;

  RequestTable requests;
  std::vector<RequestId> running;
  RequestQueue waiting;
  std::unique_ptr<RemoteCaches> remote;  // null: no connector
  std::optional<EncoderInputs> encoder;  // with groups of cross attention
  std::vector<RequestId> finished;       // since the last schedule()
  std::vector<RequestId> sent_back;      // by resets since the last schedule(), where it tells them

  SchedulerOutput output;
  std::int32_t token_budget = 0;  // of a step
  std::int32_t draft_slots = 0;   // that each scheduled request takes of the input budget
  StepState step;
  std::deque<std::vector<InFlightRow>> in_flight;
  std::vector<std::vector<InFlightRow>> spare_rows;
  std::vector<StoppedRequest> stopped;
  std::vector<StaleOutput> stale;
};

// Makes a scheduler's parts, and the scheduler of them.
struct SchedulerParts : CacheParts {
  virtual std::unique_ptr<Scheduler::Impl> scheduler(const EngineConfig& engine,
                                                     const std::vector<KVCacheGroupSpec>& groups,
                                                     BlockSizes sizes, std::int64_t num_blocks,
                                                     const KVTransfer& transfer) const;
};

}  // namespace lockstep
