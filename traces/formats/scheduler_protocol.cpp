// Each message is built from the recording's own writers, so that a dialogue and the recording made
// of it cannot differ in form.
#include "traces/formats/scheduler_protocol.h"

#include "base/json_writer.h"
#include "reference/plan/limits.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/recording_fields.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

// Events of clients are whole messages: {"add":..}, {"abort":..}, {"pause_state":..}.
std::string event_message(const RecordedEvent& event) {
  JsonWriter out;
  write_recorded_event(out, event);
  return out.take_line();
}

std::string read_id(JsonObject& object) {
  return std::string(object.required("id").nonempty_string());
}

// Replaces the queues, the pool and the counters of the prefix cache by those of a reply. `skipped`
// is optional, hence the reset: an absent one must not keep the previous state's.
void read_state(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  step.skipped.reset();
  read_state_keys(object, header, step);
}

}  // namespace

std::string hello_message_of(std::string_view protocol, std::int64_t version) {
  return object_line([&](JsonWriter& out) {
    out.key("hello").begin_object().integer(protocol, version).end_object();
  });
}

std::string hello_message() {
  return hello_message_of("scheduler_protocol", kSchedulerProtocolVersion);
}

std::string open_message(const RecordingHeader& header) {
  return object_line([&](JsonWriter& out) {
    write_engine_keys(out.key("open").begin_object(), header);
    out.integer("seed", header.seed).end_object();
  });
}

// The default priority is omitted, which engines without priorities need not accept.
std::string add_message(const RequestSpec& request) {
  return event_message({.request = request, .priority_given = request.priority != 0});
}

std::string abort_message(const std::string& name) {
  return event_message({.kind = RecordedEvent::Kind::abort, .name = name});
}

std::string pause_message(PauseState state) {
  return event_message({.kind = RecordedEvent::Kind::pause_state, .pause_state = state});
}

// Not the event of a recording: the result is not known yet, so the key has an object instead of a
// flag.
std::string reset_message(bool preempts_running) {
  return object_line([&](JsonWriter& out) {
    out.key("reset_prefix_cache").begin_object().boolean("running", preempts_running).end_object();
  });
}

std::string schedule_message(std::int64_t step, bool shows_tables) {
  return object_line([&](JsonWriter& out) {
    out.integer("schedule", step);
    if (shows_tables) out.boolean("tables", true);
  });
}

std::string update_message(const RecordedStep& step) {
  return object_line([&](JsonWriter& out) {
    write_tokens_by_request(out.integer("update", step.step).key("sampled"), step.sampled);
    if (step.drafts) write_tokens_by_request(out.key("drafts"), *step.drafts);
    if (step.worker) write_worker(out.key("worker"), *step.worker);
  });
}

std::string close_message() {
  return object_line([](JsonWriter& out) { out.boolean("close", true); });
}

std::string connector_answer_message(const RecordedConnectorAnswer& answer) {
  return object_line([&](JsonWriter& out) {
    out.key("external").integer_or_null(answer.external).boolean("async", answer.async);
  });
}

std::string keeps_message(bool keeps) {
  return object_line([&](JsonWriter& out) { out.boolean("keeps", keeps); });
}

// Policies are refused here: they describe how an engine differs from a release of vLLM, and only
// files have them.
EngineHello read_hello(JsonObject& object) {
  EngineHello hello;
  JsonObject said = object.required("hello").object();
  said.required("scheduler_protocol").integer(kSchedulerProtocolVersion, kSchedulerProtocolVersion);
  JsonObject engine = said.required("engine").object();
  hello.engine.name = engine.required("name").nonempty_string();
  hello.engine.version = engine.required("version").nonempty_string();
  engine.finish();
  hello.features = read_names(said.required("features"));
  said.finish();
  return hello;
}

std::string read_refusal(JsonObject& object) {
  const JsonValue refused = object.optional("refused");
  return refused ? std::string(JsonValue(refused).nonempty_string()) : std::string();
}

// A size that a recording may not have is refused.
std::string read_opened(JsonObject& object, RecordingHeader& header) {
  if (object.has("refused")) return read_refusal(object);
  JsonObject opened = object.required("opened").object();
  header.scheduler_block_size = opened.required("scheduler_block_size").integer(1, kTokensMax);
  check_scheduler_block_size(opened, header);
  header.hash_block_size = opened.required("hash_block_size").integer(1, kTokensMax);
  opened.finish();
  return {};
}

void read_decision(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  read_decision_keys(object, header, step);
  read_state(object, header, step);
}

// `stopped` is replaced, since the step may have that of an earlier output.
EngineOutcome read_outcome(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  EngineOutcome outcome;
  step.stopped.clear();
  read_stopped_key(object, step);
  for (auto& [id, tokens] : object.required("num_tokens").object().entries())
    outcome.num_tokens.emplace_back(id, tokens.integer(0, kTokensMax));
  read_state(object, header, step);
  return outcome;
}

bool read_reset(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  const bool succeeded = object.required("reset_prefix_cache").boolean();
  read_state(object, header, step);
  return succeeded;
}

// A query has `ask` and expects an answer; a notification has `tell` and gets none.
ConnectorLine read_connector_line(JsonObject& object, const RecordingHeader& header) {
  using Kind = ConnectorLine::Kind;
  ConnectorLine line;
  if (auto asked = object.optional("ask")) {
    constexpr JsonWord<Kind> kQuestions[] = {{"matched_tokens", Kind::matched_tokens},
                                             {"finished", Kind::finished}};
    line.kind = asked.word<Kind>(kQuestions);
    line.id = read_id(object);
    if (line.kind == Kind::matched_tokens)
      line.tokens = object.required("local").integer<std::int32_t>(0, kTokensMax);
    else if (auto blocks = object.optional("blocks"))
      BlockLists{header}.read(blocks, line.kept.emplace());
    return line;
  }
  constexpr JsonWord<Kind> kTold[] = {{"allocated", Kind::allocated}};
  line.kind = object.required("tell").word<Kind>(kTold);
  line.id = read_id(object);
  line.tokens = object.required("external").integer<std::int32_t>(0, kTokensMax);
  // Only the first group's list is read; the others are not needed.
  for (JsonValue group : object.required("blocks").array()) {
    for (JsonValue block : group.array())
      line.blocks.push_back(BlockId{block.integer<std::int32_t>(0, header.num_blocks - 1)});
    break;
  }
  return line;
}

}  // namespace lockstep
