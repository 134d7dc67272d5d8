#include "base/output_file.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/request_trace.h"

namespace lockstep {
namespace {

void write_hints(JsonWriter& out, const EngineHints& hints) {
  out.begin_object();
  if (!hints.options.given.empty()) write_engine_options(out.key("config"), hints.options);
  if (hints.num_blocks) out.integer("num_blocks", *hints.num_blocks);
  out.end_object();
}

void write_output(JsonWriter& out, const OutputPlan& output) {
  out.begin_object();
  if (!output.tokens.empty()) {
    out.key("tokens").integers(output.tokens);
  } else {
    out.integer("length", output.length);
    if (output.fill) out.integer("fill", *output.fill);
  }
  out.end_object();
}

void write_request(JsonWriter& out, const TraceHeader& header, const TraceRequest& request,
                   std::uint64_t ordinal) {
  const RequestSpec& spec = request.spec;
  out.begin_object().string("id", spec.name);
  if (request.after.empty()) {
    out.integer("t", spec.arrival_ns);
  } else {
    out.key("after").strings(request.after).integer("delay", request.delay_ns);
  }
  write_prompt(out.key("prompt"), spec.prompt, header.ids, ordinal);
  write_output(out.key("output"), request.output);
  if (spec.max_tokens != request.output.length) out.integer("max_tokens", spec.max_tokens);
  if (spec.eos_token) out.integer("eos", *spec.eos_token);
  if (!spec.stop_token_ids.empty()) out.key("stop_token_ids").integers(spec.stop_token_ids);
  if (request.abort) {
    out.key("abort").begin_object();
    if (request.abort->t_ns) out.integer("t", *request.abort->t_ns);
    if (request.abort->after_tokens) out.integer("after_tokens", *request.abort->after_tokens);
    out.end_object();
  }
  if (spec.priority != 0) out.integer("priority", spec.priority);
  if (!spec.cache_salt.empty()) out.string("salt", spec.cache_salt);
  write_rare_request_keys(out, spec);
  out.end_object();
}

}  // namespace

std::string trace_header_line(const TraceHeader& header) {
  JsonWriter out;
  out.begin_object().integer("lockstep_trace", kTraceVersion).string("time", "ns");
  out.key("source").begin_object().string("kind", header.source.kind);
  out.string("name", header.source.name);
  if (header.source.seed) out.key("seed").uint64(*header.source.seed);
  out.end_object();
  if (header.ids) {
    out.key("ids").begin_object().integer("block", header.ids->block_tokens);
    out.string("tail", header.ids->tail == IdTail::ceil ? "ceil" : "floor").end_object();
  }
  if (header.engine) write_hints(out.key("engine"), *header.engine);
  if (header.is_encoder_decoder) out.boolean("is_encoder_decoder", true);
  out.end_object();
  return out.take_line();
}

std::string trace_record_line(const TraceHeader& header, const TraceRecord& record,
                              std::uint64_t ordinal) {
  JsonWriter out;
  if (const auto* request = std::get_if<TraceRequest>(&record)) {
    write_request(out, header, *request, ordinal);
  } else {
    out.begin_object().string("control", "reset_prefix_cache");
    const auto& control = std::get<TraceControl>(record);
    out.integer("t", control.t_ns);
    if (control.preempts_running) out.boolean("running", true);
    out.end_object();
  }
  return out.take_line();
}

std::string trace_end_line(std::uint64_t num_records) {
  JsonWriter out;
  out.begin_object().boolean("end", true).key("records").uint64(num_records).end_object();
  return out.take_line();
}

std::string trace_to_text(const Trace& trace) {
  std::string text = trace_header_line(trace.header);
  std::uint64_t ordinal = 0;
  for (const TraceRecord& record : trace.records) {
    text += trace_record_line(trace.header, record, ordinal);
    if (std::holds_alternative<TraceRequest>(record)) ++ordinal;
  }
  return text + trace_end_line(trace.records.size());
}

Result<void> write_request_trace(const std::string& path, const Trace& trace) {
  return write_output(path, trace_to_text(trace));
}

}  // namespace lockstep
