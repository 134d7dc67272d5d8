#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/json_reader.h"
#include "base/number_text.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 8> kBurstColumns = {
    "Timestamp", "Request tokens", "Response tokens", "Total tokens",
    "Model",     "Log Type",       "Session ID",      "Elapsed time"};
enum BurstColumn : std::size_t { kBurstTime, kRequest, kResponse, kTotal };
constexpr std::size_t kBurstRequired = 3;  // the first of them

class BurstGptReader final : public ImportReader {
 public:
  BurstGptReader(LineReader&& lines, const ImportOptions& options)
      : ImportReader(std::move(lines), options, "burstgpt") {}

  Result<void> read_header() {
    std::string_view line;
    LS_RETURN_IF_ERROR(lines_.next(line));
    const auto names = split_cells(line);
    num_cells_ = names.size();
    lines_.expect_header(line);
    notes_.assumed.emplace_back("no ids in this format: no two prompts share a prefix");
    for (std::size_t place = 0; place < names.size(); ++place) {
      const auto* const column = std::ranges::find(kBurstColumns, names[place]);
      if (column == kBurstColumns.end() && !carries_input(names[place])) {
        ++notes_.skipped[std::string(names[place])];
        continue;
      }
      if (column == kBurstColumns.end())
        return refuse("header", names[place],
                      fmt::format("one of {}", fmt::join(kBurstColumns, ", ")));
      std::size_t& found = places_[static_cast<std::size_t>(column - kBurstColumns.begin())];
      if (found != kNowhere) return refuse("header", names[place], "each column once");
      found = place;
    }
    for (std::size_t column = 0; column < kBurstRequired; ++column)
      if (places_[column] == kNowhere)
        return refuse("header", line, fmt::format("a column {}", kBurstColumns[column]));
    return {};
  }

 private:
  tl::unexpected<Error> refuse(std::string_view field, std::string_view found,
                               std::string_view expected) const {
    return fail(fmt::format("{}:{}: field `{}`: found \"{}\"; expected {}", lines_.path(),
                            lines_.number(), field, printable_excerpt(found), expected));
  }

  Result<std::int64_t> tokens(const std::vector<std::string_view>& cells, BurstColumn column,
                              std::int64_t least) const {
    const std::string_view cell = cells[places_[column]];
    if (const auto found = digits_of(cell, least, kPromptTokensMax)) return *found;
    return refuse(kBurstColumns[column], cell,
                  fmt::format("an integer from {} to {}", least, kPromptTokensMax));
  }

  Result<ImportedRow> read_row(std::string_view line) override {
    const auto cells = split_cells(line);
    if (cells.size() != num_cells_) return refuse("row", line, fmt::format("{} cells", num_cells_));
    const std::string_view time = cells[places_[kBurstTime]];
    const auto t_ns = scaled_decimal_of(time, 9);
    if (!t_ns || *t_ns < last_ns_)
      return refuse(kBurstColumns[kBurstTime], time,
                    "seconds, not before those of the row above, and not below 0");
    last_ns_ = *t_ns;
    const std::int64_t least = options_.zero_output == ZeroOutput::refuse ? 1 : 0;
    LS_ASSIGN_OR_RETURN(const std::int64_t request, tokens(cells, kRequest, 1));
    LS_ASSIGN_OR_RETURN(const std::int64_t response, tokens(cells, kResponse, least));
    if (places_[kTotal] != kNowhere) {
      LS_ASSIGN_OR_RETURN(const std::int64_t total, tokens(cells, kTotal, 1));
      if (total != request + response)
        return refuse(kBurstColumns[kTotal], cells[places_[kTotal]],
                      fmt::format("{}, request and response", request + response));
    }
    return ImportedRow{.t_ns = *t_ns,
                       .prompt = private_prompt(request, ordinal_),
                       .output_length = static_cast<std::int32_t>(response)};
  }

  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
  std::array<std::size_t, kBurstColumns.size()> places_ = [] {
    std::array<std::size_t, kBurstColumns.size()> places;
    places.fill(kNowhere);
    return places;
  }();
  std::size_t num_cells_ = 0;
  std::int64_t last_ns_ = 0;
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
  LS_RETURN_IF_ERROR(reader->read_header());
  return reader;
}

}  // namespace lockstep
