// Sessions: requests whose input comes in chunks. Where one stops it keeps its blocks and waits;
// its next chunk takes the place of the last token that it sampled, and it comes in again as if
// new.
#include <algorithm>

#include "properties/audit/audit_impl.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

bool sessions_keep_computed(const RecordingHeader& header) {
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  return profile != nullptr && profile->sessions_keep_computed;
}

void Auditor::Impl::take_session_event(const RecordedEvent& event) {
  const auto found = requests_.find(event.name);
  if (found == requests_.end() || found->second.has_left || !found->second.is_session) {
    if (event.kind == RecordedEvent::Kind::chunk)
      report(AuditRule::recording, event.name, "gets a chunk of input, and is no live session");
    return;
  }
  AuditedRequest& session = found->second;
  if (event.kind == RecordedEvent::Kind::chunk && session.awaits_input) {
    begin_chunk(session, event.request);
  } else if (event.kind == RecordedEvent::Kind::chunk) {
    session.chunks.push_back(event.request);
  } else if (session.awaits_input) {
    session.has_ended = true;
  } else {
    session.is_closed = true;
  }
}

// Its output of later steps is dropped, and what was sampled behind the token that stopped it.
void Auditor::Impl::stop_session(std::int64_t last_output, AuditedRequest& session) {
  const auto dropped = std::ranges::find_if(
      session.sampled_in, [&](const auto& sampled) { return sampled.first > last_output; });
  if (dropped != session.sampled_in.end())
    withdraw_output(session, static_cast<std::size_t>(dropped - session.sampled_in.begin()),
                    "its session had stopped");
  const auto first_output = static_cast<std::size_t>(session.num_prompt);
  // Those that keep what is computed keep the first chunk's limit too.
  const std::int32_t limit =
      sessions_keep_computed_ ? session.first_max_tokens : session.max_tokens;
  std::size_t end = std::min(session.tokens.size(), first_output + static_cast<std::size_t>(limit));
  for (std::size_t i = first_output; i < end; ++i)
    if (session.stopped_since >= 0 && ends_it(session, session.tokens[i])) end = i + 1;
  session.tokens.resize(end);
  session.contents.resize(end);
  session.drafts.clear();
  session.sampled_in.clear();
  session.running = false;
  session.is_between_chunks = true;
  if (!session.chunks.empty()) {
    const RequestSpec chunk = std::move(session.chunks.front());
    session.chunks.erase(session.chunks.begin());
    begin_chunk(session, chunk);
  } else if (session.is_closed) {
    session.has_ended = true;
  } else {
    session.awaits_input = true;
  }
}

void Auditor::Impl::begin_chunk(AuditedRequest& session, const RequestSpec& chunk) {
  session.awaits_input = false;
  // One that has not computed its first tokens has sampled nothing to drop.
  if (std::cmp_greater(session.tokens.size(), session.num_prompt)) {
    const std::int32_t counted = std::max(session.computed, session.scheduled_to);
    const auto all = static_cast<std::int32_t>(session.tokens.size());
    const std::int32_t kept = sessions_keep_computed_ ? std::min(all, counted) : all - 1;
    session.tokens.resize(static_cast<std::size_t>(kept));
    session.contents.resize(static_cast<std::size_t>(kept));
  }
  const auto base = static_cast<std::int32_t>(session.tokens.size());
  for (PromptItem item : chunk.keys.mm) {
    item.first += base;
    session.keyed.keys.mm.push_back(std::move(item));
  }
  names_.insert_or_assign(session.index, session.keyed);
  for (const std::int32_t token : chunk.prompt.materialize()) {
    const auto position = static_cast<std::int32_t>(session.tokens.size());
    const std::uint64_t before = position == 0 ? session.root : session.contents.back();
    session.tokens.push_back(token);
    session.contents.push_back(content_at_position(session.keyed, before, token, position));
  }
  session.num_prompt = static_cast<std::int32_t>(session.tokens.size());
  session.max_tokens = chunk.max_tokens;
  session.eos_token = chunk.eos_token;
  session.full_since = session.stopped_since = session.unheard_step = -1;
}

}  // namespace lockstep
