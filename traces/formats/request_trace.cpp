// Request traces as files: fields of each record, the checks between records, and the reader.
//
// Checked while reading: keys, ranges, unique names, order of times, that `after` names earlier
// requests, and that each request's planned output ends it.
#include <fmt/format.h>

#include <algorithm>

#include "base/json_fields.h"
#include "base/line_reader.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/request_trace.h"
#include "traces/formats/spec_json.h"

namespace lockstep {

// Nanoseconds in 63 bits: 292 years. kNoArrival is the earliest abort of a request whose arrival
// depends on others.
constexpr std::int64_t kTimeMax = std::numeric_limits<std::int64_t>::max(), kNoArrival = 0;

constexpr form::Between kTime{0, kTimeMax}, kPositive{1, INT64_MAX};

template <class Io>
void fields(Io& io, FieldsOf<Io, HashIdConvention>& ids) {
  io.required("block", ids.block_tokens, kPositive);
  io.required("tail", ids.tail, form::Word<IdTail>{kJsonWords<IdTail>});
}

template <class Io>
void fields(Io& io, FieldsOf<Io, TraceSource>& source) {
  io.required("kind", source.kind);
  io.required("name", source.name, form::AnyText{});
  io.optional("seed", source.seed, form::Unsigned{});
}

// Hints without options have no `config`: {"num_blocks":64}.
template <class Io>
void fields(Io& io, FieldsOf<Io, EngineHints>& hints) {
  if constexpr (Io::kReads) {
    if (auto config = io.object.optional("config")) hints.options = read_engine_options(config);
  } else if (!hints.options.given.empty()) {
    write_engine_options(io.out.key("config"), hints.options);
  }
  io.optional("num_blocks", hints.num_blocks, form::Between{1, kBlocksMax});
}

template <class Io>
void fields(Io& io, FieldsOf<Io, TraceHeader>& header) {
  io.constant("lockstep_trace", kTraceVersion);
  if constexpr (Io::kReads) {
    JsonValue time = io.object.required("time");
    if (time.string() != "ns") time.refuse("\"ns\", the only unit of time here");
  } else {
    io.out.string("time", "ns");
  }
  io.required("source", header.source);
  io.optional("ids", header.ids);
  io.optional("engine", header.engine);
  io.optional("is_encoder_decoder", header.is_encoder_decoder);
}

// Tokens imply the length; `length` may have a `fill`. Both forms in one object are refused, since
// the second form's keys are then unread.
template <class Io>
void fields(Io& io, FieldsOf<Io, OutputPlan>& output) {
  io.optional("tokens", output.tokens, TokenIds{});
  if constexpr (Io::kReads)
    if (auto tokens = io.object.optional("tokens")) {
      if (output.tokens.empty()) tokens.refuse("at least one token");
      output.length = static_cast<std::int32_t>(output.tokens.size());
      return;
    }
  if (!output.tokens.empty()) return;
  io.required("length", output.length, kPositive);
  io.optional("fill", output.fill, form::Between{0, kTokenIdMax});
}

// `t` is not before the request's arrival; a request with `after` has no arrival of its own, so any
// time is accepted.
template <class Io>
void fields(Io& io, FieldsOf<Io, AbortPlan>& abort, const std::int64_t& arrival_ns) {
  if constexpr (Io::kReads)
    if (io.object.has("t") == io.object.has("after_tokens"))
      io.object.refuse_because("expected one of \"t\" and \"after_tokens\"");
  io.optional("t", abort.t_ns, form::Between{arrival_ns, kTimeMax});
  io.optional("after_tokens", abort.after_tokens, kPositive);
}

void TraceRequest::set_output_length(std::int32_t length) {
  output.length = length;
  if (!output.tokens.empty()) output.tokens.resize(static_cast<std::size_t>(length));
  spec.min_tokens = std::min(spec.min_tokens, length);
}

void TraceRequest::end_at_length(std::int32_t length) {
  set_output_length(length);
  spec.max_tokens = length;
  spec.eos_token.reset();
  spec.stop_token_ids.clear();
}

namespace {

// True if sampling the token ends the request, min_tokens aside.
bool ends_request(const RequestSpec& spec, std::int32_t token) {
  const auto& stops = spec.stop_token_ids;
  return token == spec.eos_token || std::find(stops.begin(), stops.end(), token) != stops.end();
}

// Refuses a request that nothing ends, that ends before its planned output does, or whose output
// exceeds max_tokens or is shorter than min_tokens. Tokens before min_tokens do not end it.
// Repetition detection may end it anywhere, so it needs no end token.
void check_end(JsonValue output_value, const TraceRequest& request) {
  const OutputPlan& output = request.output;
  const RequestSpec& spec = request.spec;
  if (output.length > spec.max_tokens)
    output_value.refuse_because(fmt::format(
        "found {} output tokens; expected at most max_tokens, {}", output.length, spec.max_tokens));
  if (spec.min_tokens > output.length)
    output_value.refuse_because(
        fmt::format("found {} output tokens; expected at least min_tokens, {}", output.length,
                    spec.min_tokens));
  const std::int32_t last = output.length - 1;
  // A replay that generates the tokens itself appends a token that ends the request.
  const bool repeats = spec.repetition_detection != RepetitionDetection{};
  bool ended = spec.eos_token || !spec.stop_token_ids.empty();
  if (!output.tokens.empty() || output.fill) {
    const auto token_at = [&output](std::int32_t i) {
      return output.fill ? *output.fill : output.tokens[static_cast<std::size_t>(i)];
    };
    ended = ends_request(spec, token_at(last));
    // With `fill` all tokens are equal, so that the first one decides for all.
    for (std::int32_t i = std::max(spec.min_tokens - 1, 0);
         i < (output.fill && spec.min_tokens == 0 ? std::min(last, 1) : last); ++i) {
      if (!ends_request(spec, token_at(i))) continue;
      output_value.refuse_because(
          fmt::format("found {}, a token that ends the request, at output token {} of {}; expected "
                      "it at the end only",
                      token_at(i), i, output.length));
    }
  }
  if (output.length < spec.max_tokens && !ended && !repeats)
    output_value.refuse_because(
        fmt::format("found {0} output tokens and nothing that ends the request there; expected "
                    "max_tokens {0} or an eos token at the end",
                    output.length));
}

// Prompts depend on the trace's convention and on the request's number in it.
struct RequestContext {
  const TraceHeader& header;
  std::uint64_t ordinal = 0;
};

// Arrival: at `t`, or `delay` after the last of the requests in `after` has ended; never both.
template <class Io>
void arrival_fields(Io& io, FieldsOf<Io, TraceRequest>& request) {
  io.optional("after", request.after);
  if constexpr (Io::kReads)
    if (auto after = io.object.optional("after")) {
      if (request.after.empty()) after.refuse("at least one request");
      if (io.object.has("t"))
        io.object.refuse_because("found both \"t\" and \"after\"; expected one of them");
    }
  if (request.after.empty())
    io.required("t", request.spec.arrival_ns, kTime);
  else
    io.required("delay", request.delay_ns, kTime);
}

}  // namespace

template <class Io>
void fields(Io& io, FieldsOf<Io, TraceRequest>& request, const RequestContext& at) {
  auto& spec = request.spec;
  io.required("id", spec.name);
  arrival_fields(io, request);
  if constexpr (Io::kReads)
    spec.prompt = read_prompt(io.object.required("prompt"), at.header.ids, at.ordinal);
  else
    write_prompt(io.out.key("prompt"), spec.prompt, at.header.ids, at.ordinal);
  io.required("output", request.output);
  // max_tokens defaults to the length of the output, which is therefore read first.
  if constexpr (Io::kReads) spec.max_tokens = request.output.length;
  io.unless(request.output.length, "max_tokens", spec.max_tokens, kPositive);
  io.optional("eos", spec.eos_token, form::Between{0, kTokenIdMax});
  io.optional("stop_token_ids", spec.stop_token_ids, TokenIds{});
  if constexpr (Io::kReads) {
    if (auto stop = io.object.optional("stop_token_ids"); stop && spec.stop_token_ids.empty())
      stop.refuse("at least one token, or no such key");
    read_rare_request_keys(io.object, spec, {.has_items_beside = at.header.is_encoder_decoder});
    check_end(io.object.required("output"), request);
  }
  io.optional("abort", request.abort,
              form::With{request.after.empty() ? spec.arrival_ns : kNoArrival});
  io.optional("priority", spec.priority, form::Between{INT64_MIN, INT64_MAX});
  io.optional("salt", spec.cache_salt);
  if constexpr (!Io::kReads) write_rare_request_keys(io.out, spec);
}

template <class Io>
void fields(Io& io, FieldsOf<Io, TraceControl>& control) {
  static constexpr JsonWord<TraceControl::Kind> kKinds[] = {
      {"reset_prefix_cache", TraceControl::Kind::reset_prefix_cache},
      {"pause_state", TraceControl::Kind::pause_state}};
  io.required("control", control.kind, form::Word<TraceControl::Kind>{kKinds});
  io.required("t", control.t_ns, kTime);
  if (control.kind == TraceControl::Kind::pause_state)
    io.required("state", control.pause_state, form::Word<PauseState>{kPauseStates});
  else
    io.optional("running", control.preempts_running);
}

std::int64_t* time_of(TraceRecord& record) {
  if (auto* control = std::get_if<TraceControl>(&record)) return &control->t_ns;
  auto& request = std::get<TraceRequest>(record);
  return request.after.empty() ? &request.spec.arrival_ns : nullptr;
}

TraceHeader read_trace_header(JsonValue value) { return row_of_fields<TraceHeader>(value); }

// A name is inserted after `after` has been checked, so a request cannot wait for itself.
TraceRecord TraceRecordReader::read(JsonValue value) {
  JsonObject object = value.object();
  if (object.has("control")) {
    const auto control = row_of_fields<TraceControl>(value);
    check_time(object, control.t_ns);
    return control;
  }
  auto request = row_of_fields<TraceRequest>(value, RequestContext{header_, ordinal_++});
  if (request.after.empty()) check_time(object, request.spec.arrival_ns);
  if (!request.after.empty()) {
    JsonValue after = object.required("after");
    for (JsonValue name : after.array())
      if (!names_.contains(std::string(name.string())))
        name.refuse("an earlier request of this trace");
  }
  if (!names_.insert(request.spec.name).second)
    object.required("id").refuse("a name that no earlier request has");
  return request;
}

// The message names the previous time, as sorting the file is the usual repair.
void TraceRecordReader::check_time(JsonObject& object, std::int64_t t_ns) {
  if (t_ns < last_t_ns_)
    object.required("t").refuse(
        fmt::format("at least {}, the time of the record before", last_t_ns_));
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

// Reads a request trace line by line.
//
// Invariants
// (1) num_records_ records have been returned; the end line must state that number.
// (2) After ended_, nothing is read.
class RequestTraceReader final : public TraceReader {
 public:
  explicit RequestTraceReader(LineReader&& lines)
      : lines_(std::move(lines)), json_(lines_.path()) {}

  Result<void> read_header() {
    std::string_view line;
    LS_RETURN_IF_ERROR(lines_.next(line));
    if (json_.parse(line, 1, lines_.is_cut_off())) header_ = read_trace_header(json_.root());
    if (!json_.ok()) return json_.failure();
    records_ = TraceRecordReader(header_);
    return {};
  }

  const TraceHeader& header() const override { return header_; }

  Result<bool> next(TraceRecord& record) override {
    if (ended_) return false;
    std::string_view line;
    LS_ASSIGN_OR_RETURN(const bool got, lines_.next(line));
    const std::int64_t number = lines_.number();
    if (!got) {
      // A missing end line means a truncated file. A recording may be cut off; a trace without its
      // last requests would be another workload.
      json_.fail_line(
          number, "found the end of the file; expected a record or {\"end\":true,\"records\":N}");
    } else if (json_.parse(line, number, lines_.is_cut_off())) {
      if (json_.root().is_object() && json_.root().object().has("end")) {
        LS_RETURN_IF_ERROR(read_end(number));
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
    LS_ASSIGN_OR_RETURN(const bool has_more, lines_.next(line));
    if (has_more) json_.fail_line(number + 1, "found a line after the end line; expected none");
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
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  auto reader = std::make_unique<RequestTraceReader>(std::move(lines));
  LS_RETURN_IF_ERROR(reader->read_header());
  return reader;
}

Result<Trace> read_all(TraceReader& reader) {
  Trace trace{.header = reader.header(), .records = {}};
  while (true) {
    TraceRecord record;
    LS_ASSIGN_OR_RETURN(const bool more, reader.next(record));
    if (!more) return trace;
    trace.records.push_back(std::move(record));
  }
}

std::string trace_header_line(const TraceHeader& header) { return line_of_fields(header); }

std::string trace_record_line(const TraceHeader& header, const TraceRecord& record,
                              std::uint64_t ordinal) {
  if (const auto* request = std::get_if<TraceRequest>(&record))
    return line_of_fields(*request, RequestContext{header, ordinal});
  return line_of_fields(std::get<TraceControl>(record));
}

std::string trace_end_line(std::uint64_t num_records) {
  JsonWriter out;
  out.begin_object().boolean("end", true).key("records").uint64(num_records).end_object();
  return out.take_line();
}

// `ordinal` counts requests only, as the reader does; controls do not change it.
std::string trace_to_text(const Trace& trace) {
  std::string text = trace_header_line(trace.header);
  std::uint64_t ordinal = 0;
  for (const TraceRecord& record : trace.records) {
    text += trace_record_line(trace.header, record, ordinal);
    if (std::holds_alternative<TraceRequest>(record)) ++ordinal;
  }
  return text + trace_end_line(trace.records.size());
}

}  // namespace lockstep
