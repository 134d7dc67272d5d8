#include "traces/importers/open_trace.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "traces/importers/foreign_traces.h"

namespace lockstep {
namespace {

struct FormatName {
  FileFormat format;
  std::string_view name;
  std::string_view sign;  // what its first line shows
};

constexpr std::array kFormats = std::to_array<FormatName>({
    {FileFormat::request_trace, "request trace", "{\"lockstep_trace\":1,...}"},
    {FileFormat::recording, "engine recording", "{\"schedule_recording\":1,...}"},
    {FileFormat::benchmark, "benchmark file", "{\"benchmark\":...}"},
    {FileFormat::saved_case, "saved case", "{\"lockstep_case\":1,...}"},
    {FileFormat::mooncake, "Mooncake trace", "{\"timestamp\":..,\"hash_ids\":[..],...}"},
    {FileFormat::azure, "Azure trace", "TIMESTAMP,ContextTokens,GeneratedTokens"},
    {FileFormat::layouts, "layout recording", "{\"layout_recording\":1,...}"},
});

tl::unexpected<Error> unknown_format(const std::string& path, std::string_view line) {
  std::string known;
  for (const FormatName& format : kFormats) {
    known += fmt::format("{}{} ({})", known.empty() ? "" : ", ", format.name, format.sign);
  }
  return fail(
      fmt::format("{}:1: found \"{}\", the first line of no known format; expected one of: {}",
                  path, printable_excerpt(line), known));
}

}  // namespace

std::string_view name_of(FileFormat format) {
  return kFormats[static_cast<std::size_t>(format)].name;
}

Result<FileFormat> detect_format(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  std::string_view line;
  LS_RETURN_IF_ERROR(lines.next(line));
  if (is_azure_header(line)) return FileFormat::azure;
  JsonReader json(path);
  if (!json.parse(line) || !json.root().is_object()) return unknown_format(path, line);
  const JsonObject object = json.root().object();
  constexpr std::pair<std::string_view, FileFormat> kFirstKeys[] = {
      {"lockstep_trace", FileFormat::request_trace},
      {"schedule_recording", FileFormat::recording},
      {"benchmark", FileFormat::benchmark},
      {"lockstep_case", FileFormat::saved_case},
      {"hash_ids", FileFormat::mooncake},
      {"layout_recording", FileFormat::layouts},
  };
  for (const auto& [key, format] : kFirstKeys) {
    if (object.has(key)) return format;
  }
  return unknown_format(path, line);
}

Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path,
                                                const ImportOptions& options) {
  LS_ASSIGN_OR_RETURN(const FileFormat format, detect_format(path));
  return open_trace(path, format, options);
}

Result<std::unique_ptr<TraceReader>> open_trace(const std::string& path, FileFormat format,
                                                const ImportOptions& options) {
  switch (format) {
    case FileFormat::request_trace:
      return open_request_trace(path);
    case FileFormat::mooncake:
      return open_mooncake(path, options);
    case FileFormat::azure:
      return open_azure(path, options);
    case FileFormat::benchmark: {
      LS_ASSIGN_OR_RETURN(auto file, read_benchmark_file(path));
      return requests_of(std::move(file), path);
    }
    case FileFormat::recording:
    case FileFormat::saved_case:
    case FileFormat::layouts:
      break;
  }
  return fail(fmt::format("{}:1: found {} {}; expected requests and their arrivals", path,
                          format == FileFormat::recording ? "an" : "a", name_of(format)));
}

}  // namespace lockstep
