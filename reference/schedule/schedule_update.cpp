// The rules are those of vllm/v1/core/sched/scheduler.py, update_from_output().
#include <algorithm>
#include <iterator>
#include <utility>

#include "reference/schedule/scheduler_impl.h"

namespace lockstep {

void Scheduler::Impl::take_output(const ModelOutput& model) {
  const KVConnectorOutput& report = model.kv_connector_output;
  LS_CHECK(report.empty() || remote != nullptr, "a report of a connector, and there is none");
  LS_CHECK(!in_flight.empty() ||
               (remote != nullptr && !config.async_scheduling && model.token_ends.empty()),
           "no step in flight");
  std::vector<InFlightRow> rows;
  if (!in_flight.empty()) {
    rows = std::move(in_flight.front());
    in_flight.pop_front();
  }
  LS_CHECK(model.token_ends.size() == rows.size(), "{} rows of tokens for {} scheduled requests",
           model.token_ends.size(), rows.size());
  stopped.clear();
  stale.clear();
  if (remote != nullptr && !rows.empty()) step_is_over();
  std::vector<RequestId> voided = take_failed_loads(report);
  if (!report.invalid_block_ids.empty()) {
    const std::vector<RequestId> lost = take_invalid_blocks(report, rows);
    std::ranges::copy_if(lost, std::back_inserter(voided), [&](RequestId id) {
      return std::ranges::find(voided, id) == voided.end();
    });
  }
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool is_void = !voided.empty() && std::ranges::find(voided, rows[i].id) != voided.end();
    LS_CHECK(model.token_ends[i] >= begin && model.token_ends[i] <= model.tokens.size(),
             "row {} has tokens [{}, {}) of {}", i, begin, model.token_ends[i],
             model.tokens.size());
    const std::uint32_t size = is_void ? 0 : model.token_ends[i] - begin;
    take_row(rows[i], std::span(model.tokens).subspan(begin, size));
    begin = model.token_ends[i];
  }
  if (!stopped.empty())
    std::erase_if(running, [&](RequestId id) { return at(id).status == RequestStatus::finished; });
  if (!voided.empty() && remote->fails_requests) fail_requests(std::move(voided));
  if (!report.empty()) take_transfers(report);
  update_drafts(model, rows);
  spare_rows.push_back(std::move(rows));
}

// Appends tokens until one of them ends the request.
bool Scheduler::Impl::append_tokens(Request& request, std::span<const std::int32_t> tokens,
                                    FinishReason& reason, std::size_t& num_kept) {
  bool stops = false;
  num_kept = 0;
  for (const std::int32_t token : tokens) {
    request.tokens.append(token);
    ++num_kept;
    if (request.has_min_tokens && profile.min_tokens_hold_every_end &&
        request.num_output_tokens() < request.min_tokens)
      continue;
    if (request.ends_with(token)) {
      reason = FinishReason::stop;
      stops = true;
    } else if (request.num_tokens() >= config.max_model_len ||
               request.num_output_tokens() >= request.max_tokens) {
      reason = FinishReason::length;
      stops = true;
    } else if (request.detects_repetition && request.num_output_tokens() >= request.min_tokens &&
               request.repeats_itself()) {
      reason = FinishReason::repetition;
      stops = true;
    }
    if (stops) break;
  }
  if (config.enable_prefix_caching)
    request.hashes.extend(hash_rule, request.tokens, request.cache_salt, request.keys);
  return stops;
}

// Settles output that was in flight when its request was preempted.
void Scheduler::Impl::take_row(const InFlightRow& row, std::span<const std::int32_t> tokens) {
  if (requests.generation(row.id) != row.generation) return;  // it has left in the meantime
  const Request& request = at(row.id);
  const bool is_stale =
      config.async_scheduling && !tokens.empty() && request.num_preemptions != row.num_preemptions;
  const std::int32_t num_before = is_stale ? request.num_tokens() : 0;
  update_row(row, tokens);
  if (is_stale) stale.push_back({row.id, request.num_tokens() - num_before});
}

void Scheduler::Impl::update_row(const InFlightRow& row, std::span<const std::int32_t> tokens) {
  Request& request = at(row.id);
  request.num_in_flight_tokens -= row.num_tokens;
  LS_CHECK(request.num_in_flight_tokens >= 0, "{} has {} tokens in flight", request.name,
           request.num_in_flight_tokens);
  const bool is_stale = request.num_stale_tokens > 0;
  if (is_stale) request.num_stale_tokens -= row.num_tokens;
  // Blocks now hold the rows of cross attention.
  if (encoder && request.num_computed_tokens > 0 && !(is_stale && request.drops_stale_output))
    encoder->let_go(request);
  if (tokens.empty() || (is_stale && request.drops_stale_output)) return;
  const auto num_sampled = static_cast<std::int32_t>(tokens.size());
  if (row.num_spec > 0 && !is_stale) take_back_rejected(request, row.num_spec - (num_sampled - 1));
  if (request.num_outputs_to_drop > 0) {
    --request.num_outputs_to_drop;
    return;
  }
  const bool was_running = request.status == RequestStatus::running;
  FinishReason reason{};
  std::size_t num_kept = 0;
  const bool stops = append_tokens(request, tokens, reason, num_kept);
  if (!is_stale)
    count_output(request, num_sampled, static_cast<std::int32_t>(num_kept), was_running);
  if (!stops) return;
  stopped.push_back({row.id, reason});
  if (!was_running) {
    waiting.remove(row.id, request);
    if (remote != nullptr) remote->remove(row.id, request);
  }
  retire(row.id);
}

// They were counted as computed when they were scheduled.
void Scheduler::Impl::take_back_rejected(Request& request, std::int32_t num_rejected) {
  if (request.num_computed_tokens > 0) request.num_computed_tokens -= num_rejected;
  if (request.num_output_placeholders > 0) request.num_output_placeholders -= num_rejected;
}

// Subtracts sampled tokens from those in flight, and publishes the blocks that they confirm.
void Scheduler::Impl::count_output(Request& request, std::int32_t num_sampled,
                                   std::int32_t num_kept, bool was_running) {
  if (!profile.publishes_with_output) {
    if (!config.async_scheduling) return;
    request.num_output_placeholders -= num_kept;
    LS_CHECK(request.num_output_placeholders >= 0, "request {} has {} placeholders", request.name,
             request.num_output_placeholders);
    if (was_running)
      cache.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders);
    return;
  }
  const bool had_placeholders = request.num_output_placeholders > 0;
  request.num_computed_tokens -=
      num_sampled - num_kept;  // what a stop cut off was never computed for good
  if (had_placeholders) request.num_output_placeholders -= num_sampled;
  LS_CHECK(request.num_output_placeholders >= 0, "request {} has {} placeholders", request.name,
           request.num_output_placeholders);
  if (was_running && (had_placeholders || config.num_spec_tokens > 0))
    cache.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens);
}

void Scheduler::Impl::update_drafts(const ModelOutput& model, std::span<const InFlightRow> rows) {
  if (model.draft_ends.empty()) return;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (requests.generation(rows[i].id) != rows[i].generation) continue;
    Request& request = at(rows[i].id);
    const std::uint32_t begin = i == 0 ? 0 : model.draft_ends[i - 1];
    LS_CHECK(begin <= model.draft_ends[i] && model.draft_ends[i] <= model.draft_tokens.size(),
             "row {} has drafts [{}, {}) of {}", i, begin, model.draft_ends[i],
             model.draft_tokens.size());
    request.spec_tokens.clear();
    if (!request.is_prefill_chunk)
      request.spec_tokens.assign(model.draft_tokens.begin() + begin,
                                 model.draft_tokens.begin() + model.draft_ends[i]);
  }
}

// Ends a request: frees its blocks; the next step reports it.
void Scheduler::Impl::retire(RequestId id) {
  Request& request = at(id);
  if (remote != nullptr) remote->prefilling.erase(id);
  if (encoder) encoder->let_go(request);
  const bool keeps = keeps_blocks(id);
  request.status = RequestStatus::finished;
  if (!keeps) give_back(request);
  LS_CHECK(keeps || !holds_blocks(id), "{} has finished and still holds blocks", request.name);
  requests.end(id);
  finished.push_back(id);
}

// Its end has been reported; unless a connector keeps its blocks, the id is free for others.
void Scheduler::Impl::forget(RequestId id) {
  if (remote != nullptr) {
    const auto held = remote->held.find(id);
    if (held != remote->held.end()) {
      held->second.is_reported = true;
      return;
    }
  }
  LS_CHECK(at(id).status == RequestStatus::finished, "{} is forgotten before its end", at(id).name);
  requests.erase(id);
}

}  // namespace lockstep
