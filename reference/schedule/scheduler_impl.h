// The scheduler's state, and its parts by file: schedule_step.cpp decides a step,
// schedule_update.cpp takes a step's output in, schedule_transfers.cpp what a KV connector says,
// scheduler.cpp is what others see.
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
#include "reference/schedule/encoder_inputs.h"
#include "reference/schedule/remote_caches.h"
#include "reference/schedule/request_queue.h"
#include "reference/schedule/scheduler.h"
#include "reference/schedule/state_chunks.h"

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

struct Scheduler::Impl {
  Impl(const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
       std::int64_t num_blocks, const KVTransfer& transfer, const CacheParts& parts);
  virtual ~Impl() = default;

  Request& at(RequestId id) { return const_cast<Request&>(std::as_const(*this).at(id)); }
  const Request& at(RequestId id) const {
    LS_CHECK(index_of(id) < requests.size() && requests[index_of(id)] != nullptr,
             "request {} does not exist", index_of(id));
    return *requests[index_of(id)];
  }
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
  std::int32_t num_available_tokens() const { return std::min(budget, input_budget - draft_slots); }
  // Tokens of a waiting request that are computed once `hit` is taken.
  std::int32_t num_computed_with_hit(const Request& request) const {
    return request.num_computed_tokens + hit.num_tokens + hit.num_external_tokens -
           hit.num_replayed_tokens;
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

  std::vector<std::unique_ptr<Request>> requests;
  std::vector<std::uint32_t> generations;
  std::vector<RequestId> free_ids;
  std::vector<RequestId> running;
  RequestQueue waiting;
  std::unique_ptr<RemoteCaches> remote;  // null: no connector
  std::optional<EncoderInputs> encoder;  // with groups of cross attention
  std::vector<std::int32_t> to_encode;   // items of the request that has asked last
  std::vector<RequestId> finished;       // since the last schedule()
  std::vector<RequestId> sent_back;      // by resets since the last schedule(), where it tells them

  SchedulerOutput output;
  std::int32_t token_budget = 0;  // of a step
  std::int32_t draft_slots = 0;   // that each scheduled request takes of the input budget
  // What is left of both in the step under construction. They part only while drafts take slots.
  std::int32_t budget = 0;
  std::int32_t input_budget = 0;
  std::int32_t long_prefill_threshold = 0;  // in this step; 0: none
  bool continues_prefill = false;           // this step holds a chunk of a prompt begun earlier
  std::vector<RequestId> skipped;           // waiting requests passed over in this step
  std::vector<std::size_t> first_new;       // per group, of the last allocation
  PrefixHit hit;
  // Tokens past the last looked-up hit that some group holds. Also used for a request that looks
  // nothing up.
  std::int32_t num_shared_of_last_lookup = 0;
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
