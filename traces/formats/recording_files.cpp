// Recordings as files, step by step or whole, and their requests as a trace.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "base/line_reader.h"
#include "base/output_file.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

// The reader's members are behind a pointer so that recording.h does not need the JSON reader.
//
// Invariants
// (1) next_step is the number of steps that next() has returned.
// (2) ended: `end` is set, and no further line is read.
struct RecordingReader::State {
  explicit State(LineReader&& opened) : lines(std::move(opened)), json(lines.path()) {}
  LineReader lines;
  JsonReader json;
  RecordingHeader header;
  RecordingEnd end;
  std::int64_t next_step = 0;
  bool ended = false;
  bool has_loading = false;  // a step has listed its loads in flight
  bool has_skipped = false;  // ... and the requests that wait for them
  // Refuses transfers whose requests the recording does not show.
  void check_shown(const RecordedStep& step) {
    has_loading |= step.loading.has_value();
    has_skipped |= step.skipped.has_value() || step.transfers.kv_holding.has_value();
    if (!has_loading && step.worker && !step.worker->received.empty())
      json.fail_line(lines.number(),
                     "worker.received: found a load that has ended, and no step lists loads in "
                     "flight; expected `loading` in each step that has some");
    if (!has_skipped && step.loading && !step.loading->empty())
      json.fail_line(lines.number(),
                     "loading: found a load in flight, and no step lists the requests that wait "
                     "for one; expected `skipped`");
  }
  // Ends the recording after its last whole step, in a file without an end line. Returns what
  // next() returns then.
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
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  auto state = std::make_unique<State>(std::move(lines));
  std::string_view line;
  LS_RETURN_IF_ERROR(state->lines.next(line));
  if (state->json.parse(line, 1, state->lines.is_cut_off()))
    state->header = read_recording_header(state->json.root());
  if (!state->json.ok()) return state->json.failure();
  return RecordingReader(std::move(state));
}

const RecordingHeader& RecordingReader::header() const { return state_->header; }

std::string RecordingReader::place() const {
  return fmt::format("{}:{}", state_->lines.path(), state_->lines.number());
}

std::span<const RecordedStep> RecordedSteps::in_memory() const {
  if (recording_ != nullptr) return recording_->steps;
  return {};
}

Result<bool> RecordingReader::next(RecordedStep& step) {
  State& state = *state_;
  if (state.ended) return false;
  std::string_view line;
  LS_ASSIGN_OR_RETURN(const bool got, state.lines.next(line));
  const std::int64_t number = state.lines.number();
  // A missing end line, or a torn last line without a newline, is what a killed process leaves: the
  // steps before it stay usable. A torn line that ends in a newline is damage and is refused.
  if (!got) return state.cut_off();
  if (state.json.parse(line, number, state.lines.is_cut_off())) {
    const JsonValue root = state.json.root();
    if (root.is_object() && JsonValue(root).object().has("end")) {
      state.end = read_recording_end(root, state.header, state.next_step);
      state.ended = true;
      // Anything after the end line means that two recordings were joined or that the end is not
      // the last write; the line number of the extra line is reported.
      LS_ASSIGN_OR_RETURN(const bool has_more,
                          state.json.ok() ? state.lines.next(line) : Result<bool>(false));
      if (has_more)
        state.json.fail_line(number + 1, "found a line after the end line; expected none");
    } else {
      step = read_recorded_step(root, state.header, state.next_step++);
      if (state.json.ok()) state.check_shown(step);
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

// Collects lines, so that short steps do not cost a system call each.
struct RecordingWriter::State {
  OutputFile file;
  std::string buffer;
  Result<void> append(const std::string& line) {
    buffer += line;
    // 64 KiB per write.
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
  LS_ASSIGN_OR_RETURN(auto file, OutputFile::create(path));
  return RecordingWriter(
      std::make_unique<State>(State{std::move(file), recording_header_line(header)}));
}

Result<void> RecordingWriter::write(const RecordedStep& step) {
  return state_->append(recording_step_line(step));
}

Result<void> RecordingWriter::close(const RecordingEnd& end) {
  state_->buffer += recording_end_line(end);
  if (const auto flushed = state_->flush(); !flushed) return flushed;
  return state_->file.commit();
}

std::string cut_off_text(const RecordingEnd& end) {
  if (!end.is_cut_off) return {};
  if (end.steps == 0) return "cut off before its first step";
  return fmt::format("cut off after step {}", end.steps - 1);
}

Result<Recording> read_recording(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto reader, RecordingReader::open(path));
  Recording recording{.header = reader.header(), .steps = {}, .end = {}};
  while (true) {
    RecordedStep step;
    LS_ASSIGN_OR_RETURN(const bool more, reader.next(step));
    if (!more) break;
    recording.steps.push_back(std::move(step));
  }
  recording.end = reader.end();
  return recording;
}

Result<Recording> read_recorded_steps(const std::string& path) {
  auto recording = read_recording(path);
  if (!recording || !recording->steps.empty()) return recording;
  const std::string cut_off = cut_off_text(recording->end);
  return fail("{}:1: has no step to run{}{}", path, cut_off.empty() ? "" : "; ", cut_off);
}

namespace {

// What the engine made of one request.
struct Ending {
  std::vector<std::int32_t> tokens;  // sampled, in order
  bool has_stopped = false;
};

// Returns the output that the engine kept: tokens sampled after a stop token or past max_tokens
// were discarded. A request that never ended, or sampled nothing, gets max_tokens tokens without
// content.
OutputPlan output_of(const RequestSpec& spec, const Ending& ending) {
  OutputPlan output;
  if (!ending.has_stopped || ending.tokens.empty()) {
    output.length = spec.max_tokens;
    return output;
  }
  for (const std::int32_t token : ending.tokens) {
    output.tokens.push_back(token);
    const bool stops = token == spec.eos_token ||
                       std::ranges::find(spec.stop_token_ids, token) != spec.stop_token_ids.end();
    if (stops || std::ssize(output.tokens) == spec.max_tokens) break;
  }
  output.length = static_cast<std::int32_t>(output.tokens.size());
  // A placeholder (-1) that the recorded model accepted stands for an unknown token: keep the
  // length and let the replay generate tokens.
  if (std::ranges::any_of(output.tokens, [](std::int32_t token) { return token < 0; }))
    output.tokens.clear();
  return output;
}

// Collects the requests of a recording.
//
// Invariants
// (1) A name may repeat in a recording: places_ has the latest request of a name. The trace's own
//     names are unique: "a", "a#2".
// (2) endings_ has one entry per record, whose request's output it becomes in take().
class RecordedRequests {
 public:
  // Adds the events of `step` at t_ns. An abort of an unknown name is dropped: the engine ignored
  // it too. Refuses an event that a trace cannot hold.
  Result<void> add(std::int64_t step, const std::vector<RecordedEvent>& events, std::int64_t t_ns) {
    constexpr std::array<std::string_view, 10> kNames = {
        "add",   "abort", "reset_prefix_cache", "pause_state",    "output",
        "chunk", "close", "grammar_ready",      "grammar_failed", "reset_encoder_cache"};
    using Kind = RecordedEvent::Kind;
    for (const RecordedEvent& event : events) {
      if (event.kind == Kind::add) {
        add_request(event.request, t_ns);
      } else if (event.kind == Kind::abort) {
        const auto place = places_.find(event.name);
        if (place == places_.end()) continue;
        std::get<TraceRequest>(records_[place->second]).abort =
            AbortPlan{.t_ns = t_ns, .after_tokens = {}};
      } else if (event.kind == Kind::reset_prefix_cache) {
        records_.emplace_back(TraceControl{.t_ns = t_ns, .preempts_running = event.resets_running});
      } else if (event.kind == Kind::pause_state) {
        records_.emplace_back(TraceControl{.kind = TraceControl::Kind::pause_state,
                                           .t_ns = t_ns,
                                           .pause_state = event.pause_state});
      } else if (event.kind != Kind::output) {
        return fail(
            "step {}: found `{}`, which no request trace holds; `lockstep replay` follows "
            "the recording itself",
            step, kNames[static_cast<std::size_t>(event.kind)]);
      }
    }
    return {};
  }

  // Adds what a step sampled, and the requests that its outputs ended.
  void add_outputs(const RecordedStep& step) {
    endings_.resize(records_.size());
    for (const RecordedTokens& row : step.sampled)
      if (const auto place = places_.find(row.id); place != places_.end()) {
        std::vector<std::int32_t>& tokens = endings_[place->second].tokens;
        tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
      }
    for (const RecordedStopped& row : step.stopped)
      if (const auto place = places_.find(row.id); place != places_.end())
        endings_[place->second].has_stopped = true;
  }

  // Only the length ends a request, also one that an abort ended before min_tokens, so that another
  // engine that samples other tokens stops at the same output token.
  std::vector<TraceRecord> take() {
    endings_.resize(records_.size());
    for (std::size_t i = 0; i < endings_.size(); ++i)
      if (auto* const request = std::get_if<TraceRequest>(&records_[i])) {
        request->output = output_of(request->spec, endings_[i]);
        request->end_at_length(request->output.length);
      }
    return std::move(records_);
  }

 private:
  void add_request(const RequestSpec& spec, std::int64_t t_ns) {
    places_[spec.name] = records_.size();
    TraceRequest request;
    request.spec = spec;
    request.spec.arrival_ns = t_ns;
    for (int n = 2; !names_.insert(request.spec.name).second; ++n)
      request.spec.name = fmt::format("{}#{}", spec.name, n);
    records_.emplace_back(std::move(request));
  }

  std::vector<TraceRecord> records_;
  std::map<std::string, std::size_t> places_;
  std::set<std::string> names_;
  std::vector<Ending> endings_;
};

}  // namespace

Result<Trace> trace_of(const Recording& recording, std::int64_t step_ns) {
  if (recording.header.connector)
    return fail("a recording of a KV connector, whose answers no request trace holds");
  RecordedRequests requests;
  for (const RecordedStep& step : recording.steps) {
    LS_RETURN_IF_ERROR(requests.add(step.step, step.before, step.step * step_ns));
    // Events in `during` follow the decision: a name that they reuse has no output in this step.
    requests.add_outputs(step);
    LS_RETURN_IF_ERROR(requests.add(step.step, step.during, step.step * step_ns));
  }
  const bool has_encoder = recording.header.options.inputs.is_encoder_decoder.value_or(false);
  return Trace{
      .header = {.source = {.kind = "recording", .name = recording.header.family, .seed = {}},
                 .ids = {},
                 .engine = {},
                 .is_encoder_decoder = has_encoder},
      .records = requests.take()};
}

}  // namespace lockstep
