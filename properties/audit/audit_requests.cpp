// What becomes of requests: each is in a queue until it ends, samples what its rows allow, and ends
// when it is said to.
#include <fmt/core.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "properties/audit/audit_impl.h"

namespace lockstep {

bool is_given(const RecordingHeader& header, std::string_view option) {
  return find_engine_profile(header.engine.profile()) != nullptr &&
         std::ranges::find(header.options.given, option) != header.options.given.end();
}

// The worker's buffers are as large as the largest step that the configuration allows.
void Auditor::Impl::check_batch(const RecordedStep& step) {
  std::int64_t num_tokens = 0;
  for (const RecordedScheduled& row : step.scheduled) num_tokens += row.tokens;
  if (knows_max_tokens_ && num_tokens > config_.max_num_batched_tokens)
    report(AuditRule::limits, {},
           fmt::format("{} tokens are scheduled, and a worker has room for {}: "
                       "max_num_batched_tokens",
                       num_tokens, config_.max_num_batched_tokens),
           "too many tokens");
  const auto num_rows = std::max(std::ssize(step.scheduled), std::ssize(step.running));
  if (knows_max_requests_ && num_rows > config_.max_num_seqs)
    report(AuditRule::limits, {},
           fmt::format("{} requests run, and a worker has room for {}: max_num_seqs", num_rows,
                       config_.max_num_seqs),
           "too many requests");
}

// Outputs come in in the order of their steps, each once.
void Auditor::Impl::check_order_of_outputs(const RecordedStep& step) {
  if (!config_.async_scheduling || !step.output_of_step || *step.output_of_step > last_output_)
    return;
  report(AuditRule::stale_output, {},
         fmt::format("the output of step {} comes in, and that of step {} had come in before",
                     *step.output_of_step, last_output_),
         fmt::format("order {}", *step.output_of_step));
}

// Whoever is in none is never run again, and nothing tells its client.
void Auditor::Impl::check_queues(const RecordedStep& step) {
  if (!lists_all_queues_) return;
  std::set<std::string_view> queued(step.running.begin(), step.running.end());
  const auto add = [&](const std::string& name, const char* queue) {
    if (!queued.insert(name).second)
      report(AuditRule::queues, name, fmt::format("is in the {} queue and in another one", queue));
  };
  for (const std::string& name : step.waiting) add(name, "waiting");
  if (step.skipped)
    for (const RecordedSkipped& skipped : *step.skipped) add(skipped.id, "skipped");
  for (const std::string& name : step.inputs.holding) add(name, "holding");
  const std::set<std::string_view> running(step.running.begin(), step.running.end());
  for (const RecordedScheduled& row : step.scheduled)
    if (queued.contains(row.id) && !running.contains(row.id))
      report(AuditRule::queues, row.id,
             "is scheduled, and is in another queue than the running one", "scheduled");
  for (auto& [name, request] : requests_) {
    if (request.has_left) continue;
    if (request.has_ended) {
      if (checks_ends_)
        report(AuditRule::queues, name, "has ended, and the worker is not told: it keeps its row",
               "ended");
      continue;
    }
    if (request.running && queued.contains(name) && !running.contains(name))
      report(AuditRule::queues, name,
             "waits, and the worker is not told that it was preempted: it keeps its row and blocks",
             "waits");
    if (queued.contains(name)) continue;
    report(AuditRule::queues, name,
           fmt::format("has {} of its {} tokens computed and is in no queue: nothing runs it again",
                       request.computed, request.tokens.size()));
  }
}

// Whoever gives way to others is the least important of those who run. Beside a connector a request
// may have to start over for another reason.
void Auditor::Impl::check_victims(const RecordedStep& step) {
  if (config_.policy != SchedulingPolicy::priority || has_connector_) return;
  for (const std::string& name : step.preempted) {
    const auto victim = requests_.find(name);
    if (victim == requests_.end()) continue;
    for (const std::string& other : step.running) {
      const auto runs_on = requests_.find(other);
      if (runs_on == requests_.end() || !runs_on->second.running ||
          runs_on->second.priority <= victim->second.priority)
        continue;
      report(AuditRule::victim, name,
             fmt::format("is preempted with priority {}, and {} with priority {} runs on",
                         victim->second.priority, other, runs_on->second.priority));
      break;
    }
  }
}

// A token follows the last one that is known: a row that ends before it has none to give, and one
// that goes beyond has one more for each draft that it verified.
void Auditor::Impl::check_sampled(const RecordedStep& step, const AuditRow& row) {
  const AuditedRequest& request = *row.request;
  const auto num_sampled = std::ssize(sampled_of(step, request.name));
  const auto known = std::ssize(request.tokens);
  if (num_sampled == 0 || num_sampled <= row.last - known + 1) return;
  report(AuditRule::sampled, request.name,
         row.last < known
             ? fmt::format("a token is sampled behind token {}, and {} are known: those between "
                           "have not been computed",
                           row.last - 1, known)
             : fmt::format("{} tokens are sampled from a row that verifies {} drafts", num_sampled,
                           row.last - known));
}

void Auditor::Impl::check_sampled_of_nobody(const RecordedStep& step) {
  for (const RecordedTokens& sampled : step.sampled)
    if (!sampled.tokens.empty() &&
        std::ranges::find(step.scheduled, sampled.id, &RecordedScheduled::id) ==
            step.scheduled.end())
      report(AuditRule::sampled, sampled.id, "a token is sampled, and no row of it was scheduled");
}

bool ends_it(const AuditedRequest& request, std::int32_t token) {
  return request.eos_token == token || std::ranges::count(request.stop_token_ids, token) > 0;
}

// The longest that a request may get has been reached, by the output of which step.
void Auditor::Impl::note_limit(const RecordedStep& step, AuditedRequest& request) {
  const bool is_full = std::ssize(request.tokens) >= request.num_prompt + request.max_tokens ||
                       std::ssize(request.tokens) >= config_.max_model_len;
  if (is_full && request.full_since < 0) request.full_since = step.step;
  if (request.stopped_since >= 0 || request.has_min_tokens) return;
  for (const std::int32_t token : sampled_of(step, request.name))
    if (ends_it(request, token)) request.stopped_since = step.step;
}

// The output that ended it had come in, and it goes on.
void Auditor::Impl::check_limit(const AuditedRequest& request) {
  if (!request.is_past_telling && request.stopped_since >= 0 &&
      request.stopped_since <= last_output_)
    return report(AuditRule::sampled, request.name,
                  fmt::format("is scheduled behind the token that the output of step {} ended it "
                              "with",
                              request.stopped_since));
  if (request.is_past_telling || request.full_since < 0 || request.full_since > last_output_ ||
      request.has_min_tokens)
    return;
  report(AuditRule::sampled, request.name,
         fmt::format("is scheduled with {} tokens: it may sample {}, and the output of step {} was "
                     "the last",
                     request.tokens.size(), request.max_tokens, request.full_since));
}

// Why a request is said to have ended must be so.
void Auditor::Impl::check_stopped(const RecordedStopped& stopped, const AuditedRequest& request) {
  if (request.is_adrift() || request.is_past_telling) return;
  const auto num_output = std::ssize(request.tokens) - request.num_prompt;
  if (stopped.reason == "length" && request.full_since < 0)
    report(AuditRule::sampled, request.name,
           fmt::format("ends for its length with {} tokens sampled of {}", num_output,
                       request.max_tokens));
  if (stopped.reason == "repetition" && !request.detects_repetition)
    report(AuditRule::sampled, request.name,
           "ends because it repeats itself, and was not to be watched for that");
  if (stopped.reason == "stop" && !request.is_pooled &&
      std::none_of(request.tokens.begin() + request.num_prompt, request.tokens.end(),
                   [&](std::int32_t token) { return ends_it(request, token); }))
    report(
        AuditRule::sampled, request.name,
        fmt::format("ends by a stop token, and none of the {} that it sampled is one", num_output));
}

}  // namespace lockstep
