#include "sim/foreign/reported_decisions.h"

#include <fmt/format.h>

#include <algorithm>

#include "sim/engine/step_observer.h"

namespace lockstep {

// Returns the rows of `tokens` that are not empty, by request name, as a recording lists them.
static std::vector<RecordedTokens> tokens_by_request(const std::vector<std::int32_t>& tokens,
                                                     const std::vector<std::uint32_t>& ends,
                                                     const std::vector<std::string>& names) {
  std::vector<RecordedTokens> rows;
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (ends[i] > begin)
      rows.push_back({names[i], {tokens.begin() + begin, tokens.begin() + ends[i]}});
    begin = ends[i];
  }
  return rows;
}

ReportedDecisions::ReportedDecisions(std::unique_ptr<StepReporter> reporter, RecordingHeader header,
                                     KVConnector* connector)
    : reporter_(std::move(reporter)), header_(std::move(header)), connector_(connector) {
  // Before the first report; the null block is never free.
  step_.free_blocks = header_.num_blocks - 1;
}

// A KV connector's queries.

std::optional<ExternalHit> ReportedDecisions::matched_tokens(const std::string& name,
                                                             std::int32_t num_local_tokens) {
  const RequestId* id = find(name);
  if (id == nullptr) return std::nullopt;
  at(*id).has_received = false;  // it may load again
  return connector_->get_num_new_matched_tokens(
      {.request = *id,
       .name = at(*id).name,
       .num_tokens = static_cast<std::int32_t>(at(*id).num_tokens),
       .num_local_tokens = num_local_tokens,
       .block_keys = block_keys(*id),
       .hash_block_size = static_cast<std::int32_t>(header_.hash_block_size)});
}

std::optional<bool> ReportedDecisions::request_finished(const std::string& name,
                                                        std::optional<BlocksPerGroup> blocks) {
  const RequestId* id = find(name);
  if (id == nullptr) return std::nullopt;
  if (blocks) at(*id).table = std::move(*blocks);
  const bool keeps = connector_->request_finished(*id, at(*id).name);
  at(*id).is_sending = at(*id).is_sending || keeps;
  return keeps;
}

bool ReportedDecisions::allocated(const std::string& name, std::span<const BlockId> blocks,
                                  std::int32_t num_external_tokens) {
  const RequestId* id = find(name);
  if (id == nullptr) return false;
  connector_->update_state_after_alloc(*id, blocks, num_external_tokens);
  return true;
}

// Requests: ids and names.

RequestId ReportedDecisions::give_id() {
  if (!free_ids_.empty()) {
    const RequestId id = free_ids_.back();
    free_ids_.pop_back();
    return id;
  }
  requests_.emplace_back();
  return RequestId{static_cast<std::uint32_t>(requests_.size() - 1)};
}

const RequestId* ReportedDecisions::find(const std::string& name) const {
  // A name may be reused while its earlier request is not yet reported finished.
  if (const auto live = live_.find(name); live != live_.end()) return &live->second;
  if (const auto left = left_.find(name); left != left_.end()) return &left->second.back();
  const auto held = held_.find(name);
  return held == held_.end() ? nullptr : &held->second;
}

std::vector<RequestId> ReportedDecisions::ids_of(std::string_view key,
                                                 const std::vector<std::string>& names) {
  std::vector<RequestId> ids;
  ids.reserve(names.size());
  for (const std::string& name : names) {
    if (const RequestId* id = find(name))
      ids.push_back(*id);
    else
      reporter_->fail(
          fmt::format("{}: `{}` was never added, or its end has been reported", key, name));
  }
  return ids;
}

Result<RequestId> ReportedDecisions::add_request(RequestSpec request) {
  LS_RETURN_IF_ERROR(reporter_->add(request));
  const RequestId id = give_id();
  std::optional<KnownTokens> known;
  if (connector_ != nullptr && header_.options.config.enable_prefix_caching)
    extend_keys(known.emplace(
        KnownTokens{TokenSequence(request.prompt), request.cache_salt, request.keys}));
  live_[request.name] = id;
  Request& added = at(id);
  added = {.name = std::move(request.name),
           .first_step = num_steps_,
           .num_tokens = request.prompt.size(),
           .is_live = true,
           .known = std::move(known)};
  for (const PromptItem& item : request.keys.mm) added.item_rows.push_back(item.num_rows());
  waiting_.push_back(id);
  return id;
}

// With a connector the engine has no hash lookahead (beside_connector()).
void ReportedDecisions::extend_keys(KnownTokens& known) const {
  const HashRule rule{.hash_block_size = static_cast<std::int32_t>(header_.hash_block_size)};
  known.hashes.extend(rule, known.tokens, known.cache_salt, known.keys);
}

// Prompt and accepted output. Only an end, a reset, a step in flight or a lost block drops samples.
void ReportedDecisions::check_counts(const StepReporter::TokenCounts& counts,
                                     const RecordedStep& output) {
  const bool may_drop = header_.options.config.async_scheduling || connector_ != nullptr ||
                        output.step < reset_before_;
  const auto sampled_of = [&](const std::string& name) {
    const auto row = std::ranges::find(output.sampled, name, &RecordedTokens::id);
    return row == output.sampled.end() ? 0 : std::ssize(row->tokens);
  };
  for (const auto& [name, num_tokens] : counts.num_tokens) {
    const auto live = live_.find(name);
    if (live == live_.end() || at(live->second).first_step > output.step) continue;
    const std::int64_t before = at(live->second).num_tokens, most = before + sampled_of(name);
    const bool ends = std::ranges::count(step_.stopped, name, &RecordedStopped::id) > 0;
    const std::int64_t least = may_drop || ends ? before : most;
    if (num_tokens < least || num_tokens > most)
      reporter_->fail(fmt::format("num_tokens: `{}` has {}; expected {}, its prompt and output",
                                  name, num_tokens, most));
  }
  for (const RecordedTokens& row : output.sampled) {
    const auto live = live_.find(row.id);
    if (live == live_.end() || at(live->second).first_step > output.step) continue;
    if (std::ranges::find(counts.num_tokens, row.id,
                          &std::pair<std::string, std::int64_t>::first) == counts.num_tokens.end())
      reporter_->fail(fmt::format("num_tokens: `{}` has sampled, and is not listed", row.id));
  }
}

// An engine may drop sampled tokens, but only the last ones of an output, or all of them.
void ReportedDecisions::take_tokens(RequestId id, std::int64_t num_tokens,
                                    const std::vector<RecordedTokens>& sampled) {
  Request& request = at(id);
  request.num_tokens = num_tokens;
  if (!request.known) return;
  const auto row = std::ranges::find(sampled, request.name, &RecordedTokens::id);
  if (row == sampled.end()) return;
  for (const std::int32_t token : row->tokens)
    if (request.known->tokens.size() < num_tokens) request.known->tokens.append(token);
  extend_keys(*request.known);
}

void ReportedDecisions::leave(RequestId id) {
  if (!at(id).is_live) return;
  at(id).is_live = false;
  // A load in flight keeps the blocks of a finished request until its report.
  at(id).is_loading = std::ranges::any_of(skipped_, [&](const SkippedRequest& request) {
    return request.id == id && request.is_loading && !at(id).has_received;
  });
  live_.erase(at(id).name);
  left_[at(id).name].push_back(id);
  std::erase(running_, id);
  std::erase(waiting_, id);
  std::erase_if(skipped_, [&](const SkippedRequest& request) { return request.id == id; });
  free_if_over(id);
}

// An id is free once the end is reported and no transfer names it. The blocks are free at once: a
// host tier must not store them.
void ReportedDecisions::free_if_over(RequestId id) {
  if (!at(id).is_live && !at(id).is_held()) at(id).table.clear();
  if (!at(id).is_reported) return;
  if (at(id).is_held()) {
    held_[at(id).name] = id;
  } else {
    held_.erase(at(id).name);
    // Front in, back out: an id is reused as late as possible.
    free_ids_.insert(free_ids_.begin(), id);
  }
}

void ReportedDecisions::abort_request(RequestId request) {
  reporter_->abort_request(at(request).name);
  leave(request);
}

bool ReportedDecisions::reset_prefix_cache(bool preempts_running) {
  const auto succeeded = reporter_->reset_prefix_cache(preempts_running, step_);
  if (preempts_running) reset_before_ = num_steps_;
  if (preempts_running)
    for (const RequestId id : running_) {
      at(id).table.clear();
      at(id).preempted_in = num_steps_;
    }
  if (succeeded) take_state();
  return succeeded.value_or(false);
}

// Steps.

// The queues and counts as reported last.
void ReportedDecisions::take_state() {
  running_ = ids_of("running", step_.running);
  waiting_ = ids_of("waiting", step_.waiting);
  for (const RequestId id : running_) at(id).has_received = false;
  skipped_.clear();
  // Releases that keep requests with blocks apart report only those: SkippedRequest.
  const auto& skipped = step_.skipped ? step_.skipped : step_.transfers.kv_holding;
  for (const RecordedSkipped& row : skipped.value_or(std::vector<RecordedSkipped>{})) {
    const bool waits_for_load = row.status == "WAITING_FOR_REMOTE_KVS";
    for (const RequestId id : ids_of("skipped", {row.id}))
      skipped_.push_back({.id = id,
                          .status = waits_for_load ? RequestStatus::waiting_for_remote_kvs
                                    : row.status == "PREEMPTED" ? RequestStatus::preempted
                                                                : RequestStatus::waiting,
                          .is_loading = waits_for_load && !at(id).has_received});
  }
  // Counted once: a step reports counts at the decision and again after its output.
  counters_.stored += std::exchange(step_.stored, 0);
  counters_.evicted += std::exchange(step_.evicted, 0);
  counters_.cleared |= std::exchange(step_.cleared, false);
}

// Reported ends: of names that are used again, the oldest.
void ReportedDecisions::take_finished() {
  for (const std::string& name : step_.finished) {
    const auto left = left_.find(name);
    if (left == left_.end()) {
      reporter_->fail(
          fmt::format("finished: `{}` is not an ended request with a pending report", name));
      continue;
    }
    // The oldest request of that name: ends are reported in order.
    const RequestId id = left->second.front();
    left->second.pop_front();
    if (left->second.empty()) left_.erase(left);
    output_.finished.push_back(id);
    at(id).is_reported = true;
    free_if_over(id);
  }
}

// False: no request has its name.
bool ReportedDecisions::take_row(const RecordedScheduled& row) {
  const RequestId* id = find(row.id);
  if (id == nullptr) {
    reporter_->fail(
        fmt::format("scheduled: `{}` was never added, or its end has been reported", row.id));
    return false;
  }
  ScheduledRequest& scheduled = output_.scheduled.emplace_back(
      ScheduledRequest{.id = *id,
                       .num_tokens = row.tokens,
                       .computed = row.computed,
                       .num_spec = static_cast<std::int32_t>(row.spec.size()),
                       .is_new = row.is_new,
                       .is_resumed = row.resumed,
                       .first_block = static_cast<std::uint32_t>(output_.block_ends.size())});
  BlocksPerGroup& table = at(*id).table;
  // New and resumed rows have all blocks of the request, other rows only the added ones.
  if (row.is_new || row.resumed) table.clear();
  table.resize(header_.groups.size());
  for (std::size_t g = 0; g < header_.groups.size(); ++g) {
    if (row.blocks) {
      const std::vector<BlockId>& handed = (*row.blocks)[g];
      output_.block_ids.insert(output_.block_ids.end(), handed.begin(), handed.end());
      table[g].insert(table[g].end(), handed.begin(), handed.end());
    }
    output_.block_ends.push_back(static_cast<std::uint32_t>(output_.block_ids.size()));
  }
  output_.spec_tokens.insert(output_.spec_tokens.end(), row.spec.begin(), row.spec.end());
  output_.total_num_scheduled_tokens += row.tokens;
  for (const std::int32_t item : row.encode) {
    const std::vector<std::int32_t>& rows = at(*id).item_rows;
    if (item < 0 || static_cast<std::size_t>(item) >= rows.size()) {
      reporter_->fail(fmt::format("scheduled: `{}` has no item {}", row.id, item));
      return false;
    }
    output_.encode.push_back(item);
    ++scheduled.num_encoded;
    scheduled.num_encoder_rows += rows[static_cast<std::size_t>(item)];
  }
  return true;
}

void ReportedDecisions::take_decision() {
  output_.num_groups = static_cast<std::int32_t>(header_.groups.size());
  output_.preempted = ids_of("preempted", step_.preempted);
  // A preempted request has no blocks; a resumed one reports its table again.
  for (const RequestId id : output_.preempted) {
    at(id).table.clear();
    // SGLang's tree has replaced blocks of a request that keeps running: docs/engines.md.
    if (step_.runs(at(id).name))
      output_.replaced.push_back(id);
    else
      at(id).preempted_in = output_.step;
  }
  for (const RecordedScheduled& row : step_.scheduled)
    if (!take_row(row)) return;
  if (step_.common_prefix_blocks) output_.common_prefix_blocks = *step_.common_prefix_blocks;
  output_.zero = step_.zero;
  output_.copies = step_.copies;
  output_.free_encoder = step_.inputs.free_encoder;
  if (!step_.inputs.encoder_slots.empty())
    output_.encoder_slots = step_.inputs.encoder_slots.front();
  output_.loads_within = step_.transfers.loads_within;
  take_pages();
}

void ReportedDecisions::take_pages() {
  if (!step_.pages) return;
  HostPageCommand& command = output_.host_pages;
  command = {.is_told = true,
             .transfers = step_.pages->transfers,
             .all_resident = step_.pages->all_resident,
             .num_free_host_blocks = step_.pages->free_host_blocks};
  const auto of = [](const auto& lists, const std::string& name) {
    for (const auto& [request, list] : lists)
      if (request == name) return list;
    return decltype(lists.front().second){};
  };
  for (const ScheduledRequest& scheduled : output_.scheduled)
    command.rows.push_back({.id = scheduled.id,
                            .mirrors = of(step_.pages->mirrors, at(scheduled.id).name),
                            .residency = of(step_.pages->residency, at(scheduled.id).name)});
}

void ReportedDecisions::take_tables() {
  // Between two reports of all tables, only the added blocks are known.
  for (Request& request : requests_) request.is_shown = false;
  for (auto* tables : {&step_.tables, &step_.loading}) {
    if (!*tables) continue;
    for (RecordedTable& table : **tables)
      for (const RequestId id :
           ids_of(tables == &step_.loading ? "loading" : "tables", {table.id})) {
        at(id).table = std::move(table.blocks);
        at(id).is_shown = true;
      }
  }
}

// A live request that loads waits for it: an engine that queues it elsewhere may run it too early.
void ReportedDecisions::check_loads() {
  if (!step_.loading || !(step_.skipped || step_.transfers.kv_holding)) return;
  for (const RecordedTable& table : *step_.loading) {
    const RequestId* id = find(table.id);
    if (id == nullptr || !at(*id).is_live || at(*id).has_received) continue;
    const auto waits = std::ranges::find(skipped_, *id, &SkippedRequest::id);
    if (waits == skipped_.end() || !waits->is_loading)
      reporter_->fail(fmt::format(
          "loading: `{}` is not in `skipped` with the status WAITING_FOR_REMOTE_KVS", table.id));
  }
}

// Applies the transfers of the previous recorded step: requests whose blocks the connector kept,
// and transfers that ended.
void ReportedDecisions::take_transfers() {
  const auto ended = [&](const std::string& name, bool Request::*transfer) {
    const RequestId* found = find(name);
    if (found == nullptr) return;
    const RequestId id = *found;
    at(id).*transfer = false;
    free_if_over(id);
  };
  for (const std::string& name : step_.held)
    if (const RequestId* id = find(name)) at(*id).is_sending = true;
  if (!step_.worker) return;
  for (const std::string& name : step_.worker->received) {
    if (const RequestId* id = find(name)) at(*id).has_received = true;
    ended(name, &Request::is_loading);
  }
  for (const std::string& name : step_.worker->sent) ended(name, &Request::is_sending);
}

const SchedulerOutput& ReportedDecisions::schedule() {
  // Reports of a step take effect before the next decision: step_ still holds the previous step.
  take_transfers();
  // A step that the reporter fails to decide keeps the last count.
  const std::int64_t free_blocks = step_.free_blocks;
  step_ = {};
  step_.free_blocks = free_blocks;
  output_ = {};
  output_.step = num_steps_++;
  if (!reporter_->decide(output_.step, step_)) return output_;
  take_finished();
  for (const RecordedConnectorAnswer& answer :
       step_.connector.value_or(std::vector<RecordedConnectorAnswer>()))
    if (const RequestId* id = find(answer.id)) at(*id).has_received = false;  // it may load again
  take_decision();
  take_state();
  take_tables();
  check_loads();
  if (failure() != nullptr) {
    output_ = {};
    return output_;
  }
  InFlight flight{.step = output_.step, .rows = {}};
  for (const RecordedScheduled& row : step_.scheduled) flight.rows.push_back(row.id);
  const bool is_async = header_.options.config.async_scheduling;
  // The same rule as OutputsInFlight in sim/engine/live_requests.h.
  if (!flight.rows.empty() || (header_.connector && is_async))
    in_flight_.push_back(std::move(flight));
  return output_;
}

void ReportedDecisions::take_report(const KVConnectorOutput& report, RecordedStep& output) {
  if (report.empty()) return;
  const auto names_of = [&](const std::vector<RequestId>& ids) {
    std::vector<std::string> list;
    for (const RequestId id : ids) list.push_back(at(id).name);
    return list;
  };
  output.worker = {.received = names_of(report.finished_recving),
                   .sent = names_of(report.finished_sending),
                   .invalid_blocks = report.invalid_block_ids,
                   .failed = names_of(report.failed_recving)};
  for (const RequestId id : report.finished_recving) {
    at(id).is_loading = false;
    at(id).has_received = true;
    free_if_over(id);
  }
  for (const RequestId id : report.finished_sending) {
    at(id).is_sending = false;
    free_if_over(id);
  }
}

std::span<const StoppedRequest> ReportedDecisions::update_from_output(const ModelOutput& output) {
  stopped_.clear();
  stale_outputs_.clear();
  InFlight flight{.step = output_.step, .rows = {}};
  if (!in_flight_.empty()) {
    flight = std::move(in_flight_.front());
    in_flight_.pop_front();
  }
  RecordedStep reported;
  reported.step = flight.step;
  reported.sampled = tokens_by_request(output.tokens, output.token_ends, flight.rows);
  // With asynchronous scheduling, only the worker has the drafts.
  if (!output.draft_ends.empty() && !header_.options.config.async_scheduling)
    reported.drafts = tokens_by_request(output.draft_tokens, output.draft_ends, flight.rows);
  take_report(output.kv_connector_output, reported);
  for (const RecordedTokens& row : reported.sampled) {
    const auto live = live_.find(row.id);
    if (live == live_.end()) continue;
    const Request& request = at(live->second);
    if (request.first_step <= flight.step && request.preempted_in > flight.step)
      stale_outputs_.push_back({live->second, static_cast<std::int32_t>(-request.num_tokens)});
  }
  StepReporter::TokenCounts counts;
  if (!reporter_->update(reported, step_, counts)) return stopped_;
  if (counts.are_claims) check_counts(counts, reported);
  for (const auto& [name, num_tokens] : counts.num_tokens)
    for (const RequestId id : ids_of("num_tokens", {name}))
      take_tokens(id, num_tokens, reported.sampled);
  for (StaleOutput& stale : stale_outputs_)
    stale.num_taken += static_cast<std::int32_t>(at(stale.id).num_tokens);
  for (const RecordedStopped& row : step_.stopped) {
    const auto reason = from_name<FinishReason>(row.reason);
    const auto live = live_.find(row.id);
    // SGLang runs an aborted request for one more step and reports its end with that output.
    if (live == live_.end() && reason == FinishReason::abort && left_.contains(row.id)) continue;
    if (!reason || live == live_.end()) {
      reporter_->fail(fmt::format("stopped: {} `{}`", reason ? "no live request" : "no such reason",
                                  reason ? row.id : row.reason));
      return stopped_;
    }
    stopped_.push_back({.id = live->second, .reason = *reason});
    leave(stopped_.back().id);
  }
  take_state();
  return stopped_;
}

std::vector<HeldRequest> ReportedDecisions::held() const {
  std::vector<HeldRequest> held;
  for (std::uint32_t i = 0; i < requests_.size(); ++i)
    if (const Request& request = at(RequestId{i}); request.is_held())
      held.push_back({.id = RequestId{i}, .is_loading = request.is_loading});
  return held;
}

std::span<const BlockKey> ReportedDecisions::block_keys(RequestId request) const {
  const std::optional<KnownTokens>& known = at(request).known;
  return known ? known->hashes.keys() : std::span<const BlockKey>();
}

std::span<const BlockId> ReportedDecisions::block_table(RequestId request,
                                                        std::int32_t group) const {
  const BlocksPerGroup& table = at(request).table;
  const auto of_group = static_cast<std::size_t>(group);
  return of_group < table.size() ? std::span<const BlockId>(table[of_group])
                                 : std::span<const BlockId>();
}

}  // namespace lockstep
