#include "traces/formats/worker_facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "reference/plan/limits.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

constexpr std::int64_t kWorkerFactsVersion = 1;
constexpr std::size_t kDigestDigits = 32;
constexpr std::int64_t kSlotsMax = std::int64_t{1} << 48;

// Numbers that follow one another as pairs: the first, and how many. `num`: of them all.
template <class T>
std::vector<T> read_number_runs(JsonValue value, std::int64_t least, std::int64_t most,
                                std::int64_t num) {
  std::vector<T> numbers;
  JsonArray array = value.array();
  std::int64_t first = 0;
  bool is_first = true;
  for (JsonValue entry : array) {
    if (is_first) {
      first = entry.integer(least, most);
    } else {
      const std::int64_t room = std::min(most - first + 1, num - std::ssize(numbers));
      const std::int64_t count = entry.integer(1, std::max<std::int64_t>(room, 1));
      if (count > room) break;
      for (std::int64_t i = 0; i < count; ++i) numbers.push_back(static_cast<T>(first + i));
    }
    is_first = !is_first;
  }
  if (!is_first || std::ssize(numbers) != num)
    value.refuse(fmt::format("pairs of a first number and a count, {} numbers in all", num));
  return numbers;
}

template <class T>
void write_number_runs(JsonWriter& out, const std::vector<T>& numbers) {
  out.begin_array();
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    out.integer(numbers[i]).integer(static_cast<std::int64_t>(end - i));
    i = end;
  }
  out.end_array();
}

std::vector<BlockId> read_block_list(JsonValue value, const RecordingHeader& header) {
  std::vector<BlockId> blocks;
  for (JsonValue block : value.array())
    blocks.push_back(BlockId{block.integer<std::int32_t>(0, header.num_blocks - 1)});
  return blocks;
}

std::vector<FactRow> read_rows(JsonValue value) {
  std::vector<FactRow> rows;
  std::set<std::string, std::less<>> names;
  for (JsonValue entry : value.array()) {
    JsonArray pair = entry.array();
    if (pair.size() != 2) {
      entry.refuse("[request, tokens]");
      return rows;
    }
    FactRow& row = rows.emplace_back();
    bool is_name = true;
    for (JsonValue part : pair) {
      if (is_name)
        row.id = part.nonempty_string();
      else
        row.tokens = part.integer<std::int32_t>(1, kTokensMax);
      is_name = false;
    }
    if (!names.insert(row.id).second) entry.refuse("each request once");
  }
  return rows;
}

GroupFacts read_group_facts(JsonValue value, const RecordingHeader& header, std::size_t group,
                            std::size_t num_rows, std::int64_t num_tokens) {
  JsonObject object = value.object();
  GroupFacts facts;
  JsonValue tables = object.required("tables");
  for (JsonValue table : tables.array()) {
    std::vector<BlockId>& blocks = facts.tables.emplace_back();
    for (JsonValue block : table.array()) blocks.push_back(BlockId{block.integer<std::int32_t>(0)});
  }
  if (facts.tables.size() != num_rows)
    tables.refuse(fmt::format("one table for each of the {} rows", num_rows));
  const bool has_slots = !is_state_kind(header.groups[group].spec.kind);
  if (auto slots = object.optional("slots")) {
    facts.slots = read_number_runs<Slot>(slots, PAD_SLOT_ID, kSlotsMax, num_tokens);
  } else if (has_slots && num_tokens > 0) {
    object.refuse_because("found no \"slots\"; expected the slots of all tokens");
  }
  object.finish();
  return facts;
}

ChangedPage read_changed_page(JsonValue value, const RecordingHeader& header) {
  JsonObject object = value.object();
  ChangedPage page;
  page.tensor = object.required("tensor").integer<std::int32_t>(0, 1 << 20);
  page.block = BlockId{object.required("block").integer<std::int32_t>(0, header.num_blocks - 1)};
  JsonValue digest = object.required("digest");
  page.digest = digest.string();
  if (page.digest.size() != kDigestDigits ||
      page.digest.find_first_not_of("0123456789abcdef") != std::string::npos)
    digest.refuse(fmt::format("{} hexadecimal digits", kDigestDigits));
  std::int64_t most = 0;
  for (const KVCacheGroupSpec& group : header.groups) most = std::max(most, group.spec.block_size);
  if (auto slots = object.optional("slots")) {
    std::int32_t before = -1;
    for (JsonValue slot : slots.array()) {
      page.slots.push_back(slot.integer<std::int32_t>(before + 1, most - 1));
      before = page.slots.back();
    }
  }
  if (auto beside = object.optional("beside")) page.beside = beside.boolean();
  object.finish();
  return page;
}

}  // namespace

WorkerStepFacts read_worker_step_facts(JsonValue value, const RecordingHeader& header) {
  JsonObject object = value.object();
  WorkerStepFacts facts;
  facts.rows = read_rows(object.required("rows"));
  std::int64_t num_tokens = 0;
  for (const FactRow& row : facts.rows) num_tokens += row.tokens;
  facts.positions =
      read_number_runs<std::int64_t>(object.required("positions"), 0, kTokensMax, num_tokens);
  JsonValue groups = object.required("groups");
  JsonArray each = groups.array();
  if (each.size() != (facts.rows.empty() ? 0 : header.groups.size()))
    groups.refuse(fmt::format("facts of each of the {} groups, or none where no request ran",
                              header.groups.size()));
  else
    for (JsonValue group : each)
      facts.groups.push_back(
          read_group_facts(group, header, facts.groups.size(), facts.rows.size(), num_tokens));
  if (auto zeroed = object.optional("zeroed")) facts.zeroed = read_block_list(zeroed, header);
  if (auto changed = object.optional("changed"))
    for (JsonValue page : changed.array()) facts.changed.push_back(read_changed_page(page, header));
  object.finish();
  return facts;
}

void write_worker_step_facts(JsonWriter& out, const WorkerStepFacts& facts) {
  out.begin_object().key("rows").begin_array();
  for (const FactRow& row : facts.rows)
    out.begin_array().string(row.id).integer(row.tokens).end_array();
  out.end_array();
  write_number_runs(out.key("positions"), facts.positions);
  out.key("groups").begin_array();
  for (const GroupFacts& group : facts.groups) {
    out.begin_object().key("tables").begin_array();
    for (const std::vector<BlockId>& table : group.tables) out.integers(table);
    out.end_array();
    if (!group.slots.empty()) write_number_runs(out.key("slots"), group.slots);
    out.end_object();
  }
  out.end_array();
  if (!facts.zeroed.empty()) out.key("zeroed").integers(facts.zeroed);
  if (!facts.changed.empty()) {
    out.key("changed").begin_array();
    for (const ChangedPage& page : facts.changed) {
      out.begin_object().integer("tensor", page.tensor).integer("block", index_of(page.block));
      out.string("digest", page.digest);
      if (!page.slots.empty()) out.key("slots").integers(page.slots);
      if (page.beside) out.boolean("beside", true);
      out.end_object();
    }
    out.end_array();
  }
  out.end_object();
}

WorkedBy read_worked_by(JsonValue value) {
  JsonObject object = value.object();
  WorkedBy worked;
  worked.engine = read_recorded_engine(object.required("engine"));
  if (auto runner = object.optional("runner")) worked.runner = runner.nonempty_string();
  if (auto states = object.optional("states")) worked.states = states.nonempty_string();
  if (auto plant = object.optional("plant")) worked.plant = plant.nonempty_string();
  object.finish();
  return worked;
}

void write_worked_by(JsonWriter& out, const WorkedBy& worked) {
  write_recorded_engine(out.begin_object().key("engine"), worked.engine);
  if (!worked.runner.empty()) out.string("runner", worked.runner);
  if (!worked.states.empty()) out.string("states", worked.states);
  if (!worked.plant.empty()) out.string("plant", worked.plant);
  out.end_object();
}

std::string WorkedBy::text() const {
  return fmt::format("{}{}{}{}{}{}{}", engine.text(), runner.empty() ? "" : ", runner ", runner,
                     states.empty() ? "" : ", states as ", states,
                     plant.empty() ? "" : ", with defect ", plant);
}

WorkedBy read_worker_facts_key(JsonValue value) {
  JsonObject object = value.object();
  object.required("version").integer(kWorkerFactsVersion, kWorkerFactsVersion);
  WorkedBy worked = read_worked_by(object.required("worked_by"));
  object.finish();
  return worked;
}

void write_worker_facts_key(JsonWriter& out, const WorkedBy& worked) {
  out.begin_object().integer("version", kWorkerFactsVersion);
  write_worked_by(out.key("worked_by"), worked);
  out.end_object();
}

}  // namespace lockstep
