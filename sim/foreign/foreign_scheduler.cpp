#include "sim/foreign/foreign_scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "sim/engine/step_observer.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/run_field_rows.h"

namespace lockstep {
namespace {

std::string lacks(const EngineHello& hello, std::string_view feature) {
  return fmt::format("{}: the engine cannot be asked for {}", hello.engine.text(), feature);
}

// Features that a request asks for.
std::vector<std::string_view> features_of(const RequestSpec& request) {
  std::vector<std::string_view> features;
  if (!request.cache_salt.empty()) features.push_back("cache_salt");
  if (!request.keys.lora.name.empty()) features.push_back("lora");
  if (!request.keys.mm.empty()) features.push_back("mm");
  if (!request.keys.embeds.empty()) features.push_back("embeds");
  if (request.min_tokens > 0) features.push_back("min_tokens");
  if (request.repetition_detection.max_pattern_size > 0) features.push_back("repetition_detection");
  if (request.skip_reading_prefix_cache) features.push_back("skip_reading_prefix_cache");
  return features;
}

// Rows of `tokens` as a recording tells them: those that are not empty.
std::vector<RecordedTokens> tokens_by_request(const std::vector<std::int32_t>& tokens,
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

}  // namespace

std::string missing_feature(const EngineHello& hello, const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  std::vector<std::string> features;
  const auto need = [&](bool needs, std::string feature) {
    if (needs) features.push_back(std::move(feature));
  };
  for (const KVCacheGroupSpec& group : header.groups)
    features.emplace_back(name_of(group.spec.kind));
  need(config.async_scheduling, "async_scheduling");
  need(config.policy == SchedulingPolicy::priority, "priority");
  need(config.num_spec_tokens > 0,
       fmt::format("spec:{}",
                   run_rows::kWordsOf<SpecMethod>[static_cast<std::size_t>(config.spec_method)]));
  need(config.dcp > 1, "dcp");
  need(config.pcp > 1, "pcp");
  need(config.dcp > 1 && std::ranges::any_of(
                             header.groups,
                             [](const KVCacheGroupSpec& group) { return !group.spec.dcp_sharded; }),
       "dcp_sharded");
  need(!config.enable_chunked_prefill, "no_chunked_prefill");
  need(!config.enable_prefix_caching, "no_prefix_caching");
  need(header.connector.has_value(), "connector");
  for (const std::string& feature : features)
    if (!hello.can(feature)) return feature;
  return {};
}

Result<std::unique_ptr<ForeignScheduler>> ForeignScheduler::open(ForeignEngines& engines,
                                                                 const EngineToDecide& to_decide,
                                                                 std::int64_t tables_every) {
  RecordingHeader header =
      header_of_engine(to_decide.engine, to_decide.plan.groups, to_decide.plan.num_blocks);
  const KVTransfer& transfer = to_decide.transfer;
  if (transfer.connector != nullptr)
    connect_engine(header, transfer.kv_load_failure_policy, transfer.connector->traits());
  if (const std::string missing = missing_feature(engines.hello(), header); !missing.empty())
    return fail(lacks(engines.hello(), missing));
  LS_ASSIGN_OR_RETURN(auto engine, engines.take());
  std::unique_ptr<ForeignScheduler> scheduler(
      new ForeignScheduler(std::move(engine), std::move(header), transfer.connector, tables_every));
  std::string refused;
  RecordingHeader& opened = scheduler->header_;
  scheduler->ask(open_message(opened),
                 [&](JsonObject& reply) { refused = read_opened(reply, opened); });
  if (!refused.empty()) return fail(fmt::format("{}: {}", engines.hello().engine.text(), refused));
  scheduler->step_.free_blocks = opened.num_blocks - 1;
  return scheduler;
}

bool ForeignScheduler::ask(const std::string& message,
                           const std::function<void(JsonObject& reply)>& read) {
  if (connector_ == nullptr) return engine_->ask(message, read);
  return engine_->ask(message, read, [this](JsonObject& line) { return answer_connector(line); });
}

std::string ForeignScheduler::answer_connector(JsonObject& line) {
  const ConnectorLine said = read_connector_line(line, header_);
  const RequestId* id = find(said.id);
  if (id == nullptr) {
    engine_->fail_reply(
        fmt::format("the connector is queried for `{}`, which is not a live request", said.id));
    return {};
  }
  switch (said.kind) {
    case ConnectorLine::Kind::matched_tokens: {
      at(*id).has_received = false;  // it may load again
      const ExternalHit hit = connector_->get_num_new_matched_tokens(
          {.request = *id,
           .name = at(*id).name,
           .num_tokens = static_cast<std::int32_t>(at(*id).num_tokens),
           .num_local_tokens = said.tokens,
           .hash_block_size = static_cast<std::int32_t>(header_.hash_block_size)});
      return connector_answer_message(
          {.id = said.id, .local = said.tokens, .external = hit.num_tokens, .async = hit.is_async});
    }
    case ConnectorLine::Kind::finished: {
      const bool keeps = connector_->request_finished(*id, at(*id).name);
      at(*id).is_sending = at(*id).is_sending || keeps;
      return keeps_message(keeps);
    }
    case ConnectorLine::Kind::allocated:
      connector_->update_state_after_alloc(*id, said.blocks, said.tokens);
      return {};
  }
  return {};
}

// Requests: ids and names.

RequestId ForeignScheduler::give_id() {
  if (!free_ids_.empty()) {
    const RequestId id = free_ids_.back();
    free_ids_.pop_back();
    return id;
  }
  requests_.emplace_back();
  return RequestId{static_cast<std::uint32_t>(requests_.size() - 1)};
}

const RequestId* ForeignScheduler::find(const std::string& name) const {
  if (const auto live = live_.find(name); live != live_.end()) return &live->second;
  if (const auto left = left_.find(name); left != left_.end()) return &left->second.back();
  const auto held = held_.find(name);
  return held == held_.end() ? nullptr : &held->second;
}

std::vector<RequestId> ForeignScheduler::ids_of(std::string_view key,
                                                const std::vector<std::string>& names) {
  std::vector<RequestId> ids;
  ids.reserve(names.size());
  for (const std::string& name : names) {
    if (const RequestId* id = find(name)) {
      ids.push_back(*id);
    } else {
      engine_->fail_reply(
          fmt::format("reply:{}: `{}` is no request that was added, or its end has "
                      "been reported",
                      key, name));
    }
  }
  return ids;
}

Result<RequestId> ForeignScheduler::add_request(RequestSpec request) {
  for (const std::string_view feature : features_of(request))
    if (!engine_->hello().can(feature)) return fail(lacks(engine_->hello(), feature));
  std::string refused;
  ask(add_message(request), [&](JsonObject& reply) { refused = read_refusal(reply); });
  if (!refused.empty()) return fail(std::move(refused));
  const RequestId id = give_id();
  live_[request.name] = id;
  at(id) = {.name = std::move(request.name), .num_tokens = request.prompt.size(), .is_live = true};
  waiting_.push_back(id);
  return id;
}

void ForeignScheduler::leave(RequestId id) {
  if (!at(id).is_live) return;
  at(id).is_live = false;
  at(id).is_loading = std::ranges::any_of(skipped_, [&](const SkippedRequest& request) {
    return request.id == id && request.is_loading && !at(id).has_received;
  });
  live_.erase(at(id).name);
  left_[at(id).name].push_back(id);
  std::erase(running_, id);
  std::erase(waiting_, id);
  std::erase_if(skipped_, [&](const SkippedRequest& request) { return request.id == id; });
}

// An id is free once the end is reported and no transfer names it.
void ForeignScheduler::free_if_over(RequestId id) {
  if (!at(id).is_reported) return;
  if (at(id).is_held()) {
    held_[at(id).name] = id;
  } else {
    held_.erase(at(id).name);
    free_ids_.insert(free_ids_.begin(), id);
  }
}

void ForeignScheduler::abort_request(RequestId request) {
  ask(abort_message(at(request).name), [](JsonObject&) {});
  leave(request);
}

void ForeignScheduler::set_pause_state(PauseState state) {
  if (!engine_->hello().can("pause_state"))
    return engine_->fail_reply(lacks(engine_->hello(), "pause_state"));
  ask(pause_message(state), [](JsonObject&) {});
}

bool ForeignScheduler::reset_prefix_cache(bool preempts_running) {
  const std::string_view feature = preempts_running ? "reset_running" : "reset_prefix_cache";
  if (!engine_->hello().can(feature)) {
    engine_->fail_reply(lacks(engine_->hello(), feature));
    return false;
  }
  bool succeeded = false;
  if (ask(reset_message(preempts_running),
          [&](JsonObject& reply) { succeeded = read_reset(reply, header_, step_); }))
    take_state();
  return succeeded;
}

// Steps.

// The queues and counts as the last reply has them.
void ForeignScheduler::take_state() {
  running_ = ids_of("running", step_.running);
  waiting_ = ids_of("waiting", step_.waiting);
  for (const RequestId id : running_) at(id).has_received = false;
  skipped_.clear();
  for (const RecordedSkipped& row : step_.skipped.value_or(std::vector<RecordedSkipped>{})) {
    const bool waits_for_load = row.status == "WAITING_FOR_REMOTE_KVS";
    for (const RequestId id : ids_of("skipped", {row.id}))
      skipped_.push_back({.id = id,
                          .status = waits_for_load ? RequestStatus::waiting_for_remote_kvs
                                    : row.status == "PREEMPTED" ? RequestStatus::preempted
                                                                : RequestStatus::waiting,
                          .is_loading = waits_for_load && !at(id).has_received});
  }
  counters_.stored += std::exchange(step_.stored, 0);
  counters_.evicted += std::exchange(step_.evicted, 0);
  counters_.cleared |= std::exchange(step_.cleared, false);
}

// Ends that the engine reports: of names that are used again, the oldest.
void ForeignScheduler::take_finished() {
  for (const std::string& name : step_.finished) {
    const auto left = left_.find(name);
    if (left == left_.end()) {
      engine_->fail_reply(
          fmt::format("reply:finished: `{}` is not an ended request with a pending report", name));
      continue;
    }
    const RequestId id = left->second.front();
    left->second.pop_front();
    if (left->second.empty()) left_.erase(left);
    output_.finished.push_back(id);
    at(id).is_reported = true;
    free_if_over(id);
  }
}

void ForeignScheduler::take_decision() {
  output_.num_groups = static_cast<std::int32_t>(header_.groups.size());
  for (const RecordedScheduled& row : step_.scheduled) {
    const RequestId* id = find(row.id);
    if (id == nullptr) {
      engine_->fail_reply(fmt::format(
          "reply:scheduled: `{}` is no request that was added, or its end has been reported",
          row.id));
      return;
    }
    output_.scheduled.push_back(
        {.id = *id,
         .num_tokens = row.tokens,
         .computed = row.computed,
         .num_spec = static_cast<std::int32_t>(row.spec.size()),
         .is_new = row.is_new,
         .is_resumed = row.resumed,
         .first_block = static_cast<std::uint32_t>(output_.block_ends.size())});
    for (std::size_t g = 0; g < header_.groups.size(); ++g) {
      if (row.blocks)
        output_.block_ids.insert(output_.block_ids.end(), (*row.blocks)[g].begin(),
                                 (*row.blocks)[g].end());
      output_.block_ends.push_back(static_cast<std::uint32_t>(output_.block_ids.size()));
    }
    output_.spec_tokens.insert(output_.spec_tokens.end(), row.spec.begin(), row.spec.end());
    output_.total_num_scheduled_tokens += row.tokens;
  }
  output_.preempted = ids_of("preempted", step_.preempted);
  if (step_.common_prefix_blocks) output_.common_prefix_blocks = *step_.common_prefix_blocks;
  output_.zero = step_.zero;
  output_.copies = step_.copies;
}

const SchedulerOutput& ForeignScheduler::schedule() {
  const std::int64_t free_blocks = step_.free_blocks;
  step_ = {};
  step_.free_blocks = free_blocks;
  output_ = {};
  output_.step = num_steps_++;
  const bool shows_tables = num_steps_ % tables_every_ == 0;
  for (Request& request : requests_) request.table.clear();
  if (!ask(schedule_message(output_.step, shows_tables),
           [&](JsonObject& reply) { read_decision(reply, header_, step_); }))
    return output_;
  take_finished();
  take_decision();
  take_state();
  for (auto* tables : {&step_.tables, &step_.loading})
    if (*tables)
      for (RecordedTable& table : **tables)
        for (const RequestId id : ids_of("tables", {table.id}))
          at(id).table = std::move(table.blocks);
  if (failure() != nullptr) {
    output_ = {};
    return output_;
  }
  InFlight flight{.step = output_.step, .rows = {}};
  for (const RecordedScheduled& row : step_.scheduled) flight.rows.push_back(row.id);
  const bool is_async = header_.options.config.async_scheduling;
  if (!flight.rows.empty() || (connector_ != nullptr && is_async))
    in_flight_.push_back(std::move(flight));
  return output_;
}

std::span<const StoppedRequest> ForeignScheduler::update_from_output(const ModelOutput& output) {
  stopped_.clear();
  InFlight flight{.step = output_.step, .rows = {}};
  if (!in_flight_.empty()) {
    flight = std::move(in_flight_.front());
    in_flight_.pop_front();
  }
  const auto names_of = [&](const std::vector<RequestId>& ids) {
    std::vector<std::string> list;
    for (const RequestId id : ids) list.push_back(at(id).name);
    return list;
  };
  RecordedStep update;
  update.step = flight.step;
  update.sampled = tokens_by_request(output.tokens, output.token_ends, flight.rows);
  // With steps in flight the worker alone knows the drafts.
  if (!output.draft_ends.empty() && !header_.options.config.async_scheduling)
    update.drafts = tokens_by_request(output.draft_tokens, output.draft_ends, flight.rows);
  const KVConnectorOutput& report = output.kv_connector_output;
  if (!report.empty()) {
    update.worker = {.received = names_of(report.finished_recving),
                     .sent = names_of(report.finished_sending),
                     .invalid_blocks = report.invalid_block_ids};
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
  EngineOutcome outcome;
  if (!ask(update_message(update),
           [&](JsonObject& reply) { outcome = read_outcome(reply, header_, step_); }))
    return stopped_;
  for (const auto& [name, num_tokens] : outcome.num_tokens)
    for (const RequestId id : ids_of("num_tokens", {name})) at(id).num_tokens = num_tokens;
  for (const RecordedStopped& row : step_.stopped) {
    const auto reason = finish_reason_from_name(row.reason);
    const auto live = live_.find(row.id);
    if (!reason || live == live_.end()) {
      engine_->fail_reply(fmt::format("reply:stopped: {} `{}`",
                                      reason ? "no live request" : "no such reason",
                                      reason ? row.id : row.reason));
      return stopped_;
    }
    stopped_.push_back({.id = live->second, .reason = *reason});
    leave(stopped_.back().id);
  }
  take_state();
  return stopped_;
}

std::vector<HeldRequest> ForeignScheduler::held() const {
  std::vector<HeldRequest> held;
  for (std::uint32_t i = 0; i < requests_.size(); ++i)
    if (const Request& request = at(RequestId{i}); request.is_held())
      held.push_back({.id = RequestId{i}, .is_loading = request.is_loading});
  return held;
}

std::span<const BlockId> ForeignScheduler::block_table(RequestId request,
                                                       std::int32_t group) const {
  const BlocksPerGroup& table = at(request).table;
  return table.empty() ? std::span<const BlockId>() : table[static_cast<std::size_t>(group)];
}

DecisionsFactory decisions_of(std::shared_ptr<ForeignEngines> engines, std::int64_t tables_every) {
  return [engines = std::move(engines),
          tables_every](const EngineToDecide& engine) -> Result<std::unique_ptr<DecisionSource>> {
    return ForeignScheduler::open(*engines, engine, tables_every);
  };
}

CacheCounters ForeignScheduler::take_cache_counters() { return std::exchange(counters_, {}); }

}  // namespace lockstep
