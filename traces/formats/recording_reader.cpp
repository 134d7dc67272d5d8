#include <fmt/format.h>

#include <algorithm>

#include "base/line_reader.h"
#include "reference/plan/limits.h"
#include "reference/profiles/engine_profile.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/recording.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

constexpr std::int64_t kCountMax = std::int64_t{1} << 40;

std::vector<std::string> optional_names(JsonObject& object, std::string_view key) {
  const JsonValue value = object.optional(key);
  return value ? read_names(value) : std::vector<std::string>{};
}

bool optional_boolean(JsonObject& object, std::string_view key) {
  JsonValue value = object.optional(key);
  return value && value.boolean();
}

std::vector<BlockId> read_blocks(JsonValue value, const RecordingHeader& header) {
  return read_blocks(value, header.num_blocks);
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
  for (JsonValue group : value.array()) {
    const std::size_t g = groups.size();
    const bool is_host = header.options.config.host_pool_num_blocks > 0 &&
                         g < header.groups.size() && header.groups[g].role == kPageSourceRole;
    groups.push_back(read_blocks(
        group, is_host ? header.options.config.host_pool_num_blocks : header.num_blocks));
  }
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

// An entry whose only key says what it is and whose.
struct NamedEvent {
  std::string_view key;
  RecordedEvent::Kind kind;
};
constexpr NamedEvent kNamedEvents[] = {{"close", RecordedEvent::Kind::close},
                                       {"grammar_ready", RecordedEvent::Kind::grammar_ready},
                                       {"grammar_failed", RecordedEvent::Kind::grammar_failed}};

void read_add(JsonObject& object, const RecordingHeader& header, RecordedEvent& event) {
  event.is_pooling = optional_boolean(object, "pooling");
  const EngineProfile* const profile = find_engine_profile(header.options.config.engine);
  const AddedForm form{
      .has_max_tokens = !event.is_pooling,
      .keys = {.has_items_beside = header.options.inputs.is_encoder_decoder.value_or(false),
               .zeroes_embedded = profile != nullptr && profile->zeroes_embedded_tokens}};
  event.request = read_added_request(object, event.priority_given, form);
  event.request.arrival_ns = object.required("arrival").scaled_decimal(9);
  event.needs_grammar = optional_boolean(object, "structured");
  event.is_session = optional_boolean(object, "resumable");
  if (auto parent = object.optional("parent")) event.parent = read_name(parent);
  if (auto session = object.optional("session_id")) event.session_id = read_name(session);
}

void read_chunk(JsonObject& object, RecordedEvent& event) {
  event.kind = RecordedEvent::Kind::chunk;
  event.name = event.request.name = read_name(object.required("chunk"));
  event.request.prompt = read_recorded_prompt(object.required("prompt"));
  event.request.max_tokens = object.required("max_tokens").integer<std::int32_t>(1);
  event.request.arrival_ns = object.required("arrival").scaled_decimal(9);
  if (auto items = object.optional("mm"))
    event.request.keys.mm = read_prompt_items(items, event.request.prompt.size());
  if (auto eos = object.optional("eos"))
    event.request.eos_token = eos.integer<std::int32_t>(0, kTokenIdMax);
}

RecordedEvent read_event(JsonValue value, const RecordingHeader& header) {
  RecordedEvent event;
  JsonObject object = value.object();
  const auto* const named =
      std::ranges::find_if(kNamedEvents, [&](const NamedEvent& of) { return object.has(of.key); });
  if (named != std::end(kNamedEvents)) {
    event.kind = named->kind;
    event.name = read_name(object.required(named->key));
  } else if (object.has("add")) {
    read_add(object, header, event);
  } else if (object.has("chunk")) {
    read_chunk(object, event);
  } else if (auto dropped = object.optional("reset_encoder_cache")) {
    event.kind = RecordedEvent::Kind::reset_encoder_cache;
    if (!dropped.boolean()) dropped.refuse("true");
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
  if (const auto encode = object.optional("encode")) row.encode = read_token_ids(encode);
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
  worker.failed = optional_names(object, "failed");
  const auto read_numbers = [&](std::string_view key, std::vector<std::int64_t>& numbers) {
    if (auto list = object.optional(key))
      for (JsonValue number : list.array()) numbers.push_back(number.integer(0, kCountMax));
  };
  read_numbers("jobs", worker.jobs);
  read_numbers("store_events", worker.store_events);
  if (auto counts = object.optional("enqueued")) worker.enqueued = read_transfer_counts(counts);
  if (auto counts = object.optional("completed")) worker.completed = read_transfer_counts(counts);
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

// [[id, status], ...]
std::vector<RecordedSkipped> read_statuses(JsonValue value) {
  std::vector<RecordedSkipped> rows;
  for (JsonValue element : value.array()) {
    auto [id, status] = read_pair(element);
    rows.push_back({std::move(id), std::move(status)});
  }
  return rows;
}

void read_input_keys(JsonObject& object, RecordedInputs& inputs) {
  inputs.free_encoder = optional_names(object, "free_encoder");
  if (auto slots = object.optional("encoder_slots")) {
    for (JsonValue rows : slots.array())
      inputs.encoder_slots.push_back(rows.integer<std::int32_t>(0, kTokensMax));
    if (inputs.encoder_slots.empty() || inputs.encoder_slots.size() > 2)
      slots.refuse("[rows free, rows free or reclaimable], or the first alone");
  }
  if (auto cache = object.optional("encoder_cache"))
    inputs.encoder_cache = read_encoder_cache(cache);
  if (auto freeable = object.optional("encoder_freeable"))
    inputs.encoder_freeable = read_names(freeable);
  inputs.holding = optional_names(object, "holding");
  if (auto blocked = object.optional("blocked")) inputs.blocked = read_statuses(blocked);
  if (auto grammar = object.optional("grammar")) inputs.grammar = read_grammar(grammar);
  if (auto drafts = object.optional("drafts_in_flight"))
    inputs.drafts_in_flight = read_tokens_by_request(drafts);
  if (auto spec = object.optional("spec_in_flight"))
    inputs.spec_in_flight = read_tokens_by_request(spec);
  if (auto invalid = object.optional("invalid_drafts"))
    for (auto& [id, count] : invalid.object().entries())
      inputs.invalid_drafts.push_back(
          {std::string(id), count.integer<std::int32_t>(0, kTokensMax)});
  inputs.pooled = optional_names(object, "pooled");
}

void read_transfer_keys(JsonObject& object, RecordedTransfers& transfers) {
  if (auto holding = object.optional("kv_holding")) transfers.kv_holding = read_statuses(holding);
  transfers.loads_within = optional_boolean(object, "loads_within");
  const auto keep = [&](std::string_view key, std::string& text) {
    if (auto value = object.optional(key)) text = value.text();
  };
  keep("parts", transfers.parts);
  if (auto parts = object.optional("parts_worker"))
    for (JsonValue part : parts.array()) {
      JsonObject report = part.object();
      transfers.parts_worker.push_back(
          {read_names(report.required("received")), read_names(report.required("sent"))});
      report.finish();
    }
  keep("parts_held", transfers.parts_held);
  keep("offload", transfers.offload);
}

RecordedConnectorConfig read_connector_config(JsonValue value) {
  JsonObject object = value.object();
  RecordedConnectorConfig config;
  constexpr JsonWord<bool> kPolicies[] = {{"recompute", false}, {"fail", true}};
  config.fail_on_load_error = object.required("kv_load_failure_policy").word<bool>(kPolicies);
  config.supports_hybrid_groups = object.required("supports_hybrid_groups").boolean();
  if (auto role = object.optional("kv_role")) config.kv_role = read_name(role);
  if (auto name = object.optional("name")) config.name = read_name(name);
  constexpr std::string_view kOptions[] = {
      "host_blocks",     "eviction_policy",  "lazy",
      "store_threshold", "blocks_per_chunk", "sync_load_tokens"};
  for (const std::string_view key : kOptions)
    if (auto option = object.optional(key)) config.options.emplace_back(key, option.text());
  if (auto parts = object.optional("parts")) config.parts = parts.integer<std::int32_t>(1, 64);
  config.requires_kv_delivery = optional_boolean(object, "requires_kv_delivery");
  config.divergent_hits = optional_boolean(object, "divergent_hits");
  config.waits_for_sends = optional_boolean(object, "waits_for_sends");
  object.finish();
  return config;
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
    step.skipped = read_statuses(skipped);
  }
  JsonValue free_blocks = object.required("free_blocks");
  step.free_blocks = free_blocks.is_null() ? -1 : free_blocks.integer(0, header.num_blocks);
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

RequestSpec read_added_request(JsonObject& object, bool& priority_given, AddedForm form) {
  RequestSpec request;
  request.name = read_name(object.required("add"));
  if (!read_embeds_alone(object, request))
    request.prompt = read_recorded_prompt(object.required("prompt"));
  if (form.has_max_tokens)
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
  read_rare_request_keys(object, request, form.keys);
  return request;
}

RecordingHeader read_recording_header(JsonValue value) {
  JsonObject object = value.object();
  RecordingHeader header;
  object.required("schedule_recording").integer(1, 1);
  header.engine = read_recorded_engine(object.required("engine"));
  header.family = object.required("family").string();
  header.seed = object.required("seed").integer();
  header.options = read_engine_options(object.required("config"), InputsIn::recording);
  header.options.config.engine = header.engine.profile();
  header.groups = read_kv_cache_groups(object.required("groups"));
  header.num_blocks = object.required("num_blocks").integer(1, kBlocksMax);
  if (auto blocks = object.optional("hisparse_host_num_blocks"))
    header.options.config.host_pool_num_blocks = blocks.integer(1, kBlocksMax);
  if (auto connector = object.optional("connector"))
    header.connector = read_connector_config(connector);
  constexpr JsonWord<HashAlgorithm> kAlgorithms[] = {{"sha256_cbor", HashAlgorithm::sha256_cbor},
                                                     {"xxhash_cbor", HashAlgorithm::xxhash_cbor}};
  if (auto algorithm = object.optional("hash_algorithm")) {
    header.options.config.hash_algorithm = algorithm.word<HashAlgorithm>(kAlgorithms);
    header.has_cache_events = true;
  }
  header.scheduler_block_size = object.required("scheduler_block_size").integer(1, kTokensMax);
  header.hash_block_size = object.required("hash_block_size").integer(1, kTokensMax);
  if (auto rows = object.optional("encoder_compute_budget"))
    header.encoder_compute_budget = rows.integer<std::int32_t>(0, kTokensMax);
  if (auto rows = object.optional("encoder_cache_size"))
    header.encoder_cache_size = rows.integer<std::int32_t>(0, kTokensMax);
  if (has_cross_attention(header.groups)) {
    header.options.config.encoder_compute_budget = header.encoder_compute_budget.value_or(0);
    header.options.config.encoder_cache_size = header.encoder_cache_size.value_or(0);
  }
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
      step.before.push_back(read_event(event, header));
      if (step.before.back().kind == RecordedEvent::Kind::output)
        event.refuse("an output in \"during\"");
    }
  }
  if (auto answers = object.optional("connector")) step.connector = read_connector_answers(answers);
  read_decision_keys(object, header, step);
  if (auto pages = object.optional("hisparse")) step.pages = read_pages(pages, header);
  read_state_keys(object, header, step);
  if (auto held = object.optional("held_drafts");
      is_announced(held, header.has_held_drafts, "held_drafts"))
    step.held_drafts = read_held_drafts(held, step);
  read_table_keys(object, header, step);
  read_input_keys(object, step.inputs);
  read_transfer_keys(object, step.transfers);
  if (auto deferred = object.optional("deferred")) {
    if (header.connector)
      step.transfers.deferred = read_names(deferred);
    else
      step.inputs.is_deferred = deferred.boolean();
  }
  if (auto during = object.optional("during")) {
    for (JsonValue event : during.array()) {
      step.during.push_back(read_event(event, header));
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
    if (!header.has_cache_events) events.refuse("no events: the header has no \"hash_algorithm\"");
    for (JsonValue event : events.array()) step.events.push_back(read_cache_event(event, header));
  }
  if (auto facts = object.optional("facts")) {
    if (!header.worker_facts) facts.refuse("no facts: the header has no \"worker_facts\"");
    step.facts = read_worker_step_facts(facts, header);
  }
  object.finish();
  return step;
}

RecordingEnd read_recording_end(JsonValue value, const RecordingHeader& header,
                                std::int64_t steps) {
  JsonObject object = value.object();
  RecordingEnd end;
  JsonValue mark = object.required("end");
  if (!mark.boolean()) mark.refuse("true");
  end.steps = object.required("steps").integer(steps, steps);
  end.unfinished = read_names(object.required("unfinished"));
  if (auto count = object.optional("steps_in_flight")) {
    end.steps_in_flight = count.integer(1, std::max<std::int64_t>(steps, 1));
  }
  end.is_cut_off = optional_boolean(object, "cut_off");
  if (auto raised = object.optional("raised")) {
    JsonObject of = raised.object();
    end.raised_in = read_name(of.required("in"));
    if (auto before = of.optional("before"))
      for (JsonValue event : before.array()) end.raised_before.push_back(read_event(event, header));
    of.finish();
  }
  if (auto failure = object.optional("failure")) {
    JsonObject of = failure.object();
    end.failed_check = of.required("check").nonempty_string();
    end.failed_what = of.required("what").string();
    of.finish();
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
  // After the last whole step of a file without an end line.
  bool cut_off() {
    end = {.steps = next_step, .unfinished = {}, .is_cut_off = true};
    ended = true;
    return false;
  }
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
  if (!*got) return state.cut_off();
  if (state.json.parse(line, number, state.lines.is_cut_off())) {
    const JsonValue root = state.json.root();
    if (root.is_object() && JsonValue(root).object().has("end")) {
      state.end = read_recording_end(root, state.header, state.next_step);
      state.ended = true;
      const auto behind = state.json.ok() ? state.lines.next(line) : Result<bool>(false);
      if (!behind) return tl::unexpected(behind.error());
      if (*behind)
        state.json.fail_line(number + 1, "found a line after the end line; expected none");
    } else {
      step = read_recorded_step(root, state.header, state.next_step++);
    }
  } else if (state.json.is_cut_off()) {
    return state.cut_off();
  }
  if (!state.json.ok()) return state.json.failure();
  return !state.ended;
}

const RecordingEnd& RecordingReader::end() const {
  LS_CHECK(state_->ended, "end() before the last step was read");
  return state_->end;
}

}  // namespace lockstep
