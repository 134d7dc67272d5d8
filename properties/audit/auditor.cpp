#include "properties/audit/auditor.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace lockstep {

std::span<const std::int32_t> sampled_of(const RecordedStep& step, const std::string& name) {
  const auto found = std::ranges::find(step.sampled, name, &RecordedTokens::id);
  if (found == step.sampled.end()) return {};
  return found->tokens;
}

Auditor::Auditor(const RecordingHeader& header, AuditScope scope, AuditedRules rules)
    : core_(header, scope, rules),
      hits_(core_),
      counted_hits_(core_.setup.has_connector ? nullptr : &hits_),
      blocks_(core_, header),
      tokens_(core_, blocks_, counted_hits_),
      transfers_(core_, blocks_, tokens_),
      outputs_(core_, blocks_, header),
      drafts_(core_, tokens_, header),
      sessions_(core_, outputs_, drafts_),
      inputs_(core_, outputs_, header),
      names_ends_(core_.setup.names_ends()) {
  if (has_states(header.groups)) states_.emplace(core_, tokens_, counted_hits_);
  if (header.has_cache_events && core_.setup.checks_rules()) events_.emplace(core_);
  if (header.worker_facts) facts_.emplace(core_, blocks_);
  if (rules == AuditedRules::all && core_.setup.checks_rules())
    policy_.emplace(core_, transfers_, header);
}

std::vector<std::string> Auditor::not_checked() const {
  std::vector<std::string> not_checked;
  if (!outputs_.shows_queues())
    not_checked.emplace_back("the queue of each request: the recording does not list its queues");
  if (!outputs_.lists_ends())
    not_checked.emplace_back("ends by a stop token: some requests list no `eos`, `stop_token_ids`");
  if (!untold_.empty())
    not_checked.emplace_back("whether a client is notified of each end: no step lists `stopped`");
  if (!blocks_.adds_up_blocks())
    not_checked.emplace_back("lost blocks: no step shows all blocks that are held and free");
  if (drafts_.meets_digest())
    not_checked.emplace_back(
        "drafts after some hits: a digest covers several of the next tokens' embeddings");
  if (policy_ && counted_hits_ != nullptr && core_.setup.profile == nullptr)
    not_checked.emplace_back("whether hits are lost without a reason: the engine has no profile");
  return not_checked;
}

void Auditor::step(const RecordedStep& step) {
  core_.findings.begin_step(step.step);
  const std::int64_t last_output_before = core_.last_output;
  take_events(step, step.before);
  preempt(step);
  if (policy_) policy_->check_victims(step);
  for (const std::string& name : step.finished)
    if (outputs_.check_end(name)) {
      check_told(*core_.requests.find(name));
      transfers_.release(step, name);
    }
  transfers_.begin(step);
  blocks_.begin(step);

  std::vector<AuditRow>& rows = rows_;
  rows.clear();
  for (const RecordedScheduled& scheduled : step.scheduled)
    if (auto row = make_row(step, scheduled)) rows.push_back(std::move(*row));
  for (const KVCacheBlockCopy& copy : step.copies) core_.pool.copy(copy.from, copy.to);
  for (const AuditRow& row : rows) hits_.check_allowed(row);
  transfers_.step(step);
  if (policy_) policy_->check_adapters(step);
  const std::int64_t num_encoded = inputs_.run_encoder(step);
  if (policy_) policy_->check_encoder(num_encoded, inputs_.num_rows_held());
  inputs_.step(rows);
  transfers_.void_rows(step, rows);
  if (states_)
    for (const AuditRow& row : rows) states_->begin(row);
  if (facts_) facts_->step(step, rows);
  for (std::size_t g = 0; g < core_.setup.groups.size(); ++g) run_group(step, rows, g);
  if (core_.setup.checks_rules()) check_step(step);

  take_samples(step, rows);
  if (events_) events_->step(step, rows);
  drafts_.end(step, rows);
  inputs_.end(step);
  take_events(step, step.during);
  outputs_.end(step, last_output_before);
  take_outputs(step);
  core_.last_output = core_.setup.config.async_scheduling
                          ? step.output_of_step.value_or(core_.last_output)
                          : step.step;
}

void Auditor::end(const RecordingEnd& end) {
  core_.findings.begin_step(-1);
  blocks_.end();
  outputs_.end();
  for (const std::string& name : end.unfinished)
    if (core_.requests.find(name) == nullptr)
      core_.findings.report(
          AuditRule::recording, name,
          fmt::format("the end line lists {} as unfinished, but no live request has this name",
                      name));
  if (!end.failed_check.empty())
    core_.findings.report(AuditRule::recording, {},
                          fmt::format("the run ended after the last step by {}: {}",
                                      end.failed_check, end.failed_what));
  if (policy_ && !end.is_cut_off) policy_->end();
  if (policy_ && counted_hits_ != nullptr) hits_.end();
}

void Auditor::take_events(const RecordedStep& step, const std::vector<RecordedEvent>& events) {
  const std::int64_t first_step = step.step + (&events == &step.during ? 1 : 0);
  for (const RecordedEvent& event : events) take_event(step, event, first_step);
}

void Auditor::take_event(const RecordedStep& step, const RecordedEvent& event,
                         std::int64_t first_step) {
  using Kind = RecordedEvent::Kind;
  if (policy_) policy_->begin(event);
  if (event.kind == Kind::output) core_.last_output = event.output_of_step;
  if (event.resets_running) reset_running();
  hits_.begin(event, first_step);
  inputs_.begin(event);
  if (event.kind == Kind::chunk || event.kind == Kind::close) sessions_.begin(event);
  AuditRequest* const same =
      core_.requests.find(event.kind == Kind::add ? event.request.name : event.name);
  if (event.kind == Kind::abort && same != nullptr) same->has_ended = true;
  if (event.kind != Kind::add) return;
  // A name is free once its request has ended; the next step reports that end to the worker.
  if (same != nullptr && same->has_ended && !same->has_left) {
    outputs_.expect_end(event.request.name);
    transfers_.release(step, event.request.name);
  }
  add(event, first_step);
}

// The engine refuses a request that is too long, and never schedules it.
void Auditor::add(const RecordedEvent& event, std::int64_t first_step) {
  if (event.request.prompt.size() > core_.setup.config.max_model_len) return;
  const AuditRequest* same = core_.requests.find(event.request.name);
  if (same != nullptr && !same->has_left)
    core_.findings.report(AuditRule::recording, event.request.name,
                          "two live requests have this name");
  const AuditRequest& request =
      core_.requests.add(event.request, core_.setup.groups.size(),
                         [&](const auto& visit) { core_.pool.for_each_request(visit); });
  core_.findings.begin(request);
  blocks_.begin(request);
  transfers_.begin(request);
  outputs_.begin(request, event, first_step);
  drafts_.begin(request);
  sessions_.begin(request, event);
  inputs_.begin(request, event.needs_grammar);
  hits_.begin(request, !event.request.skip_reading_prefix_cache);
  if (states_) states_->begin(request);
  if (policy_) policy_->begin(request, event.request.priority);
  scheduled_in_.begin(request) = -1;
  ends_.begin(request);
}

// Running requests release their blocks, and the engine drops their output in flight.
void Auditor::reset_running() {
  for (auto& [name, request] : core_.requests) {
    if (!request.running || request.has_ended) continue;
    request.running = false;
    request.is_reset = true;
    for (auto& table : request.tables) table.clear();
    drafts_.drop(request);
    outputs_.reset(request);
  }
}

void Auditor::preempt(const RecordedStep& step) {
  for (const std::string& name : step.preempted) {
    AuditRequest* const request = core_.requests.find(name);
    check_preempted(name, request);
    if (request == nullptr) continue;
    request->running = request->is_reset = false;
    request->preempted_in = step.step;
    drafts_.drop(*request);
    for (auto& table : request->tables) table.clear();
  }
  // Newer releases report the requests that a reset has preempted in the next step.
  const bool reports_resets =
      core_.setup.names_ends() &&
      core_.setup.profile->in_flight_accounting == InFlightAccounting::tokens;
  for (auto& [name, request] : core_.requests)
    if (std::exchange(request.is_reset, false) && reports_resets && !request.has_ended)
      core_.findings.report(
          AuditRule::queues, name,
          "was preempted by a reset, and the worker is not notified: it keeps its row", "reset");
}

void Auditor::check_told(const AuditRequest& request) {
  if (!core_.setup.is_recording() || request.has_ended || request.has_left) return;
  untold_.push_back(
      {.rule = AuditRule::queues,
       .step = core_.findings.step(),
       .request = request.name,
       .what = fmt::format("is reported finished after {} of its {} tokens, and neither an output "
                           "nor its client has ended it: no client is notified",
                           request.computed, request.tokens.size())});
  if (names_ends_) report_untold();
}

void Auditor::report_untold() {
  for (AuditFinding& finding : std::exchange(untold_, {})) {
    std::string cause = core_.findings.cause_of(finding.rule, finding.request, {});
    core_.findings.add(std::move(finding), std::move(cause));
  }
}

// True if the engine runs a request though it has handled the end.
bool Auditor::is_past_end(const RecordedStep& step, const AuditRequest& request) {
  if (!request.has_ended || !core_.setup.is_recording()) return false;
  std::int64_t& handled_in = ends_[request].handled_in;
  if (handled_in < 0) handled_in = step.step;
  return core_.setup.profile != nullptr || handled_in <= core_.last_output;
}

// True if the request has ended and should be among the finished ones. With a connector, engines
// without a profile may report it after its blocks are sent.
bool Auditor::keeps_row(const RecordedStep& step, const AuditRequest& request) const {
  if (!request.has_ended || request.has_left || !core_.setup.is_recording()) return false;
  if (core_.setup.profile != nullptr) return true;
  const std::int64_t handled_in = ends_[request].handled_in;
  return !core_.setup.has_connector && handled_in >= 0 && step.step >= handled_in + 2 &&
         scheduled_in_[request] <= core_.last_output;
}

void Auditor::check_preempted(const std::string& name, const AuditRequest* request) {
  if (!core_.setup.is_recording()) return;
  if (request == nullptr || request->has_left)
    core_.findings.report(AuditRule::queues, name,
                          "is preempted, and no live request has this name", "unknown");
  else if (core_.setup.profile != nullptr && !request->running && !request->is_reset)
    core_.findings.report(AuditRule::queues, name, "is preempted, and does not run", "preempted");
}

// Of several outputs after one step, one may be received before the client disconnects.
void Auditor::check_stopped_once(const RecordedStep& step, const std::string& name,
                                 const AuditRequest* request) {
  const bool is_sure =
      std::ranges::count(step.during, RecordedEvent::Kind::output, &RecordedEvent::kind) == 0;
  const bool is_again =
      core_.setup.names_ends()
          ? request == nullptr || request->has_ended || request->has_left
          : core_.setup.is_recording() && request != nullptr && ends_[*request].is_stopped;
  if (is_sure && is_again)
    core_.findings.report(AuditRule::queues, name, "is ended by an output, and had ended before",
                          "stopped");
}

// A request is new to the worker in its first row, when it is resumed after a preemption or a
// reset, and with each chunk of a session.
void Auditor::check_start(const RecordedScheduled& scheduled, const AuditRequest& request,
                          bool is_first) {
  const auto report = [&](AuditRule rule, std::string what) {
    core_.findings.report(rule, request.name, std::move(what));
  };
  if (!scheduled.is_new && !request.running && request.preempted_in >= 0)
    report(AuditRule::handed_out,
           fmt::format("was preempted in step {} and is handed over like one that runs: the worker "
                       "appends to the blocks that it had",
                       request.preempted_in));
  else if (!scheduled.is_new && !request.running)
    report(AuditRule::starts, "its row is not new, and the worker has no blocks of it");
  else if (scheduled.is_new && request.running)
    report(AuditRule::starts, "its row is new, and it runs: no step reports that it was preempted");
  else if (scheduled.resumed && request.running)
    report(AuditRule::starts,
           "its row is resumed, and it runs: the worker would replace its table");
  else if (scheduled.resumed && is_first)
    report(AuditRule::starts, "its first row is resumed: the worker never had it");
  else if (scheduled.is_new && !scheduled.resumed && !is_first && !request.is_between_chunks)
    report(AuditRule::starts, "was preempted, and its row is new without being resumed");
}

std::optional<AuditRow> Auditor::make_row(const RecordedStep& step,
                                          const RecordedScheduled& scheduled) {
  FindingList& findings = core_.findings;
  AuditRequest* const live = core_.requests.find(scheduled.id);
  if (live == nullptr || live->has_left) {
    findings.report(AuditRule::scheduled_tokens, scheduled.id, "a finished request is scheduled");
    return {};
  }
  AuditRequest& request = *live;
  if (is_past_end(step, request))
    findings.report(AuditRule::scheduled_tokens, request.name,
                    "is scheduled, and an output or its client has ended it", "ended");
  const std::int64_t scheduled_before = std::exchange(scheduled_in_[request], step.step);
  if (scheduled_before == step.step) {
    findings.report(AuditRule::scheduled_tokens, request.name, "scheduled twice in one step");
    return {};
  }
  outputs_.check_limit(request);
  inputs_.check_grammar(request);
  check_start(scheduled, request, scheduled_before < 0);
  const bool was_loaded = request.transfer == Transfer::loaded;
  const bool was_running = request.running && !scheduled.is_new;
  const bool is_session_again = request.is_between_chunks;
  fill_table(step, scheduled, request);
  AuditRow row;
  row.request = &request;
  row.first = scheduled.computed;
  // The engine counts drafts in flight as computed; the worker starts after the accepted ones. A
  // count beyond the previous row skips tokens.
  if (core_.setup.has_drafts_in_flight() && !scheduled.is_new &&
      (row.first <= outputs_.take_count(request) || request.is_unpredictable))
    row.first = std::min(row.first, request.computed);
  row.last = row.first + scheduled.tokens;
  row.counted_to = request.counted_to = scheduled.computed + scheduled.tokens;
  row.num_spec = static_cast<std::int32_t>(scheduled.spec.size());
  row.spec = scheduled.spec;
  row.sampled = sampled_of(step, scheduled.id);
  blocks_.reserve(request, row.counted_to);
  if (transfers_.is_dropped(step, scheduled, request)) return {};
  if (row.num_spec >= scheduled.tokens) {
    request.is_unpredictable = true;
    findings.report(AuditRule::scheduled_tokens, request.name,
                    scheduled.tokens == 0
                        ? "its row schedules 0 tokens"
                        : fmt::format("{} drafts are to be verified in a step of {} tokens",
                                      row.num_spec, scheduled.tokens));
    return {};
  }
  const auto known = static_cast<std::int32_t>(request.tokens.size());
  if (row.last > known + row.num_spec || row.first > known) {
    request.is_unpredictable = true;
    outputs_.report_unknown_tokens(row);
    return {};
  }
  if (was_running) blocks_.check_progress_of(row);
  blocks_.check_size(row);
  drafts_.step(scheduled, request);
  blocks_.check_draft_slots(scheduled, row, was_loaded);
  if (scheduled.is_new && !is_session_again) {
    row.num_hit = scheduled.computed;
    if (!was_loaded) row.num_local_hit = transfers_.num_hit(step, scheduled, request);
  }
  fill_contents(scheduled, row);
  return row;
}

// The worker receives the request's blocks. A new request starts after its hit and its load.
void Auditor::fill_table(const RecordedStep& step, const RecordedScheduled& scheduled,
                         AuditRequest& request) {
  const std::int32_t hit = transfers_.num_hit(step, scheduled, request);
  const std::int32_t loaded_to = KvTransferLedger::loaded_to(step, scheduled);
  if (scheduled.is_new) {
    const bool is_session_again = std::exchange(request.is_between_chunks, false);
    request.computed = scheduled.computed;
    outputs_.ends_of(request).rejected_in.clear();
    blocks_.restart(request, scheduled.computed, is_session_again);
    if (states_) states_->begin(request);
    const std::int32_t num_replayed =
        blocks_.first_replayed(request) > 0 ? core_.setup.num_replayed : 0;
    if (counted_hits_ != nullptr && !is_session_again) hits_.step(request, hit + num_replayed);
  }
  request.transfer = Transfer::none;
  request.running = true;
  if (!blocks_.extend(scheduled, request, hit)) return;
  if (!scheduled.is_new) return;
  for (std::size_t g = 0; g < core_.setup.groups.size() && !blocks_.tells_copies(); ++g)
    if (is_state(core_.setup.groups[g].spec) && hit % core_.setup.block_sizes[g] != 0)
      transfers_.load_states(request, g, hit - 1, hit, {});
  if (hit < loaded_to)
    transfers_.load(request, hit, loaded_to,
                    step.worker ? std::span<const BlockId>(step.worker->invalid_blocks)
                                : std::span<const BlockId>());
}

void Auditor::fill_contents(const RecordedScheduled& scheduled, AuditRow& row) {
  const AuditRequest& request = *row.request;
  const auto known = static_cast<std::int32_t>(request.tokens.size());
  const std::span<const std::int32_t> sampled = row.sampled;
  std::uint64_t content = row.content_at(row.first);
  row.contents.reserve(static_cast<std::size_t>(row.last - row.first));
  for (std::int32_t p = row.first; p < row.last; ++p) {
    const auto draft = static_cast<std::size_t>(p - known);
    // Accepted drafts came back as sampled tokens, whatever drafts the engine had.
    if (p < known)
      content = request.contents[static_cast<std::size_t>(p)];
    else
      content = content_after(content,
                              draft + 1 < sampled.size() ? sampled[draft] : scheduled.spec[draft]);
    row.contents.push_back(content);
  }
}

void Auditor::run_group(const RecordedStep& step, const std::vector<AuditRow>& rows,
                        std::size_t group) {
  const KVCacheSpec& spec = core_.setup.groups[group].spec;
  if (is_state(spec))
    states_->step(rows, group);
  else if (is_cross_attention(spec))
    inputs_.read_encoder_rows(step, rows, group);
  else
    tokens_.step(rows, group);
}

// Rules over all requests of a step.
void Auditor::check_step(const RecordedStep& step) {
  blocks_.step(step);
  if (policy_) policy_->step(step);
  blocks_.check_shown_tables(step);
  if (policy_) policy_->check_batch(step);
  for (const auto& [name, request] : core_.requests)
    if (request.has_ended && keeps_row(step, request))
      core_.findings.report(AuditRule::queues, name,
                            "has ended, and the worker is not notified: it keeps its row", "ended");
  outputs_.check_queues(step);
  drafts_.check_held(step);
  outputs_.check_unscheduled_samples(step);
}

void Auditor::take_samples(const RecordedStep& step, const std::vector<AuditRow>& rows) {
  for (const AuditRow& row : rows) {
    if (row.is_void) continue;
    outputs_.check_sampled(row);
    if (states_) states_->end(row, static_cast<std::int32_t>(row.sampled.size()));
    outputs_.accept(step, row);
  }
}

void Auditor::take_outputs(const RecordedStep& step) {
  const std::int64_t last =
      core_.setup.config.async_scheduling ? step.output_of_step.value_or(-1) : step.step;
  transfers_.end(step, last);
  if (!step.stopped.empty() && core_.setup.is_recording()) {
    names_ends_ = true;
    report_untold();
  }
  for (const RecordedStopped& stopped : step.stopped) {
    AuditRequest* const request = core_.requests.find(stopped.id);
    check_stopped_once(step, stopped.id, request);
    if (request == nullptr) continue;
    outputs_.check_stopped(stopped, *request);
    if (sessions_.end(stopped, last, *request)) continue;
    request->has_ended = true;
    ends_[*request] = {.is_stopped = true, .handled_in = step.step};
  }
  outputs_.report_unheard(last);
  transfers_.report_adrift(step, last);
}

}  // namespace lockstep
