// Traces in CSV: Azure's and BurstGPT's. Both state arrivals and lengths only, so every prompt is
// private to its request. Columns are found by name; unknown ones are skipped and counted unless
// they carry a length, a time or ids.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <vector>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "base/number_text.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"

namespace lockstep {
namespace {

// Azure's columns; Column indexes them.
constexpr std::array<std::string_view, 3> kColumns = {"TIMESTAMP", "ContextTokens",
                                                      "GeneratedTokens"};
enum Column : std::size_t { kTimestamp, kContextTokens, kGeneratedTokens };

// Removes "Z", "+HH:MM" or "-HH:MM" from the end of a time and returns the minutes by which its
// clock is ahead of UTC: 0 without an offset, nullopt for a malformed one.
std::optional<std::int64_t> take_offset_minutes(std::string_view& time) {
  if (time.ends_with('Z')) {
    time.remove_suffix(1);
    return 0;
  }
  const std::size_t sign = time.find_first_of("+-");
  if (sign == time.npos) return 0;
  const std::string_view offset = time.substr(sign + 1);
  if (offset.size() != 5 || offset[2] != ':') return std::nullopt;
  const auto hours = digits_of(offset.substr(0, 2), 0, 14);
  const auto minutes = digits_of(offset.substr(3), 0, 59);
  if (!hours || !minutes) return std::nullopt;
  const std::int64_t ahead = *hours * 60 + *minutes;
  const bool behind = time[sign] == '-';
  time = time.substr(0, sign);
  return behind ? -ahead : ahead;
}

// A table whose first line names its columns, with one request per line in order of time.
//
// Invariants
// (1) Every row has as many cells as the header.
// (2) last_ns_ is the time of the previous row.
class TableReader : public ImportReader {
 public:
  using ImportReader::ImportReader;

  // Reads the first line, which each further file must repeat: the places of the known columns, the
  // first `required` of which it must have.
  Result<void> read_columns(std::span<const std::string_view> known, std::size_t required) {
    std::string_view line;
    LS_RETURN_IF_ERROR(lines_.next(line));
    num_cells_ = split_cells(line).size();
    lines_.expect_header(line);
    notes_.assumed.emplace_back("no ids in this format: no two prompts share a prefix");
    LS_ASSIGN_OR_RETURN(const auto names, cells_of(line));
    known_ = known;
    places_.assign(known.size(), kNowhere);
    for (std::size_t place = 0; place < names.size(); ++place) {
      const auto column = std::ranges::find(known, names[place]);
      if (column == known.end()) {
        if (carries_input(names[place]))
          return refuse("header", names[place], fmt::format("one of {}", fmt::join(known, ", ")));
        ++notes_.skipped[std::string(names[place])];
        continue;
      }
      std::size_t& found = places_[static_cast<std::size_t>(column - known.begin())];
      if (found != kNowhere) return refuse("header", names[place], "each column once");
      found = place;
    }
    for (std::size_t column = 0; column < required; ++column)
      if (places_[column] == kNowhere)
        return refuse("header", line, fmt::format("a column {}", known[column]));
    return {};
  }

 protected:
  // Splits a row and checks its number of cells.
  Result<std::vector<std::string_view>> cells_of(std::string_view line) const {
    if (line.find('\r') != line.npos)
      return refuse("row", line, "no CR within a line: tr '\\r' '\\n' < FILE");
    auto cells = split_cells(line);
    if (cells.size() != num_cells_) return refuse("row", line, fmt::format("{} cells", num_cells_));
    return cells;
  }
  // Refuses a cell in the wording of the JSON formats.
  tl::unexpected<Error> refuse(std::string_view field, std::string_view found,
                               std::string_view expected) const {
    return fail("{}:{}: field `{}`: found \"{}\"; expected {}", lines_.path(), lines_.number(),
                field, printable_excerpt(found), expected);
  }

  // Parses a known column's number of tokens of at least `least`.
  Result<std::int64_t> tokens_of(const std::vector<std::string_view>& cells, std::size_t column,
                                 std::int64_t least) const {
    const std::string_view cell = cells[places_[column]];
    if (const auto found = digits_of(cell, least, kPromptTokensMax)) return *found;
    return refuse(known_[column], cell,
                  fmt::format("an integer from {} to {}", least, kPromptTokensMax));
  }

  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
  std::span<const std::string_view> known_;
  std::vector<std::size_t> places_;  // of the known columns; kNowhere: the file does not have it
  std::int64_t last_ns_ = 0;

 private:
  std::size_t num_cells_ = 0;
};

// Reads Azure's trace. Timestamps are absolute; the first row is time 0.
class AzureReader final : public TableReader {
 public:
  AzureReader(LineReader&& lines, const ImportOptions& options)
      : TableReader(std::move(lines), options, "azure") {}

 private:
  Result<ImportedRow> read_row(std::string_view line) override {
    LS_ASSIGN_OR_RETURN(const auto cells, cells_of(line));
    const auto cell = [&](Column column) { return cells[places_[column]]; };
    const auto time = utc_ns_of(cell(kTimestamp));
    if (!time)
      return refuse(kColumns[kTimestamp], cell(kTimestamp),
                    "a time like 2023-11-16 18:17:03.9799600");
    if (ordinal_ == 0) first_ns_ = last_ns_ = *time;
    if (*time < last_ns_)
      return refuse(kColumns[kTimestamp], cell(kTimestamp),
                    "a time not before that of the row above");
    last_ns_ = *time;
    LS_ASSIGN_OR_RETURN(const std::int64_t context, tokens_of(cells, kContextTokens, 1));
    const std::int64_t least = options_.zero_output == ZeroOutput::refuse ? 1 : 0;
    LS_ASSIGN_OR_RETURN(const std::int64_t generated, tokens_of(cells, kGeneratedTokens, least));
    return ImportedRow{.t_ns = *time - first_ns_,
                       .prompt = private_prompt(context, ordinal_),
                       .output_length = static_cast<std::int32_t>(generated)};
  }

  std::int64_t first_ns_ = 0;
};

}  // namespace

// Checks every field's range before it computes: 2023-02-29 is not a time. Leap seconds (:60) are
// refused, as no trace has any.
std::optional<std::int64_t> utc_ns_of(std::string_view timestamp) {
  // "YYYY-MM-DD" and one of " T" and "HH:MM:SS"
  constexpr std::size_t kWholeSeconds = 19;
  if (timestamp.size() < kWholeSeconds || timestamp[4] != '-' || timestamp[7] != '-' ||
      (timestamp[10] != ' ' && timestamp[10] != 'T') || timestamp[13] != ':' ||
      timestamp[16] != ':')
    return std::nullopt;
  const auto year = digits_of(timestamp.substr(0, 4), 1970, 2199);
  const auto month = digits_of(timestamp.substr(5, 2), 1, 12);
  const auto day = digits_of(timestamp.substr(8, 2), 1, 31);
  const auto hour = digits_of(timestamp.substr(11, 2), 0, 23);
  const auto minute = digits_of(timestamp.substr(14, 2), 0, 59);
  std::string_view rest = timestamp.substr(17);
  const auto ahead_minutes = take_offset_minutes(rest);
  if (!year || !month || !day || !hour || !minute || !ahead_minutes || rest.size() < 2)
    return std::nullopt;
  if (!digits_of(rest.substr(0, 2), 0, 59) || (rest.size() > 2 && rest[2] != '.'))
    return std::nullopt;
  const auto second_ns = scaled_decimal_of(rest, 9);
  const auto date = std::chrono::year(static_cast<int>(*year)) / static_cast<int>(*month) /
                    static_cast<int>(*day);
  if (!date.ok() || !second_ns) return std::nullopt;
  const std::int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
  const std::int64_t minutes = (days * 24 + *hour) * 60 + *minute - *ahead_minutes;
  return minutes * 60'000'000'000 + *second_ns;
}

// True if all required columns are present, in any order and among others.
bool is_azure_header(std::string_view line) {
  const auto names = split_cells(line);
  return std::all_of(kColumns.begin(), kColumns.end(), [&](std::string_view column) {
    return std::find(names.begin(), names.end(), column) != names.end();
  });
}

Result<std::unique_ptr<TraceReader>> open_azure(const std::string& path,
                                                const ImportOptions& options) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path, options.shards));
  auto reader = std::make_unique<AzureReader>(std::move(lines), options);
  LS_RETURN_IF_ERROR(reader->read_columns(kColumns, kColumns.size()));
  return reader;
}

namespace {

// BurstGPT's columns, the required ones first; BurstColumn indexes those that are read.
constexpr std::array<std::string_view, 8> kBurstColumns = {
    "Timestamp", "Request tokens", "Response tokens", "Total tokens",
    "Model",     "Log Type",       "Session ID",      "Elapsed time"};
enum BurstColumn : std::size_t { kBurstTime, kRequest, kResponse, kTotal };
constexpr std::size_t kBurstRequired = 3;  // the first of them

// Reads BurstGPT's trace. Timestamps are seconds since the trace's own start.
class BurstGptReader final : public TableReader {
 public:
  BurstGptReader(LineReader&& lines, const ImportOptions& options)
      : TableReader(std::move(lines), options, "burstgpt") {}

 private:
  Result<ImportedRow> read_row(std::string_view line) override {
    LS_ASSIGN_OR_RETURN(const auto cells, cells_of(line));
    const std::string_view time = cells[places_[kBurstTime]];
    const auto t_ns = scaled_decimal_of(time, 9);
    if (!t_ns)
      return refuse(kBurstColumns[kBurstTime], time,
                    "seconds up to 9223372036, with at most 9 digits after the point");
    if (*t_ns < last_ns_)
      return refuse(kBurstColumns[kBurstTime], time,
                    "seconds, not before those of the row above, and not below 0");
    last_ns_ = *t_ns;
    const std::int64_t least = options_.zero_output == ZeroOutput::refuse ? 1 : 0;
    LS_ASSIGN_OR_RETURN(const std::int64_t request, tokens_of(cells, kRequest, 1));
    LS_ASSIGN_OR_RETURN(const std::int64_t response, tokens_of(cells, kResponse, least));
    // A total that is not the sum shows that columns were mixed up.
    if (places_[kTotal] != kNowhere) {
      LS_ASSIGN_OR_RETURN(const std::int64_t total, tokens_of(cells, kTotal, 1));
      if (total != request + response)
        return refuse(kBurstColumns[kTotal], cells[places_[kTotal]],
                      fmt::format("{}, request and response", request + response));
    }
    return ImportedRow{.t_ns = *t_ns,
                       .prompt = private_prompt(request, ordinal_),
                       .output_length = static_cast<std::int32_t>(response)};
  }
};

}  // namespace

bool is_burstgpt_header(std::string_view line) {
  const auto names = split_cells(line);
  return std::all_of(
      kBurstColumns.begin(), kBurstColumns.begin() + kBurstRequired,
      [&](std::string_view column) { return std::ranges::find(names, column) != names.end(); });
}

Result<std::unique_ptr<TraceReader>> open_burstgpt(const std::string& path,
                                                   const ImportOptions& options) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path, options.shards));
  auto reader = std::make_unique<BurstGptReader>(std::move(lines), options);
  LS_RETURN_IF_ERROR(reader->read_columns(kBurstColumns, kBurstRequired));
  return reader;
}

}  // namespace lockstep
