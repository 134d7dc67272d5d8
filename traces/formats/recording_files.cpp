// Recordings as files, step by step or whole, and their requests as a trace.
#include <fmt/format.h>

#include <algorithm>
#include <map>
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
  // A missing end line, or a torn last line without a newline, is what a killed process leaves: the
  // steps before it stay usable. A torn line that ends in a newline is damage and is refused.
  if (!*got) return state.cut_off();
  if (state.json.parse(line, number, state.lines.is_cut_off())) {
    const JsonValue root = state.json.root();
    if (root.is_object() && JsonValue(root).object().has("end")) {
      state.end = read_recording_end(root, state.header, state.next_step);
      state.ended = true;
      // Anything after the end line means that two recordings were joined or that the end is not
      // the last write; the line number of the extra line is reported.
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

std::string cut_off_text(const RecordingEnd& end) {
  if (!end.is_cut_off) return {};
  if (end.steps == 0) return "cut off before its first step";
  return fmt::format("cut off after step {}", end.steps - 1);
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

namespace {

// The outputs of all requests, and how those that ended did so.
struct Ends {
  std::map<std::string, std::vector<std::int32_t>> tokens;  // sampled, in order
  std::map<std::string, std::string> reasons;               // of those that stopped
};

// One pass over the recording. A reused name is treated as one request: its outputs are joined.
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

// Returns the output that the engine kept: tokens sampled after a stop token or past max_tokens
// were discarded. A request that never ended, or sampled nothing, gets max_tokens tokens without
// content.
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
  // A placeholder (-1) that the recorded model accepted stands for an unknown token: keep the
  // length and let the replay generate tokens.
  if (std::ranges::any_of(output.tokens, [](std::int32_t token) { return token < 0; }))
    output.tokens.clear();
  return output;
}

}  // namespace

// Names may repeat in a recording, hence `places` has the latest request of a name. An abort of an
// unknown name is dropped: the engine ignored it too.
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
        // Only the length ends the request, so that another engine that samples other tokens stops
        // at the same output token.
        request.spec.max_tokens = request.output.length;
        request.spec.eos_token.reset();
        request.spec.stop_token_ids.clear();
        places[event.request.name] = trace.records.size();
        trace.records.emplace_back(std::move(request));
      } else if (event.kind == RecordedEvent::Kind::abort) {
        const auto place = places.find(event.name);
        if (place == places.end()) continue;
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
