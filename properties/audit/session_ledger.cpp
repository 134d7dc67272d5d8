#include "properties/audit/session_ledger.h"

#include <algorithm>
#include <utility>

namespace lockstep {

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

}  // namespace lockstep
