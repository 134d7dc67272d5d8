#include "properties/audit/output_ledger.h"

#include <fmt/core.h>

#include <algorithm>

namespace lockstep {

bool OutputLedger::Ends::is_ended_by(std::int32_t token) const {
  return eos_token == token || std::ranges::count(stop_token_ids, token) > 0;
}

OutputLedger::OutputLedger(AuditCore& core, BlockLedger& blocks, const RecordingHeader& header)
    : Ledger(core),
      blocks_(blocks),
      is_live_check_(std::ranges::count(header.beyond_format, "live_check") > 0),
      shows_queues_(setup_.scope != AuditScope::whole_recording) {}

void OutputLedger::begin(const AuditRequest& request, const RecordedEvent& event,
                         std::int64_t first_step) {
  Ends& ends = ends_.begin(request);
  ends.max_tokens = event.is_pooling ? 1 : event.request.max_tokens;
  ends.has_min_tokens = event.request.min_tokens > 0;
  ends.detects_repetition = event.request.repetition_detection.max_pattern_size > 0;
  ends.eos_token = event.request.eos_token;
  ends.stop_token_ids = event.request.stop_token_ids;
  ends.lists_tokens = event.has_no_stop_tokens || ends.eos_token || !ends.stop_token_ids.empty();
  ends.first_step = first_step;
}

bool OutputLedger::check_end(const std::string& name) {
  const bool is_of_another = expected_ends_.erase(name) > 0;
  const AuditRequest* request = requests_.find(name);
  if (!is_of_another && (request == nullptr || request->has_left))
    report(AuditRule::queues, name, "is reported finished, and no live request has this name",
           "finished");
  return request != nullptr && (!is_of_another || request->has_ended);
}

void OutputLedger::list_queued(const RecordedStep& step) {
  queued_.clear();
  const auto add = [&](const std::string& name, const char* queue) {
    queued_.push_back({&name, queue, requests_.find(name)});
  };
  for (const std::string& name : step.running) add(name, nullptr);
  for (const std::string& name : step.waiting) add(name, "waiting");
  if (step.skipped)
    for (const RecordedSkipped& skipped : *step.skipped) add(skipped.id, "skipped");
  if (step.transfers.kv_holding)
    for (const RecordedSkipped& held : *step.transfers.kv_holding) add(held.id, "holding");
  for (const std::string& name : step.inputs.holding) add(name, "holding");
}

// Reports names that no live request has, and those that are in a queue twice.
void OutputLedger::report_unsound() const {
  for (const Queued& one : queued_) {
    const std::string_view queue = one.queue == nullptr ? "running" : one.queue;
    const bool is_live = one.request != nullptr && !one.request->has_left;
    const auto times = std::ranges::count_if(queued_, [&](const Queued& other) {
      return *other.name == *one.name && other.queue == one.queue;
    });
    if (queue == "holding" || (is_live && (times == 1 || queue == "skipped"))) continue;
    report(AuditRule::queues, *one.name,
           fmt::format("is in the {} queue{}", queue,
                       is_live ? " twice" : ", and no live request has this name"),
           is_live ? "twice" : "unknown");
  }
}

void OutputLedger::report_unqueued() {
  for (auto& [cause, finding] : std::exchange(unqueued_, {}))
    findings_.add(std::move(finding), cause);
}

void OutputLedger::end() {
  if (!has_scheduled_) report_unqueued();
}

void OutputLedger::check_queues(const RecordedStep& step) {
  list_queued(step);
  bool is_sound = true;  // all are live, once
  for (const Queued& one : queued_) {
    Ends* const ends = one.request == nullptr ? nullptr : &ends_[*one.request];
    const bool is_first = ends != nullptr && std::exchange(ends->queued_in, step.step) != step.step;
    is_sound &= is_first && !one.request->has_left;
    if (is_first) ends->queue = one.queue;
  }
  if (!is_sound) report_unsound();
  const bool is_listed = !setup_.has_connector || step.skipped || step.transfers.kv_holding;
  has_unlisted_ = has_unlisted_ || !is_listed;
  if (is_live_check_ || !is_listed) return;
  shows_queues_ = shows_queues_ || !queued_.empty();
  has_scheduled_ = has_scheduled_ || !step.scheduled.empty();
  if (shows_queues_) report_unqueued();
  const auto first_of = [&](const std::string& name) {
    return std::ranges::find_if(queued_, [&](const Queued& one) { return *one.name == name; });
  };
  for (auto again = queued_.begin(); again != queued_.end() && !is_sound; ++again)
    if (again->queue != nullptr && first_of(*again->name) != again)
      report(AuditRule::queues, *again->name,
             fmt::format("is in the {} queue and in another one", again->queue));
  // Requests of the running queue are the first ones.
  for (const RecordedScheduled& row : step.scheduled)
    if (const auto at = queued_.size() > step.running.size() ? first_of(row.id) : queued_.end();
        at != queued_.end() && at->queue != nullptr)
      report(AuditRule::queues, row.id,
             "is scheduled, and is in another queue than the running one", "scheduled");
  for (const auto& [name, request] : requests_) {
    if (request.has_left || request.has_ended) continue;
    const Ends& ends = ends_[request];
    const bool is_queued = ends.queued_in == step.step;
    if (request.running && is_queued && ends.queue != nullptr)
      report(AuditRule::queues, name,
             "waits, and the worker is not notified that it was preempted: it keeps its row and "
             "blocks",
             "waits");
    if (is_queued) continue;
    AuditFinding finding{
        .rule = AuditRule::queues,
        .step = step_number(),
        .request = name,
        .what = fmt::format("has {} of its {} tokens computed and is in no queue: nothing runs it "
                            "again",
                            request.computed, request.tokens.size())};
    std::string cause = findings_.cause_of(finding.rule, name, {});
    if (shows_queues_)
      findings_.add(std::move(finding), std::move(cause));
    else
      unqueued_.try_emplace(std::move(cause), std::move(finding));
  }
}

void OutputLedger::report_unknown_tokens(const AuditRow& row) {
  const AuditRequest& request = *row.request;
  AuditFinding finding{
      .rule = AuditRule::scheduled_tokens, .step = step_number(), .request = request.name};
  finding.what = fmt::format("tokens [{}, {}) are scheduled, but only {} are known and {} drafted",
                             row.first, row.last, request.tokens.size(), row.num_spec);
  if (const std::int64_t unheard = ends_[request].unheard_step;
      setup_.config.async_scheduling && unheard >= 0)
    unheard_.push_back({std::move(finding), unheard});
  else
    findings_.add(std::move(finding),
                  findings_.cause_of(AuditRule::scheduled_tokens, request.name, {}));
}

void OutputLedger::report_unheard(std::int64_t last) {
  for (const Unheard& unheard : unheard_)
    if (unheard.step <= last)
      findings_.add(unheard.finding,
                    findings_.cause_of(unheard.finding.rule, unheard.finding.request, {}));
  std::erase_if(unheard_, [&](const Unheard& unheard) { return unheard.step <= last; });
}

// A row that ends before the last known token samples nothing. A row that goes beyond it samples
// one token, and one more per draft that it verifies.
void OutputLedger::check_sampled(const AuditRow& row) const {
  const AuditRequest& request = *row.request;
  const auto num_sampled = std::ssize(row.sampled);
  const auto known = std::ssize(request.tokens);
  for (std::int64_t i = 0; i < std::min<std::int64_t>(num_sampled - 1, row.num_spec); ++i)
    if (const std::int32_t draft = row.spec[i];
        row.last == known + row.num_spec && draft >= 0 && draft != row.sampled[i])
      return report(AuditRule::sampled, request.name,
                    fmt::format("token {} is accepted as a draft at {}, where the row verifies {}",
                                row.sampled[i], known + i, draft));
  if (num_sampled == 0 || num_sampled <= row.last - known + 1) return;
  report(AuditRule::sampled, request.name,
         row.last < known
             ? fmt::format("a token is sampled after token {}, and {} are known: those between "
                           "have not been computed",
                           row.last - 1, known)
             : fmt::format("{} tokens are sampled from a row that verifies {} drafts", num_sampled,
                           row.last - known));
}

void OutputLedger::check_unscheduled_samples(const RecordedStep& step) const {
  for (const RecordedTokens& sampled : step.sampled)
    if (!sampled.tokens.empty() &&
        std::ranges::find(step.scheduled, sampled.id, &RecordedScheduled::id) ==
            step.scheduled.end())
      report(AuditRule::sampled, sampled.id, "a token is sampled, and no row of it was scheduled");
}

void OutputLedger::accept(const RecordedStep& step, const AuditRow& row) {
  AuditRequest& request = *row.request;
  Ends& ends = ends_[request];
  const auto tokens = row.sampled;
  const auto num_rejected = row.num_spec > 0 && !tokens.empty()
                                ? row.num_spec - (static_cast<std::int32_t>(tokens.size()) - 1)
                                : 0;
  request.computed = row.last - num_rejected;
  request.scheduled_to = row.counted_to;
  if (num_rejected > 0 && setup_.has_drafts_in_flight())
    ends.rejected_in.emplace_back(step.step, num_rejected);
  blocks_.note_computed(request);
  if (tokens.empty() && row.last >= std::ssize(request.tokens)) ends.unheard_step = step.step;
  std::erase_if(ends.sampled_in, [&](const auto& s) { return s.first <= core_.last_output; });
  if (!tokens.empty()) ends.sampled_in.emplace_back(step.step, request.tokens.size());
  for (const std::int32_t token : tokens) request.append(token);
  const bool is_full = std::ssize(request.tokens) >= request.num_prompt + ends.max_tokens ||
                       std::ssize(request.tokens) >= setup_.config.max_model_len;
  if (is_full && ends.full_since < 0) ends.full_since = step.step;
  if (ends.stopped_since >= 0 || ends.has_min_tokens) return;
  for (const std::int32_t token : tokens)
    if (ends.is_ended_by(token)) ends.stopped_since = step.step;
}

// The end of its last row, less the drafts that the received outputs rejected.
std::int32_t OutputLedger::take_count(AuditRequest& request) {
  std::erase_if(ends_[request].rejected_in, [&](const auto& rejected) {
    const bool is_received = rejected.first <= core_.last_output;
    if (is_received) request.counted_to -= rejected.second;
    return is_received;
  });
  return request.counted_to;
}

// A request is scheduled though the output that ended it was received.
void OutputLedger::check_limit(const AuditRequest& request) const {
  const Ends& ends = ends_[request];
  if (request.is_unpredictable) return;
  if (ends.stopped_since >= 0 && ends.stopped_since <= core_.last_output)
    return report(AuditRule::sampled, request.name,
                  fmt::format("is scheduled after the token that the output of step {} ended it "
                              "with",
                              ends.stopped_since));
  if (ends.full_since < 0 || ends.full_since > core_.last_output || ends.has_min_tokens) return;
  report(AuditRule::sampled, request.name,
         fmt::format("is scheduled with {} tokens: it may sample {}, and the output of step {} was "
                     "the last",
                     request.tokens.size(), ends.max_tokens, ends.full_since));
}

void OutputLedger::check_stopped(const RecordedStopped& stopped, const AuditRequest& request) {
  if (!from_name<FinishReason>(stopped.reason))
    report(AuditRule::recording, request.name,
           fmt::format("ends by `{}`, an unknown reason", stopped.reason));
  if (request.is_adrift || request.is_unpredictable) return;
  const Ends& ends = ends_[request];
  const auto num_output = std::ssize(request.tokens) - request.num_prompt;
  if (stopped.reason == "length" && ends.full_since < 0)
    report(AuditRule::sampled, request.name,
           fmt::format("ends for its length with {} tokens sampled of {}", num_output,
                       ends.max_tokens));
  if (stopped.reason == "abort" && !request.has_ended)
    report(AuditRule::sampled, request.name, "ends by an abort, and no client has aborted it");
  if (stopped.reason == "repetition" && !ends.detects_repetition)
    report(AuditRule::sampled, request.name,
           "ends because it repeats itself, and was not to be watched for that");
  if (stopped.reason != "stop" || ends.is_pooled) return;
  // In a run every request comes with its tokens.
  if (setup_.scope == AuditScope::whole_recording && !ends.lists_tokens)
    lists_ends_ = false;
  else if (std::none_of(request.tokens.begin() + request.num_prompt, request.tokens.end(),
                        [&](std::int32_t token) { return ends.is_ended_by(token); }))
    report(
        AuditRule::sampled, request.name,
        fmt::format("ends by a stop token, and none of the {} that it sampled is one", num_output));
}

void OutputLedger::reset(AuditRequest& request) {
  const std::int64_t last = setup_.config.async_scheduling ? core_.last_output : step_number() - 1;
  withdraw_after(request, last, "a reset had preempted all running requests");
}

void OutputLedger::withdraw_after(AuditRequest& request, std::int64_t last,
                                  const std::string& why) {
  const auto& sampled_in = ends_[request].sampled_in;
  const auto dropped =
      std::ranges::find_if(sampled_in, [&](const auto& sampled) { return sampled.first > last; });
  if (dropped != sampled_in.end())
    withdraw(request, static_cast<std::size_t>(dropped - sampled_in.begin()), why);
}

// Later samples continue those of the output at `index`: all of them are dropped.
void OutputLedger::withdraw(AuditRequest& request, std::size_t index, const std::string& why) {
  Ends& ends = ends_[request];
  LS_CHECK(index < ends.sampled_in.size(), "output {} of {}", index, ends.sampled_in.size());
  const auto [first_step, num_tokens] = ends.sampled_in[index];
  blocks_.note_withdrawn(request);
  for (std::size_t i = index; i < ends.sampled_in.size(); ++i)
    ends.void_outputs.emplace_back(ends.sampled_in[i].first, why);
  request.cut(num_tokens);
  ends.sampled_in.resize(index);
  if (ends.full_since >= first_step) ends.full_since = -1;
  if (ends.stopped_since >= first_step) ends.stopped_since = -1;
}

void OutputLedger::end(const RecordedStep& step, std::int64_t last_output_before) {
  if (setup_.config.async_scheduling && step.output_of_step &&
      *step.output_of_step <= core_.last_output)
    report(AuditRule::stale_output, {},
           fmt::format("the output of step {} arrives, and that of step {} had arrived before",
                       *step.output_of_step, core_.last_output),
           fmt::format("order {}", *step.output_of_step));
  const std::int64_t last =
      setup_.config.async_scheduling ? step.output_of_step.value_or(-1) : step.step;
  for (const RecordedStaleOutput& output : step.stale_outputs) {
    AuditRequest* const request = requests_.find(output.id);
    if (output.of_step > last || output.of_step <= last_output_before) {
      report(AuditRule::stale_output, output.id,
             fmt::format("the output of step {} is received, and {}", output.of_step,
                         output.of_step > last
                             ? fmt::format("those up to step {} have arrived", last)
                             : fmt::format("it had arrived before: those up to step {} had",
                                           last_output_before)));
    } else if (request == nullptr || request->has_left) {
      if (output.taken > 0)
        report(AuditRule::stale_output, output.id,
               fmt::format(
                   "{} tokens of the output of step {} are taken, and the request had finished",
                   output.taken, output.of_step));
    } else {
      take_stale(step, output, *request);
    }
  }
  for (auto& [name, request] : requests_)
    if (auto& outputs = ends_[request].void_outputs; !outputs.empty())
      std::erase_if(outputs, [&](const auto& output) { return output.first <= last; });
}

void OutputLedger::take_stale(const RecordedStep& step, const RecordedStaleOutput& output,
                              AuditRequest& request) {
  if (request.is_unpredictable || request.is_adrift) return;
  const auto accuse = [&](const std::string& why) {
    request.is_unpredictable = true;
    report(AuditRule::stale_output, output.id,
           fmt::format("{} tokens of the output of step {} are taken, {}", output.taken,
                       output.of_step, why));
  };
  const Ends& ends = ends_[request];
  const auto gone = std::ranges::find(ends.void_outputs, output.of_step,
                                      &std::pair<std::int64_t, std::string>::first);
  if (gone != ends.void_outputs.end()) {
    if (output.taken > 0) accuse("which was to be dropped: " + gone->second);
    return;
  }
  const auto sampled = std::ranges::find(ends.sampled_in, output.of_step,
                                         &std::pair<std::int64_t, std::size_t>::first);
  if (sampled == ends.sampled_in.end()) {
    if (output.taken > 0 && output.of_step < ends.first_step)
      accuse("and none were sampled for it there: a request of that name has ended since");
    return;
  }
  const auto next = std::next(sampled);
  const std::size_t end = next == ends.sampled_in.end() ? request.tokens.size() : next->second;
  const auto num_sampled = static_cast<std::int32_t>(end - sampled->second);
  if (request.has_ended) {
    // Of several outputs after one step, one may be received before the client disconnects.
    const bool is_sure = std::ranges::find(step.during, RecordedEvent::Kind::output,
                                           &RecordedEvent::kind) == step.during.end();
    if (output.taken > 0 && is_sure) accuse("and the request had ended");
    return;
  }
  if (output.taken > num_sampled) return accuse(fmt::format("and it has {}", num_sampled));
  if (output.taken == num_sampled) return;
  if (output.taken > 0) {
    if (std::ranges::find(step.stopped, output.id, &RecordedStopped::id) == step.stopped.end())
      accuse(fmt::format("and it has {}: the later ones are lost", num_sampled));
    return;
  }
  if (request.preempted_in <= output.of_step)
    return accuse(
        fmt::format("of {} that were sampled: it has continued since, without them", num_sampled));
  withdraw(request, static_cast<std::size_t>(sampled - ends.sampled_in.begin()),
           fmt::format("the output of step {} was", output.of_step));
}

void SessionLedger::begin(const AuditRequest& request, const RecordedEvent& event) {
  Session& session = sessions_.begin(request);
  session.is_session = event.is_session;
  session.first_max_tokens = outputs_.ends_of(request).max_tokens;
}

void SessionLedger::begin(const RecordedEvent& event) {
  const bool is_chunk = event.kind == RecordedEvent::Kind::chunk;
  AuditRequest* const request = requests_.find(event.name);
  if (request == nullptr || request->has_left || !sessions_[*request].is_session) {
    if (is_chunk)
      report(AuditRule::recording, event.name, "gets a chunk of input, and is no live session");
    return;
  }
  Session& session = sessions_[*request];
  if (is_chunk && session.awaits_input)
    begin_chunk(*request, event.request);
  else if (is_chunk)
    session.chunks.push_back(event.request);
  else if (session.awaits_input)
    request->has_ended = true;
  else
    session.is_closed = true;
}

// Also drops the samples after the token that stopped it.
bool SessionLedger::end(const RecordedStopped& stopped, std::int64_t last_output,
                        AuditRequest& request) {
  Session& session = sessions_[request];
  if (!session.is_session || (stopped.reason != "stop" && stopped.reason != "length")) return false;
  outputs_.withdraw_after(request, last_output, "its session had stopped");
  OutputLedger::Ends& ends = outputs_.ends_of(request);
  const auto first_output = static_cast<std::size_t>(request.num_prompt);
  // Releases that keep the computed tokens keep the limit of the first chunk too.
  const std::int32_t limit = keeps_computed() ? session.first_max_tokens : ends.max_tokens;
  std::size_t end = std::min(request.tokens.size(), first_output + static_cast<std::size_t>(limit));
  for (std::size_t i = first_output; i < end; ++i)
    if (ends.stopped_since >= 0 && ends.is_ended_by(request.tokens[i])) end = i + 1;
  request.cut(end);
  drafts_.drop(request);
  ends.sampled_in.clear();
  request.running = false;
  request.is_between_chunks = true;
  if (!session.chunks.empty()) {
    const RequestSpec chunk = std::move(session.chunks.front());
    session.chunks.erase(session.chunks.begin());
    begin_chunk(request, chunk);
  } else if (session.is_closed) {
    request.has_ended = true;
  } else {
    session.awaits_input = true;
  }
  return true;
}

void SessionLedger::begin_chunk(AuditRequest& request, const RequestSpec& chunk) {
  sessions_[request].awaits_input = false;
  // A session that has not computed its first tokens has no sample to drop.
  if (std::cmp_greater(request.tokens.size(), request.num_prompt)) {
    const std::int32_t counted = std::max(request.computed, request.scheduled_to);
    const auto all = static_cast<std::int32_t>(request.tokens.size());
    request.cut(static_cast<std::size_t>(keeps_computed() ? std::min(all, counted) : all - 1));
  }
  const auto base = static_cast<std::int32_t>(request.tokens.size());
  for (PromptItem item : chunk.keys.mm) {
    item.first += base;
    request.keyed.keys.mm.push_back(std::move(item));
  }
  requests_.set_keys(request);
  for (const std::int32_t token : chunk.prompt.materialize()) {
    const auto position = static_cast<std::int32_t>(request.tokens.size());
    const std::uint64_t before = position == 0 ? request.root : request.contents.back();
    request.tokens.push_back(token);
    request.contents.push_back(content_at_position(request.keyed, before, token, position));
  }
  request.num_prompt = static_cast<std::int32_t>(request.tokens.size());
  OutputLedger::Ends& ends = outputs_.ends_of(request);
  ends.max_tokens = chunk.max_tokens;
  ends.eos_token = chunk.eos_token;
  ends.full_since = ends.stopped_since = ends.unheard_step = -1;
}

namespace {

// True if a token of [first, last) has a row of the item.
bool needs_rows(const PromptItem& item, std::int32_t first, std::int32_t last) {
  const auto meets = [&](std::int32_t begin, std::int32_t count) {
    return first < item.first + begin + count && item.first + begin < last;
  };
  if (item.embeds.empty()) return meets(0, item.count);
  return std::ranges::any_of(item.embeds,
                             [&](const TokenSpan& span) { return meets(span.first, span.count); });
}

}  // namespace

InputLedger::InputLedger(AuditCore& core, OutputLedger& outputs, const RecordingHeader& header)
    : Ledger(core),
      outputs_(outputs),
      has_encoder_(header.encoder_compute_budget.has_value()),
      has_cross_attention_(has_cross_attention(header.groups)) {}

void InputLedger::begin(const RecordedEvent& event) {
  if (event.kind == RecordedEvent::Kind::reset_encoder_cache) encoded_.clear();
  if (event.kind != RecordedEvent::Kind::grammar_ready) return;
  if (const AuditRequest* request = requests_.find(event.name); request != nullptr)
    awaits_grammar_[*request] = false;
}

void InputLedger::check_grammar(const AuditRequest& request) const {
  if (awaits_grammar_[request])
    report(AuditRule::inputs, request.name, "is scheduled before its grammar is compiled");
}

std::int64_t InputLedger::run_encoder(const RecordedStep& step) {
  if (!has_encoder_) return 0;
  for (const std::string& item : step.inputs.free_encoder) encoded_.erase(item);
  std::int64_t num_rows = 0;
  for (const RecordedScheduled& scheduled : step.scheduled) {
    const AuditRequest* request = requests_.find(scheduled.id);
    if (request == nullptr) continue;
    const std::vector<PromptItem>& items = request->keyed.keys.mm;
    for (const std::int32_t number : scheduled.encode) {
      if (std::cmp_greater_equal(number, items.size())) {
        report(AuditRule::inputs, scheduled.id,
               fmt::format("item {} is encoded, and the request has {}", number, items.size()));
        continue;
      }
      const PromptItem& item = items[static_cast<std::size_t>(number)];
      num_rows += item.num_rows();
      encoded_.try_emplace(item.identifier, item.num_rows());
    }
  }
  return num_rows;
}

std::int64_t InputLedger::num_rows_held() const {
  std::int64_t num_rows = 0;
  for (const auto& [item, rows] : encoded_) num_rows += rows;
  return num_rows;
}

void InputLedger::step(std::span<const AuditRow> rows) const {
  if (!has_encoder_ || has_cross_attention_) return;
  for (const AuditRow& row : rows)
    for (const PromptItem& item : row.request->keyed.keys.mm)
      if (needs_rows(item, row.first, row.last) && !encoded_.contains(item.identifier))
        report(AuditRule::inputs, row.request->name,
               fmt::format("tokens [{}, {}) are computed, and the encoder's rows of {} {}, tokens "
                           "[{}, {}), are not there: never computed, or dropped",
                           row.first, row.last, item.kind, item.identifier, item.first,
                           item.first + item.count),
               item.identifier);
}

void InputLedger::end(const RecordedStep& step) {
  for (const std::string& name : step.inputs.pooled) {
    const AuditRequest* request = requests_.find(name);
    if (request == nullptr) continue;
    outputs_.ends_of(*request).is_pooled = true;
    if (request->computed < request->num_prompt)
      report(AuditRule::sampled, name,
             fmt::format("is pooled after {} of its {} tokens", request->computed,
                         request->num_prompt));
  }
}

void InputLedger::read_encoder_rows(const RecordedStep& step, std::span<const AuditRow> rows,
                                    std::size_t group) {
  for (const AuditRow& row : rows) {
    const auto scheduled =
        std::ranges::find(step.scheduled, row.request->name, &RecordedScheduled::id);
    read_encoder_rows(row, group, scheduled != step.scheduled.end() && !scheduled->encode.empty());
  }
}

// The first chunk writes the rows of the encoder, and every token reads them.
void InputLedger::read_encoder_rows(const AuditRow& row, std::size_t group, bool is_encoded) {
  const AuditRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  std::int32_t position = 0;
  for (const PromptItem& item : request.keyed.keys.mm) {
    for (std::int32_t i = 0; i < item.count; ++i, ++position) {
      const auto index = static_cast<std::size_t>(position / size);
      const BlockId block = index < table.size() ? table[index] : kNullBlock;
      const bool is_own =
          block != kNullBlock && pool_.belongs_to(block, static_cast<std::int32_t>(group));
      const std::uint64_t content = content_of_encoder_row(item, i);
      if (is_own && is_encoded)
        pool_.write(block, position % size, {&content, 1}, request.index, position, 0);
      ++core_.num_reads;
      if (is_own && pool_.read(block, position % size).content == content) continue;
      return report(
          AuditRule::attention_read, request, group, position, block,
          fmt::format("cross-attention of tokens [{}, {}) reads row {} of {} {} from block {}, "
                      "which does not hold it",
                      row.first, row.last, i, item.kind, item.identifier, index_of(block)));
    }
  }
}

}  // namespace lockstep
