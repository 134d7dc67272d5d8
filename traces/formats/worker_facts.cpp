// Worker facts as JSON. Positions and slots are written as runs of consecutive numbers, because a
// prefill of 8,192 tokens has few of them.
#include "traces/formats/worker_facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "traces/formats/engine_options.h"
#include "traces/formats/recording_fields.h"

namespace lockstep {
namespace {

constexpr std::int64_t kWorkerFactsVersion = 1;
// Slots are block * block_size + offset: 2^31 blocks of 2^17 tokens.
constexpr std::int64_t kSlotsMax = std::int64_t{1} << 48;

// Reads runs of consecutive numbers as pairs of the first number and the count: [8,4,4,1] are 8, 9,
// 10, 11 and 4. Each number is from `least` to `most`, and there are `num` in all: counts are
// bounded before anything is allocated.
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

// The longest runs, from left to right: equal numbers give equal bytes.
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

// [[request, tokens], ...], each request once. A request without tokens is not part of the batch.
struct Rows {
  static constexpr form::Pair<form::Plain, form::Between> kRow{
      "[request, tokens]", {}, {1, kTokensMax}};
  static void read(JsonValue value, std::vector<FactRow>& rows) {
    std::set<std::string, std::less<>> names;
    for (JsonValue entry : value.array()) {
      kRow.read(entry, rows.emplace_back());
      if (!names.insert(rows.back().id).second) return entry.refuse("each request once");
    }
  }
  static void write(JsonWriter& out, const std::vector<FactRow>& rows) {
    form::Each{kRow}.write(out, rows);
  }
};

// The form of runs of numbers; writing needs no limits.
struct Runs {
  std::int64_t least = 0, most = 0, num = 0;
  template <class T>
  void read(JsonValue value, std::vector<T>& numbers) const {
    numbers = read_number_runs<T>(value, least, most, num);
  }
  template <class T>
  static void write(JsonWriter& out, const std::vector<T>& numbers) {
    write_number_runs(out, numbers);
  }
};

// What bounds the facts of one group: the plan, the rows and the tokens of the step.
struct GroupContext {
  const RecordingHeader& header;
  std::size_t group = 0, num_rows = 0;
  std::int64_t num_tokens = 0;
};

// Offsets within a block, ascending. The block's group is not known here, so the largest block_size
// bounds them.
struct BlockSlots {
  const RecordingHeader& header;
  void read(JsonValue value, std::vector<std::int32_t>& slots) const {
    std::int64_t most = 0;
    for (const KVCacheGroupSpec& group : header.groups)
      most = std::max(most, group.spec.block_size);
    for (JsonValue slot : value.array())
      slots.push_back(slot.integer<std::int32_t>(slots.empty() ? 0 : slots.back() + 1, most - 1));
  }
  static void write(JsonWriter& out, const std::vector<std::int32_t>& slots) {
    out.integers(slots);
  }
};

std::int64_t num_tokens_of(const WorkerStepFacts& facts) {
  std::int64_t tokens = 0;
  for (const FactRow& row : facts.rows) tokens += row.tokens;
  return tokens;
}

// Facts of each group; none if no request ran.
struct Groups {
  const RecordingHeader& header;
  std::size_t num_rows = 0;
  std::int64_t num_tokens = 0;
  void read(JsonValue value, std::vector<GroupFacts>& groups) const {
    const JsonArray each = value.array();
    if (each.size() != (num_rows == 0 ? 0 : header.groups.size()))
      return value.refuse(fmt::format(
          "facts of each of the {} groups, or none where no request ran", header.groups.size()));
    for (JsonValue group : each) {
      const GroupContext context{header, groups.size(), num_rows, num_tokens};
      read_fields(group, groups.emplace_back(), context);
    }
  }
  void write(JsonWriter& out, const std::vector<GroupFacts>& groups) const {
    const GroupContext context{header};
    form::Each{form::With{context}}.write(out, groups);
  }
};

}  // namespace

// Entries of tables are not bounded by the pool: a worker's table may hold stale or corrupt ids,
// which the audit reports.
template <class Io>
void fields(Io& io, FieldsOf<Io, GroupFacts>& facts, const GroupContext& at) {
  io.required("tables", facts.tables, form::Each<form::Each<Block>>{{{INT64_C(1) << 31}}});
  io.optional("slots", facts.slots, Runs{PAD_SLOT_ID, kSlotsMax, at.num_tokens});
  if constexpr (Io::kReads) {
    if (facts.tables.size() != at.num_rows)
      io.object.required("tables").refuse(
          fmt::format("one table for each of the {} rows", at.num_rows));
    // A group of states has one state per request, not one slot per token.
    if (!io.object.has("slots") && at.num_tokens > 0 &&
        !is_state_kind(at.header.groups[at.group].spec.kind))
      io.object.refuse_because("found no \"slots\"; expected the slots of all tokens");
  }
}

template <class Io>
void fields(Io& io, FieldsOf<Io, ChangedPage>& page, const RecordingHeader& header) {
  io.required("tensor", page.tensor, form::Between{0, 1 << 20});
  io.required("block", page.block, Block{header.num_blocks});
  io.required("digest", page.digest, form::Hexadecimal{32});
  io.optional("slots", page.slots, BlockSlots{header});
  io.optional("beside", page.beside);
}

// `rows` comes first: the number of tokens, which all other lists must match, follows from it.
template <class Io>
void fields(Io& io, FieldsOf<Io, WorkerStepFacts>& facts, const RecordingHeader& header) {
  io.required("rows", facts.rows, Rows{});
  const std::int64_t num_tokens = num_tokens_of(facts);
  io.required("positions", facts.positions, Runs{0, kTokensMax, num_tokens});
  io.required("groups", facts.groups, Groups{header, facts.rows.size(), num_tokens});
  io.optional("zeroed", facts.zeroed, blocks_of(header));
  io.optional("changed", facts.changed, form::Each{form::With{header}});
}

template <class Io>
void fields(Io& io, FieldsOf<Io, WorkedBy>& worked) {
  io.required("engine", worked.engine, form::Code{read_recorded_engine, write_recorded_engine});
  io.optional("runner", worked.runner);
  io.optional("states", worked.states);
  io.optional("plant", worked.plant);
}

WorkerStepFacts read_worker_step_facts(JsonValue value, const RecordingHeader& header) {
  return row_of_fields<WorkerStepFacts>(value, header);
}

void write_worker_step_facts(JsonWriter& out, const WorkerStepFacts& facts) {
  write_fields(out, facts, any_header());
}

WorkedBy read_worked_by(JsonValue value) { return row_of_fields<WorkedBy>(value); }

void write_worked_by(JsonWriter& out, const WorkedBy& worked) { write_fields(out, worked); }

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
