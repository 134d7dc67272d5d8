#include "traces/formats/step_hashes.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "traces/formats/lines_json.h"

namespace lockstep {
namespace {

constexpr std::size_t kHashDigits = 32;
constexpr std::size_t kBufferBytes = std::size_t{1} << 16;

bool is_hash(std::string_view text) {
  return text.size() == kHashDigits && std::ranges::all_of(text, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::string read_hash(JsonValue value) {
  const std::string_view text = value.string();
  if (!is_hash(text)) value.refuse("32 hexadecimal digits");
  return std::string(text);
}

HashedPage read_page(JsonValue value) {
  const JsonArray entry = value.array();
  if (entry.size() != 4) {
    value.refuse("[rank, tensor, block, fingerprint]");
    return {};
  }
  HashedPage page;
  page.rank = entry[0].integer<std::int32_t>(0);
  page.tensor = entry[1].integer<std::int32_t>(0);
  page.block = entry[2].integer<std::int32_t>(0);
  page.fingerprint = read_hash(entry[3]);
  return page;
}

StepHashes read_step(JsonObject& object, const StepHashesHeader& header, std::int64_t number) {
  StepHashes step;
  step.step = object.required("step").integer(number, number);
  step.hash = read_hash(object.required("hash"));
  step.decision = read_hash(object.required("decision"));
  for (auto& [request, groups] : object.required("tables").object().entries()) {
    HashedTable& table = step.tables.emplace_back();
    table.request = request;
    for (JsonValue group : groups.array()) table.groups.push_back(read_hash(group));
  }
  if (header.has_pages)
    for (JsonValue page : object.required("pages").array()) step.pages.push_back(read_page(page));
  if (auto ended = object.optional("ended"))
    for (JsonValue request : ended.array()) step.ended.push_back(read_name(request));
  object.finish();
  return step;
}

StepHashesEnd read_end(JsonObject& object, std::int64_t steps) {
  StepHashesEnd end;
  if (JsonValue value = object.required("end"); !value.boolean()) value.refuse("true");
  end.steps = object.required("steps").integer(steps, steps);
  end.verdict = object.required("verdict").nonempty_string();
  if (auto check = object.optional("check")) end.check = check.nonempty_string();
  object.finish();
  return end;
}

std::string header_line(const StepHashesHeader& header) {
  JsonWriter out;
  out.begin_object()
      .integer("lockstep_hashes", 1)
      .string("engine", header.engine)
      .string("backend", header.backend)
      .boolean("has_pages", header.has_pages)
      .end_object();
  return out.take_line();
}

void write_pages(JsonWriter& out, const std::vector<HashedPage>& pages) {
  out.begin_array();
  for (const HashedPage& page : pages)
    out.begin_array()
        .integer(page.rank)
        .integer(page.tensor)
        .integer(page.block)
        .string(page.fingerprint)
        .end_array();
  out.end_array();
}

}  // namespace

bool StepHashesReader::is_header(std::string_view line) {
  return line.starts_with("{\"lockstep_hashes\":");
}

Result<StepHashesReader> StepHashesReader::open(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  StepHashesReader reader(std::move(lines));
  std::string_view line;
  LS_RETURN_IF_ERROR(reader.lines_.next(line));
  JsonReader json(path);
  if (json.parse(line, reader.lines_.number(), reader.lines_.is_cut_off())) {
    JsonObject object = json.root().object();
    object.required("lockstep_hashes").integer(1, 1);
    reader.header_.engine = object.required("engine").nonempty_string();
    reader.header_.backend = object.required("backend").nonempty_string();
    reader.header_.has_pages = object.required("has_pages").boolean();
    object.finish();
  }
  if (!json.ok()) return json.failure();
  return reader;
}

Result<bool> StepHashesReader::next(StepHashes& step) {
  LS_CHECK(!has_ended_, "step {} is read after the end", steps_);
  std::string_view line;
  LS_ASSIGN_OR_RETURN(const bool has_line, lines_.next(line));
  if (!has_line)
    return fail(
        fmt::format("{}:{}: the file ends without its end line; write it again with "
                    "`lockstep replay --hashes`",
                    lines_.path(), lines_.number() + 1));
  JsonReader json(lines_.path());
  bool is_step = false;
  if (json.parse(line, lines_.number(), lines_.is_cut_off())) {
    JsonObject object = json.root().object();
    is_step = !object.has("end");
    if (is_step)
      step = read_step(object, header_, steps_);
    else
      end_ = read_end(object, steps_);
  }
  if (!json.ok()) return json.failure();
  steps_ += is_step ? 1 : 0;
  if (is_step) return true;
  has_ended_ = true;
  LS_ASSIGN_OR_RETURN(const bool has_more, lines_.next(line));
  if (has_more)
    return fail(
        fmt::format("{}:{}: a line after the end line; remove it", lines_.path(), lines_.number()));
  return false;
}

const StepHashesEnd& StepHashesReader::end() const {
  LS_CHECK(has_ended_, "the end is asked for after step {}", steps_);
  return end_;
}

Result<StepHashesWriter> StepHashesWriter::create(const std::string& path,
                                                  const StepHashesHeader& header) {
  LS_ASSIGN_OR_RETURN(auto file, OutputFile::create(path));
  StepHashesWriter writer(std::move(file), header.has_pages);
  writer.buffer_ = header_line(header);
  return writer;
}

Result<void> StepHashesWriter::write(const StepHashes& step) {
  LS_CHECK(step.step == steps_, "step {} is written after {} steps", step.step, steps_);
  LS_CHECK(is_hash(step.hash) && is_hash(step.decision), "hash {}, decision {}", step.hash,
           step.decision);
  ++steps_;
  JsonWriter out;
  out.begin_object().integer("step", step.step);
  out.string("hash", step.hash).string("decision", step.decision);
  out.key("tables").begin_object();
  for (const HashedTable& table : step.tables) out.key(table.request).strings(table.groups);
  out.end_object();
  if (has_pages_) write_pages(out.key("pages"), step.pages);
  if (!step.ended.empty()) out.key("ended").strings(step.ended);
  buffer_ += out.end_object().take_line();
  if (buffer_.size() < kBufferBytes) return {};
  const auto written = file_.write(buffer_);
  buffer_.clear();
  return written;
}

Result<void> StepHashesWriter::close(const StepHashesEnd& end) {
  LS_CHECK(end.steps == steps_, "{} steps written, {} at the end", steps_, end.steps);
  JsonWriter out;
  out.begin_object().boolean("end", true).integer("steps", end.steps);
  out.string("verdict", end.verdict);
  if (!end.check.empty()) out.string("check", end.check);
  buffer_ += out.end_object().take_line();
  LS_RETURN_IF_ERROR(file_.write(buffer_));
  return file_.commit();
}

}  // namespace lockstep
