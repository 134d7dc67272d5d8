// What follows from a KV connector's answers and its workers' reports. The rules are those of
// vllm/v1/core/sched/scheduler.py, "KV Connector Related Methods", and of schedule() around them.
#include <algorithm>
#include <iterator>
#include <utility>

#include "reference/cache/group_manager.h"
#include "reference/schedule/scheduler_impl.h"

namespace lockstep {

// Requests that were passed over come before those that arrived since; by priority the better head
// comes first.
RequestQueue* Scheduler::Impl::next_queue() {
  if (remote != nullptr && !remote->holding.empty()) return &remote->holding;
  RequestQueue* const skipped_before = remote == nullptr ? nullptr : &remote->skipped;
  if (skipped_before == nullptr || skipped_before->empty())
    return waiting.empty() ? nullptr : &waiting;
  if (config.policy == SchedulingPolicy::fcfs || waiting.empty()) return skipped_before;
  const bool arrived_first = at(waiting.peek()).before(at(skipped_before->peek()));
  return arrived_first ? &waiting : skipped_before;
}

RequestQueue& Scheduler::Impl::queue_of_skipped(RequestId id) {
  if (remote == nullptr) return waiting;
  return holds_blocks(id) && profile.holders_come_first ? remote->holding : remote->skipped;
}

// Whether the head of the queue lets others of it pass when it has no room.
bool Scheduler::Impl::stands_aside(const RequestQueue& queue) const {
  return remote != nullptr && &queue == &remote->holding;
}

// Whether requests of the queue go on while nobody new is scheduled.
bool Scheduler::Impl::enters_in_pause(const RequestQueue& queue) const {
  return remote != nullptr && profile.holders_come_first && &queue == &remote->holding;
}

// Whether everybody who is being prefilled, or loads, could still be given all that it needs if
// this request began to load.
bool Scheduler::Impl::leaves_room(const Request& request) {
  std::int64_t num_blocks = cache.num_blocks_to_finish(request, &hit, num_lookahead);
  const auto add = [&](RequestId id) {
    num_blocks += cache.num_blocks_to_finish(at(id), nullptr, num_lookahead);
  };
  for (const RequestId id : running)
    if (at(id).is_prefill_chunk) add(id);
  for (const RequestId id : remote->passed_over())
    if (holds_blocks(id)) add(id);
  for (const RequestId id : skipped)
    if (holds_blocks(id)) add(id);
  return cache.pool().can_give(num_blocks);
}

// A request whose load is over goes on from what has arrived. False: it still loads.
bool Scheduler::Impl::promote(RequestId id) {
  Request& request = at(id);
  if (request.status != RequestStatus::waiting_for_remote_kvs) return true;
  if (remote->received.erase(id) == 0) return false;
  const bool failed = remote->failed.erase(id) > 0;
  if (failed && request.num_computed_tokens == 0)
    cache.free(request);  // nothing arrived; it may hit something by now
  else
    cache.cache_blocks(request, request.num_computed_tokens);
  // Its last token is computed here even if it was loaded: sampling needs its logits.
  if (!failed && request.num_computed_tokens == request.num_tokens()) --request.num_computed_tokens;
  request.status = request.num_preemptions > 0 ? RequestStatus::preempted : RequestStatus::waiting;
  return true;
}

// Looks up what is computed of a waiting request, here and elsewhere. False: the connector does not
// know yet.
bool Scheduler::Impl::find_computed_tokens(RequestId id) {
  Request& request = at(id);
  if (request.num_computed_tokens > 0) {  // loaded before; it holds those blocks
    hit.clear(first_new.size());
    return true;
  }
  cache.find_longest_cache_hit(request, hit);
  request.shared_prefix_boundary = hit.shared_prefix_boundary;
  if (!request.skips_prefix_cache)
    num_shared_of_last_lookup = std::max(hit.shared_prefix_boundary - hit.num_tokens, 0);
  if (remote == nullptr) return true;
  const ExternalHit external = remote->connector.get_num_new_matched_tokens(
      {id, request.name, request.num_tokens(), hit.num_tokens, request.hashes.keys(),
       static_cast<std::int32_t>(block_sizes.hash_block_size)});
  if (!external.num_tokens) return false;
  hit.num_external_tokens = *external.num_tokens;
  hit.loads_async = external.is_async;
  const std::int32_t limit = request.num_tokens() - (hit.loads_async ? 0 : 1);
  LS_CHECK(hit.num_external_tokens >= (hit.loads_async ? 1 : 0) &&
               hit.num_tokens + hit.num_external_tokens <= limit,
           "{} tokens of {} are elsewhere, {} of its {} here", hit.num_external_tokens,
           request.name, hit.num_tokens, request.num_tokens());
  return true;
}

// Whether a request that is about to finish leaves its blocks behind.
bool Scheduler::Impl::keeps_blocks(RequestId id) {
  if (remote == nullptr) return false;
  Request& request = at(id);
  const bool is_loading = remote->is_loading(id, request);  // a transfer writes into them
  remote->received.erase(id);
  remote->failed.erase(id);
  // A load goes on writing all that it was given: nothing that its tokens have left behind, but for
  // the window of a prompt's last token, where the profile keeps that.
  if (!is_loading) cache.remove_skipped_blocks(request, request.num_computed_tokens);
  const bool is_sent = remote->connector.request_finished(id, request.name);
  if (!is_loading && !is_sent) return false;
  remote->held.insert({id, {.is_loading = is_loading, .is_reported = false}});
  return true;
}

// A finished request gives its blocks back; it is forgotten once both this and its end are known.
void Scheduler::Impl::release(RequestId id) {
  const auto held = remote->held.find(id);
  LS_CHECK(held != remote->held.end(), "{} has nothing to give back", at(id).name);
  cache.free(at(id));
  const bool reported = held->second.is_reported;
  remote->held.erase(held);
  if (reported) forget(id);
}

void Scheduler::Impl::take_transfers(const KVConnectorOutput& report) {
  for (const RequestId id : report.finished_recving) {
    if (at(id).status == RequestStatus::waiting_for_remote_kvs)
      remote->received.insert(id);
    else
      release(id);
  }
  for (const RequestId id : report.finished_sending) release(id);
}

// Cuts each of `candidates` back to before its first invalid block; returns those that have one. A
// block that several share is computed by the first of them, and the others count on it. `tails`,
// unless null, receives the blocks that were cut off.
std::vector<RequestId> Scheduler::Impl::cut_at_invalid_blocks(
    const std::vector<RequestId>& candidates, const std::set<BlockId>& invalid,
    std::span<const InFlightRow> rows, std::vector<BlockId>* tails) {
  const auto block_size = static_cast<std::int32_t>(block_sizes.scheduler_block_size);
  std::vector<RequestId> affected;
  std::set<BlockId> taken_care_of;
  for (const RequestId id : candidates) {
    Request& request = at(id);
    const auto row = std::ranges::find(rows, id, &InFlightRow::id);
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
      if (!taken_care_of.insert(block).second || is_cut) continue;
      is_cut = true;
      request.num_computed_tokens = static_cast<std::int32_t>(i) * block_size;
      if (tails != nullptr) tails->insert(tails->end(), blocks.begin() + i, blocks.end());
    }
    if (!is_affected) continue;
    if (!is_cut) request.num_computed_tokens = num_computed;
    affected.push_back(id);
  }
  return affected;
}

// Blocks that a load was to fill and did not. Returns the scheduled requests whose output is void.
std::vector<RequestId> Scheduler::Impl::take_invalid_blocks(const KVConnectorOutput& report,
                                                            std::span<const InFlightRow> rows) {
  LS_CHECK(first_new.size() == 1, "invalid blocks in {} groups", first_new.size());
  const std::set<BlockId> invalid(report.invalid_block_ids.begin(), report.invalid_block_ids.end());
  std::vector<RequestId> loading = remote->passed_over();
  std::erase_if(loading, [&](RequestId id) {
    return at(id).status != RequestStatus::waiting_for_remote_kvs;
  });
  // What a request still loads is not in the prefix cache yet.
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

// Who would have to compute a lost block without the window before it starts again.
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

void Scheduler::Impl::preempt_deserted() {
  std::size_t index = 0;
  for (const RequestId id : remote->deserted)
    if (std::ranges::find(running, id) != running.end()) preempt(id, index);
  remote->deserted.clear();
}

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
