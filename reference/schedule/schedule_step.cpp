// Decides a step: running requests in order, then waiting ones. Source of the rules:
// vllm/v1/core/sched/scheduler.py, schedule(), and async_scheduler.py, _update_after_schedule().
// The order of every check is the engine's, since each one changes what the next one sees.
#include <algorithm>
#include <utility>

#include "reference/schedule/scheduler_impl.h"

namespace lockstep {

// Tokens that a running request gets in this step; 0: none. A decode gets 1 token and its drafts, a
// prefill a chunk. Example with async scheduling and 3 drafts: 10 known tokens, a step of 4 in
// flight, so 13 computed, 4 placeholders and 3 new drafts: 10 + 3 + 4 - 13 = 4 tokens.
std::int32_t Scheduler::Impl::num_tokens_of_running(const Request& request) const {
  // The tokens in flight reach max_tokens even if all their drafts are rejected: nothing is left to
  // schedule. num_computed_tokens counts placeholders, of which only one is certain.
  if (request.num_output_placeholders > 0 &&
      request.num_computed_tokens + 2 - request.num_output_placeholders >=
          std::int64_t{request.num_prompt_tokens()} + request.max_tokens)
    return 0;
  std::int32_t num_new = request.num_tokens() +
                         static_cast<std::int32_t>(request.spec_tokens.size()) +
                         request.num_output_placeholders - request.num_computed_tokens;
  if (step.long_prefill_threshold > 0) num_new = std::min(num_new, step.long_prefill_threshold);
  num_new = std::min(num_new, num_available_tokens());
  num_new = std::min(num_new, config.max_model_len - 1 - request.num_computed_tokens);
  if (splits_at_state_blocks) num_new = state_chunks.clip(request, num_new, 0, 0);
  return leave_lookahead(request, request.num_computed_tokens, num_new);
}

// Shortens a prefill chunk so that it ends at the prompt's end, or far enough before it that every
// MTP module reads known tokens after it. Example: lookahead 3, 1 token would be left: the chunk
// gives up 2 tokens, and the next one has 3. 0: the chunk is too short for that.
std::int32_t Scheduler::Impl::leave_lookahead(const Request& request, std::int32_t computed,
                                              std::int32_t num_new) const {
  const std::int32_t num_left = request.num_tokens() - computed - num_new;
  if (num_left <= 0 || num_left >= config.num_prefill_lookahead_tokens) return num_new;
  return std::max(num_new - (config.num_prefill_lookahead_tokens - num_left), 0);
}

// The request to preempt: the last one admitted, or the one with the lowest priority. May be the
// request that needs the blocks.
RequestId Scheduler::Impl::pick_victim() const {
  LS_CHECK(!running.empty(), "no running request to preempt");
  if (config.policy == SchedulingPolicy::fcfs) return running.back();
  // The first of those with the largest (priority, arrival), as Python's max() returns.
  return *std::ranges::max_element(running, [&](RequestId a, RequestId b) {
    return std::pair(at(a).priority, at(a).arrival_ns) <
           std::pair(at(b).priority, at(b).arrival_ns);
  });
}

// Removes a request from the step under construction, with its blocks, drafts and tokens, and
// returns its budget. The flat lists close the gap: O(scheduled requests).
void Scheduler::Impl::drop_from_output(RequestId id) {
  const auto row = std::ranges::find(output.scheduled, id, &ScheduledRequest::id);
  LS_CHECK(row != output.scheduled.end(), "{} is not in the step", at(id).name);
  const auto i = static_cast<std::size_t>(row - output.scheduled.begin());
  const std::size_t num_groups = step.first_new.size();
  const std::uint32_t begin = row->first_block == 0 ? 0 : output.block_ends[row->first_block - 1];
  const std::uint32_t end = output.block_ends[row->first_block + num_groups - 1];
  output.block_ids.erase(output.block_ids.begin() + begin, output.block_ids.begin() + end);
  const auto ends = output.block_ends.begin() + row->first_block;
  output.block_ends.erase(ends, ends + static_cast<std::ptrdiff_t>(num_groups));
  for (std::size_t j = i * num_groups; j < output.block_ends.size(); ++j)
    output.block_ends[j] -= end - begin;
  std::int32_t first_spec = 0;
  for (auto before = output.scheduled.begin(); before != row; ++before)
    first_spec += before->num_spec;
  const auto spec = output.spec_tokens.begin() + first_spec;
  output.spec_tokens.erase(spec, spec + row->num_spec);
  output.total_num_scheduled_tokens -= row->num_tokens;
  step.budget += row->num_tokens;
  step.input_budget += row->num_tokens + draft_slots;
  output.scheduled.erase(row);
  for (std::size_t j = i; j < output.scheduled.size(); ++j)
    output.scheduled[j].first_block -= static_cast<std::uint32_t>(num_groups);
  LS_CHECK(output.block_ends.size() == output.scheduled.size() * num_groups,
           "{} block lists for {} requests", output.block_ends.size(), output.scheduled.size());
  LS_CHECK(output.total_num_scheduled_tokens >= 0, "a step of {} tokens",
           output.total_num_scheduled_tokens);
}

// Preempts a running request. `index` is the scan's position in `running`; it moves back if the
// victim was before it. Older releases move it only for victims that were scheduled, so a request
// is passed over (EngineProfile::scan_follows_every_victim).
void Scheduler::Impl::preempt(RequestId victim, std::size_t& index) {
  const auto place = std::ranges::find(running, victim);
  LS_CHECK(place != running.end(), "{} is preempted but not in the running queue", at(victim).name);
  const bool passed = static_cast<std::size_t>(place - running.begin()) < index;
  running.erase(place);
  const bool scheduled =
      std::ranges::find(output.scheduled, victim, &ScheduledRequest::id) != output.scheduled.end();
  if (scheduled) drop_from_output(victim);
  if (profile.scan_follows_every_victim ? passed : scheduled) --index;
  Request& request = at(victim);
  if (scheduled && profile.withdraws_what_is_undone)
    cache.withdraw(request, request.num_computed_tokens);
  send_back(victim, remote != nullptr && remote->traits.requires_kv_delivery &&
                        profile.drops_output_of_victims);
  output.preempted.push_back(victim);
}

// Frees the request's blocks and moves it to the head of the waiting queue: recompute preemption.
// Its tokens stay, so a resume computes prompt and output again. REQUIRES: it is not in `running`.
void Scheduler::Impl::send_back(RequestId victim, bool drops_stale_output) {
  Request& request = at(victim);
  LS_CHECK(request.status == RequestStatus::running, "{} is preempted but does not run",
           request.name);
  give_back(request);
  if (encoder) encoder->let_go(request);
  if (remote != nullptr) remote->prefilling.erase(victim);
  request.status = RequestStatus::preempted;
  request.num_computed_tokens = 0;
  ++request.num_preemptions;
  request.spec_tokens.clear();
  if (profile.in_flight_accounting == InFlightAccounting::tokens) {
    // Output that was to be dropped stays so: its positions have been sampled again.
    request.drops_stale_output =
        drops_stale_output || (request.drops_stale_output && request.num_stale_tokens > 0);
    request.num_stale_tokens = request.num_in_flight_tokens;
    request.num_output_placeholders = 0;
  } else if (drops_stale_output) {
    request.num_outputs_to_drop = request.num_output_placeholders;
    request.num_output_placeholders = 0;
  }
  waiting.prepend(victim, request);
}

// Preempts every running request, for a reset of the prefix cache. Releases that count tokens in
// flight report the victims in the next decision, which may admit them again.
void Scheduler::Impl::preempt_all_running() {
  while (!running.empty()) {
    const RequestId victim = running.back();
    running.pop_back();
    send_back(victim, true);
    if (profile.in_flight_accounting == InFlightAccounting::tokens) sent_back.push_back(victim);
  }
}

// Gives a running request its slots; preempts requests until the pool has the blocks, possibly the
// request itself. Terminates: every round removes a running request.
SlotGrant Scheduler::Impl::allocate_or_preempt(RequestId id, std::int32_t num_new,
                                               std::size_t& index) {
  Request& request = at(id);
  LS_CHECK(num_new > 0 && num_new <= num_available_tokens(), "{} is given {} tokens of {}",
           request.name, num_new, num_available_tokens());
  if (cache.is_at_rest(request, num_new, num_lookahead)) {
    emit(id, num_new, Handed::none, false);
    return SlotGrant::granted;
  }
  while (!cache.allocate_slots(request, num_new, num_lookahead, nullptr, false, step.first_new)) {
    const RequestId victim = pick_victim();
    if (!may_preempt(victim)) return SlotGrant::refused;
    preempt(victim, index);
    if (victim == id) return SlotGrant::self_preempted;
  }
  emit(id, num_new, Handed::added, false);
  return SlotGrant::granted;
}

// Appends the request's blocks to the output, group by group: the whole table, or the entries from
// first_new on.
void Scheduler::Impl::hand_over(const Request& request, bool whole_table) {
  LS_CHECK(step.first_new.size() == request.groups.size(), "{} has {} tables, the step {}",
           request.name, request.groups.size(), step.first_new.size());
  for (std::size_t g = 0; g < step.first_new.size(); ++g) {
    const std::vector<BlockId>& blocks = request.groups[g].blocks;
    const std::size_t first = whole_table ? 0 : step.first_new[g];
    LS_CHECK(first <= blocks.size(), "{}: new entries from {} in a table of {}", request.name,
             first, blocks.size());
    output.block_ids.insert(output.block_ids.end(),
                            blocks.begin() + static_cast<std::ptrdiff_t>(first), blocks.end());
    output.block_ends.push_back(static_cast<std::uint32_t>(output.block_ids.size()));
  }
}

// Appends a scheduled request to the output and subtracts its tokens from the budget.
void Scheduler::Impl::emit(RequestId id, std::int32_t num_tokens, Handed handed,
                           bool keeps_drafts) {
  Request& request = at(id);
  LS_CHECK(num_tokens > 0 && num_tokens <= step.budget, "{} is scheduled with {} tokens of {}",
           request.name, num_tokens, step.budget);
  ScheduledRequest row{.id = id,
                       .num_tokens = num_tokens,
                       .computed = request.num_computed_tokens,
                       .first_block = static_cast<std::uint32_t>(output.block_ends.size())};
  if (handed == Handed::none) {
    const auto end = static_cast<std::uint32_t>(output.block_ids.size());
    output.block_ends.insert(output.block_ends.end(), step.first_new.size(), end);
  } else {
    hand_over(request, handed == Handed::whole_table);
  }
  if (!request.spec_tokens.empty()) take_drafts(request, row, keeps_drafts);
  output.scheduled.push_back(row);
  output.total_num_scheduled_tokens += num_tokens;
  step.budget -= num_tokens;
  step.input_budget -= num_tokens + draft_slots;
  LS_CHECK(output.block_ends.size() == output.scheduled.size() * step.first_new.size(),
           "{} block lists for {} requests", output.block_ends.size(), output.scheduled.size());
}

// Moves the drafts that fit into the scheduled tokens to the output, or all of them; the others are
// dropped. Row tokens = known tokens not computed + drafts, which gives the number that fits.
void Scheduler::Impl::take_drafts(Request& request, ScheduledRequest& row, bool keeps_drafts) {
  const auto num_drafts = static_cast<std::int32_t>(request.spec_tokens.size());
  const std::int32_t num_spec =
      keeps_drafts ? num_drafts
                   : std::min(row.num_tokens + request.num_computed_tokens - request.num_tokens() -
                                  request.num_output_placeholders,
                              num_drafts);
  if (num_spec > 0) {
    row.num_spec = num_spec;
    output.spec_tokens.insert(output.spec_tokens.end(), request.spec_tokens.begin(),
                              request.spec_tokens.begin() + num_spec);
  }
  request.spec_tokens.clear();
}

// A step in which a request was preempted admits no waiting request: the pool has no blocks for it.
void Scheduler::Impl::schedule() {
  begin_step();
  schedule_running();
  if (output.preempted.empty()) schedule_waiting();
  output.preempted.insert(output.preempted.end(), sent_back.begin(), sent_back.end());
  sent_back.clear();
  if (profile.reports_common_prefix_blocks) count_common_prefix();
  take_copies();
  cache.take_new_block_ids(output.zero);
  if (encoder) {
    encoder->take_dropped(output.free_encoder);
    output.encoder_slots = encoder->num_free_rows();
  }
  plan_page_transfers();
  finish_step();
}

// Clears the previous decision and keeps its memory. Requests whose end it reported are forgotten
// now, so their ids stay valid until the caller has read it.
void Scheduler::Impl::begin_step() {
  for (const RequestId id : output.finished) forget(id);
  ++output.step;
  output.scheduled.clear();
  output.block_ends.clear();
  output.block_ids.clear();
  output.spec_tokens.clear();
  output.preempted.clear();
  output.zero.clear();
  output.copies.clear();
  output.loads_within = false;
  output.encode.clear();
  if (encoder) encoder->begin_step();
  output.total_num_scheduled_tokens = 0;
  output.finished.clear();
  std::swap(output.finished, finished);

  step.budget = pause_state == PauseState::paused_all ? 0 : token_budget;
  step.input_budget = config.max_num_batched_tokens;
  // The long-prefill threshold protects other requests, so it does not bind a request that is
  // alone. Requests that load count as others.
  const std::size_t loading = remote == nullptr ? 0 : remote->passed_over().size();
  const bool binds =
      !profile.long_prefill_only_in_company || running.size() + waiting.size() + loading > 1;
  step.long_prefill_threshold = binds ? config.long_prefill_token_threshold : 0;
  step.continues_prefill = false;
  cache.begin_step();
  if (remote != nullptr) preempt_deserted();
}

// Requests that can hold references: running ones, and with a connector those that load or are
// held. Common prefix blocks must have that many references.
std::int32_t Scheduler::Impl::num_requests_with_blocks() const {
  auto count = static_cast<std::int32_t>(running.size());
  if (remote == nullptr) return count;
  for (const RequestId id : remote->passed_over()) count += holds_blocks(id) ? 1 : 0;
  for (const auto& [id, how] : remote->held) count += holds_blocks(id) ? 1 : 0;
  return count;
}

// Any running request gives the same answer, so the first one is asked for.
void Scheduler::Impl::count_common_prefix() {
  if (running.empty())
    output.common_prefix_blocks.assign(step.first_new.size(), 0);
  else
    cache.num_common_prefix_blocks(at(running[0]), num_requests_with_blocks(),
                                   output.common_prefix_blocks);
}

// One pass over the running requests. A request without new tokens does not stop those after it, so
// this is not strictly first come first served.
void Scheduler::Impl::schedule_running() {
  std::size_t index = 0;
  while (index < running.size() && num_available_tokens() > 0) {
    const RequestId id = running[index];
    const std::int32_t num_new = num_tokens_of_running(at(id));
    if (num_new <= 0) {
      ++index;  // later requests may still run
      continue;
    }
    const SlotGrant grant = allocate_or_preempt(id, num_new, index);
    if (grant != SlotGrant::granted) {
      // The request preempted itself: later requests have a higher priority, and its blocks are
      // free. It is no longer in `running`, so `index` already names the next one.
      if (grant == SlotGrant::self_preempted && config.policy == SchedulingPolicy::priority &&
          profile.scan_survives_self_preemption)
        continue;
      break;
    }
    step.continues_prefill |= at(id).is_prefill_chunk;
    ++index;
  }
}

// True if a request that enters with one token left gets placeholder drafts: every request of the
// step then has the same number of tokens, which captured graphs need.
bool Scheduler::Impl::enters_as_decode(std::int32_t num_computed, std::int32_t num_new,
                                       bool any_running) const {
  if (config.num_spec_tokens == 0 || num_new != 1 || step.continues_prefill) return false;
  switch (profile.pads_new_decodes) {
    case PadsNewDecodes::never:
      return false;
    case PadsNewDecodes::beside_running_or_waits:
      return any_running;
    case PadsNewDecodes::beside_running:
      return any_running && has_room_for_drafts(num_computed);
    case PadsNewDecodes::beside_running_or_after_hit:
      break;
  }
  return (any_running || num_computed > 0) && has_room_for_drafts(num_computed);
}

// True if max_model_len leaves positions for the token, the drafts and the token that is sampled
// after them.
bool Scheduler::Impl::has_room_for_drafts(std::int32_t num_computed) const {
  return num_computed + 1 + config.num_spec_tokens + 1 <= config.max_model_len;
}

// Tokens of a waiting request after its prefix lookup; 0: it must wait, and so must those after it.
// `padded`: it gets placeholder drafts.
std::int32_t Scheduler::Impl::num_tokens_of_waiting(const Request& request, bool any_running,
                                                    bool& padded) const {
  const std::int32_t num_computed = num_computed_with_hit(request);
  std::int32_t num_new = request.num_tokens() - num_computed;
  const std::int32_t num_padded = 1 + config.num_spec_tokens;
  padded = enters_as_decode(num_computed, num_new, any_running);
  const bool waits = profile.pads_new_decodes == PadsNewDecodes::beside_running_or_waits;
  if (padded) {
    if (num_padded > num_available_tokens() ||
        (waits && step.hit.num_tokens + num_padded > config.max_model_len))
      return 0;
    num_new = num_padded;
  }
  if (step.long_prefill_threshold > 0) num_new = std::min(num_new, step.long_prefill_threshold);
  // Without chunked prefill the whole prompt needs one step.
  if (!config.enable_chunked_prefill && num_new > num_available_tokens()) return 0;
  num_new = std::min(num_new, num_available_tokens());
  if (!splits_at_state_blocks) return num_new;
  num_new =
      state_chunks.clip(request, num_new, step.hit.num_tokens + step.hit.num_external_tokens,
                        request.num_computed_tokens == 0 ? step.num_shared_of_last_lookup : 0);
  // The block boundary cut the placeholder rows: the request runs without them.
  if (padded && !waits && num_new > 0 && num_new != num_padded) {
    padded = false;
    return 1;
  }
  return num_new;
}

// Admits the head of `queue`: it runs in this step, or starts an asynchronous load. The order of
// the checks is the engine's: tokens, encoder, lookahead, room for others, blocks.
Entry Scheduler::Impl::enter(RequestId id, RequestQueue& queue, bool any_running) {
  Request& request = at(id);
  bool padded = false;
  std::int32_t num_new =
      step.hit.loads_async ? 0 : num_tokens_of_waiting(request, any_running, padded);
  if (num_new == 0 && !step.hit.loads_async) return Entry::waits;
  if (encoder && !encoder->ask(request, num_new, step.to_encode))
    return profile.passes_over_unencoded ? Entry::is_passed_over : Entry::waits;
  if (!step.hit.loads_async) {
    num_new = leave_lookahead(request, num_computed_with_hit(request), num_new);
    if (num_new == 0) return Entry::is_passed_over;
  }
  if (step.hit.loads_async && !leaves_room(id)) return Entry::waits;
  // A load computes nothing, so it needs no slots for drafts yet.
  const bool looks_ahead =
      request.num_computed_tokens > 0 || (profile.lookahead_in_first_step && !step.hit.loads_async);
  // Replayed tokens have their slots in the hit already.
  const std::int32_t num_past_hit = std::max(num_new - step.hit.num_replayed_tokens, 0);
  if (!cache.allocate_slots(request, num_past_hit, looks_ahead ? num_lookahead : 0, &step.hit,
                            config.scheduler_reserve_full_isl, step.first_new)) {
    if (encoder) encoder->let_go(request);
    return Entry::waits;
  }
  LS_CHECK(queue.peek() == id, "{} enters from behind the head of its queue", request.name);
  if (remote != nullptr) tell_connector(id);
  queue.pop();
  request.num_computed_tokens = num_computed_with_hit(request);
  LS_CHECK(request.num_computed_tokens <= request.num_tokens(), "{} has {} of {} tokens computed",
           request.name, request.num_computed_tokens, request.num_tokens());
  if (step.hit.loads_async) {  // its tokens count as computed; promote() corrects them
    request.status = RequestStatus::waiting_for_remote_kvs;
    remote->prefilling.insert(id);
    remote->deferred.insert(id);
    step.skipped.push_back(id);
    return Entry::enters;
  }
  if (remote != nullptr) {
    remote->deferred.erase(id);
    if (request.num_computed_tokens + num_new < request.num_tokens()) remote->prefilling.insert(id);
  }
  output.loads_within |= step.hit.num_external_tokens > 0;
  running.push_back(id);
  const bool resumed = request.status == RequestStatus::preempted;
  request.status = RequestStatus::running;
  if (padded) request.spec_tokens.assign(config.num_spec_tokens, -1);
  const bool keeps_drafts =
      padded && profile.pads_new_decodes == PadsNewDecodes::beside_running_or_waits;
  emit(id, num_new, Handed::whole_table, keeps_drafts);
  output.scheduled.back().is_new = true;
  output.scheduled.back().is_resumed = resumed;
  if (encoder) encode(request);
  return Entry::enters;
}

// Computes the encoder items that the request, the last one of the step, has asked for.
void Scheduler::Impl::encode(Request& request) {
  encoder->take(request, step.to_encode);
  ScheduledRequest& row = output.scheduled.back();
  LS_CHECK(&at(row.id) == &request, "{} is encoded, and {} entered last", request.name,
           at(row.id).name);
  row.num_encoded = static_cast<std::int32_t>(step.to_encode.size());
  row.num_encoder_rows = request.num_encoder_rows;
  output.encode.insert(output.encode.end(), step.to_encode.begin(), step.to_encode.end());
}

// Admits waiting requests until the budget, the number of running requests or the pool ends it.
// Requests that cannot run yet (their load is in flight, the connector has no answer) are passed
// over and return to the head of their queue in the same order.
void Scheduler::Impl::schedule_waiting() {
  const bool any_running = !output.scheduled.empty();
  bool has_obstacle = false;  // a request that holds blocks cannot continue for lack of blocks
  step.skipped.clear();
  while (num_available_tokens() > 0 &&
         static_cast<std::int32_t>(running.size()) < config.max_num_seqs) {
    RequestQueue* const queue = next_queue();
    if (queue != nullptr && pause_state != PauseState::unpaused && !enters_in_pause(*queue)) break;
    if (queue == nullptr || (has_obstacle && !stands_aside(*queue))) break;
    const RequestId id = queue->peek();
    // Output of the preempted request is still in flight: sampling the same position again would
    // deliver it twice.
    const bool is_awaited = at(id).num_stale_tokens > 0 && !at(id).drops_stale_output;
    const bool is_ready = !is_awaited && promote(id) && find_computed_tokens(id);
    const Entry entry = is_ready ? enter(id, *queue, any_running) : Entry::is_passed_over;
    if (entry == Entry::enters) continue;
    if (entry == Entry::waits && !stands_aside(*queue)) break;
    queue->pop();
    if (remote != nullptr) remote->deferred.insert(id);
    step.skipped.push_back(id);
    if (entry == Entry::waits) has_obstacle = true;
  }
  for (auto id = step.skipped.rbegin(); id != step.skipped.rend(); ++id)
    queue_of_skipped(*id).prepend(*id, at(*id));
  LS_CHECK(std::ssize(running) <= config.max_num_seqs, "{} requests run, at most {}",
           running.size(), config.max_num_seqs);
}

// Advances the counters of the scheduled requests and puts the step in flight. Counters advance
// now, not with the output, so that the next step can be decided before it.
void Scheduler::Impl::finish_step() {
  // An empty step has no output, except the reports of a connector's workers.
  if (output.scheduled.empty() && (remote == nullptr || !config.async_scheduling)) return;
  std::vector<InFlightRow> rows;
  if (!spare_rows.empty()) {
    rows = std::move(spare_rows.back());
    spare_rows.pop_back();
    rows.clear();
  }
  if (remote != nullptr && !output.scheduled.empty()) ++remote->steps_decided;
  for (const ScheduledRequest& row : output.scheduled) {
    Request& request = at(row.id);
    request.num_computed_tokens += row.num_tokens;
    request.num_in_flight_tokens += row.num_tokens;
    request.is_prefill_chunk =
        request.num_computed_tokens < request.num_tokens() + request.num_output_placeholders;
    if (remote != nullptr) {
      request.last_step = remote->steps_decided;
      if (!request.is_prefill_chunk) remote->prefilling.erase(row.id);
    }
    rows.push_back({row.id, requests.generation(row.id), row.num_tokens, row.num_spec,
                    config.async_scheduling ? request.num_preemptions : 0,
                    !request.is_prefill_chunk});
    if (config.async_scheduling && !request.is_prefill_chunk) {
      // The next step is decided before this one's tokens are known: one sampled token and the
      // drafts count as placeholders.
      request.num_output_placeholders += 1 + row.num_spec;
      request.spec_tokens.assign(config.num_spec_tokens, -1);
    }
  }
  LS_CHECK(rows.size() == output.scheduled.size(), "{} rows in flight for {} requests", rows.size(),
           output.scheduled.size());
  in_flight.push_back(std::move(rows));
}

}  // namespace lockstep
