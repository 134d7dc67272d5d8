// The table of formats with their tests and readers, and the option --import.
#include "traces/importers/open_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <utility>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "base/number_text.h"
#include "traces/formats/step_hashes.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"

namespace lockstep {
namespace {

// What the tests of the table see: the first line of a file, or the whole of a document over many
// lines.
struct Beginning {
  std::string_view line;
  // null: the line is not a JSON object.
  const JsonObject* object = nullptr;
  bool has(std::string_view key) const { return object != nullptr && object->has(key); }
};

Result<std::unique_ptr<TraceReader>> open_benchmark(const std::string& path, const ImportOptions&) {
  LS_ASSIGN_OR_RETURN(auto file, read_benchmark_file(path));
  return requests_of(std::move(file), path);
}

Result<std::unique_ptr<TraceReader>> open_own(const std::string& path, const ImportOptions&) {
  return open_request_trace(path);
}

// One row of the table.
struct KnownFormat {
  FileFormat format;
  std::string_view name;
  // What the first line shows, for the message about unknown files.
  std::string_view sign;
  bool (*is)(const Beginning& file);
  // null: the format has no requests with arrivals.
  OpenTrace* open = nullptr;
  // The options of --import that a reader uses; Lockstep's own formats state everything.
  std::string_view options = {};
};

constexpr std::string_view kOfEveryTool = "zero, arrival, torn";

// The first row whose test succeeds wins. Own formats precede those of other tools, whose tests are
// looser; Mooncake is last, because other formats have its keys too.
constexpr std::array kFormats = std::to_array<KnownFormat>({
    {FileFormat::request_trace, "request trace", "{\"lockstep_trace\":1,...}",
     [](const Beginning& file) { return file.has("lockstep_trace"); }, open_own},
    {FileFormat::recording, "engine recording", "{\"schedule_recording\":1,...}",
     [](const Beginning& file) { return file.has("schedule_recording"); }},
    {FileFormat::benchmark, "benchmark file", "{\"benchmark\":...}",
     [](const Beginning& file) { return file.has("benchmark"); }, open_benchmark},
    {FileFormat::saved_case, "saved case", "{\"lockstep_case\":1,...}",
     [](const Beginning& file) { return file.has("lockstep_case"); }},
    {FileFormat::layouts, "layout recording", "{\"layout_recording\":1,...}",
     [](const Beginning& file) { return file.has("layout_recording"); }},
    {FileFormat::azure, "Azure trace", "TIMESTAMP,ContextTokens,GeneratedTokens",
     [](const Beginning& file) { return is_azure_header(file.line); }, open_azure, kOfEveryTool},
    {FileFormat::burstgpt, "BurstGPT trace", "Timestamp,Request tokens,Response tokens,...",
     [](const Beginning& file) { return is_burstgpt_header(file.line); }, open_burstgpt,
     kOfEveryTool},
    {FileFormat::weka, "Weka trace", "{\"id\":..,\"block_size\":..,\"requests\":[..],...}",
     [](const Beginning& file) { return file.has("requests") && file.has("block_size"); },
     open_weka, kOfEveryTool},
    {FileFormat::bailian, "Bailian trace", "{\"chat_id\":..,\"parent_chat_id\":..,...}",
     [](const Beginning& file) { return file.has("chat_id"); }, open_bailian,
     "block, zero, arrival, torn"},
    {FileFormat::llmservingsim, "LLMServingSim workload", "{\"input_toks\":..,...}",
     [](const Beginning& file) { return file.has("input_toks") || file.has("sub_requests"); },
     open_llmservingsim, kOfEveryTool},
    {FileFormat::dynamo, "Dynamo request trace", "{\"schema\":\"dynamo.request.trace.v1\",...}",
     [](const Beginning& file) { return file.has("schema") && file.has("event_type"); },
     open_dynamo, kOfEveryTool},
    {FileFormat::aiperf_manifest, "AIPerf manifest",
     "{\"num_sessions\":..,\"generation_params\":{..},...}",
     [](const Beginning& file) { return file.has("generation_params"); }, open_aiperf_manifest,
     kOfEveryTool},
    {FileFormat::mooncake, "Mooncake trace", "{\"timestamp\":..,\"hash_ids\":[..],...}",
     [](const Beginning& file) {
       return file.has("hash_ids") || file.has("input_length") || file.has("input_tokens");
     },
     open_mooncake, "block, time, turns, zero, arrival, torn"},
});

// REQUIRES: every FileFormat has a row.
const KnownFormat& known(FileFormat format) {
  return *std::ranges::find(kFormats, format, &KnownFormat::format);
}

// What to do with a file that is not text of one byte per ASCII character, by its first bytes;
// empty: nothing is known.
std::string_view how_to_read(std::string_view line) {
  if (line.starts_with("\x28\xb5\x2f\xfd")) return "a zstd file; unpack it first: zstd -d FILE";
  if (line.starts_with("\xff\xfe") || line.starts_with("\xfe\xff"))
    return "text in UTF-16; convert it to UTF-8 first: iconv -f UTF-16 -t UTF-8 FILE";
  return {};
}

// Lists what the first line of each format shows. Step hashes have no requests but are easily
// passed by mistake, so they get their own message.
tl::unexpected<Error> unknown_format(const std::string& path, std::string_view line) {
  if (const auto how = how_to_read(line); !how.empty()) return fail("{}: {}", path, how);
  if (StepHashesReader::is_header(line))
    return fail("{}: step hashes of a run; `lockstep same` compares two of them", path);
  std::string formats;
  for (const KnownFormat& format : kFormats)
    formats += fmt::format("{}{} ({})", formats.empty() ? "" : ", ", format.name, format.sign);
  return fail("{}:1: found \"{}\", the first line of no known format; expected one of: {}", path,
              printable_excerpt(line), formats);
}

const KnownFormat* format_of(const Beginning& file) {
  const auto* const found =
      std::ranges::find_if(kFormats, [&](const KnownFormat& format) { return format.is(file); });
  return found == kFormats.end() ? nullptr : found;
}

// Tests a document over many lines, which starts with a brace on its own line; nullptr: another
// file. The whole text of at most 16 MiB is parsed.
Result<const KnownFormat*> format_of_document(const std::string& path, std::string_view line) {
  if (line != "{") return nullptr;
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kJsonTextBytesMax));
  JsonReader json(path);
  if (!json.parse(text) || !json.root().is_object()) return nullptr;
  const JsonObject object = json.root().object();
  return format_of({.line = line, .object = &object});
}

// Parses the value of an option as a positive number.
Result<std::int64_t> number_of(std::string_view name, std::string_view text) {
  const auto number = digits_of(text, 1, std::numeric_limits<std::int32_t>::max());
  if (!number) return fail("{}: found \"{}\"; expected a number of tokens", name, text);
  return *number;
}

// Parses the value of an option as one of `words`; the error lists them.
template <class T>
Result<T> word_of(std::string_view name, std::string_view text,
                  std::initializer_list<std::pair<std::string_view, T>> words) {
  for (const auto& [word, meaning] : words)
    if (word == text) return meaning;
  return fail("{}: found \"{}\"; expected one of {}", name, text,
              joined(words, [](const auto& known) { return known.first; }));
}

// Sets the option `name`. One branch per option: the table in docs/formats.md lists them in the
// same order.
Result<void> set_option(std::string_view name, std::string_view value, ImportOptions& options) {
  if (name == "block") {
    LS_ASSIGN_OR_RETURN(const std::int64_t tokens, number_of(name, value));
    options.block_tokens = static_cast<std::int32_t>(tokens);
  } else if (name == "time") {
    LS_ASSIGN_OR_RETURN(options.time_unit,
                        word_of<TimeUnit>(name, value, {{"ms", TimeUnit::ms}, {"s", TimeUnit::s}}));
  } else if (name == "turns") {
    LS_ASSIGN_OR_RETURN(
        options.turns,
        word_of<Turns>(name, value, {{"whole", Turns::whole}, {"added", Turns::added}}));
  } else if (name == "zero") {
    LS_ASSIGN_OR_RETURN(options.zero_output, word_of<ZeroOutput>(name, value,
                                                                 {{"one", ZeroOutput::one_token},
                                                                  {"skip", ZeroOutput::skip},
                                                                  {"refuse", ZeroOutput::refuse}}));
  } else if (name == "arrival") {
    LS_ASSIGN_OR_RETURN(options.arrivals, word_of<Arrivals>(name, value,
                                                            {{"recorded", Arrivals::recorded},
                                                             {"closed", Arrivals::closed}}));
  } else if (name == "torn") {
    LS_ASSIGN_OR_RETURN(options.skips_torn,
                        word_of<bool>(name, value, {{"refuse", false}, {"skip", true}}));
  } else {
    return fail("found \"{}\"; expected block, time, turns, zero, arrival or torn", name);
  }
  return {};
}

}  // namespace

std::string_view name_of(FileFormat format) { return known(format).name; }

Result<ImportOptions> import_options_from_text(std::string_view text) {
  ImportOptions options;
  for (const std::string_view part : split_cells(text)) {
    const std::size_t equals = part.find('=');
    const std::string_view name = part.substr(0, equals);
    if (equals == part.npos)
      return fail("found \"{}\"; expected NAME=VALUE, as in block=16,time=s", part);
    if (std::ranges::find(options.given, name) != options.given.end())
      return fail("found {} twice", name);
    options.given.emplace_back(name);
    LS_RETURN_IF_ERROR(set_option(name, part.substr(equals + 1), options));
  }
  return options;
}

// Reads the first line only, unless it is "{". A cut-off line is reported as such rather than as an
// unknown format.
Result<FileFormat> detect_format(const std::string& path) {
  LS_RETURN_IF_ERROR(check_read_twice(path));
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  std::string_view line;
  LS_RETURN_IF_ERROR(lines.next(line));
  JsonReader json(path);
  const KnownFormat* format = nullptr;
  if (json.parse(line, 1, lines.is_cut_off()) && json.root().is_object()) {
    const JsonObject object = json.root().object();
    format = format_of({.line = line, .object = &object});
  } else {
    format = format_of({.line = line});
    if (format == nullptr) {
      LS_ASSIGN_OR_RETURN(format, format_of_document(path, line));
    }
  }
  // A line that begins as an object is one: its error says more than a list of formats.
  if (format == nullptr && how_to_read(line).empty() &&
      (json.is_cut_off() || (!json.ok() && line.starts_with("{\""))))
    return json.failure();
  if (format == nullptr) return unknown_format(path, line);
  return format->format;
}

Result<void> check_import(const std::string& path, FileFormat format,
                          const ImportOptions& options) {
  const KnownFormat& row = known(format);
  for (const std::string& name : options.given)
    if (row.options.find(name) == row.options.npos)
      return fail("{}: --import {} has no effect on a file of this format, {}; expected {}", path,
                  name, row.name, row.options.empty() ? "no --import" : row.options);
  return {};
}

Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path,
                                                const ImportOptions& options) {
  LS_ASSIGN_OR_RETURN(const FileFormat format, detect_format(path));
  return open_trace(path, format, options);
}

Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path, FileFormat format,
                                                const ImportOptions& options) {
  // Own formats are complete in one file; a manifest names its rows itself.
  for (const std::string& shard : options.shards) {
    LS_ASSIGN_OR_RETURN(const FileFormat other, detect_format(shard));
    if (format < FileFormat::mooncake || format > FileFormat::dynamo || other != format)
      return fail(
          "{}: found a {} after a {}; several files must be shards of one trace of another tool",
          shard, name_of(other), name_of(format));
  }
  LS_RETURN_IF_ERROR(check_import(path, format, options));
  if (OpenTrace* const open = known(format).open) return open(path, options);
  return fail("{}:1: found {} {}; expected requests and their arrivals", path,
              format == FileFormat::recording ? "an" : "a", name_of(format));
}

}  // namespace lockstep
