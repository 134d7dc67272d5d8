#include "sim/recording/recorded_terms.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>

#include "base/check.h"
#include "base/number_text.h"

namespace lockstep {

namespace {

std::string_view status_of(RequestStatus status) {
  switch (status) {
    case RequestStatus::waiting:
      return "WAITING";
    case RequestStatus::waiting_for_remote_kvs:
      return "WAITING_FOR_REMOTE_KVS";
    case RequestStatus::preempted:
      return "PREEMPTED";
    case RequestStatus::running:
    case RequestStatus::finished:
      break;
  }
  LS_CHECK(false, "a request of status {} in the queue", static_cast<int>(status));
}

// The engine reports these as sets; recordings hold them sorted.
std::vector<std::string> sorted_names_of(const StepView& view, std::span<const RequestId> ids) {
  std::vector<std::string> names;
  write_names(view, ids, names);
  std::ranges::sort(names);
  return names;
}

void write_pages_of(const StepView& view, RecordedPages& pages) {
  const HostPageCommand& command = view.decision.host_pages;
  pages.transfers = command.transfers;
  pages.all_resident = command.all_resident;
  pages.free_host_blocks = command.num_free_host_blocks;
  for (const HostPageRow& row : command.rows) {
    const std::string name(view.name(row.id));
    if (!row.mirrors.empty()) pages.mirrors.emplace_back(name, row.mirrors);
    if (!row.residency.pages.empty()) pages.residency.emplace_back(name, row.residency);
  }
}

void write_scheduled(const StepView& view, std::size_t index, std::size_t first_spec,
                     std::size_t first_item, RecordedScheduled& scheduled) {
  const SchedulerOutput& decision = view.decision;
  const ScheduledRequest& row = decision.scheduled[index];
  scheduled.id = view.name(row.id);
  scheduled.tokens = row.num_tokens;
  scheduled.is_new = row.is_new;
  scheduled.resumed = row.is_resumed;
  scheduled.computed = row.computed;
  const auto spec = decision.spec_tokens.begin() + static_cast<std::ptrdiff_t>(first_spec);
  scheduled.spec.assign(spec, spec + row.num_spec);
  const auto items = decision.encode.begin() + static_cast<std::ptrdiff_t>(first_item);
  scheduled.encode.assign(items, items + row.num_encoded);
  bool any = row.is_new || row.is_resumed;
  for (std::int32_t g = 0; g < decision.num_groups; ++g) any |= !decision.blocks(index, g).empty();
  if (!any) return;
  BlocksPerGroup& blocks = scheduled.blocks.emplace();
  blocks.reserve(static_cast<std::size_t>(decision.num_groups));
  for (std::int32_t g = 0; g < decision.num_groups; ++g) {
    const auto handed = decision.blocks(index, g);
    blocks.emplace_back(handed.begin(), handed.end());
  }
}

}  // namespace

void write_names(const StepView& view, std::span<const RequestId> ids,
                 std::vector<std::string>& names) {
  names.resize(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) names[i] = view.name(ids[i]);
}

void UnfinishedNames::step(const StepView& view) {
  now_.clear();
  for (const RequestId id : view.decisions.running()) now_.push_back(view.name(id));
  for (const RequestId id : view.decisions.waiting()) now_.push_back(view.name(id));
  for (const SkippedRequest& request : view.decisions.skipped())
    now_.push_back(view.name(request.id));
  if (std::ranges::equal(now_, queued_)) return;
  queued_.assign(now_.begin(), now_.end());
  sorted_ = queued_;
  std::ranges::sort(sorted_);  // another engine's waiting requests include those that it skipped
  const auto repeated = std::ranges::unique(sorted_);
  sorted_.erase(repeated.begin(), repeated.end());
}

void write_decision(const StepView& view, RecordedStep& step) {
  const SchedulerOutput& decision = view.decision;
  step.step = decision.step;
  std::size_t first_spec = 0, first_item = 0;
  step.scheduled.resize(decision.scheduled.size());
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    write_scheduled(view, i, first_spec, first_item, step.scheduled[i]);
    first_spec += static_cast<std::size_t>(decision.scheduled[i].num_spec);
    first_item += static_cast<std::size_t>(decision.scheduled[i].num_encoded);
  }
  step.inputs.free_encoder = decision.free_encoder;
  if (decision.encoder_slots) step.inputs.encoder_slots = {*decision.encoder_slots};
  step.preempted = sorted_names_of(view, decision.preempted);
  step.finished = sorted_names_of(view, decision.finished);
  // The engine reports a set: a name that was free, taken and free again ends once.
  const auto again = std::ranges::unique(step.finished);
  step.finished.erase(again.begin(), again.end());
  step.zero = decision.zero;
  step.copies = decision.copies;
  write_names(view, view.decisions.running(), step.running);
  write_names(view, view.decisions.waiting(), step.waiting);
  step.free_blocks = view.decisions.num_free_blocks();
  if (decision.host_pages.is_told) write_pages_of(view, step.pages.emplace());
}

RecordedTable table_of(const StepView& view, RequestId id) {
  RecordedTable table;
  table.id = view.decisions.name(id);
  table.blocks.reserve(static_cast<std::size_t>(view.decision.num_groups));
  for (std::int32_t g = 0; g < view.decision.num_groups; ++g) {
    const auto blocks = view.decisions.block_table(id, g);
    table.blocks.emplace_back(blocks.begin(), blocks.end());
  }
  return table;
}

std::vector<RecordedTable> tables_of(const StepView& view) {
  std::vector<RecordedTable> tables;
  for (const RequestId id : view.decisions.running()) tables.push_back(table_of(view, id));
  return tables;
}

// Requests that load, as far as the scheduler knows.
static std::vector<RequestId> loading_in(const StepView& view) {
  std::vector<RequestId> loading;
  for (const SkippedRequest& request : view.decisions.skipped())
    if (request.is_loading) loading.push_back(request.id);
  for (const HeldRequest& request : view.decisions.held())
    if (request.is_loading) loading.push_back(request.id);
  return loading;
}

void write_transfers(const StepView& view, const std::set<std::string>& received,
                     RecordedStep& step) {
  std::vector<RecordedSkipped> skipped;
  for (const SkippedRequest& request : view.decisions.skipped())
    skipped.push_back({std::string(view.name(request.id)), std::string(status_of(request.status))});
  if (const auto deferred = view.decisions.deferred()) {
    step.transfers.kv_holding = std::move(skipped);
    step.transfers.deferred = sorted_names_of(view, *deferred);
    step.transfers.loads_within = view.decision.loads_within;
  } else {
    step.skipped = std::move(skipped);
  }
  std::vector<RecordedTable> loading;
  for (const RequestId id : loading_in(view))
    if (!received.contains(std::string(view.decisions.name(id))))
      loading.push_back(table_of(view, id));
  std::ranges::sort(loading, {}, &RecordedTable::id);
  if (!loading.empty()) step.loading = std::move(loading);
}

void write_reset_results(const StepView& view, std::vector<RecordedEvent>& events) {
  std::size_t reset = 0;
  for (RecordedEvent& event : events) {
    if (event.kind != RecordedEvent::Kind::reset_prefix_cache) continue;
    LS_CHECK(reset < view.resets.size(), "{} resets ran, and one more is written down",
             view.resets.size());
    event.reset_succeeded = view.resets[reset++] != 0;
  }
}

void write_cache_events(const StepView& view, RecordedStep& step) {
  for (const CacheEvent& event : view.cache_events) {
    RecordedCacheEvent& told = step.events.emplace_back();
    told.kind = event.kind == CacheEvent::Kind::stored    ? RecordedCacheEvent::Kind::stored
                : event.kind == CacheEvent::Kind::removed ? RecordedCacheEvent::Kind::removed
                                                          : RecordedCacheEvent::Kind::cleared;
    told.group = event.group;
    for (const ExternalBlockHash& hash : event.block_hashes)
      told.block_hashes.push_back(hex_digits(hash));
    if (event.parent) told.parent = hex_digits(*event.parent);
    told.token_ids = event.token_ids;
    told.block_size = event.block_size;
    for (const std::optional<std::string>& salt : event.extra_keys) {
      told.extra_keys.emplace_back();
      if (salt) told.extra_keys.back().push_back({*salt});
    }
  }
}

void write_held_drafts(const StepView& view, RecordedStep& step) {
  if (view.model().num_spec_tokens() == 0) return;
  const auto write = [&](RequestId id) {
    const auto drafts = view.model().drafts(id);
    const bool is_scheduled =
        !drafts.empty() && std::ranges::find(view.decision.scheduled, id, &ScheduledRequest::id) !=
                               view.decision.scheduled.end();
    if (!drafts.empty() && !is_scheduled)
      step.held_drafts.push_back({std::string(view.name(id)), {drafts.begin(), drafts.end()}});
  };
  for (const RequestId id : view.decisions.running()) write(id);
  for (const RequestId id : view.decisions.waiting()) write(id);
  for (const SkippedRequest& skipped : view.decisions.skipped()) write(skipped.id);
  std::ranges::sort(step.held_drafts, {}, &RecordedTokens::id);
}

void write_stale_outputs(const StepView& view, RecordedStep& step) {
  for (const StaleOutputOfStep& stale : view.stale_outputs)
    step.stale_outputs.push_back({.id = std::string(view.name(stale.output.id)),
                                  .of_step = stale.step,
                                  .taken = stale.output.num_taken});
}

void write_outcome(const StepView& view, RecordedStep& step) {
  for (const StoppedRequest& stopped : view.stopped)
    step.stopped.push_back(
        {.id = std::string(view.name(stopped.id)), .reason = std::string(name_of(stopped.reason))});
  step.stored = view.counters.stored;
  step.evicted = view.counters.evicted;
  step.cleared = view.counters.cleared;
}

ExternalHit ConnectorLog::get_num_new_matched_tokens(const ExternalQuery& query) {
  const ExternalHit hit = inner_.get_num_new_matched_tokens(query);
  names_.insert_or_assign(query.request, query.name);
  answers_.push_back({.id = std::string(query.name),
                      .local = query.num_local_tokens,
                      .external = hit.num_tokens,
                      .async = hit.is_async});
  return hit;
}

bool ConnectorLog::request_finished(RequestId request, std::string_view name) {
  const bool keeps = inner_.request_finished(request, name);
  names_.insert_or_assign(request, name);
  if (keeps) held_.emplace_back(name);
  return keeps;
}

void ConnectorLog::finished(const StepView& view, const std::optional<RecordedWorker>& worker) {
  if (worker) received_.insert(worker->received.begin(), worker->received.end());
  if (received_.empty()) return;
  std::set<std::string> unheard;
  for (const RequestId id : loading_in(view))
    if (std::string name(view.decisions.name(id)); received_.contains(name))
      unheard.insert(std::move(name));
  received_ = std::move(unheard);
}

RecordedWorker ConnectorLog::worker(const KVConnectorOutput& report) const {
  const auto names = [&](const std::vector<RequestId>& ids) {
    std::vector<std::string> list;
    for (const RequestId id : ids) {
      const auto name = names_.find(id);
      LS_CHECK(name != names_.end(), "request {} was never queried", index_of(id));
      list.push_back(name->second);
    }
    return list;
  };
  return {.received = names(report.finished_recving),
          .sent = names(report.finished_sending),
          .invalid_blocks = report.invalid_block_ids,
          .failed = names(report.failed_recving),
          .enqueued = report.enqueued,
          .completed = report.completed};
}

namespace {

using Json = nlohmann::ordered_json;

std::string child(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

// Depth first, in the order of the recorded side; keys that only the model has come last.
std::optional<FieldDifference> difference(const std::string& path, const Json& recorded,
                                          const Json& model) {
  if (recorded == model) return std::nullopt;
  if (recorded.is_object() && model.is_object()) {
    for (const auto& [key, value] : recorded.items()) {
      if (!model.contains(key)) return FieldDifference{child(path, key), value.dump(), "absent"};
      if (auto found = difference(child(path, key), value, model[key])) return found;
    }
    for (const auto& [key, value] : model.items())
      if (!recorded.contains(key)) return FieldDifference{child(path, key), "absent", value.dump()};
  }
  if (recorded.is_array() && model.is_array()) {
    for (std::size_t i = 0; i < std::min(recorded.size(), model.size()); ++i)
      if (auto found = difference(fmt::format("{}[{}]", path, i), recorded[i], model[i]))
        return found;
  }
  return FieldDifference{path, recorded.dump(), model.dump()};
}

}  // namespace

void StepTranscript::decided(const RecordedStep& recorded, const StepView& view,
                             ConnectorLog* connector) {
  step_ = {};
  step_.before = recorded.before;
  write_reset_results(view, step_.before);
  write_decision(view, step_);
  if (connector != nullptr) {
    auto answers = connector->take_answers();
    if (!answers.empty()) step_.connector = std::move(answers);
    write_transfers(view, connector->received(), step_);
    if (recorded.skipped && !recorded.transfers.kv_holding && step_.transfers.kv_holding) {
      // Another engine that decides tells of its first queue alone.
      step_.skipped = std::exchange(step_.transfers, {}).kv_holding;
    }
    step_.worker = recorded.worker;
    // What several connectors, or one of the engine's own, made of the scheduler's questions.
    step_.transfers.parts = recorded.transfers.parts;
    step_.transfers.parts_worker = recorded.transfers.parts_worker;
    step_.transfers.parts_held = recorded.transfers.parts_held;
    step_.transfers.offload = recorded.transfers.offload;
  }
  if (recorded.common_prefix_blocks)
    step_.common_prefix_blocks = view.decision.common_prefix_blocks;
  if (has_held_drafts_) write_held_drafts(view, step_);
  step_.during = recorded.during;
  step_.sampled = recorded.sampled;
  step_.drafts = recorded.drafts;
  if (recorded.tables) step_.tables = tables_of(view);
  step_.output_of_step = recorded.output_of_step;
  step_.stale_outputs = recorded.stale_outputs;
  step_.stopped = recorded.stopped;
  step_.held = recorded.held;
  step_.stored = recorded.stored;
  step_.evicted = recorded.evicted;
  step_.cleared = recorded.cleared;
  step_.events = recorded.events;
  step_.facts = recorded.facts;
}

void StepTranscript::take_inputs(const RecordedStep& recorded) {
  step_.worker = recorded.worker;
  step_.during = recorded.during;
  step_.sampled = recorded.sampled;
  step_.drafts = recorded.drafts;
}

void StepTranscript::finished(const StepView& view, ConnectorLog* connector) {
  step_.held.clear();
  if (connector != nullptr) {
    step_.held = connector->take_held();
    connector->finished(view, step_.worker);
  }
  write_reset_results(view, step_.during);
  step_.stopped.clear();
  write_outcome(view, step_);
  step_.stale_outputs.clear();
  if (has_stale_outputs_) write_stale_outputs(view, step_);
  step_.events.clear();
  if (has_cache_events_) write_cache_events(view, step_);
  step_.output_of_step.reset();
  if (view.output_of_step >= 0) step_.output_of_step = view.output_of_step;
}

FieldDifference first_difference(const std::string& recorded_line, const std::string& model_line) {
  const Json recorded = Json::parse(recorded_line);
  const Json model = Json::parse(model_line);
  auto found = difference("", recorded, model);
  LS_CHECK(found.has_value(), "equal lines: {}", recorded_line);
  return *std::move(found);
}

}  // namespace lockstep
