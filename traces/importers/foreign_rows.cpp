// Code that readers of foreign traces share.
#include "traces/importers/foreign_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/number_text.h"
#include "base/seeded_random.h"
#include "traces/formats/prompt_json.h"

namespace lockstep {

std::vector<std::string> ReadNotes::phrases(const ImportOptions& options) const {
  std::vector<std::string> all = assumed;
  if (zero_outputs > 0 && options.zero_output != ZeroOutput::refuse)
    all.push_back(fmt::format(
        "{} with an output of 0 tokens {} (--import zero=...)", counted(zero_outputs, "request"),
        options.zero_output == ZeroOutput::skip ? "left out" : "get one token"));
  for (const auto& [name, times] : skipped)
    all.push_back(fmt::format("unknown key {} skipped, {}", name, counted(times, "time")));
  return all;
}

std::string name_of_files(const std::string& path, const ImportOptions& options) {
  if (options.shards.empty()) return path;
  return fmt::format("{} and {}", path, counted(std::ssize(options.shards), "shard"));
}

JsonValue optional_alias(JsonObject& object, std::string_view name, std::string_view alias) {
  if (object.has(name) && object.has(alias))
    object.refuse_because(fmt::format("found both \"{}\" and \"{}\"; expected one", name, alias));
  return object.has(alias) ? object.optional(alias) : object.optional(name);
}

JsonValue required_alias(JsonObject& object, std::string_view name, std::string_view alias) {
  return object.has(alias) ? optional_alias(object, name, alias) : object.required(name);
}

std::int64_t read_arrival_ns(JsonObject& object, std::string_view key, int digits,
                             const ImportOptions& options) {
  JsonValue time = object.optional(key);
  if (!time && options.arrivals == Arrivals::recorded)
    object.refuse_because(fmt::format(
        "found no key \"{}\"; expected it, or --import arrival=closed: all arrive at once", key));
  const std::int64_t t_ns = read_span_ns(time, digits);
  return options.arrivals == Arrivals::closed ? 0 : t_ns;
}

// The number is scaled from its decimal text, so 0.1 s is exactly 100,000,000 ns.
std::int64_t read_span_ns(JsonValue value, int digits) {
  const std::int64_t ns = value.scaled_decimal(digits);
  if (ns < 0 || ns > kSpanMaxNs) value.refuse("a time from 0 to 90 years");
  return std::clamp<std::int64_t>(ns, 0, kSpanMaxNs);
}

// Both conventions fix the number of ids exactly, so a file with another block size is noticed at
// its first row.
void check_id_count(JsonValue value, std::size_t found, std::int64_t length,
                    const HashIdConvention& ids) {
  if (ids.block_tokens < 1) return;  // refused where it was read
  const std::int64_t expected = hash_ids_for(length, ids);
  if (static_cast<std::int64_t>(found) == expected) return;
  value.refuse_because(fmt::format("found {} ids for {} tokens; expected {}, one per {} tokens",
                                   found, length, expected, ids.block_tokens));
}

// The range of seeds for large ids holds 2^32 of them, which no trace in memory reaches. Ids inside
// that range are replaced as well, so that no small id collides with a seed.
std::uint64_t WideIds::seed_of(std::uint64_t id) {
  constexpr std::uint64_t kMax = static_cast<std::uint64_t>(kHashIdMax);
  constexpr std::uint64_t kWideMax = std::uint64_t{1} << 32;  // more than fit into memory
  if (id <= kMax - kWideMax) return id;
  return seeds_.try_emplace(id, kMax - seeds_.size()).first->second;
}

bool leaves_out_torn(const LineReader& lines, std::string_view line, const ImportOptions& options,
                     ReadNotes& notes) {
  if (!options.skips_torn || !lines.is_cut_off()) return false;
  // A row of JSON is complete if it parses; a cell of CSV may have lost digits unnoticed.
  if (line.starts_with('{') && JsonReader(lines.path()).parse(line)) return false;
  notes.assumed.push_back(
      fmt::format("the torn last row of {}, line {}, is left out", lines.path(), lines.number()));
  return true;
}

std::vector<std::uint64_t> read_hash_ids(JsonValue value, std::int64_t length,
                                         const HashIdConvention& ids, WideIds& wide) {
  std::vector<std::uint64_t> hash_ids;
  for (JsonValue id : value.array()) hash_ids.push_back(wide.seed_of(id.uint64()));
  check_id_count(value, hash_ids.size(), length, ids);
  return hash_ids;
}

std::vector<std::uint64_t> IdTable::ids_of(std::uint64_t scope,
                                           const std::vector<std::uint64_t>& found) {
  std::vector<std::uint64_t> ids;
  ids.reserve(found.size());
  for (const std::uint64_t id : found)
    ids.push_back(ids_.try_emplace({scope, id}, ids_.size()).first->second);
  return ids;
}

// Only equality matters: the table is never iterated, so the order of the hash has no effect on
// output.
std::size_t IdTable::Hash::operator()(const std::pair<std::uint64_t, std::uint64_t>& key) const {
  return splitmix64(key.first + splitmix64(key.second));
}

std::vector<std::string_view> split_cells(std::string_view line) {
  std::vector<std::string_view> cells;
  while (true) {
    const std::size_t comma = line.find(',');
    cells.push_back(line.substr(0, comma));
    if (comma == line.npos) return cells;
    line.remove_prefix(comma + 1);
  }
}

std::optional<std::int64_t> digits_of(std::string_view text, std::int64_t min, std::int64_t max) {
  if (text.empty() ||
      !std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; }))
    return std::nullopt;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value >= min && value <= max ? std::optional(value) : std::nullopt;
}

}  // namespace lockstep
