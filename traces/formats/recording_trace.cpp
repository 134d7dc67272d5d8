#include "traces/formats/recording_trace.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <utility>

namespace lockstep {
namespace {

// What a recording says about how each request ended.
struct Ends {
  std::map<std::string, std::vector<std::int32_t>> tokens;  // sampled, in order
  std::map<std::string, std::string> reasons;               // of those that stopped
};

Ends ends_of(const Recording& recording) {
  Ends ends;
  for (const RecordedStep& step : recording.steps) {
    for (const RecordedTokens& row : step.sampled) {
      std::vector<std::int32_t>& tokens = ends.tokens[row.id];
      tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    }
    for (const RecordedStopped& row : step.stopped) ends.reasons[row.id] = row.reason;
  }
  return ends;
}

// The output as the engine kept it: what a stop cut off is not part of it.
OutputPlan output_of(const RequestSpec& spec, const Ends& ends) {
  OutputPlan output;
  const auto sampled = ends.tokens.find(spec.name);
  if (!ends.reasons.contains(spec.name) || sampled == ends.tokens.end()) {
    output.length = spec.max_tokens;
    return output;
  }
  for (const std::int32_t token : sampled->second) {
    output.tokens.push_back(token);
    const bool stops = token == spec.eos_token ||
                       std::ranges::find(spec.stop_token_ids, token) != spec.stop_token_ids.end();
    if (stops || std::ssize(output.tokens) == spec.max_tokens) break;
  }
  output.length = static_cast<std::int32_t>(output.tokens.size());
  // A placeholder that the recorded model accepted is no token of another.
  if (std::ranges::any_of(output.tokens, [](std::int32_t token) { return token < 0; }))
    output.tokens.clear();
  return output;
}

}  // namespace

Result<Trace> trace_of(const Recording& recording, std::int64_t step_ns) {
  if (recording.header.connector)
    return fail("a recording of a KV connector, whose answers no request trace holds");
  const Ends ends = ends_of(recording);
  Trace trace;
  trace.header.source = {.kind = "recording", .name = recording.header.family, .seed = {}};
  std::map<std::string, std::size_t> places;
  for (const RecordedStep& step : recording.steps) {
    std::vector<RecordedEvent> events = step.before;
    events.insert(events.end(), step.during.begin(), step.during.end());
    for (const RecordedEvent& event : events) {
      const std::int64_t t_ns = step.step * step_ns;
      if (event.kind == RecordedEvent::Kind::add) {
        TraceRequest request;
        request.spec = event.request;
        request.output = output_of(event.request, ends);
        request.spec.arrival_ns = t_ns;
        request.spec.max_tokens = request.output.length;  // nothing else ends it
        request.spec.eos_token.reset();
        request.spec.stop_token_ids.clear();
        places[event.request.name] = trace.records.size();
        trace.records.emplace_back(std::move(request));
      } else if (event.kind == RecordedEvent::Kind::abort) {
        const auto place = places.find(event.name);
        if (place == places.end()) continue;  // no block of that name
        auto& request = std::get<TraceRequest>(trace.records[place->second]);
        request.abort = AbortPlan{.t_ns = t_ns, .after_tokens = {}};
      } else if (event.kind == RecordedEvent::Kind::output) {
        continue;
      } else if (event.kind == RecordedEvent::Kind::pause_state) {
        return fail("a recording of an engine that paused, which no request trace says");
      } else {
        trace.records.emplace_back(
            TraceControl{.t_ns = t_ns, .preempts_running = event.resets_running});
      }
    }
  }
  return trace;
}

}  // namespace lockstep
