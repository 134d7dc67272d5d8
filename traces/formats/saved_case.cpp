// Saved cases: the first line's fields, the reader of the lines after it, and the file of known
// failures.
#include "traces/formats/saved_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/json_fields.h"
#include "base/line_reader.h"
#include "base/number_text.h"
#include "base/output_file.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/run_fields.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

constexpr std::int64_t kCaseVersion = 1;
// Arguments of faults have no common range; each kind of fault checks its own.
constexpr form::Between kAnyNumber{INT64_MIN, INT64_MAX}, kStep{0, INT64_MAX};

// Reads settings by their present or older name; absent ones keep their default. The object is
// small, so a linear search per key suffices.
void read_settings(JsonValue value, RunSpec& run) {
  for (auto& [key, entry] : value.object().entries()) {
    const auto field = std::ranges::find_if(run_fields(), [&](const RunField& one) {
      return one.saved_in == SavedIn::settings && (one.name == key || one.old_name == key);
    });
    if (field != run_fields().end())
      field->read(*field, entry, run);
    else if (!key.starts_with("x_"))
      entry.refuse_because("found an unknown setting; expected a known setting");
  }
}

// Writes settings that differ from their default, so that a new setting does not change older
// cases.
void write_settings(JsonWriter& out, const SavedCase& saved) {
  out.begin_object();
  for (const RunField& field : run_fields())
    if (field.saved_in == SavedIn::settings && !field.is_default(saved))
      field.write(out.key(field.name), saved);
  out.end_object();
}

// The options that are keys of the first line (SavedIn::header); all of them are required.
template <class Io>
void run_fields_of_header(Io& io, FieldsOf<Io, SavedCase>& saved) {
  for (const RunField& field : run_fields()) {
    if (field.saved_in != SavedIn::header) continue;
    if constexpr (Io::kReads)
      field.read(field, io.object.required(field.name), saved);
    else
      field.write(io.out.key(field.name), saved);
  }
}

}  // namespace

// {"kind":..,"step":..,"arguments":{"blocks":10}}
template <class Io>
void fields(Io& io, FieldsOf<Io, Fault>& fault) {
  io.required("kind", fault.kind);
  io.required("step", fault.step, kStep);
  io.required("arguments", fault.arguments, form::ById{kAnyNumber});
}

template <class Io>
void fields(Io& io, FieldsOf<Io, ExpectedVerdict>& verdict) {
  io.required("kind", verdict.kind);
  io.optional("step", verdict.step, kStep);
  io.optional("check", verdict.check);
  io.optional("request", verdict.request);
  io.optional("cause", verdict.cause);
}

// The first line. `recorded` announces that a recording follows the trace. kernel_block_sizes must
// have one entry per group of the plan.
template <class Io>
void fields(Io& io, FieldsOf<Io, SavedCase>& saved) {
  io.constant("lockstep_case", kCaseVersion);
  io.required("name", saved.name, form::AnyText{});
  if constexpr (Io::kReads)
    saved.engine = read_engine_options(io.object.required("engine")).config;
  else
    write_engine_options(io.out.key("engine"), all_engine_options(saved.engine));
  io.required("cache", saved.cache, form::Code{read_kv_cache_config, write_kv_cache_config});
  run_fields_of_header(io, saved);
  if constexpr (Io::kReads) {
    if (saved.kernel_block_sizes.size() != saved.cache.groups.size())
      io.object.required("kernel_block_sizes")
          .refuse(fmt::format("one size for each of the {} groups", saved.cache.groups.size()));
    read_settings(io.object.required("settings"), saved);
  } else {
    write_settings(io.out.key("settings"), saved);
  }
  io.required("faults", saved.faults);
  io.optional("expected", saved.expected);
  io.optional("decided_by", saved.decided_by,
              form::Code{read_recorded_engine, write_recorded_engine});
  io.optional("worked_by", saved.worked_by, form::Code{read_worked_by, write_worked_by});
  bool is_recorded = saved.recording.has_value();
  io.required("recorded", is_recorded);
  if constexpr (Io::kReads)
    if (is_recorded) saved.recording.emplace();
}

namespace {

// Reads the lines of a case in sequence.
//
// Invariants
// (1) The JSON reader keeps the first error; after it, next() reads no further line.
// (2) The parts follow each other without separators: every part ends with its own end line.
class CaseReader {
 public:
  explicit CaseReader(LineReader&& lines) : lines_(std::move(lines)), json_(lines_.path()) {}

  Result<SavedCase> read() {
    SavedCase saved;
    if (next("the case's configuration")) read_fields(json_.root(), saved);
    read_trace(saved.trace);
    if (saved.recording) read_recording(*saved.recording);
    std::string_view line;
    LS_ASSIGN_OR_RETURN(const bool has_more, json_.ok() ? lines_.next(line) : false);
    if (has_more)
      json_.fail_line(lines_.number(), "found a line after the end of the case; expected none");
    if (!json_.ok()) return json_.failure();
    return saved;
  }

 private:
  // Parses the next line; false: the file has ended, its line is not JSON, or an earlier error
  // exists. `expected` completes the message for a truncated file.
  bool next(std::string_view expected) {
    if (!json_.ok()) return false;
    std::string_view line;
    const auto got = lines_.next(line);
    if (!got)
      json_.fail_with(got.error());
    else if (!*got)
      json_.fail_line(lines_.number(),
                      fmt::format("found the end of the file; expected {}", expected));
    return json_.ok() && json_.parse(line, lines_.number(), lines_.is_cut_off());
  }

  // Both parts mark their last line with the key `end`.
  bool at_end_line() {
    const JsonValue root = json_.root();
    return root.is_object() && JsonValue(root).object().has("end");
  }

  void read_trace(Trace& trace) {
    if (!next("the header of the case's trace")) return;
    trace.header = read_trace_header(json_.root());
    TraceRecordReader records(trace.header);
    while (next("a record, or the end line of the case's trace")) {
      if (at_end_line()) return read_trace_end(json_.root(), trace.records.size());
      trace.records.push_back(records.read(json_.root()));
    }
  }

  // A recording that was cut off has an end line here, with the flag `cut_off`.
  void read_recording(Recording& recording) {
    if (!next("the header of the case's recording")) return;
    recording.header = read_recording_header(json_.root());
    while (next("a step, or the end line of the case's recording")) {
      const auto steps = static_cast<std::int64_t>(recording.steps.size());
      if (at_end_line()) {
        recording.end = read_recording_end(json_.root(), recording.header, steps);
        return;
      }
      recording.steps.push_back(read_recorded_step(json_.root(), recording.header, steps));
    }
  }

  LineReader lines_;
  JsonReader json_;
};

}  // namespace

Result<SavedCase> read_saved_case(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  return CaseReader(std::move(lines)).read();
}

Result<SavedCase> saved_case_from_text(std::string name, std::string text) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::of_text(std::move(name), std::move(text)));
  return CaseReader(std::move(lines)).read();
}

std::string saved_case_to_text(const SavedCase& saved) {
  JsonWriter header;
  write_fields(header, saved);
  std::string text = header.take_line() + trace_to_text(saved.trace);
  if (saved.recording) {
    text += recording_header_line(saved.recording->header);
    for (const RecordedStep& step : saved.recording->steps) text += recording_step_line(step);
    text += recording_end_line(saved.recording->end);
  }
  return text;
}

Result<void> write_saved_case(const std::string& path, const SavedCase& saved) {
  return write_output(path, saved_case_to_text(saved));
}

constexpr std::size_t kKnownFileMax = 1 << 20;

// True for a day of the calendar such as "2027-01-31", whose order as text is that of time.
static bool is_date(std::string_view text) {
  constexpr std::string_view kShape = "0000-00-00";
  if (text.size() != kShape.size()) return false;
  for (std::size_t i = 0; i < text.size(); ++i)
    if (kShape[i] == '-' ? text[i] != '-' : text[i] < '0' || text[i] > '9') return false;
  const auto part = [&](std::size_t first, std::size_t count) {
    return static_cast<int>(*scaled_decimal_of(text.substr(first, count), 0));
  };
  return (std::chrono::year(part(0, 4)) / part(5, 2) / part(8, 2)).ok();
}

// Reads one entry of the list. `until` is read twice, once as text and once to refuse it with its
// position.
static KnownFailure read_known(JsonValue value) {
  JsonObject object = value.object();
  FieldReader io(object);
  KnownFailure known;
  io.required("id", known.id);
  io.required("check", known.check);
  io.optional("text", known.text);
  io.optional("until", known.until);
  std::string test;  // of the pytest plugin, which reads the same file
  io.optional("test", test);
  if (auto until = object.optional("until"); until && !is_date(known.until))
    until.refuse("a date, as in \"2027-01-31\"");
  object.finish();
  return known;
}

Result<std::vector<KnownFailure>> read_known_file(const std::string& path) {
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kKnownFileMax));
  JsonReader json(path);
  std::vector<KnownFailure> known;
  if (json.parse(text)) {
    JsonObject object = json.root().object();
    object.required("lockstep_known").integer(1, 1);
    for (JsonValue entry : object.required("known").array()) {
      known.push_back(read_known(entry));
      const auto is_same = [&](const KnownFailure& other) { return other.id == known.back().id; };
      if (std::ranges::count_if(known, is_same) > 1) entry.refuse("an id that no other entry has");
    }
    object.finish();
  }
  if (!json.ok()) return json.failure();
  return known;
}

}  // namespace lockstep
