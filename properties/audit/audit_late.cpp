// Drafts and outputs that have been overtaken: what they were made of is no longer the request's.
#include <fmt/format.h>

#include <algorithm>

#include "properties/audit/audit_impl.h"

namespace lockstep {

bool makes_drafts_in_time(const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  return config.num_spec_tokens > 0 && !config.async_scheduling &&
         std::ranges::find(header.beyond_format, "pipeline_parallel_size") ==
             header.beyond_format.end();
}

static std::string list_text(std::span<const std::int32_t> tokens) {
  return fmt::format("[{}]", fmt::join(tokens, ", "));
}

// A row verifies the drafts that were proposed behind its last token, from the first on; -1 fills
// a row up. They are used up by it.
void Auditor::Impl::check_drafts(const RecordedScheduled& scheduled, AuditedRequest& request) {
  const std::vector<std::int32_t> proposed = std::exchange(request.drafts, {});
  if (!checks_drafts_ || !are_drafts_told_) return;
  for (std::size_t i = 0; i < scheduled.spec.size(); ++i) {
    const std::int32_t draft = scheduled.spec[i];
    if (draft < 0 || (i < proposed.size() && proposed[i] == draft)) continue;
    const std::string known = proposed.empty()
                                  ? "none was proposed behind them"
                                  : fmt::format("step {} proposed {} behind them",
                                                request.drafted_in, list_text(proposed));
    const std::string preempted =
        request.preempted_in >= 0
            ? fmt::format("; it was preempted in step {}", request.preempted_in)
            : "";
    return report(AuditRule::drafts, request.name,
                  fmt::format("has {} tokens and verifies the drafts {}, and {}{}",
                              request.tokens.size(), list_text(scheduled.spec), known, preempted));
  }
}

// Drafts are made of what the step has computed.
void Auditor::Impl::take_drafts(const RecordedStep& step) {
  if (!checks_drafts_ || !step.drafts) return;
  are_drafts_told_ = true;
  for (const RecordedTokens& drafts : *step.drafts) {
    const auto found = requests_.find(drafts.id);
    if (found == requests_.end()) continue;
    const bool is_scheduled = std::ranges::find(step.scheduled, drafts.id,
                                                &RecordedScheduled::id) != step.scheduled.end();
    if (!is_scheduled && !drafts.tokens.empty())
      report(AuditRule::drafts, drafts.id,
             fmt::format("is given the drafts {}, and no row of it was scheduled that they could "
                         "be made of",
                         list_text(drafts.tokens)));
    found->second.drafts = drafts.tokens;
    found->second.drafted_in = step.step;
  }
}

// Only who runs on keeps drafts; whoever is preempted computes anew what they were made of.
void Auditor::Impl::check_held_drafts(const RecordedStep& step) {
  for (const RecordedTokens& held : step.held_drafts) {
    const auto found = requests_.find(held.id);
    const auto accuse = [&](std::string why) {
      report(AuditRule::drafts, held.id,
             fmt::format("keeps the drafts {} for a later step, {}", list_text(held.tokens), why));
    };
    if (found == requests_.end() || found->second.has_left) {
      accuse("and there is no such request");
      continue;
    }
    const AuditedRequest& request = found->second;
    if (!request.running)
      accuse(request.preempted_in >= 0
                 ? fmt::format("and was preempted in step {}: what they follow is computed anew",
                               request.preempted_in)
                 : std::string("and does not run"));
    else if (std::ssize(held.tokens) > config_.num_spec_tokens)
      accuse(fmt::format("and the engine makes {}", config_.num_spec_tokens));
    else if (checks_drafts_ && are_drafts_told_ && held.tokens != request.drafts)
      accuse(request.drafts.empty() ? std::string("and none were proposed behind its last token")
                                    : fmt::format("and step {} proposed {}", request.drafted_in,
                                                  list_text(request.drafts)));
  }
}

// From the output at `index` on, nothing that was in flight is the request's any more: what came
// later was sampled behind it.
void Auditor::Impl::withdraw_output(AuditedRequest& request, std::size_t index,
                                    const std::string& why) {
  const auto [first_step, num_tokens] = request.sampled_in[index];
  request.withdrawn_in = step_;
  for (std::size_t i = index; i < request.sampled_in.size(); ++i)
    request.void_outputs.emplace_back(request.sampled_in[i].first, why);
  request.tokens.resize(num_tokens);
  request.contents.resize(num_tokens);
  request.sampled_in.resize(index);
  if (request.full_since >= first_step) request.full_since = -1;
  if (request.stopped_since >= first_step) request.stopped_since = -1;
}

void Auditor::Impl::take_stale_outputs(const RecordedStep& step, std::int64_t last_output_before) {
  const std::int64_t last = config_.async_scheduling ? step.output_of_step.value_or(-1) : step.step;
  for (const RecordedStaleOutput& output : step.stale_outputs) {
    const auto found = requests_.find(output.id);
    if (output.of_step > last || output.of_step <= last_output_before) {
      report(AuditRule::stale_output, output.id,
             fmt::format("the output of step {} is taken in, and {}", output.of_step,
                         output.of_step > last
                             ? fmt::format("those up to step {} have come in", last)
                             : fmt::format("it had come in before: those up to step {} had",
                                           last_output_before)));
    } else if (found == requests_.end() || found->second.has_left) {
      if (output.taken > 0)
        report(AuditRule::stale_output, output.id,
               fmt::format("{} tokens of the output of step {} are taken, and the request had left",
                           output.taken, output.of_step));
    } else {
      take_stale_output(step, output, found->second);
    }
  }
  for (auto& [name, request] : requests_)
    if (!request.void_outputs.empty())
      std::erase_if(request.void_outputs, [&](const auto& output) { return output.first <= last; });
}

void Auditor::Impl::take_stale_output(const RecordedStep& step, const RecordedStaleOutput& output,
                                      AuditedRequest& request) {
  if (request.is_past_telling || request.is_adrift()) return;
  const auto accuse = [&](const std::string& why) {
    request.is_past_telling = true;
    report(AuditRule::stale_output, output.id,
           fmt::format("{} tokens of the output of step {} are taken, {}", output.taken,
                       output.of_step, why));
  };
  const auto gone = std::ranges::find(request.void_outputs, output.of_step,
                                      &std::pair<std::int64_t, std::string>::first);
  if (gone != request.void_outputs.end()) {
    if (output.taken > 0) accuse("which was to be dropped: " + gone->second);
    return;
  }
  const auto sampled = std::ranges::find(request.sampled_in, output.of_step,
                                         &std::pair<std::int64_t, std::size_t>::first);
  if (sampled == request.sampled_in.end()) {
    if (output.taken > 0 && output.of_step < request.first_step)
      accuse("and none were sampled for it there: a request of that name has left since");
    return;
  }
  const auto next = std::next(sampled);
  const std::size_t end = next == request.sampled_in.end() ? request.tokens.size() : next->second;
  const auto num_sampled = static_cast<std::int32_t>(end - sampled->second);
  if (request.has_ended) {
    // Of several outputs behind one step, one may have come in before its client left.
    const bool is_sure = std::ranges::find(step.during, RecordedEvent::Kind::output,
                                           &RecordedEvent::kind) == step.during.end();
    if (output.taken > 0 && is_sure) accuse("and the request had ended");
    return;
  }
  if (output.taken > num_sampled) return accuse(fmt::format("and it has {}", num_sampled));
  if (output.taken == num_sampled) return;
  if (output.taken > 0) {
    if (std::ranges::find(step.stopped, output.id, &RecordedStopped::id) == step.stopped.end())
      accuse(fmt::format("and it has {}: those behind are lost", num_sampled));
    return;
  }
  if (request.preempted_in <= output.of_step)
    return accuse(
        fmt::format("of {} that were sampled: it has run on since, and misses them", num_sampled));
  withdraw_output(request, static_cast<std::size_t>(sampled - request.sampled_in.begin()),
                  fmt::format("the output of step {} was", output.of_step));
}

}  // namespace lockstep
