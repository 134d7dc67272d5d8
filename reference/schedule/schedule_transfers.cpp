// The scheduler's decisions that follow from a KV connector's answers and its workers' reports.
// Source of the rules: vllm/v1/core/sched/scheduler.py, "KV Connector Related Methods", and
// schedule() around them. Every function except next_queue() and find_computed_tokens() requires
// `remote`, unless it returns at once without it.
#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "reference/cache/group_manager.h"
#include "reference/schedule/scheduler_impl.h"

namespace lockstep {

// The queue whose head is next; null: none waits. Requests that hold blocks come first where they
// have their own queue. Requests that were passed over come before newer ones; by priority, the
// better head comes first.
RequestQueue* Scheduler::Impl::next_queue() {
  if (remote != nullptr && !remote->holding.empty()) return &remote->holding;
  RequestQueue* const skipped_before = remote == nullptr ? nullptr : &remote->skipped;
  if (skipped_before == nullptr || skipped_before->empty())
    return waiting.empty() ? nullptr : &waiting;
  if (config.policy == SchedulingPolicy::fcfs || waiting.empty()) return skipped_before;
  const bool arrived_first = at(waiting.peek()).before(at(skipped_before->peek()));
  return arrived_first ? &waiting : skipped_before;
}

// The queue that a passed-over request returns to. Source: vLLM 0.33.0, _holds_kv_blocks().
RequestQueue& Scheduler::Impl::queue_of_skipped(RequestId id) {
  if (remote == nullptr) return waiting;
  if (!profile.holders_come_first) return remote->skipped;
  // Decided by its tokens and its status, not by its blocks, as the engine decides: a fully loaded
  // prompt of one token has no computed token and holds blocks.
  const Request& request = at(id);
  const bool holds =
      request.num_computed_tokens > 0 || request.status == RequestStatus::waiting_for_remote_kvs;
  return holds ? remote->holding : waiting;
}

// True if the head of the queue lets others of it pass when its blocks do not fit. No release does
// this: repair of finding 7.
bool Scheduler::Impl::stands_aside(const RequestQueue& queue) const {
  return remote != nullptr && profile.holders_stand_aside && &queue == &remote->holding;
}

// True if requests of the queue are admitted while new requests are paused: they hold blocks that
// only progress can free.
bool Scheduler::Impl::enters_in_pause(const RequestQueue& queue) const {
  return remote != nullptr && profile.holders_come_first && &queue == &remote->holding;
}

// Slots past a request's last token that a step with drafts may need: the sampled token, the
// drafts, and the draft model's lookahead (vLLM 0.33.0, _request_remaining_blocks()).
std::int32_t Scheduler::Impl::num_draft_slots() const {
  return config.num_spec_tokens > 0 ? 1 + config.num_spec_tokens + num_lookahead : 0;
}

// Blocks that in-flight prefills and loads still need. DraftRoom decides whether drafts count as
// further tokens or as blocks of their own.
std::int64_t Scheduler::Impl::num_blocks_under_way() const {
  std::int64_t num_blocks = 0;
  for (const RequestId id : remote->prefilling) {
    const bool behind = profile.draft_room == DraftRoom::behind_the_tokens;
    num_blocks += cache.num_blocks_to_finish(at(id), nullptr, behind ? num_draft_slots() : 0, true);
    if (profile.draft_room == DraftRoom::own_blocks)
      num_blocks += ceil_div(num_draft_slots(), block_sizes.scheduler_block_size);
  }
  return num_blocks;
}

// True if every request in prefill or loading could still get all its blocks after this one starts
// its load. No release checks this: repair of findings 8 and 36.
bool Scheduler::Impl::leaves_room_to_all(RequestId id) {
  const auto missing = [&](const Request& one, const PrefixHit* with) {
    const std::int32_t behind =
        std::clamp(config.max_model_len - one.num_tokens(), 0, num_lookahead);
    return cache.num_blocks_to_finish(one, with, behind, with != nullptr);
  };
  std::int64_t num_blocks = missing(at(id), &step.hit);
  const auto add = [&](RequestId other) { num_blocks += missing(at(other), nullptr); };
  for (const RequestId other : running)
    if (at(other).is_prefill_chunk) add(other);
  for (const RequestId other : remote->passed_over())
    if (holds_blocks(other)) add(other);
  for (const RequestId other : step.skipped)
    if (holds_blocks(other)) add(other);
  return cache.pool().can_give(num_blocks);
}

// True if the load may start. `hit` records the blocks that must stay free; the allocation checks
// them. An asynchronous load holds its blocks without progress and cannot be preempted, so two of
// them can deadlock. A request whose earlier load delivered nothing counts itself as in flight
// (docs/findings.md, 36).
bool Scheduler::Impl::leaves_room(RequestId id) {
  if (profile.loads_leave_room == LoadsLeaveRoom::no) return true;
  if (profile.loads_leave_room == LoadsLeaveRoom::to_all) return leaves_room_to_all(id);
  step.hit.num_blocks_left_free = num_blocks_under_way();
  if (profile.draft_room == DraftRoom::own_blocks)
    step.hit.num_blocks_left_free += ceil_div(num_draft_slots(), block_sizes.scheduler_block_size);
  if (profile.draft_room == DraftRoom::behind_the_tokens)
    step.hit.num_blocks_left_free += cache.num_attention_blocks(num_draft_slots());
  return true;
}

// Notifies the connector that the request has its blocks. Host pages may be read after they were
// freed, so an asynchronous load waits for the steps in flight.
void Scheduler::Impl::tell_connector(RequestId id) {
  Request& request = at(id);
  if (step.hit.loads_async && remote->defers_frees && cache.host_pages() != nullptr &&
      remote->steps_decided > remote->steps_over) {
    request.last_step = remote->steps_decided;
    remote->late_loads.push_back({id, remote->steps_decided, step.hit.num_external_tokens});
    return;
  }
  remote->connector.update_state_after_alloc(id, request.groups[0].blocks,
                                             step.hit.num_external_tokens);
  const bool loads_within = !step.hit.loads_async && step.hit.num_external_tokens > 0;
  if (loads_within && cache.host_pages() != nullptr && profile.restores_loads_within_a_step)
    cache.host_pages()->finish_import(request, false);
}

// True if no step in flight writes the request's blocks, so another request may get them.
bool Scheduler::Impl::may_be_freed(const Request& request) const {
  return remote == nullptr || !remote->defers_frees || request.last_step <= remote->steps_over;
}

// True if preempting the victim frees blocks now, and no transfer is about to free some.
bool Scheduler::Impl::may_preempt(RequestId victim) {
  if (remote == nullptr || !profile.waits_for_frees) return true;
  if (cache.host_pages() != nullptr && cache.host_pages()->has_pending_reclamation()) return false;
  return !(remote->traits.waits_for_sends && remote->is_sending()) && may_be_freed(at(victim));
}

// Frees the request's blocks, or defers that until the decided steps have completed: a connector
// may write freed blocks at any time, without the order of the GPU's stream.
void Scheduler::Impl::give_back(Request& request) {
  if (may_be_freed(request)) {
    cache.free(request);
    return;
  }
  auto [blocks, host_blocks] = cache.take_table(request);
  if (blocks.empty() && host_blocks.empty()) return;
  std::ranges::reverse(blocks);  // the tail first
  std::ranges::reverse(host_blocks);
  remote->freed_late.push_back({remote->steps_decided, std::move(blocks), std::move(host_blocks)});
}

// Collects the step's block copies and releases their extra references. With deferred frees the
// blocks wait for the step that makes the copies, which is the one being decided.
void Scheduler::Impl::take_copies() {
  std::vector<BlockId> held;
  cache.take_copies(output.copies, held);
  if (held.empty()) return;
  if (remote == nullptr || !remote->defers_frees) {
    cache.pool().free_blocks(held);
    return;
  }
  remote->freed_late.push_back({remote->steps_decided + 1, std::move(held)});
}

// Counts a completed non-empty step; frees the blocks and starts the loads that waited for it. Both
// queues are in the order of their steps, so the first pending entry ends the loop.
void Scheduler::Impl::step_is_over() {
  ++remote->steps_over;
  LS_CHECK(remote->steps_over <= remote->steps_decided, "{} steps completed, {} decided",
           remote->steps_over, remote->steps_decided);
  while (!remote->freed_late.empty() && remote->freed_late.front().step <= remote->steps_over) {
    const RemoteCaches::FreedLate& freed = remote->freed_late.front();
    cache.pool().free_blocks(freed.blocks);
    if (!freed.host_blocks.empty()) cache.host_pages()->host_pool().free_blocks(freed.host_blocks);
    remote->freed_late.pop_front();
  }
  while (!remote->late_loads.empty() && remote->late_loads.front().step <= remote->steps_over) {
    const RemoteCaches::LateLoad load = remote->late_loads.front();
    remote->late_loads.pop_front();
    remote->connector.update_state_after_alloc(load.id, at(load.id).groups[0].blocks,
                                               load.num_tokens);
  }
}

// Resumes a request whose load has completed, from the tokens that arrived. False: it is still
// loading. True also for a request that loads nothing.
bool Scheduler::Impl::promote(RequestId id) {
  Request& request = at(id);
  if (request.status != RequestStatus::waiting_for_remote_kvs) return true;
  if (remote->received.erase(id) == 0) return false;
  const bool failed = remote->failed.erase(id) > 0;
  // A load that brought nothing: its blocks are freed, and a new lookup may hit locally. Otherwise
  // what arrived is published only now.
  if (failed && request.num_computed_tokens == 0)
    cache.free(request);  // nothing arrived; it may now hit something
  else
    cache.cache_blocks(request, request.num_computed_tokens);
  if (failed && request.num_computed_tokens > 0 && !profile.zeroes_loads)
    cache.record_again(request, request.num_computed_tokens);
  // The last token is computed here even if it was loaded: sampling needs its logits.
  if (!failed && request.num_computed_tokens == request.num_tokens()) --request.num_computed_tokens;
  request.status = request.num_preemptions > 0 ? RequestStatus::preempted : RequestStatus::waiting;
  LS_CHECK(request.num_computed_tokens < request.num_tokens(), "{} has nothing left to compute",
           request.name);
  return true;
}

// Looks the local prefix cache up. True: attention's hit is longer than that of the states, which
// the connector must then load.
bool Scheduler::Impl::find_local_hit(Request& request) {
  std::optional<bool> lags;
  if (remote != nullptr && remote->traits.completes_divergent_hits && profile.offers_divergent_hits)
    lags = cache.find_hit_of_attention(request, step.hit);
  if (!lags) cache.find_longest_cache_hit(request, step.hit);
  request.shared_prefix_boundary = step.hit.shared_prefix_boundary;
  return lags.value_or(false);
}

// Looks up the computed tokens of a waiting request, here and at the connector. False: the
// connector has no answer yet. A request with computed tokens keeps them.
bool Scheduler::Impl::find_computed_tokens(RequestId id) {
  Request& request = at(id);
  if (request.num_computed_tokens > 0) {  // loaded before; it holds those blocks
    step.hit.clear(step.first_new.size());
    return true;
  }
  const bool diverges = find_local_hit(request);
  if (!request.skips_prefix_cache)
    step.num_shared_of_last_lookup =
        std::max(step.hit.shared_prefix_boundary - step.hit.num_tokens, 0);
  if (remote == nullptr) return true;
  const auto block_size = static_cast<std::int32_t>(block_sizes.scheduler_block_size);
  const std::int32_t part = profile.asks_for_whole_blocks ? step.hit.num_tokens % block_size : 0;
  ExternalHit external = remote->connector.get_num_new_matched_tokens(
      {id, request.name, request.num_tokens(), step.hit.num_tokens - part, request.hashes.keys(),
       static_cast<std::int32_t>(block_sizes.hash_block_size)});
  if (request.skips_prefix_cache && profile.skips_loads_too) external = {};
  if (!external.num_tokens) return false;
  const std::int32_t limit = request.num_tokens() - (external.is_async ? 0 : 1);
  LS_CHECK(*external.num_tokens >= (external.is_async ? 1 : 0) &&
               step.hit.num_tokens - part + *external.num_tokens <= limit,
           "{} tokens of {} are elsewhere, {} of its {} here", *external.num_tokens, request.name,
           step.hit.num_tokens - part, request.num_tokens());
  take_external(external);
  if (diverges && step.hit.num_external_tokens == 0) {  // no state for attention's hit
    cache.find_longest_cache_hit(request, step.hit);
    request.shared_prefix_boundary = step.hit.shared_prefix_boundary;
  }
  cache.cut_source(step.hit);
  return true;
}

// Adds the connector's tokens to the hit. If the local hit ends inside a block, a longer load
// replaces that part, and a load that is not longer is ignored: either way no block is loaded and
// copied at once.
void Scheduler::Impl::take_external(const ExternalHit& external) {
  const auto block_size = static_cast<std::int32_t>(block_sizes.scheduler_block_size);
  const std::int32_t part = profile.asks_for_whole_blocks ? step.hit.num_tokens % block_size : 0;
  if (part > 0 && *external.num_tokens <= part) return;
  if (part > 0) cache.cut_hit(step.hit, step.hit.num_tokens - part);
  LS_CHECK(step.hit.num_external_tokens == 0, "{} external tokens are taken twice",
           step.hit.num_external_tokens);
  step.hit.num_external_tokens = *external.num_tokens;
  step.hit.loads_async = external.is_async;
}

// True if a request that is about to finish keeps its blocks, for a load that still writes them or
// a send. Notifies the connector of the end.
bool Scheduler::Impl::keeps_blocks(RequestId id) {
  if (remote == nullptr) return false;
  Request& request = at(id);
  const bool begins_late =
      std::erase_if(remote->late_loads, [&](const auto& load) { return load.id == id; }) > 0;
  // A load in flight writes into the blocks. One that has not started yet is cancelled.
  const bool is_loading = !begins_late && remote->is_loading(id, request);
  remote->received.erase(id);
  remote->failed.erase(id);
  // A load keeps writing all its blocks, so none is freed before it ends. Otherwise blocks outside
  // the window are freed first, because a send does not include them.
  if (!is_loading) {
    const bool is_sure = profile.retire_basis == RetireBasis::processed;
    cache.remove_skipped_blocks(
        request,
        std::max(0, request.num_computed_tokens - (is_sure ? request.num_in_flight_tokens : 0)));
  }
  const bool is_sent = remote->connector.request_finished(id, request.name);
  if (!is_loading && !is_sent) return false;
  remote->held.insert({id, {.is_loading = is_loading, .is_reported = false}});
  return true;
}

// Frees the blocks of a held request whose transfer has completed. The id is free once its end has
// also been reported.
void Scheduler::Impl::release(RequestId id) {
  const auto held = remote->held.find(id);
  LS_CHECK(held != remote->held.end(), "{} has no blocks to free", at(id).name);
  give_back(at(id));
  const bool reported = held->second.is_reported;
  remote->held.erase(held);
  if (reported) forget(id);
}

// Processes completed loads and sends. A completed load of a live request only becomes known here;
// promote() resumes it when the queue reaches it.
void Scheduler::Impl::take_transfers(const KVConnectorOutput& report) {
  if (cache.host_pages() != nullptr) take_page_transfers(report);
  for (const RequestId id : report.finished_recving) {
    if (at(id).status == RequestStatus::waiting_for_remote_kvs)
      remote->received.insert(id);
    else
      release(id);
  }
  for (const RequestId id : report.finished_sending) release(id);
}

// Host pages: loads first, since their publication precedes that of spilled pages.
void Scheduler::Impl::take_page_transfers(const KVConnectorOutput& report) {
  HostPageCoordinator& pages = *cache.host_pages();
  for (const RequestId id : report.finished_recving)
    pages.finish_import(
        at(id), std::ranges::find(report.failed_recving, id) != report.failed_recving.end());
  if (report.enqueued.empty() && report.completed.empty()) return;
  pages.take_transfers(report.enqueued, report.completed, [&](std::vector<std::string> names) {
    remote->connector.order_published_requests(names);
    return names;
  });
}

// Plans the step's host pages once all its blocks are allocated, and sends the plan to the
// connector.
void Scheduler::Impl::plan_page_transfers() {
  if (cache.host_pages() == nullptr) return;
  std::vector<HostPageCoordinator::Row> rows;
  for (const ScheduledRequest& row : output.scheduled)
    rows.push_back({row.id, &at(row.id), row.computed, row.num_tokens});
  output.host_pages = cache.host_pages()->plan_step(rows);
  remote->connector.start_pages(output.host_pages);
}

// Moves each of `candidates` back to before its first invalid block; returns those that have one.
// If several requests share a block, the first of them computes it and the others count on that.
// `tails`, unless null, receives the blocks from the first invalid one onward. Source: vLLM 0.33.0,
// _update_requests_with_invalid_blocks().
std::vector<RequestId> Scheduler::Impl::cut_at_invalid_blocks(
    const std::vector<RequestId>& candidates, const std::set<BlockId>& invalid,
    std::span<const InFlightRow> rows, std::vector<BlockId>* tails) {
  const auto block_size = static_cast<std::int32_t>(block_sizes.scheduler_block_size);
  std::vector<RequestId> affected;
  std::set<BlockId> taken_care_of;
  for (const RequestId id : candidates) {
    Request& request = at(id);
    const auto row = std::ranges::find(rows, id, &InFlightRow::id);
    // Tokens of the step whose output this is were computed after the load, so they do not count.
    const std::int32_t num_computed =
        request.num_computed_tokens - (row == rows.end() ? 0 : row->num_tokens);
    const std::vector<BlockId>& blocks = request.groups[0].blocks;
    const auto num_blocks =
        std::min<std::ptrdiff_t>(ceil_div(num_computed, block_size), std::ssize(blocks));
    bool is_affected = false;
    bool is_cut = false;
    for (std::ptrdiff_t i = 0; i < num_blocks; ++i) {
      const BlockId block = blocks[i];
      if (!invalid.contains(block)) continue;
      is_affected = true;
      // An earlier request computes this block, or this request has been cut further left.
      if (!taken_care_of.insert(block).second || is_cut) continue;
      is_cut = true;
      request.num_computed_tokens = static_cast<std::int32_t>(i) * block_size;
      if (tails != nullptr) tails->insert(tails->end(), blocks.begin() + i, blocks.end());
    }
    if (!is_affected) continue;
    // All its invalid blocks are computed by others. It repeats only the step.
    if (!is_cut) request.num_computed_tokens = num_computed;
    affected.push_back(id);
  }
  return affected;
}

// Processes blocks that a load did not fill. Returns the requests whose output of this step is
// void; with fails_requests, also those that fail while they load.
std::vector<RequestId> Scheduler::Impl::take_invalid_blocks(const KVConnectorOutput& report,
                                                            std::span<const InFlightRow> rows) {
  LS_CHECK(step.first_new.size() == 1, "invalid blocks in {} groups", step.first_new.size());
  const std::set<BlockId> invalid(report.invalid_block_ids.begin(), report.invalid_block_ids.end());
  std::vector<RequestId> loading = remote->passed_over();
  std::erase_if(loading, [&](RequestId id) {
    return at(id).status != RequestStatus::waiting_for_remote_kvs;
  });
  // Blocks of an asynchronous load are not in the prefix cache yet, so none is withdrawn.
  const std::vector<RequestId> late = cut_at_invalid_blocks(loading, invalid, rows, nullptr);
  std::vector<BlockId> tails;
  std::vector<RequestId> voided = cut_at_invalid_blocks(running, invalid, rows, &tails);
  if (!remote->fails_requests) {  // the blocks stay findable: they are filled in the next steps
    remote->failed.insert(late.begin(), late.end());
    if (profile.restarts_behind_windows) desert(late, voided);
    return voided;
  }
  cache.pool().evict_blocks(tails);
  voided.insert(voided.begin(), late.begin(), late.end());
  return voided;
}

// Processes loads that brought nothing. Returns the requests that fail with them; otherwise they
// compute their tokens here, after promote().
std::vector<RequestId> Scheduler::Impl::take_failed_loads(const KVConnectorOutput& report) {
  std::vector<RequestId> failed;
  for (const RequestId id : report.failed_recving) {
    Request& request = at(id);
    if (request.status != RequestStatus::waiting_for_remote_kvs) continue;
    if (remote->fails_requests) {
      failed.push_back(id);
      continue;
    }
    request.num_computed_tokens = 0;
    remote->failed.insert(id);
  }
  return failed;
}

// Marks requests that would compute a lost block without the window before it: they start over.
// Repair of finding 14.
void Scheduler::Impl::desert(const std::vector<RequestId>& late,
                             const std::vector<RequestId>& voided) {
  const auto lacks_window = [&](RequestId id) {
    return cache.lacks_window(at(id), at(id).num_computed_tokens);
  };
  for (const RequestId id : late)
    if (lacks_window(id)) at(id).num_computed_tokens = 0;
  std::ranges::copy_if(voided, std::inserter(remote->deserted, remote->deserted.end()),
                       lacks_window);
}

// A preemption is how a running request starts over. Those that have ended meanwhile are skipped.
void Scheduler::Impl::preempt_deserted() {
  std::size_t index = 0;
  for (const RequestId id : remote->deserted)
    if (std::ranges::find(running, id) != running.end()) preempt(id, index);
  remote->deserted.clear();
}

// Ends the requests with an error: all leave their queues first, then their blocks are freed in the
// engine's order.
void Scheduler::Impl::fail_requests(std::vector<RequestId> ids) {
  remote->connector.order_failed_requests(ids);
  for (const RequestId id : ids) {
    if (at(id).status == RequestStatus::running)
      std::erase(running, id);
    else
      remote->remove(id, at(id));
  }
  for (const RequestId id : ids) {
    stopped.push_back({id, FinishReason::error});
    retire(id);
  }
}

}  // namespace lockstep
