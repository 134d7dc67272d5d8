#include <fmt/format.h>

#include <algorithm>

#include "base/line_reader.h"
#include "reference/plan/limits.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/recording.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

constexpr std::int64_t kCountMax = std::int64_t{1} << 40;

std::string read_name(JsonValue value) { return std::string(value.nonempty_string()); }

std::vector<std::string> optional_names(JsonObject& object, std::string_view key) {
  const JsonValue value = object.optional(key);
  return value ? read_names(value) : std::vector<std::string>{};
}

bool optional_boolean(JsonObject& object, std::string_view key) {
  JsonValue value = object.optional(key);
  return value && value.boolean();
}

std::vector<BlockId> read_blocks(JsonValue value, const RecordingHeader& header) {
  std::vector<BlockId> blocks;
  const JsonArray array = value.array();
  blocks.reserve(array.size());
  for (JsonValue block : array) {
    blocks.push_back(BlockId{block.integer<std::int32_t>(0, header.num_blocks - 1)});
  }
  return blocks;
}

KVCacheBlockCopy read_copy(JsonValue value, const RecordingHeader& header) {
  const std::vector<BlockId> blocks = read_blocks(value, header);
  if (blocks.size() == 2) return {blocks[0], blocks[1]};
  value.refuse("[from, to]");
  return {};
}

BlocksPerGroup read_blocks_per_group(JsonValue value, const RecordingHeader& header) {
  BlocksPerGroup groups;
  groups.reserve(header.groups.size());
  for (JsonValue group : value.array()) groups.push_back(read_blocks(group, header));
  if (groups.size() != header.groups.size()) {
    value.refuse(fmt::format("one list of blocks for each of the {} groups", header.groups.size()));
  }
  return groups;
}

std::vector<RecordedTable> read_tables(JsonValue value, const RecordingHeader& header) {
  std::vector<RecordedTable> tables;
  for (auto& [id, blocks] : value.object().entries()) {
    tables.push_back({std::string(id), read_blocks_per_group(blocks, header)});
  }
  return tables;
}

std::vector<RecordedTokens> read_tokens_by_request(JsonValue value) {
  std::vector<RecordedTokens> rows;
  JsonObject object = value.object();
  rows.reserve(object.size());
  for (auto& [id, tokens] : object.entries()) {
    rows.push_back({std::string(id), read_token_ids(tokens, -1)});
  }
  return rows;
}

// [id, word]
std::pair<std::string, std::string> read_pair(JsonValue value) {
  const JsonArray pair = value.array();
  if (pair.size() == 2) return {read_name(pair[0]), read_name(pair[1])};
  value.refuse("[request, word]");
  return {};
}

RecordedEvent read_event(JsonValue value) {
  RecordedEvent event;
  JsonObject object = value.object();
  if (object.has("add")) {
    event.request = read_added_request(object, event.priority_given);
    event.request.arrival_ns = object.required("arrival").scaled_decimal(9);
    if (auto parent = object.optional("parent")) event.parent = read_name(parent);
  } else if (auto aborted = object.optional("abort")) {
    event.kind = RecordedEvent::Kind::abort;
    event.name = read_name(aborted);
  } else if (auto reset = object.optional("reset_prefix_cache")) {
    event.kind = RecordedEvent::Kind::reset_prefix_cache;
    event.reset_succeeded = reset.boolean();
    event.resets_running = optional_boolean(object, "running");
  } else if (auto pause = object.optional(object.has("pause") ? "pause" : "pause_state")) {
    constexpr JsonWord<PauseState> kStates[] = {{"UNPAUSED", PauseState::unpaused},
                                                {"PAUSED_NEW", PauseState::paused_new},
                                                {"PAUSED_ALL", PauseState::paused_all}};
    event.kind = RecordedEvent::Kind::pause_state;
    event.pause_state = pause.word<PauseState>(kStates);
  } else if (auto output = object.optional("output_of_step")) {
    event.kind = RecordedEvent::Kind::output;
    event.output_of_step = output.integer(0);
  } else {
    object.refuse_because(
        "found none of \"add\", \"abort\", \"reset_prefix_cache\", \"pause_state\"; expected one");
  }
  object.finish();
  return event;
}

RecordedScheduled read_scheduled(JsonValue value, const RecordingHeader& header) {
  JsonObject object = value.object();
  RecordedScheduled row;
  row.id = read_name(object.required("id"));
  row.tokens = object.required("tokens").integer<std::int32_t>(0, kTokensMax);
  row.is_new = optional_boolean(object, "new");
  row.resumed = optional_boolean(object, "resumed");
  row.computed = object.required("computed").integer<std::int32_t>(0, kTokensMax);
  const JsonValue blocks = object.required("blocks");
  if (blocks && !blocks.is_null()) row.blocks = read_blocks_per_group(blocks, header);
  if (const auto spec = object.optional("spec")) row.spec = read_token_ids(spec, -1);
  object.finish();
  return row;
}

RecordedConnectorAnswer read_connector_answer(JsonValue value) {
  JsonObject object = value.object();
  RecordedConnectorAnswer answer;
  answer.id = read_name(object.required("id"));
  answer.local = object.required("local").integer<std::int32_t>(0, kTokensMax);
  JsonValue external = object.required("external");
  if (!external.is_null()) answer.external = external.integer<std::int32_t>(0, kTokensMax);
  answer.async = object.required("async").boolean();
  object.finish();
  return answer;
}

RecordedWorker read_worker(JsonValue value, const RecordingHeader& header) {
  JsonObject object = value.object();
  RecordedWorker worker;
  worker.received = read_names(object.required("received"));
  worker.sent = read_names(object.required("sent"));
  worker.invalid_blocks = read_blocks(object.required("invalid_blocks"), header);
  object.finish();
  return worker;
}

// Drafts of requests that the step does not schedule; the names ascend.
std::vector<RecordedTokens> read_held_drafts(JsonValue value, const RecordedStep& step) {
  std::vector<RecordedTokens> held;
  for (auto& [id, tokens] : value.object().entries()) {
    if (!held.empty() && held.back().id >= id)
      tokens.refuse_because("found a name out of order; expected ascending names");
    if (std::ranges::find(step.scheduled, id, &RecordedScheduled::id) != step.scheduled.end())
      tokens.refuse_because("found drafts of a request that the step schedules; expected \"spec\"");
    held.push_back({std::string(id), read_token_ids(tokens, -1)});
    if (held.back().tokens.empty()) tokens.refuse("at least one draft, or no such request");
  }
  return held;
}

RecordedStaleOutput read_stale_output(JsonValue value, std::int64_t step) {
  JsonObject object = value.object();
  RecordedStaleOutput output;
  output.id = read_name(object.required("id"));
  output.of_step = object.required("of_step").integer(0, step);
  output.taken = object.required("taken").integer<std::int32_t>(0, kTokensMax);
  object.finish();
  return output;
}

// Of a key that the header announces: absent and "none" are not the same.
bool is_announced(JsonValue value, bool announced, std::string_view key) {
  if (!value) return false;
  if (!announced) value.refuse(fmt::format("no such key: the header has no \"{}\"", key));
  return announced;
}

std::vector<RecordedConnectorAnswer> read_connector_answers(JsonValue value) {
  std::vector<RecordedConnectorAnswer> answers;
  for (JsonValue answer : value.array()) answers.push_back(read_connector_answer(answer));
  return answers;
}

std::optional<std::string> name_or_null(JsonValue value) {
  if (value.is_null()) return {};
  return read_name(value);
}

RecordedCacheEvent read_cache_event(JsonValue value, const RecordingHeader& header) {
  using Kind = RecordedCacheEvent::Kind;
  constexpr JsonWord<Kind> kKinds[] = {{"BlockStored", Kind::stored},
                                       {"BlockRemoved", Kind::removed},
                                       {"AllBlocksCleared", Kind::cleared}};
  JsonObject object = value.object();
  RecordedCacheEvent event;
  event.kind = object.required("type").word<Kind>(kKinds);
  if (event.kind != Kind::cleared) {
    event.group =
        object.required("group_idx").integer<std::int32_t>(0, std::ssize(header.groups) - 1);
    event.block_hashes = read_names(object.required("block_hashes"));
  }
  if (event.kind == Kind::stored) {
    event.parent = name_or_null(object.required("parent_block_hash"));
    event.token_ids = read_token_ids(object.required("token_ids"));
    event.block_size = object.required("block_size").integer<std::int32_t>(1, kTokensMax);
    for (JsonValue key : object.required("extra_keys").array())
      event.extra_keys.push_back(name_or_null(key));
  }
  object.finish();
  return event;
}

void read_common_prefix_blocks(JsonValue value, const RecordingHeader& header, RecordedStep& step) {
  auto& counts = step.common_prefix_blocks.emplace();
  for (JsonValue count : value.array()) {
    counts.push_back(count.integer<std::int32_t>(0, header.num_blocks));
  }
  if (!counts.empty() && counts.size() != header.groups.size()) {
    value.refuse(fmt::format("one count for each of the {} groups, or none", header.groups.size()));
  }
}

}  // namespace

void read_decision_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  const JsonArray scheduled = object.required("scheduled").array();
  step.scheduled.reserve(scheduled.size());
  for (JsonValue row : scheduled) step.scheduled.push_back(read_scheduled(row, header));
  step.preempted = optional_names(object, "preempted");
  step.finished = optional_names(object, "finished");
  if (auto common = object.optional("common_prefix_blocks")) {
    read_common_prefix_blocks(common, header, step);
  }
  if (auto zero = object.optional("zero")) step.zero = read_blocks(zero, header);
  if (auto copies = object.optional("copies"))
    for (JsonValue copy : copies.array()) step.copies.push_back(read_copy(copy, header));
}

void read_state_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  step.running = read_names(object.required("running"));
  step.waiting = read_names(object.required("waiting"));
  if (auto skipped = object.optional("skipped")) {
    step.skipped.emplace();
    for (JsonValue element : skipped.array()) {
      auto [id, status] = read_pair(element);
      step.skipped->push_back({std::move(id), std::move(status)});
    }
  }
  step.free_blocks = object.required("free_blocks").integer(0, header.num_blocks);
}

void read_table_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  if (auto tables = object.optional("tables")) step.tables = read_tables(tables, header);
  if (auto loading = object.optional("loading")) step.loading = read_tables(loading, header);
}

void read_stopped_key(JsonObject& object, RecordedStep& step) {
  if (auto stopped = object.optional("stopped")) {
    for (JsonValue element : stopped.array()) {
      auto [id, reason] = read_pair(element);
      step.stopped.push_back({std::move(id), std::move(reason)});
    }
  }
}

void read_cache_keys(JsonObject& object, RecordedStep& step) {
  step.held = optional_names(object, "held");
  if (auto stored = object.optional("stored")) step.stored = stored.integer(0, kCountMax);
  if (auto evicted = object.optional("evicted")) step.evicted = evicted.integer(0, kCountMax);
  step.cleared = optional_boolean(object, "cleared");
}

RequestSpec read_added_request(JsonObject& object, bool& priority_given) {
  RequestSpec request;
  request.name = read_name(object.required("add"));
  request.prompt = read_recorded_prompt(object.required("prompt"));
  request.max_tokens = object.required("max_tokens").integer<std::int32_t>(1);
  JsonValue priority = object.optional("priority");
  priority_given = static_cast<bool>(priority);
  if (priority) request.priority = priority.integer<std::int32_t>();
  if (auto salt = object.optional("cache_salt")) request.cache_salt = salt.nonempty_string();
  if (auto eos = object.optional("eos")) {
    request.eos_token = eos.integer<std::int32_t>(0, kTokenIdMax);
  }
  if (auto stop = object.optional("stop_token_ids")) {
    request.stop_token_ids = read_token_ids(stop);
    if (request.stop_token_ids.empty()) stop.refuse("at least one token, or no such key");
  }
  read_rare_request_keys(object, request);
  return request;
}

RecordingHeader read_recording_header(JsonValue value) {
  JsonObject object = value.object();
  RecordingHeader header;
  object.required("schedule_recording").integer(1, 1);
  header.engine = read_recorded_engine(object.required("engine"));
  header.family = object.required("family").string();
  header.seed = object.required("seed").integer();
  header.options = read_engine_options(object.required("config"));
  header.options.config.engine = header.engine.profile();
  header.groups = read_kv_cache_groups(object.required("groups"));
  header.num_blocks = object.required("num_blocks").integer(1, kBlocksMax);
  if (auto connector = object.optional("connector")) {
    JsonObject config = connector.object();
    constexpr JsonWord<bool> kPolicies[] = {{"recompute", false}, {"fail", true}};
    header.connector.emplace();
    header.connector->fail_on_load_error =
        config.required("kv_load_failure_policy").word<bool>(kPolicies);
    header.connector->supports_hybrid_groups = config.required("supports_hybrid_groups").boolean();
    config.finish();
  }
  header.scheduler_block_size = object.required("scheduler_block_size").integer(1, kTokensMax);
  header.hash_block_size = object.required("hash_block_size").integer(1, kTokensMax);
  if (auto version = object.optional("cache_events"))
    header.has_cache_events = version.integer(1, 1) == 1;
  if (auto version = object.optional("held_drafts"))
    header.has_held_drafts = version.integer(1, 1) == 1;
  if (auto version = object.optional("stale_outputs"))
    header.has_stale_outputs = version.integer(1, 1) == 1;
  if (auto facts = object.optional("worker_facts"))
    header.worker_facts = read_worker_facts_key(facts);
  if (auto names = object.optional("x_beyond_format")) header.beyond_format = read_names(names);
  object.finish();
  return header;
}

RecordedStep read_recorded_step(JsonValue value, const RecordingHeader& header,
                                std::int64_t expected_step) {
  JsonObject object = value.object();
  RecordedStep step;
  step.step = object.required("step").integer(expected_step, expected_step);
  if (auto before = object.optional("before")) {
    for (JsonValue event : before.array()) {
      step.before.push_back(read_event(event));
      if (step.before.back().kind == RecordedEvent::Kind::output)
        event.refuse("an output in \"during\"");
    }
  }
  if (auto answers = object.optional("connector")) step.connector = read_connector_answers(answers);
  read_decision_keys(object, header, step);
  read_state_keys(object, header, step);
  if (auto held = object.optional("held_drafts");
      is_announced(held, header.has_held_drafts, "held_drafts"))
    step.held_drafts = read_held_drafts(held, step);
  read_table_keys(object, header, step);
  if (auto during = object.optional("during")) {
    for (JsonValue event : during.array()) {
      step.during.push_back(read_event(event));
      const RecordedEvent& read = step.during.back();
      if (read.kind == RecordedEvent::Kind::output && read.output_of_step >= step.step)
        event.refuse("a step before this one");
    }
  }
  if (auto worker = object.optional("worker")) step.worker = read_worker(worker, header);
  step.sampled = read_tokens_by_request(object.required("sampled"));
  if (auto of = object.optional("output_of_step")) step.output_of_step = of.integer(0, step.step);
  if (auto stale = object.optional("stale_outputs");
      is_announced(stale, header.has_stale_outputs, "stale_outputs"))
    for (JsonValue output : stale.array())
      step.stale_outputs.push_back(read_stale_output(output, step.step));
  read_stopped_key(object, step);
  if (auto drafts = object.optional("drafts")) step.drafts = read_tokens_by_request(drafts);
  read_cache_keys(object, step);
  if (auto events = object.optional("events")) {
    if (!header.has_cache_events) events.refuse("no events: the header has no \"cache_events\"");
    for (JsonValue event : events.array()) step.events.push_back(read_cache_event(event, header));
  }
  if (auto facts = object.optional("facts")) {
    if (!header.worker_facts) facts.refuse("no facts: the header has no \"worker_facts\"");
    step.facts = read_worker_step_facts(facts, header);
  }
  object.finish();
  return step;
}

RecordingEnd read_recording_end(JsonValue value, std::int64_t steps) {
  JsonObject object = value.object();
  RecordingEnd end;
  JsonValue mark = object.required("end");
  if (!mark.boolean()) mark.refuse("true");
  end.steps = object.required("steps").integer(steps, steps);
  end.unfinished = read_names(object.required("unfinished"));
  if (auto count = object.optional("steps_in_flight")) {
    end.steps_in_flight = count.integer(1, std::max<std::int64_t>(steps, 1));
  }
  object.finish();
  return end;
}

struct RecordingReader::State {
  explicit State(LineReader&& opened) : lines(std::move(opened)), json(lines.path()) {}
  LineReader lines;
  JsonReader json;
  RecordingHeader header;
  RecordingEnd end;
  std::int64_t next_step = 0;
  bool ended = false;
};

RecordingReader::RecordingReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
RecordingReader::RecordingReader(RecordingReader&&) noexcept = default;
RecordingReader& RecordingReader::operator=(RecordingReader&&) noexcept = default;
RecordingReader::~RecordingReader() = default;

Result<RecordingReader> RecordingReader::open(const std::string& path) {
  auto lines = LineReader::open(path);
  if (!lines) return tl::unexpected(lines.error());
  auto state = std::make_unique<State>(std::move(*lines));
  std::string_view line;
  if (const auto got = state->lines.next(line); !got) return tl::unexpected(got.error());
  if (state->json.parse(line, 1, state->lines.is_cut_off())) {
    state->header = read_recording_header(state->json.root());
  }
  if (!state->json.ok()) return state->json.failure();
  return RecordingReader(std::move(state));
}

const RecordingHeader& RecordingReader::header() const { return state_->header; }

std::string RecordingReader::place() const {
  return fmt::format("{}:{}", state_->lines.path(), state_->lines.number());
}

Result<bool> RecordingReader::next(RecordedStep& step) {
  State& state = *state_;
  if (state.ended) return false;
  std::string_view line;
  const auto got = state.lines.next(line);
  if (!got) return tl::unexpected(got.error());
  const std::int64_t number = state.lines.number();
  if (!*got) {
    state.json.fail_line(number,
                         "found the end of the file; expected a step or {\"end\":true,...}");
    return state.json.failure();
  }
  if (state.json.parse(line, number, state.lines.is_cut_off())) {
    const JsonValue root = state.json.root();
    if (root.is_object() && JsonValue(root).object().has("end")) {
      state.end = read_recording_end(root, state.next_step);
      state.ended = true;
      const auto behind = state.json.ok() ? state.lines.next(line) : Result<bool>(false);
      if (!behind) return tl::unexpected(behind.error());
      if (*behind)
        state.json.fail_line(number + 1, "found a line behind the end line; expected none");
    } else {
      step = read_recorded_step(root, state.header, state.next_step++);
    }
  }
  if (!state.json.ok()) return state.json.failure();
  return !state.ended;
}

const RecordingEnd& RecordingReader::end() const {
  LS_CHECK(state_->ended, "end() before the last step was read");
  return state_->end;
}

Result<Recording> read_recording(const std::string& path) {
  auto reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  Recording recording{.header = reader->header(), .steps = {}, .end = {}};
  while (true) {
    RecordedStep step;
    const auto more = reader->next(step);
    if (!more) return tl::unexpected(more.error());
    if (!*more) break;
    recording.steps.push_back(std::move(step));
  }
  recording.end = reader->end();
  return recording;
}

}  // namespace lockstep
