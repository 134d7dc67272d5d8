// Code that readers of foreign traces share: times, ids, aliases of keys, and notes about
// assumptions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "base/result.h"
#include "traces/formats/request_trace.h"
#include "traces/importers/open_trace.h"

namespace lockstep {

inline constexpr int kDigitsOfSeconds = 9;  // 1 s is 10^9 ns
inline constexpr int kDigitsOfMs = 6;
// The longest time or span, about 90 years: the sum of three of them fits into 63 bits, so that
// arrivals and delays can be added without checks.
inline constexpr std::int64_t kSpanMaxNs = 2'850'000'000'000'000'000;

// Assumptions and omissions of a reader, which a replay prints (PreparedReplay::chosen).
struct ReadNotes {
  std::vector<std::string> assumed;  // a phrase each
  // Unknown keys and columns, with their number of occurrences.
  std::map<std::string, std::int64_t> skipped;
  std::int64_t zero_outputs = 0;

  // Returns all notes as phrases, in a fixed order.
  std::vector<std::string> phrases(const ImportOptions& options) const;
};

// Returns "FILE", or "FILE and N shards", for messages about all files of a trace.
std::string name_of_files(const std::string& path, const ImportOptions& options);

// Returns the value of a key that has two names in public traces; false: neither is present. Both
// at once are refused.
JsonValue optional_alias(JsonObject& object, std::string_view name, std::string_view alias);
// The same, required; the error names `name`.
JsonValue required_alias(JsonObject& object, std::string_view name, std::string_view alias);

// Reads a request's arrival in nanoseconds; `digits` scales the number (9 for seconds, 6 for ms).
// With Arrivals::closed it is 0, and the key may be missing.
std::int64_t read_arrival_ns(JsonObject& object, std::string_view key, int digits,
                             const ImportOptions& options);

// Reads a time or span from 0 to kSpanMaxNs; the result is in that range even after an error.
std::int64_t read_span_ns(JsonValue value, int digits);

// Maps ids of 64 bits to seeds of at most kHashIdMax, since hashes of other tools use all 64 bits
// and files here have ids below 2^62.
//
// Invariants
// (1) One id has one seed, and two ids never share one.
// (2) Small ids stay unchanged; the others count down from kHashIdMax in the order of their first
//     appearance.
class WideIds {
 public:
  std::uint64_t seed_of(std::uint64_t id);

 private:
  std::unordered_map<std::uint64_t, std::uint64_t> seeds_;
};

// Reads the ids that cover `length` tokens by the convention `ids`; another number is refused with
// both numbers.
std::vector<std::uint64_t> read_hash_ids(JsonValue value, std::int64_t length,
                                         const HashIdConvention& ids, WideIds& wide);
void check_id_count(JsonValue value, std::size_t found, std::int64_t length,
                    const HashIdConvention& ids);

// Returns true, and adds a note, if the last row of the file breaks off and the options omit such a
// row.
bool leaves_out_torn(const LineReader& lines, std::string_view line, const ImportOptions& options,
                     ReadNotes& notes);

// Calls `row(JsonValue, LINE)` for every line of the file and its shards; lines count from 1 in
// each file. Stops at the first error.
template <class Row>
Result<void> for_each_row(const std::string& path, const ImportOptions& options, ReadNotes& notes,
                          Row row) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path, options.shards));
  JsonReader json(path);
  json.skip_unknown_keys(notes.skipped);
  std::string_view line;
  while (true) {
    LS_ASSIGN_OR_RETURN(const bool more, lines.next(line));
    if (!more) return {};
    if (leaves_out_torn(lines, line, options, notes)) continue;
    json.set_file(lines.path());
    if (json.parse(line, lines.number(), lines.is_cut_off())) row(json.root(), lines.number());
    if (!json.ok()) return json.failure();
  }
}

// The same for one file that has a document per line, or one document over many lines.
template <class Row>
Result<void> for_each_document(const std::string& path, const ImportOptions& options,
                               ReadNotes& notes, Row row) {
  ImportOptions alone = options;
  alone.shards.clear();
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  std::string_view line;
  LS_RETURN_IF_ERROR(lines.next(line));
  if (JsonReader first(path); line.size() > 1 && first.parse(line))
    return for_each_row(path, alone, notes, row);
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kJsonTextBytesMax));
  JsonReader json(path);
  json.skip_unknown_keys(notes.skipped);
  if (json.parse(text, 1, true)) row(json.root(), 1);
  if (!json.ok()) return json.failure();
  return {};
}

// Maps ids of any size and scope to 0, 1, 2, ... in the order of their first appearance. Ids of two
// scopes are never equal: conversations with `local` ids have one scope each.
class IdTable {
 public:
  std::vector<std::uint64_t> ids_of(std::uint64_t scope, const std::vector<std::uint64_t>& found);

 private:
  struct Hash {
    std::size_t operator()(const std::pair<std::uint64_t, std::uint64_t>& key) const;
  };
  std::unordered_map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t, Hash> ids_;
};

// Splits a CSV line at its commas. Quoted cells are not supported: the public traces have none.

std::vector<std::string_view> split_cells(std::string_view line);

// Parses `text` as a number from min to max; nullopt: it has other characters than digits (a sign,
// a space), or another value.
std::optional<std::int64_t> digits_of(std::string_view text, std::int64_t min, std::int64_t max);

}  // namespace lockstep
