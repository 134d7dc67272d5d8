// Reading and writing of step hashes, one JSON object per line.
#include "traces/formats/step_hashes.h"

#include "base/check.h"
#include "base/json_fields.h"

namespace lockstep {
namespace {

constexpr form::Hexadecimal kHash{32};
constexpr std::size_t kBufferBytes = std::size_t{1} << 16;

// [rank, tensor, block, fingerprint]: an array, since a step may have thousands of pages.
struct PageEntry {
  static void read(JsonValue value, HashedPage& page) {
    const JsonArray entry = value.array();
    if (entry.size() != 4) return value.refuse("[rank, tensor, block, fingerprint]");
    page.rank = entry[0].integer<std::int32_t>(0);
    page.tensor = entry[1].integer<std::int32_t>(0);
    page.block = entry[2].integer<std::int32_t>(0);
    kHash.read(entry[3], page.fingerprint);
  }
  static void write(JsonWriter& out, const HashedPage& page) {
    out.begin_array().integer(page.rank).integer(page.tensor).integer(page.block);
    out.string(page.fingerprint).end_array();
  }
};

}  // namespace

template <class Io>
void fields(Io& io, FieldsOf<Io, StepHashesHeader>& header) {
  io.constant("lockstep_hashes", 1);
  io.required("engine", header.engine);
  io.required("backend", header.backend);
  io.required("has_pages", header.has_pages);
}

// `has_pages` is the header's: a run without a backend has no key `pages`, so that its absence is
// not mistaken for a step without writes.
template <class Io>
void fields(Io& io, FieldsOf<Io, StepHashes>& step, const bool& has_pages) {
  io.required("step", step.step, form::Between{step.step, step.step});
  io.required("hash", step.hash, kHash);
  io.required("decision", step.decision, kHash);
  io.required("tables", step.tables, form::ById<form::Each<form::Hexadecimal>>{{kHash}});
  if (has_pages) io.required("pages", step.pages, form::Each<PageEntry>{});
  io.optional("ended", step.ended);
}

template <class Io>
void fields(Io& io, FieldsOf<Io, StepHashesEnd>& end) {
  io.mark("end");
  io.required("steps", end.steps, form::Between{end.steps, end.steps});
  io.required("verdict", end.verdict);
  io.optional("check", end.check);
}

bool StepHashesReader::is_header(std::string_view line) {
  return line.starts_with("{\"lockstep_hashes\":");
}

Result<StepHashesReader> StepHashesReader::open(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  StepHashesReader reader(std::move(lines));
  std::string_view line;
  LS_RETURN_IF_ERROR(reader.lines_.next(line));
  JsonReader json(path);
  if (json.parse(line, reader.lines_.number(), reader.lines_.is_cut_off()))
    read_fields(json.root(), reader.header_);
  if (!json.ok()) return json.failure();
  return reader;
}

// Reads one line. The end line is recognized by its key; a line after it is an error, as in the
// other formats.
Result<bool> StepHashesReader::next(StepHashes& step) {
  LS_CHECK(!has_ended_, "step {} is read after the end", steps_);
  std::string_view line;
  LS_ASSIGN_OR_RETURN(const bool has_line, lines_.next(line));
  if (!has_line)
    return fail(
        "{}:{}: the file ends without its end line; write it again with `lockstep replay --hashes`",
        lines_.path(), lines_.number() + 1);
  JsonReader json(lines_.path());
  bool is_step = false;
  if (json.parse(line, lines_.number(), lines_.is_cut_off())) {
    is_step = !json.root().object().has("end");
    step = StepHashes();
    // Both lists of fields accept only this number.
    step.step = end_.steps = steps_;
    if (is_step)
      read_fields(json.root(), step, header_.has_pages);
    else
      read_fields(json.root(), end_);
  }
  if (!json.ok()) return json.failure();
  steps_ += is_step ? 1 : 0;
  if (is_step) return true;
  has_ended_ = true;
  LS_ASSIGN_OR_RETURN(const bool has_more, lines_.next(line));
  if (has_more)
    return fail("{}:{}: a line after the end line; remove it", lines_.path(), lines_.number());
  return false;
}

const StepHashesEnd& StepHashesReader::end() const {
  LS_CHECK(has_ended_, "the end is read after step {}", steps_);
  return end_;
}

Result<StepHashesWriter> StepHashesWriter::create(const std::string& path,
                                                  const StepHashesHeader& header) {
  LS_ASSIGN_OR_RETURN(auto file, OutputFile::create(path));
  StepHashesWriter writer(std::move(file), header.has_pages);
  writer.buffer_ = line_of_fields(header);
  return writer;
}

Result<void> StepHashesWriter::write(const StepHashes& step) {
  LS_CHECK(step.step == steps_, "step {} is written after {} steps", step.step, steps_);
  LS_CHECK(kHash.has(step.hash) && kHash.has(step.decision), "hash {}, decision {}", step.hash,
           step.decision);
  ++steps_;
  buffer_ += line_of_fields(step, has_pages_);
  if (buffer_.size() < kBufferBytes) return {};
  const auto written = file_.write(buffer_);
  buffer_.clear();
  return written;
}

Result<void> StepHashesWriter::close(const StepHashesEnd& end) {
  LS_CHECK(end.steps == steps_, "{} steps written, {} at the end", steps_, end.steps);
  buffer_ += line_of_fields(end);
  LS_RETURN_IF_ERROR(file_.write(buffer_));
  return file_.commit();
}

}  // namespace lockstep
