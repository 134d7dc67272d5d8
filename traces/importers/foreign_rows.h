// What readers of foreign traces share.
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
// The longest time or span: three of them add up without leaving 63 bits.
inline constexpr std::int64_t kSpanMaxNs = 2'850'000'000'000'000'000;

// What a reader assumed and left out, for PreparedReplay::chosen.
struct ReadNotes {
  std::vector<std::string> assumed;             // a phrase each
  std::map<std::string, std::int64_t> skipped;  // unknown keys and columns
  std::int64_t zero_outputs = 0;

  std::vector<std::string> phrases(const ImportOptions& options) const;
};

// The files of a trace, for a message about all of them.
std::string name_of_files(const std::string& path, const ImportOptions& options);

// A key that has two names in the wild: at most one of them; false when there is none.
JsonValue optional_alias(JsonObject& object, std::string_view name, std::string_view alias);
// Exactly one of them.
JsonValue required_alias(JsonObject& object, std::string_view name, std::string_view alias);

// When a request arrives. With Arrivals::closed: 0, and the key may be missing.
std::int64_t read_arrival_ns(JsonObject& object, std::string_view key, int digits,
                             const ImportOptions& options);

// A time or a span from 0 to kSpanMaxNs.
std::int64_t read_span_ns(JsonValue value, int digits);

// Ids of 64 bits as seeds of at most kHashIdMax.
//
// Invariants
// (1) One id has one seed, and two ids never share one.
// (2) Small ids stay as they are; the others count down from kHashIdMax in the order of their first
//     appearance.
class WideIds {
 public:
  std::uint64_t seed_of(std::uint64_t id);

 private:
  std::unordered_map<std::uint64_t, std::uint64_t> seeds_;
};

// Ids that cover `length` tokens as `ids` says; refused otherwise, with both numbers.
std::vector<std::uint64_t> read_hash_ids(JsonValue value, std::int64_t length,
                                         const HashIdConvention& ids, WideIds& wide);
void check_id_count(JsonValue value, std::size_t found, std::int64_t length,
                    const HashIdConvention& ids);

// True: the row is left out, and noted.
bool leaves_out_torn(const LineReader& lines, std::string_view line, const ImportOptions& options,
                     ReadNotes& notes);

// Calls `row(JsonValue, LINE)` for every line of the file and its shards.
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

// The same for one file of documents of one line each, or of one document over many lines.
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

// Ids of any size and scope as ids from 0 on, in the order in which they come up. Those of two
// scopes are never the same.
class IdTable {
 public:
  std::vector<std::uint64_t> ids_of(std::uint64_t scope, const std::vector<std::uint64_t>& found);

 private:
  struct Hash {
    std::size_t operator()(const std::pair<std::uint64_t, std::uint64_t>& key) const;
  };
  std::unordered_map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t, Hash> ids_;
};

// Cells of a CSV line: no quotes, which none of the traces here has.

std::vector<std::string_view> split_cells(std::string_view line);

// The digits of `text` as a number from min to max.
std::optional<std::int64_t> digits_of(std::string_view text, std::int64_t min, std::int64_t max);

}  // namespace lockstep
