#include "base/number_text.h"
#include "base/output_file.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/recording.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

void write_blocks_per_group(JsonWriter& out, const BlocksPerGroup& groups) {
  out.begin_array();
  for (const auto& blocks : groups) write_blocks(out, blocks);
  out.end_array();
}

void write_tables(JsonWriter& out, const std::vector<RecordedTable>& tables) {
  out.begin_object();
  for (const RecordedTable& table : tables) write_blocks_per_group(out.key(table.id), table.blocks);
  out.end_object();
}

void write_names(JsonWriter& out, std::string_view key, const std::vector<std::string>& names) {
  if (!names.empty()) out.key(key).strings(names);
}

void write_events(JsonWriter& out, std::string_view key, const std::vector<RecordedEvent>& events) {
  if (events.empty()) return;
  out.key(key).begin_array();
  for (const RecordedEvent& event : events) write_recorded_event(out, event);
  out.end_array();
}

void write_scheduled(JsonWriter& out, const RecordedScheduled& row) {
  out.begin_object().string("id", row.id).integer("tokens", row.tokens);
  if (row.is_new) out.boolean("new", true);
  if (row.resumed) out.boolean("resumed", true);
  out.integer("computed", row.computed).key("blocks");
  if (row.blocks) {
    write_blocks_per_group(out, *row.blocks);
  } else {
    out.null();
  }
  if (!row.spec.empty()) out.key("spec").integers(row.spec);
  if (!row.encode.empty()) out.key("encode").integers(row.encode);
  out.end_object();
}

void write_connector_answers(JsonWriter& out, const std::vector<RecordedConnectorAnswer>& answers) {
  out.key("connector").begin_array();
  for (const RecordedConnectorAnswer& answer : answers) {
    out.begin_object().string("id", answer.id).integer("local", answer.local).key("external");
    if (answer.external) {
      out.integer(*answer.external);
    } else {
      out.null();
    }
    out.boolean("async", answer.async).end_object();
  }
  out.end_array();
}

void write_extra_keys(JsonWriter& out, const std::vector<RecordedExtraKey>& keys) {
  if (keys.empty()) {
    out.null();
    return;
  }
  out.begin_array();
  for (const RecordedExtraKey& key : keys) {
    if (key.place)
      out.begin_array().string(key.value).integer(*key.place).end_array();
    else
      out.string(key.value);
  }
  out.end_array();
}

void write_cache_event(JsonWriter& out, const RecordedCacheEvent& event) {
  out.begin_object();
  if (event.kind == RecordedCacheEvent::Kind::cleared) {
    out.string("type", "AllBlocksCleared").end_object();
    return;
  }
  const bool is_stored = event.kind == RecordedCacheEvent::Kind::stored;
  out.string("type", is_stored ? "BlockStored" : "BlockRemoved").integer("group_idx", event.group);
  out.key("block_hashes").strings(event.block_hashes);
  const auto text = [&](std::string_view key, const std::string& value) {
    if (!value.empty()) out.string(key, value);
  };
  if (!is_stored) {
    text("medium", event.medium);
    out.end_object();
    return;
  }
  out.key("parent_block_hash").string_or_null(event.parent);
  out.key("token_ids").integers(event.token_ids).integer("block_size", event.block_size);
  if (event.lora_id) out.integer("lora_id", *event.lora_id);
  text("lora_name", event.lora_name);
  text("medium", event.medium);
  if (!event.extra_keys.empty()) out.key("extra_keys").begin_array();
  for (const std::vector<RecordedExtraKey>& keys : event.extra_keys) write_extra_keys(out, keys);
  if (!event.extra_keys.empty()) out.end_array();
  text("kv_cache_spec_kind", event.kv_cache_spec_kind);
  if (event.kv_cache_spec_sliding_window)
    out.integer("kv_cache_spec_sliding_window", *event.kv_cache_spec_sliding_window);
  text("session_id", event.session_id);
  out.end_object();
}

void write_stale_outputs(JsonWriter& out, const std::vector<RecordedStaleOutput>& outputs) {
  if (outputs.empty()) return;
  out.key("stale_outputs").begin_array();
  for (const RecordedStaleOutput& output : outputs)
    out.begin_object()
        .string("id", output.id)
        .integer("of_step", output.of_step)
        .integer("taken", output.taken)
        .end_object();
  out.end_array();
}

void write_statuses(JsonWriter& out, std::string_view key,
                    const std::vector<RecordedSkipped>& rows) {
  out.key(key).begin_array();
  for (const RecordedSkipped& row : rows)
    out.begin_array().string(row.id).string(row.status).end_array();
  out.end_array();
}

void write_encoder_keys(JsonWriter& out, const RecordedInputs& inputs) {
  write_names(out, "free_encoder", inputs.free_encoder);
  if (!inputs.encoder_slots.empty()) out.key("encoder_slots").integers(inputs.encoder_slots);
  if (inputs.encoder_cache) {
    out.key("encoder_cache").begin_object();
    for (const RecordedEncoderEntry& entry : *inputs.encoder_cache)
      out.key(entry.id).strings(entry.holders);
    out.end_object();
  }
  if (inputs.encoder_freeable) out.key("encoder_freeable").strings(*inputs.encoder_freeable);
}

// Waiting requests and their reasons, and the results of grammars and poolers.
void write_input_keys(JsonWriter& out, const RecordedInputs& inputs) {
  write_encoder_keys(out, inputs);
  write_names(out, "holding", inputs.holding);
  if (!inputs.blocked.empty()) write_statuses(out, "blocked", inputs.blocked);
  const auto tokens = [&](std::string_view key, const std::vector<RecordedTokens>& rows) {
    if (!rows.empty()) write_tokens_by_request(out.key(key), rows);
  };
  tokens("drafts_in_flight", inputs.drafts_in_flight);
  tokens("spec_in_flight", inputs.spec_in_flight);
  if (inputs.is_deferred) out.boolean("deferred", true);
  if (!inputs.invalid_drafts.empty()) {
    out.key("invalid_drafts").begin_object();
    for (const RecordedCount& row : inputs.invalid_drafts) out.integer(row.id, row.count);
    out.end_object();
  }
  if (!inputs.grammar.empty()) {
    out.key("grammar").begin_array();
    for (const RecordedGrammar& answer : inputs.grammar)
      out.begin_object()
          .string("id", answer.id)
          .integer("asked", answer.asked)
          .integer("valid", answer.valid)
          .end_object();
    out.end_array();
  }
  write_names(out, "pooled", inputs.pooled);
}

void write_transfer_keys(JsonWriter& out, const RecordedTransfers& transfers) {
  if (transfers.kv_holding) write_statuses(out, "kv_holding", *transfers.kv_holding);
  write_names(out, "deferred", transfers.deferred);
  if (transfers.loads_within) out.boolean("loads_within", true);
  const auto keep = [&](std::string_view key, const std::string& json) {
    if (!json.empty()) out.key(key).raw(json);
  };
  keep("parts", transfers.parts);
  if (!transfers.parts_worker.empty()) {
    out.key("parts_worker").begin_array();
    for (const RecordedPartReport& part : transfers.parts_worker) {
      out.begin_object();
      out.key("received").strings(part.received);
      out.key("sent").strings(part.sent);
      out.end_object();
    }
    out.end_array();
  }
  keep("parts_held", transfers.parts_held);
  keep("offload", transfers.offload);
}

void write_connector_config(JsonWriter& out, const RecordedConnectorConfig& config) {
  out.begin_object();
  out.string("kv_load_failure_policy", config.fail_on_load_error ? "fail" : "recompute");
  out.boolean("supports_hybrid_groups", config.supports_hybrid_groups);
  if (!config.kv_role.empty()) out.string("kv_role", config.kv_role);
  if (!config.name.empty()) out.string("name", config.name);
  for (const auto& [key, json] : config.options) out.key(key).raw(json);
  if (config.parts != 0) out.integer("parts", config.parts);
  if (config.requires_kv_delivery) out.boolean("requires_kv_delivery", true);
  if (config.divergent_hits) out.boolean("divergent_hits", true);
  if (config.waits_for_sends) out.boolean("waits_for_sends", true);
  out.end_object();
}

void write_add(JsonWriter& out, const RecordedEvent& event) {
  const RequestSpec& request = event.request;
  out.string("add", request.name);
  if (!request.keys.embeds.are_alone) write_prompt_of(out.key("prompt"), request);
  if (!event.is_pooling) out.integer("max_tokens", request.max_tokens);
  out.key("arrival").raw(decimal_text_of(request.arrival_ns, 9));
  if (event.priority_given) out.integer("priority", request.priority);
  if (!request.cache_salt.empty()) out.string("cache_salt", request.cache_salt);
  if (request.eos_token) out.integer("eos", *request.eos_token);
  if (!request.stop_token_ids.empty()) {
    out.key("stop_token_ids").integers(request.stop_token_ids);
  }
  write_rare_request_keys(out, request);
  if (event.needs_grammar) out.boolean("structured", true);
  if (event.is_session) out.boolean("resumable", true);
  if (event.is_pooling) out.boolean("pooling", true);
  if (!event.parent.empty()) out.string("parent", event.parent);
  if (!event.session_id.empty()) out.string("session_id", event.session_id);
}

void write_chunk(JsonWriter& out, const RecordedEvent& event) {
  const RequestSpec& request = event.request;
  out.string("chunk", event.name);
  write_recorded_prompt(out.key("prompt"), request.prompt);
  write_prompt_items(out, request.keys.mm);
  out.integer("max_tokens", request.max_tokens);
  out.key("arrival").raw(decimal_text_of(request.arrival_ns, 9));
  if (request.eos_token) out.integer("eos", *request.eos_token);
}

// What the worker and the model brought, and what it did.
void write_output_keys(JsonWriter& out, const RecordedStep& step) {
  if (step.worker) write_worker(out.key("worker"), *step.worker);
  write_tokens_by_request(out.key("sampled"), step.sampled);
  if (step.output_of_step) out.integer("output_of_step", *step.output_of_step);
  write_stale_outputs(out, step.stale_outputs);
  write_stopped_key(out, step);
  if (step.drafts) write_tokens_by_request(out.key("drafts"), *step.drafts);
  write_cache_keys(out, step);
  if (step.events.empty()) return;
  out.key("events").begin_array();
  for (const RecordedCacheEvent& event : step.events) write_cache_event(out, event);
  out.end_array();
}

}  // namespace

void write_tokens_by_request(JsonWriter& out, const std::vector<RecordedTokens>& rows) {
  out.begin_object();
  for (const RecordedTokens& row : rows) out.key(row.id).integers(row.tokens);
  out.end_object();
}

void write_recorded_event(JsonWriter& out, const RecordedEvent& event) {
  out.begin_object();
  switch (event.kind) {
    case RecordedEvent::Kind::add:
      write_add(out, event);
      break;
    case RecordedEvent::Kind::chunk:
      write_chunk(out, event);
      break;
    case RecordedEvent::Kind::close:
      out.string("close", event.name);
      break;
    case RecordedEvent::Kind::grammar_ready:
      out.string("grammar_ready", event.name);
      break;
    case RecordedEvent::Kind::grammar_failed:
      out.string("grammar_failed", event.name);
      break;
    case RecordedEvent::Kind::reset_encoder_cache:
      out.boolean("reset_encoder_cache", true);
      break;
    case RecordedEvent::Kind::abort:
      out.string("abort", event.name);
      break;
    case RecordedEvent::Kind::reset_prefix_cache:
      out.boolean("reset_prefix_cache", event.reset_succeeded);
      if (event.resets_running) out.boolean("running", true);
      break;
    case RecordedEvent::Kind::pause_state:
      out.string("pause_state", event.pause_state == PauseState::unpaused     ? "UNPAUSED"
                                : event.pause_state == PauseState::paused_new ? "PAUSED_NEW"
                                                                              : "PAUSED_ALL");
      break;
    case RecordedEvent::Kind::output:
      out.integer("output_of_step", event.output_of_step);
      break;
  }
  out.end_object();
}

void write_decision_keys(JsonWriter& out, const RecordedStep& step) {
  write_events(out, "before", step.before);
  if (step.connector) write_connector_answers(out, *step.connector);
  out.key("scheduled").begin_array();
  for (const RecordedScheduled& row : step.scheduled) write_scheduled(out, row);
  out.end_array();
  write_names(out, "preempted", step.preempted);
  write_names(out, "finished", step.finished);
  if (step.common_prefix_blocks)
    out.key("common_prefix_blocks").integers(*step.common_prefix_blocks);
  if (!step.zero.empty()) write_blocks(out.key("zero"), step.zero);
  if (step.copies.empty()) return;
  out.key("copies").begin_array();
  for (const KVCacheBlockCopy& copy : step.copies)
    out.begin_array().integer(index_of(copy.from)).integer(index_of(copy.to)).end_array();
  out.end_array();
}

void write_state_keys(JsonWriter& out, const RecordedStep& step) {
  out.key("running").strings(step.running).key("waiting").strings(step.waiting);
  if (step.skipped) write_statuses(out, "skipped", *step.skipped);
  if (step.free_blocks < 0)
    out.key("free_blocks").null();
  else
    out.integer("free_blocks", step.free_blocks);
  if (!step.held_drafts.empty()) write_tokens_by_request(out.key("held_drafts"), step.held_drafts);
  if (step.tables) write_tables(out.key("tables"), *step.tables);
  if (step.loading) write_tables(out.key("loading"), *step.loading);
  write_events(out, "during", step.during);
}

void write_stopped_key(JsonWriter& out, const RecordedStep& step) {
  if (step.stopped.empty()) return;
  out.key("stopped").begin_array();
  for (const RecordedStopped& row : step.stopped) {
    out.begin_array().string(row.id).string(row.reason).end_array();
  }
  out.end_array();
}

void write_cache_keys(JsonWriter& out, const RecordedStep& step) {
  write_names(out, "held", step.held);
  if (step.stored != 0) out.integer("stored", step.stored);
  if (step.evicted != 0) out.integer("evicted", step.evicted);
  if (step.cleared) out.boolean("cleared", true);
}

void write_worker(JsonWriter& out, const RecordedWorker& worker) {
  out.begin_object().key("received").strings(worker.received);
  out.key("sent").strings(worker.sent);
  write_blocks(out.key("invalid_blocks"), worker.invalid_blocks);
  write_names(out, "failed", worker.failed);
  if (!worker.jobs.empty()) out.key("jobs").integers(worker.jobs);
  if (!worker.store_events.empty()) out.key("store_events").integers(worker.store_events);
  if (!worker.enqueued.empty()) write_transfer_counts(out.key("enqueued"), worker.enqueued);
  if (!worker.completed.empty()) write_transfer_counts(out.key("completed"), worker.completed);
  out.end_object();
}

void write_engine_keys(JsonWriter& out, const RecordingHeader& header) {
  write_engine_options(out.key("config"), header.options);
  write_kv_cache_groups(out.key("groups"), header.groups);
  out.integer("num_blocks", header.num_blocks);
  if (header.options.config.host_pool_num_blocks != 0)
    out.integer("hisparse_host_num_blocks", header.options.config.host_pool_num_blocks);
  if (header.connector) write_connector_config(out.key("connector"), *header.connector);
}

std::string recording_header_line(const RecordingHeader& header) {
  JsonWriter out;
  out.begin_object().integer("schedule_recording", 1);
  write_recorded_engine(out.key("engine"), header.engine);
  out.string("family", header.family).integer("seed", header.seed);
  write_engine_keys(out, header);
  if (header.has_cache_events)
    out.string("hash_algorithm", header.options.config.hash_algorithm == HashAlgorithm::sha256_cbor
                                     ? "sha256_cbor"
                                     : "xxhash_cbor");
  out.integer("scheduler_block_size", header.scheduler_block_size);
  out.integer("hash_block_size", header.hash_block_size);
  if (header.encoder_compute_budget)
    out.integer("encoder_compute_budget", *header.encoder_compute_budget);
  if (header.encoder_cache_size) out.integer("encoder_cache_size", *header.encoder_cache_size);
  if (header.has_held_drafts) out.integer("held_drafts", 1);
  if (header.has_stale_outputs) out.integer("stale_outputs", 1);
  if (header.worker_facts) write_worker_facts_key(out.key("worker_facts"), *header.worker_facts);
  write_names(out, "x_beyond_format", header.beyond_format);
  out.end_object();
  return out.take_line();
}

std::string recording_step_line(const RecordedStep& step) {
  JsonWriter out;
  out.begin_object().integer("step", step.step);
  write_decision_keys(out, step);
  if (step.pages) write_pages(out.key("hisparse"), *step.pages);
  write_state_keys(out, step);
  write_input_keys(out, step.inputs);
  write_transfer_keys(out, step.transfers);
  write_output_keys(out, step);
  if (step.facts) write_worker_step_facts(out.key("facts"), *step.facts);
  out.end_object();
  return out.take_line();
}

std::string recording_end_line(const RecordingEnd& end) {
  JsonWriter out;
  out.begin_object().boolean("end", true).integer("steps", end.steps);
  out.key("unfinished").strings(end.unfinished);
  if (end.steps_in_flight != 0) out.integer("steps_in_flight", end.steps_in_flight);
  if (end.is_cut_off) out.boolean("cut_off", true);
  if (!end.raised_in.empty()) {
    out.key("raised").begin_object().string("in", end.raised_in);
    write_events(out, "before", end.raised_before);
    out.end_object();
  }
  if (!end.failed_check.empty()) {
    out.key("failure").begin_object().string("check", end.failed_check);
    out.string("what", end.failed_what).end_object();
  }
  out.end_object();
  return out.take_line();
}

struct RecordingWriter::State {
  OutputFile file;
  std::string buffer;
  Result<void> append(const std::string& line) {
    buffer += line;
    if (buffer.size() < (std::size_t{1} << 16)) return {};
    return flush();
  }
  Result<void> flush() {
    const auto written = file.write(buffer);
    buffer.clear();
    return written;
  }
};

RecordingWriter::RecordingWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
RecordingWriter::RecordingWriter(RecordingWriter&&) noexcept = default;
RecordingWriter& RecordingWriter::operator=(RecordingWriter&&) noexcept = default;
RecordingWriter::~RecordingWriter() = default;

Result<RecordingWriter> RecordingWriter::create(const std::string& path,
                                                const RecordingHeader& header) {
  auto file = OutputFile::create(path);
  if (!file) return tl::unexpected(file.error());
  return RecordingWriter(
      std::make_unique<State>(State{std::move(*file), recording_header_line(header)}));
}

Result<void> RecordingWriter::write(const RecordedStep& step) {
  return state_->append(recording_step_line(step));
}

Result<void> RecordingWriter::close(const RecordingEnd& end) {
  state_->buffer += recording_end_line(end);
  if (const auto flushed = state_->flush(); !flushed) return flushed;
  return state_->file.commit();
}

}  // namespace lockstep
