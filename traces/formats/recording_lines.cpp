// The lines of a recording, read and written: header, steps and end, each from one list of fields
// that serves both directions. The order of a list is the order of keys in a written file.
//
// Checked while reading: keys, types, ranges, blocks within their pool, one list per group, step
// numbers. Not checked: whether a decision makes sense (conform, audit).
#include <fmt/format.h>

#include <algorithm>

#include "base/number_text.h"
#include "reference/profiles/engine_profile.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/recording_fields.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

// The file has seconds as a decimal number; memory has integer nanoseconds. The text is scaled
// exactly and never passes through a floating-point number.
constexpr form::Code kSeconds{
    [](JsonValue value) { return value.scaled_decimal(9); },
    [](JsonWriter& out, std::int64_t ns) { out.raw(decimal_text_of(ns, 9)); }};

// Entries with a single key that names both the event and the request: {"abort":"r1"}.
struct NamedEvent {
  std::string_view key;
  RecordedEvent::Kind kind;
};
constexpr NamedEvent kNamedEvents[] = {{"abort", RecordedEvent::Kind::abort},
                                       {"close", RecordedEvent::Kind::close},
                                       {"grammar_ready", RecordedEvent::Kind::grammar_ready},
                                       {"grammar_failed", RecordedEvent::Kind::grammar_failed}};

// Keys of `add` that only requests with a grammar, a session, a pooler or several samples have.
template <class Io>
void rest_of_add(Io& io, FieldsOf<Io, RecordedEvent>& event) {
  io.optional("structured", event.needs_grammar);
  io.optional("resumable", event.is_session);
  io.optional("pooling", event.is_pooling);
  io.optional("parent", event.parent);
  io.optional("session_id", event.session_id);
}

// An optional flag whose absence means false.
bool read_flag(JsonObject& object, std::string_view key) {
  JsonValue value = object.optional(key);
  return value && value.boolean();
}

// Reads an `add`. Two facts outside the entry change its form: with an encoder-decoder model the
// items are not part of the prompt, and the release decides whether positions of embeddings hold
// token 0.
void read_add(JsonObject& object, const RecordingHeader& header, RecordedEvent& event) {
  event.is_pooling = read_flag(object, "pooling");
  const EngineProfile* const profile = find_engine_profile(header.options.config.engine);
  const AddedForm form{
      .has_max_tokens = !event.is_pooling,
      .keys = {.has_items_beside = header.options.inputs.is_encoder_decoder.value_or(false),
               .zeroes_embedded = profile != nullptr && profile->zeroes_embedded_tokens}};
  event.request = read_added_request(object, event.priority_given, form);
  event.has_no_stop_tokens = object.has("stop_token_ids") && event.request.stop_token_ids.empty();
  FieldReader io(object);
  io.required("arrival", event.request.arrival_ns, kSeconds);
  rest_of_add(io, event);
}

// Keys in the order of read_added_request(), with defaults omitted. A request of embeddings only
// has no `prompt`, since its tokens are all 0.
void write_add(JsonWriter& out, const RecordedEvent& event) {
  const RequestSpec& request = event.request;
  out.string("add", request.name);
  if (!request.keys.embeds.are_alone) write_prompt_of(out.key("prompt"), request);
  if (!event.is_pooling) out.integer("max_tokens", request.max_tokens);
  out.key("arrival").raw(decimal_text_of(request.arrival_ns, 9));
  if (event.priority_given) out.integer("priority", request.priority);
  if (!request.cache_salt.empty()) out.string("cache_salt", request.cache_salt);
  if (request.eos_token) out.integer("eos", *request.eos_token);
  if (!request.stop_token_ids.empty() || event.has_no_stop_tokens)
    out.key("stop_token_ids").integers(request.stop_token_ids);
  write_rare_request_keys(out, request);
  FieldWriter io(out);
  rest_of_add(io, event);
}

// A chunk has its own prompt and limit; it inherits everything else from the session's `add`.
template <class Io>
void chunk_fields(Io& io, FieldsOf<Io, RecordedEvent>& event) {
  auto& request = event.request;
  constexpr form::Code kPrompt{read_recorded_prompt, write_recorded_prompt};
  io.required("chunk", event.name);
  io.required("prompt", request.prompt, kPrompt);
  if constexpr (Io::kReads) {
    request.name = event.name;
    if (auto items = io.object.optional("mm"))
      request.keys.mm = read_prompt_items(items, request.prompt.size());
  } else {
    write_prompt_items(io.out, request.keys.mm);
  }
  io.required("max_tokens", request.max_tokens, form::Between{1, INT32_MAX});
  io.required("arrival", request.arrival_ns, kSeconds);
  io.optional("eos", request.eos_token, form::Between{0, kTokenIdMax});
}

// Recognizes an entry by the key that only its kind has; finish() then refuses every other key.
// `pause` is the older name of `pause_state`.
RecordedEvent read_event(JsonValue value, const RecordingHeader& header) {
  RecordedEvent event;
  JsonObject object = value.object();
  const auto* const named =
      std::ranges::find_if(kNamedEvents, [&](const NamedEvent& of) { return object.has(of.key); });
  if (named != std::end(kNamedEvents)) {
    event.kind = named->kind;
    event.name = object.required(named->key).nonempty_string();
  } else if (object.has("add")) {
    read_add(object, header, event);
  } else if (object.has("chunk")) {
    event.kind = RecordedEvent::Kind::chunk;
    FieldReader io(object);
    chunk_fields(io, event);
  } else if (auto dropped = object.optional("reset_encoder_cache")) {
    event.kind = RecordedEvent::Kind::reset_encoder_cache;
    if (!dropped.boolean()) dropped.refuse("true");
  } else if (auto reset = object.optional("reset_prefix_cache")) {
    event.kind = RecordedEvent::Kind::reset_prefix_cache;
    event.reset_succeeded = reset.boolean();
    event.resets_running = read_flag(object, "running");
  } else if (auto pause = object.optional(object.has("pause") ? "pause" : "pause_state")) {
    event.kind = RecordedEvent::Kind::pause_state;
    event.pause_state = pause.word<PauseState>(kPauseStates);
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

// The events of one list. Entries of processed outputs are allowed only after the decision
// (`during`), and only for earlier steps: the output of the step itself cannot precede its
// computation. The list of a raised exception may have any.
struct Events {
  const RecordingHeader& header;
  std::int64_t during_step = -1;  // -1: before the decision
  bool may_have_outputs = false;
  void read(JsonValue value, std::vector<RecordedEvent>& events) const {
    for (JsonValue one : value.array()) {
      const RecordedEvent& event = events.emplace_back(read_event(one, header));
      if (event.kind != RecordedEvent::Kind::output || may_have_outputs) continue;
      if (during_step < 0)
        one.refuse("an output in \"during\"");
      else if (event.output_of_step >= during_step)
        one.refuse("a step before this one");
    }
  }
  static void write(JsonWriter& out, const std::vector<RecordedEvent>& events) {
    out.each(events, [&](const RecordedEvent& event) { write_recorded_event(out, event); });
  }
};

// Drafts of requests that the step does not schedule, {"r1":[7,-1]}. Names ascend, which makes the
// bytes unique, and every request has at least one draft. Drafts of scheduled requests are in their
// `spec`.
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

// Returns whether to read or write `key`: always when reading, so that an unannounced key is
// refused with `refusal` instead of as unknown; only if announced when writing. Absent and "none"
// are different facts about a recording, and only the header states which one a missing key means.
template <class Io>
bool is_announced(Io& io, std::string_view key, bool announced, std::string_view refusal) {
  if constexpr (Io::kReads)
    if (JsonValue value = io.object.optional(key); value && !announced) value.refuse(refusal);
  return !Io::kReads || announced;
}

// The decision, from `scheduled` to `copies`. Adapters of the scheduler protocol send the same
// keys.
template <class Io>
void decision_fields(Io& io, FieldsOf<Io, RecordedStep>& step, const RecordingHeader& header) {
  const form::Pair<Block, Block> copy{"[from, to]", {header.num_blocks}, {header.num_blocks}};
  io.required("scheduled", step.scheduled, form::Each{form::With{header}});
  io.optional("preempted", step.preempted);
  io.optional("finished", step.finished);
  io.optional("common_prefix_blocks", step.common_prefix_blocks,
              form::Each<form::Between>{{0, header.num_blocks}});
  if constexpr (Io::kReads)
    if (step.common_prefix_blocks && !step.common_prefix_blocks->empty() &&
        step.common_prefix_blocks->size() != header.groups.size())
      io.object.required("common_prefix_blocks")
          .refuse(
              fmt::format("one count for each of the {} groups, or none", header.groups.size()));
  io.optional("zero", step.zero, blocks_of(header));
  io.optional("copies", step.copies, form::Each{copy});
}

// The queues and the pool after the decision. `free_blocks` is -1 in memory and null in the file
// when unknown, so the member passes through an optional.
template <class Io>
void state_fields(Io& io, FieldsOf<Io, RecordedStep>& step, const RecordingHeader& header) {
  if constexpr (Io::kReads) {  // an engine reports them several times in a step
    step.running.clear();
    step.waiting.clear();
  }
  io.required("running", step.running);
  io.required("waiting", step.waiting);
  io.optional("skipped", step.skipped, kPairs);
  std::optional<std::int64_t> free_blocks;
  if (step.free_blocks >= 0) free_blocks = step.free_blocks;
  if constexpr (Io::kReads) free_blocks.reset();
  io.nullable("free_blocks", free_blocks, form::Between{0, header.num_blocks});
  if constexpr (Io::kReads) step.free_blocks = free_blocks.value_or(-1);
}

// Full tables of running requests and of loads in flight, {"r1":[[1,2],[3]]}: one list per group.
template <class Io>
void table_fields(Io& io, FieldsOf<Io, RecordedStep>& step, const RecordingHeader& header) {
  const form::ById<BlockLists> tables{{header}};
  io.optional("tables", step.tables, tables);
  io.optional("loading", step.loading, tables);
}

// Changes of the prefix cache, and finished requests whose blocks are still being sent.
template <class Io>
void cache_fields(Io& io, FieldsOf<Io, RecordedStep>& step) {
  io.optional("held", step.held);
  io.optional("stored", step.stored, kCount);
  io.optional("evicted", step.evicted, kCount);
  io.optional("cleared", step.cleared);
}

// read_held_drafts() depends on the step's `scheduled`, which must have been read before.
template <class Io>
void held_draft_fields(Io& io, FieldsOf<Io, RecordedStep>& step, const RecordingHeader& header) {
  if (!is_announced(io, "held_drafts", header.has_held_drafts,
                    "no such key: the header has no \"held_drafts\""))
    return;
  if constexpr (Io::kReads) {
    if (auto held = io.object.optional("held_drafts"))
      step.held_drafts = read_held_drafts(held, step);
  } else {
    io.optional("held_drafts", step.held_drafts, kTokensByRequest);
  }
}

// Keys for inputs other than tokens: encoder items, waiting requests with their reasons, and the
// results of grammars and poolers. `deferred` is a flag here, and a list of requests in recordings
// with a connector (transfer_fields()); the header tells them apart.
template <class Io>
void input_fields(Io& io, FieldsOf<Io, RecordedInputs>& inputs, const RecordingHeader& header) {
  io.optional("free_encoder", inputs.free_encoder);
  io.optional("encoder_slots", inputs.encoder_slots, form::Each{kTokens});
  if constexpr (Io::kReads)
    if (auto slots = io.object.optional("encoder_slots");
        slots && (inputs.encoder_slots.empty() || inputs.encoder_slots.size() > 2))
      slots.refuse("[rows free, rows free or reclaimable], or the first alone");
  io.optional("encoder_cache", inputs.encoder_cache, form::ById<>{});
  io.optional("encoder_freeable", inputs.encoder_freeable);
  io.optional("holding", inputs.holding);
  io.optional("blocked", inputs.blocked, kPairs);
  io.optional("drafts_in_flight", inputs.drafts_in_flight, kTokensByRequest);
  io.optional("spec_in_flight", inputs.spec_in_flight, kTokensByRequest);
  if (!Io::kReads || !header.connector) io.optional("deferred", inputs.is_deferred);
  io.optional("invalid_drafts", inputs.invalid_drafts, form::ById{kTokens});
  io.optional("grammar", inputs.grammar);
  io.optional("pooled", inputs.pooled);
}

// Keys that newer releases have with a connector. Decisions of vLLM's own connectors are kept as
// raw JSON.
template <class Io>
void transfer_fields(Io& io, FieldsOf<Io, RecordedTransfers>& transfers,
                     const RecordingHeader& header) {
  io.optional("kv_holding", transfers.kv_holding, kPairs);
  if (!Io::kReads || header.connector) io.optional("deferred", transfers.deferred);
  io.optional("loads_within", transfers.loads_within);
  io.optional("parts", transfers.parts, form::Raw{});
  io.optional("parts_worker", transfers.parts_worker);
  io.optional("parts_held", transfers.parts_held, form::Raw{});
  io.optional("offload", transfers.offload, form::Raw{});
}

// True if the worker received what its parts received: vLLM's MultiConnector reports the union.
bool agrees_with_parts(const RecordedStep& step) {
  std::set<std::string_view> of_parts, of_worker;
  for (const RecordedPartReport& part : step.transfers.parts_worker)
    of_parts.insert(part.received.begin(), part.received.end());
  if (step.worker) of_worker.insert(step.worker->received.begin(), step.worker->received.end());
  return of_parts == of_worker;
}

// What the worker and the model returned for the step, and what the engine did with it. `sampled`
// is always present, as {} for a step without requests.
template <class Io>
void output_fields(Io& io, FieldsOf<Io, RecordedStep>& step, const RecordingHeader& header) {
  io.optional("worker", step.worker, form::With{header});
  io.required("sampled", step.sampled, kTokensByRequest);
  io.optional("output_of_step", step.output_of_step, form::Between{0, step.step});
  if (is_announced(io, "stale_outputs", header.has_stale_outputs,
                   "no such key: the header has no \"stale_outputs\""))
    io.optional("stale_outputs", step.stale_outputs, form::Each{form::With{step.step}});
  io.optional("stopped", step.stopped, kPairs);
  io.optional("drafts", step.drafts, kTokensByRequest);
  cache_fields(io, step);
  if (is_announced(io, "events", header.has_cache_events,
                   "no events: the header has no \"hash_algorithm\""))
    io.optional("events", step.events, form::Each{form::With{header}});
  if (!is_announced(io, "facts", header.worker_facts.has_value(),
                    "no facts: the header has no \"worker_facts\""))
    return;
  if constexpr (Io::kReads) {
    if (auto facts = io.object.optional("facts"))
      step.facts = read_worker_step_facts(facts, header);
  } else if (step.facts) {
    write_worker_step_facts(io.out.key("facts"), *step.facts);
  }
}

// `config` to `connector` of a header: the keys that the scheduler protocol's `open` shares. The
// engine's profile must be known before options and groups are used, so config.engine is set here.
template <class Io>
void engine_fields(Io& io, FieldsOf<Io, RecordingHeader>& header) {
  constexpr form::Code kOptions{
      [](JsonValue value) { return read_engine_options(value, InputsIn::recording); },
      write_engine_options};
  constexpr form::Code kGroups{read_kv_cache_groups, write_kv_cache_groups};
  io.required("config", header.options, kOptions);
  if constexpr (Io::kReads) header.options.config.engine = header.engine.profile();
  io.required("groups", header.groups, kGroups);
  io.required("num_blocks", header.num_blocks, form::Between{1, kBlocksMax});
  io.optional(kHostBlocksKey, header.options.config.host_pool_num_blocks,
              form::Between{1, kBlocksMax});
  io.optional("connector", header.connector);
}

}  // namespace

// A step line. step.step is the expected number when reading, so that a gap or a repetition is
// refused.
template <class Io>
void fields(Io& io, FieldsOf<Io, RecordedStep>& step, const RecordingHeader& header) {
  io.required("step", step.step, form::Between{step.step, step.step});
  io.optional("before", step.before, Events{header});
  io.optional("connector", step.connector);
  decision_fields(io, step, header);
  io.optional(kHostPagesWord, step.pages, form::With{header});
  state_fields(io, step, header);
  held_draft_fields(io, step, header);
  table_fields(io, step, header);
  io.optional("during", step.during, Events{header, step.step});
  input_fields(io, step.inputs, header);
  transfer_fields(io, step.transfers, header);
  output_fields(io, step, header);
  if constexpr (Io::kReads)
    if (auto parts = io.object.optional("parts_worker"); parts && !agrees_with_parts(step))
      parts.refuse_because("its parts received other requests than worker.received names");
}

// A single group of tokens: an entry of its tables has a block of each rank that shards it.
void check_scheduler_block_size(JsonObject& object, const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  if (header.groups.size() != 1 || is_state_kind(header.groups[0].spec.kind)) return;
  const std::int64_t block_size = header.groups[0].spec.block_size;
  if (block_size <= 0) return;  // refused already
  const std::int64_t num_blocks = header.scheduler_block_size / block_size;
  if (header.scheduler_block_size % block_size == 0 &&
      (num_blocks == 1 || num_blocks == config.dcp || num_blocks == config.pcp ||
       num_blocks == std::int64_t{config.dcp} * config.pcp))
    return;
  object.required("scheduler_block_size")
      .refuse(fmt::format("the block_size of the only group, {}{}", block_size,
                          config.dcp * config.pcp == 1 ? "" : ", over all ranks or one"));
}

// The header line. The version is in the first key; announcements of optional keys of steps follow
// the block sizes.
template <class Io>
void fields(Io& io, FieldsOf<Io, RecordingHeader>& header) {
  constexpr form::Code kEngine{read_recorded_engine, write_recorded_engine};
  constexpr form::Code kFacts{read_worker_facts_key, write_worker_facts_key};
  static constexpr JsonWord<HashAlgorithm> kAlgorithms[] = {
      {"sha256_cbor", HashAlgorithm::sha256_cbor}, {"xxhash_cbor", HashAlgorithm::xxhash_cbor}};
  io.constant("schedule_recording", 1);
  io.required("engine", header.engine, kEngine);
  io.required("family", header.family, form::AnyText{});
  io.required("seed", header.seed, form::Between{INT64_MIN, INT64_MAX});
  engine_fields(io, header);
  // 1 stands for "version 1 of these keys", not for true.
  const auto announce = [&](std::string_view key, auto& flag) {
    std::int64_t version = flag ? 1 : 0;
    io.optional(key, version, form::Between{1, 1});
    if constexpr (Io::kReads) flag = version == 1;
  };
  if constexpr (Io::kReads) header.has_cache_events = io.object.has("hash_algorithm");
  if (header.has_cache_events)
    io.required("hash_algorithm", header.options.config.hash_algorithm,
                form::Word<HashAlgorithm>{kAlgorithms});
  io.required("scheduler_block_size", header.scheduler_block_size, form::Between{1, kTokensMax});
  if constexpr (Io::kReads) check_scheduler_block_size(io.object, header);
  io.required("hash_block_size", header.hash_block_size, form::Between{1, kTokensMax});
  io.optional("encoder_compute_budget", header.encoder_compute_budget, kTokens);
  io.optional("encoder_cache_size", header.encoder_cache_size, kTokens);
  if constexpr (Io::kReads)
    // The scheduler follows encoder budgets only for cross attention; 0, for a budget that was not
    // recorded, selects max_num_batched_tokens.
    if (has_cross_attention(header.groups)) {
      header.options.config.encoder_compute_budget = header.encoder_compute_budget.value_or(0);
      header.options.config.encoder_cache_size = header.encoder_cache_size.value_or(0);
    }
  announce("held_drafts", header.has_held_drafts);
  announce("stale_outputs", header.has_stale_outputs);
  io.optional("worker_facts", header.worker_facts, kFacts);
  io.optional("x_beyond_format", header.beyond_format);
}

// The end line. end.steps is the number of step lines read, which the line must repeat: a file that
// lost lines in the middle is refused.
template <class Io>
void fields(Io& io, FieldsOf<Io, RecordingEnd>& end, const RecordingHeader& header) {
  io.mark("end");
  io.required("steps", end.steps, form::Between{end.steps, end.steps});
  io.required("unfinished", end.unfinished);
  io.optional("steps_in_flight", end.steps_in_flight,
              form::Between{1, std::max<std::int64_t>(end.steps, 1)});
  io.optional("cut_off", end.is_cut_off);
  io.nested("raised", !end.raised_in.empty(), [&](auto& raised) {
    raised.required("in", end.raised_in);
    raised.optional("before", end.raised_before, Events{header, -1, true});
  });
  io.nested("failure", !end.failed_check.empty(), [&](auto& failure) {
    failure.required("check", end.failed_check);
    failure.required("what", end.failed_what, form::AnyText{});
  });
}

// Reads the keys that `add` has in recordings, benchmark files and the scheduler protocol, but not
// `arrival`, which only recordings have.
RequestSpec read_added_request(JsonObject& object, bool& priority_given, AddedForm form) {
  RequestSpec request;
  request.name = object.required("add").nonempty_string();
  if (!read_embeds_alone(object, request))
    request.prompt = read_recorded_prompt(object.required("prompt"));
  if (form.has_max_tokens)
    request.max_tokens = object.required("max_tokens").integer<std::int32_t>(1);
  JsonValue priority = object.optional("priority");
  priority_given = static_cast<bool>(priority);
  if (priority) request.priority = priority.integer<std::int64_t>();
  if (auto salt = object.optional("cache_salt")) request.cache_salt = salt.nonempty_string();
  if (auto eos = object.optional("eos"))
    request.eos_token = eos.integer<std::int32_t>(0, kTokenIdMax);
  if (auto stop = object.optional("stop_token_ids")) request.stop_token_ids = read_token_ids(stop);
  read_rare_request_keys(object, request, form.keys);
  return request;
}

// Writes one entry of `before` or `during`; the first key identifies its kind for read_event().
void write_recorded_event(JsonWriter& out, const RecordedEvent& event) {
  out.begin_object();
  FieldWriter io(out);
  switch (event.kind) {
    case RecordedEvent::Kind::add:
      write_add(out, event);
      break;
    case RecordedEvent::Kind::chunk:
      chunk_fields(io, event);
      break;
    case RecordedEvent::Kind::abort:
    case RecordedEvent::Kind::close:
    case RecordedEvent::Kind::grammar_ready:
    case RecordedEvent::Kind::grammar_failed:
      out.string(std::ranges::find(kNamedEvents, event.kind, &NamedEvent::kind)->key, event.name);
      break;
    case RecordedEvent::Kind::reset_encoder_cache:
      out.boolean("reset_encoder_cache", true);
      break;
    case RecordedEvent::Kind::reset_prefix_cache:
      out.boolean("reset_prefix_cache", event.reset_succeeded);
      if (event.resets_running) out.boolean("running", true);
      break;
    case RecordedEvent::Kind::pause_state:
      io.required("pause_state", event.pause_state, form::Word<PauseState>{kPauseStates});
      break;
    case RecordedEvent::Kind::output:
      out.integer("output_of_step", event.output_of_step);
      break;
  }
  out.end_object();
}

// The protocol's replies share the lists of fields above; they differ from a step line only in
// which lists they combine.
void read_decision_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  FieldReader io(object);
  decision_fields(io, step, header);
  table_fields(io, step, header);
}

void read_state_keys(JsonObject& object, const RecordingHeader& header, RecordedStep& step) {
  FieldReader io(object);
  state_fields(io, step, header);
  cache_fields(io, step);
}

void read_stopped_key(JsonObject& object, RecordedStep& step) {
  FieldReader io(object);
  io.optional("stopped", step.stopped, kPairs);
}

void write_decision_keys(JsonWriter& out, const RecordedStep& step) {
  FieldWriter io(out);
  decision_fields(io, step, any_header());
}

void write_state_keys(JsonWriter& out, const RecordedStep& step) {
  FieldWriter io(out);
  state_fields(io, step, any_header());
  table_fields(io, step, any_header());
  cache_fields(io, step);
}

void write_stopped_key(JsonWriter& out, const RecordedStep& step) {
  FieldWriter io(out);
  io.optional("stopped", step.stopped, kPairs);
}

void write_worker(JsonWriter& out, const RecordedWorker& worker) {
  write_fields(out, worker, any_header());
}

void write_tokens_by_request(JsonWriter& out, const std::vector<RecordedTokens>& rows) {
  kTokensByRequest.write(out, rows);
}

void write_engine_keys(JsonWriter& out, const RecordingHeader& header) {
  FieldWriter io(out);
  engine_fields(io, header);
}

RecordingHeader read_recording_header(JsonValue value) {
  return row_of_fields<RecordingHeader>(value);
}

RecordedStep read_recorded_step(JsonValue value, const RecordingHeader& header,
                                std::int64_t expected_step) {
  RecordedStep step;
  step.step = expected_step;
  read_fields(value, step, header);
  return step;
}

RecordingEnd read_recording_end(JsonValue value, const RecordingHeader& header,
                                std::int64_t steps) {
  RecordingEnd end;
  end.steps = steps;
  read_fields(value, end, header);
  return end;
}

std::string recording_header_line(const RecordingHeader& header) { return line_of_fields(header); }
std::string recording_step_line(const RecordedStep& step) {
  return line_of_fields(step, any_header());
}
std::string recording_end_line(const RecordingEnd& end) {
  return line_of_fields(end, any_header());
}

}  // namespace lockstep
