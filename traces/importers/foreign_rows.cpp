#include "traces/importers/foreign_rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/seeded_random.h"
#include "traces/formats/prompt_json.h"

namespace lockstep {

JsonValue optional_alias(JsonObject& object, std::string_view name, std::string_view alias) {
  if (object.has(name) && object.has(alias)) {
    object.refuse_because(fmt::format("found both \"{}\" and \"{}\"; expected one", name, alias));
  }
  return object.has(alias) ? object.optional(alias) : object.optional(name);
}

JsonValue required_alias(JsonObject& object, std::string_view name, std::string_view alias) {
  return object.has(alias) ? optional_alias(object, name, alias) : object.required(name);
}

std::int64_t read_span_ns(JsonValue value, int digits) {
  const std::int64_t ns = value.scaled_decimal(digits);
  if (ns < 0 || ns > kSpanMaxNs) value.refuse("a time from 0 to 90 years");
  return std::clamp<std::int64_t>(ns, 0, kSpanMaxNs);
}

void check_id_count(JsonValue value, std::size_t found, std::int64_t length,
                    const HashIdConvention& ids) {
  if (ids.block_tokens < 1) return;  // refused where it was read
  const std::int64_t expected = hash_ids_for(length, ids);
  if (static_cast<std::int64_t>(found) == expected) return;
  value.refuse_because(fmt::format("found {} ids for {} tokens; expected {}, one per {} tokens",
                                   found, length, expected, ids.block_tokens));
}

std::vector<std::uint64_t> read_hash_ids(JsonValue value, std::int64_t length,
                                         const HashIdConvention& ids) {
  std::vector<std::uint64_t> hash_ids;
  for (JsonValue id : value.array()) hash_ids.push_back(id.integer(0, kHashIdMax));
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

std::size_t IdTable::Hash::operator()(const std::pair<std::uint64_t, std::uint64_t>& key) const {
  return splitmix64(key.first + splitmix64(key.second));
}

}  // namespace lockstep
