#include <fmt/format.h>

#include <algorithm>

#include "base/line_reader.h"
#include "base/output_file.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/request_trace.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

constexpr std::int64_t kTimeMax = std::numeric_limits<std::int64_t>::max();

HashIdConvention read_convention(JsonValue value) {
  JsonObject object = value.object();
  HashIdConvention ids;
  ids.block_tokens = object.required("block").integer<std::int32_t>(1);
  constexpr JsonWord<IdTail> kTails[] = {{"ceil", IdTail::ceil}, {"floor", IdTail::floor}};
  ids.tail = object.required("tail").word<IdTail>(kTails);
  object.finish();
  return ids;
}

TraceSource read_source(JsonValue value) {
  JsonObject object = value.object();
  TraceSource source;
  source.kind = object.required("kind").nonempty_string();
  source.name = object.required("name").string();
  if (auto seed = object.optional("seed")) source.seed = seed.uint64();
  object.finish();
  return source;
}

EngineHints read_hints(JsonValue value) {
  JsonObject object = value.object();
  EngineHints hints;
  if (auto config = object.optional("config")) hints.options = read_engine_options(config);
  if (auto blocks = object.optional("num_blocks")) hints.num_blocks = blocks.integer(1, kBlocksMax);
  object.finish();
  return hints;
}

OutputPlan read_output(JsonValue value) {
  JsonObject object = value.object();
  OutputPlan output;
  if (auto tokens = object.optional("tokens")) {
    output.tokens = read_token_ids(tokens);
    if (output.tokens.empty()) tokens.refuse("at least one token");
    output.length = static_cast<std::int32_t>(output.tokens.size());
  } else {
    output.length = object.required("length").integer<std::int32_t>(1);
    if (auto fill = object.optional("fill")) {
      output.fill = fill.integer<std::int32_t>(0, kTokenIdMax);
    }
  }
  object.finish();
  return output;
}

// The client disconnects at a time, not before its arrival, or after a number of output tokens.
AbortPlan read_abort(JsonValue value, const TraceRequest& request) {
  JsonObject object = value.object();
  AbortPlan abort;
  if (object.has("t") == object.has("after_tokens")) {
    object.refuse_because("expected one of \"t\" and \"after_tokens\"");
  }
  if (auto t = object.optional("t")) {
    abort.t_ns = t.integer(request.after.empty() ? request.spec.arrival_ns : 0, kTimeMax);
  }
  if (auto tokens = object.optional("after_tokens")) {
    abort.after_tokens = tokens.integer<std::int32_t>(1);
  }
  object.finish();
  return abort;
}

bool ends_request(const RequestSpec& spec, std::int32_t token) {
  const auto& stops = spec.stop_token_ids;
  return token == spec.eos_token || std::find(stops.begin(), stops.end(), token) != stops.end();
}

// Something must end the request, and not before its planned output is out.
void check_end(JsonValue output_value, const TraceRequest& request) {
  const OutputPlan& output = request.output;
  const RequestSpec& spec = request.spec;
  if (output.length > spec.max_tokens) {
    output_value.refuse_because(fmt::format(
        "found {} output tokens; expected at most max_tokens, {}", output.length, spec.max_tokens));
  }
  const std::int32_t last = output.length - 1;
  // A replay that makes the tokens itself ends with the eos token.
  const bool repeats = spec.repetition_detection != RepetitionDetection{};
  bool ended = spec.eos_token.has_value();
  if (!output.tokens.empty() || output.fill) {
    const auto token_at = [&output](std::int32_t i) {
      return output.fill ? *output.fill : output.tokens[static_cast<std::size_t>(i)];
    };
    ended = ends_request(spec, token_at(last));
    for (std::int32_t i = std::max(spec.min_tokens - 1, 0);
         i < (output.fill && spec.min_tokens == 0 ? std::min(last, 1) : last); ++i) {
      if (!ends_request(spec, token_at(i))) continue;
      output_value.refuse_because(fmt::format(
          "found {}, a token that ends the request, at output token {} of {}; expected it "
          "at the end only",
          token_at(i), i, output.length));
    }
  }
  if (output.length < spec.max_tokens && !ended && !repeats) {
    output_value.refuse_because(
        fmt::format("found {0} output tokens and nothing that ends the request there; expected "
                    "max_tokens {0} or "
                    "an eos token at the end",
                    output.length));
  }
}

// When the request arrives: at `t`, or `delay` after the requests in `after` have left.
void read_arrival(JsonObject& object, TraceRequest& request) {
  if (auto after = object.optional("after")) {
    request.after = read_names(after);
    if (request.after.empty()) after.refuse("at least one request");
    request.delay_ns = object.required("delay").integer(0, kTimeMax);
    if (object.has("t"))
      object.refuse_because("found both \"t\" and \"after\"; expected one of them");
  } else {
    request.spec.arrival_ns = object.required("t").integer(0, kTimeMax);
  }
}

TraceRequest read_request(JsonValue value, const TraceHeader& header, std::uint64_t ordinal) {
  JsonObject object = value.object();
  TraceRequest request;
  request.spec.name = object.required("id").nonempty_string();
  read_arrival(object, request);
  request.spec.prompt = read_prompt(object.required("prompt"), header.ids, ordinal);
  JsonValue output = object.required("output");
  request.output = read_output(output);
  request.spec.max_tokens = request.output.length;
  if (auto max = object.optional("max_tokens")) {
    request.spec.max_tokens = max.integer<std::int32_t>(1);
  }
  if (auto eos = object.optional("eos")) {
    request.spec.eos_token = eos.integer<std::int32_t>(0, kTokenIdMax);
  }
  if (auto stop = object.optional("stop_token_ids")) {
    request.spec.stop_token_ids = read_token_ids(stop);
    if (request.spec.stop_token_ids.empty()) stop.refuse("at least one token, or no such key");
  }
  read_rare_request_keys(object, request.spec, {.has_items_beside = header.is_encoder_decoder});
  check_end(output, request);
  if (auto abort = object.optional("abort")) request.abort = read_abort(abort, request);
  if (auto priority = object.optional("priority")) {
    request.spec.priority = priority.integer<std::int32_t>();
  }
  if (auto salt = object.optional("salt")) request.spec.cache_salt = salt.nonempty_string();
  object.finish();
  return request;
}

TraceControl read_control(JsonValue value) {
  JsonObject object = value.object();
  TraceControl control;
  constexpr JsonWord<TraceControl::Kind> kKinds[] = {
      {"reset_prefix_cache", TraceControl::Kind::reset_prefix_cache}};
  control.kind = object.required("control").word<TraceControl::Kind>(kKinds);
  control.t_ns = object.required("t").integer(0, kTimeMax);
  if (auto running = object.optional("running")) control.preempts_running = running.boolean();
  object.finish();
  return control;
}

}  // namespace

TraceHeader read_trace_header(JsonValue value) {
  JsonObject object = value.object();
  TraceHeader header;
  object.required("lockstep_trace").integer(kTraceVersion, kTraceVersion);
  JsonValue time = object.required("time");
  if (time.string() != "ns") time.refuse("\"ns\", the only unit of time here");
  header.source = read_source(object.required("source"));
  if (auto ids = object.optional("ids")) header.ids = read_convention(ids);
  if (auto engine = object.optional("engine")) header.engine = read_hints(engine);
  if (auto beside = object.optional("is_encoder_decoder"))
    header.is_encoder_decoder = beside.boolean();
  object.finish();
  return header;
}

TraceRecord TraceRecordReader::read(JsonValue value) {
  JsonObject object = value.object();
  if (object.has("control")) {
    const TraceControl control = read_control(value);
    check_time(object, control.t_ns);
    return control;
  }
  TraceRequest request = read_request(value, header_, ordinal_);
  ++ordinal_;
  if (request.after.empty()) check_time(object, request.spec.arrival_ns);
  if (!request.after.empty()) {
    JsonValue after = object.required("after");
    for (JsonValue name : after.array()) {
      if (!names_.contains(std::string(name.string())))
        name.refuse("an earlier request of this trace");
    }
  }
  if (!names_.insert(request.spec.name).second) {
    object.required("id").refuse("a name that no earlier request has");
  }
  return request;
}

void TraceRecordReader::check_time(JsonObject& object, std::int64_t t_ns) {
  if (t_ns < last_t_ns_) {
    object.required("t").refuse(
        fmt::format("at least {}, the time of the record before", last_t_ns_));
  }
  last_t_ns_ = t_ns;
}

void read_trace_end(JsonValue value, std::uint64_t num_records) {
  JsonObject object = value.object();
  JsonValue mark = object.required("end");
  if (!mark.boolean()) mark.refuse("true");
  const auto records = static_cast<std::int64_t>(num_records);
  object.required("records").integer(records, records);
  object.finish();
}

namespace {

class RequestTraceReader final : public TraceReader {
 public:
  explicit RequestTraceReader(LineReader&& lines)
      : lines_(std::move(lines)), json_(lines_.path()) {}

  Result<void> read_header() {
    std::string_view line;
    if (const auto got = lines_.next(line); !got) return tl::unexpected(got.error());
    if (json_.parse(line, 1, lines_.is_cut_off())) header_ = read_trace_header(json_.root());
    if (!json_.ok()) return json_.failure();
    records_ = TraceRecordReader(header_);
    return {};
  }

  const TraceHeader& header() const override { return header_; }

  Result<bool> next(TraceRecord& record) override {
    if (ended_) return false;
    std::string_view line;
    const auto got = lines_.next(line);
    if (!got) return tl::unexpected(got.error());
    const std::int64_t number = lines_.number();
    if (!*got) {
      json_.fail_line(
          number, "found the end of the file; expected a record or {\"end\":true,\"records\":N}");
    } else if (json_.parse(line, number, lines_.is_cut_off())) {
      if (json_.root().is_object() && json_.root().object().has("end")) {
        if (const auto ended = read_end(number); !ended) return tl::unexpected(ended.error());
      } else {
        record = records_.read(json_.root());
        ++num_records_;
      }
    }
    if (!json_.ok()) return json_.failure();
    return !ended_;
  }

 private:
  Result<void> read_end(std::int64_t number) {
    read_trace_end(json_.root(), num_records_);
    ended_ = true;
    if (!json_.ok()) return {};
    std::string_view line;
    const auto behind = lines_.next(line);
    if (!behind) return tl::unexpected(behind.error());
    if (*behind) json_.fail_line(number + 1, "found a line after the end line; expected none");
    return {};
  }

  LineReader lines_;
  JsonReader json_;
  TraceHeader header_;
  TraceRecordReader records_{header_};
  std::uint64_t num_records_ = 0;
  bool ended_ = false;
};

}  // namespace

Result<std::unique_ptr<TraceReader>> open_request_trace(const std::string& path) {
  auto lines = LineReader::open(path);
  if (!lines) return tl::unexpected(lines.error());
  auto reader = std::make_unique<RequestTraceReader>(std::move(*lines));
  if (const auto header = reader->read_header(); !header) return tl::unexpected(header.error());
  return reader;
}

Result<Trace> read_all(TraceReader& reader) {
  Trace trace{.header = reader.header(), .records = {}};
  while (true) {
    TraceRecord record;
    const auto more = reader.next(record);
    if (!more) return tl::unexpected(more.error());
    if (!*more) return trace;
    trace.records.push_back(std::move(record));
  }
}

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
