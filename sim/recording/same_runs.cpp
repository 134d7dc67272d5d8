#include "sim/recording/same_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/line_reader.h"
#include "base/names.h"
#include "traces/formats/step_hashes.h"

namespace lockstep {
namespace {

using OrderedJson = nlohmann::ordered_json;

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> words) {
  return std::ranges::find(words, text) != words.end();
}

// "scheduled" of "scheduled[2].tokens".
std::string_view key_of(std::string_view path) { return path.substr(0, path.find_first_of(".[")); }

// Files of which only one has something that is left out of the comparison.
template <class Has>
bool only_one(const Has& left, const Has& right) {
  return static_cast<bool>(left) != static_cast<bool>(right);
}

// Recordings.

// Adds each differing entry of two headers; `config` entry by entry.
void add_header_differences(const OrderedJson& left, const OrderedJson& right,
                            const std::string& path, std::vector<FieldDifference>& found) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : left.items()) keys.push_back(key);
  for (const auto& [key, value] : right.items())
    if (!left.contains(key)) keys.push_back(key);
  for (const std::string& key : keys) {
    const std::string at = path.empty() ? key : path + "." + key;
    // The file's identity, and what `Alignment` lists.
    if (is_one_of(at, {"engine", "family", "seed", "hash_algorithm", "held_drafts", "stale_outputs",
                       "worker_facts"}))
      continue;
    const bool both = left.contains(key) && right.contains(key);
    if (both && left[key] == right[key]) continue;
    if (at == "config") {
      add_header_differences(left[key], right[key], at, found);
    } else {
      const auto of = [&](const OrderedJson& side) {
        return side.contains(key) ? OrderedJson{{at, side[key]}}.dump() : std::string("{}");
      };
      found.push_back(first_difference(of(left), of(right)));
    }
  }
}

// Fields that only one recording has are removed from the steps of both.
class Alignment {
 public:
  Alignment(const RecordingHeader& left, const RecordingHeader& right,
            std::vector<std::string>& not_compared)
      : drops_events_(only_one(left.has_cache_events, right.has_cache_events)),
        drops_drafts_(only_one(left.has_held_drafts, right.has_held_drafts)),
        drops_stale_(only_one(left.has_stale_outputs, right.has_stale_outputs)),
        drops_facts_(only_one(left.worker_facts, right.worker_facts)),
        drops_prefix_(left.engine != right.engine) {
    const auto note = [&](bool drops, bool is_left, std::string_view what) {
      if (drops)
        not_compared.push_back(fmt::format("{}: only {} has them", what, is_left ? "A" : "B"));
    };
    note(drops_events_, left.has_cache_events, "cache events");
    note(drops_drafts_, left.has_held_drafts, "drafts that are kept for a later step");
    note(drops_stale_, left.has_stale_outputs, "outputs that arrive late");
    note(drops_facts_, left.worker_facts.has_value(), "worker facts");
    if (drops_prefix_)
      not_compared.push_back("common prefixes: a hint, which vLLM 0.33.0 no longer computes");
  }

  void apply(RecordedStep& left, RecordedStep& right) const {
    for (RecordedStep* step : {&left, &right}) {
      for (auto* events : {&step->before, &step->during})
        for (RecordedEvent& event : *events) event.request.arrival_ns = 0;
      if (drops_events_) step->events.clear();
      if (drops_drafts_) step->held_drafts.clear();
      if (drops_stale_) step->stale_outputs.clear();
      if (drops_facts_) step->facts.reset();
    }
    const auto drop = [](auto& a, auto& b) {
      if (only_one(a, b)) a = b = {};
    };
    drop(left.tables, right.tables);  // an engine shows them every few steps
    if (drops_prefix_) left.common_prefix_blocks = right.common_prefix_blocks = {};
  }

 private:
  bool drops_events_, drops_drafts_, drops_stale_, drops_facts_, drops_prefix_;
};

// The step without what clients, the model and workers bring to it.
RecordedStep without_inputs(const RecordedStep& whole) {
  RecordedStep step = whole;
  step.before.clear();
  step.during.clear();
  step.connector.reset();
  step.worker.reset();
  step.sampled.clear();
  step.output_of_step.reset();
  step.drafts.reset();
  step.inputs.grammar.clear();
  step.inputs.spec_in_flight.clear();
  step.inputs.pooled.clear();
  step.transfers.parts_worker.clear();
  return step;
}

// The inputs before the decision.
RecordedStep inputs_before(const RecordedStep& step) {
  return RecordedStep{.step = step.step, .before = step.before, .connector = step.connector};
}

// All inputs.
RecordedStep inputs_of(const RecordedStep& step) {
  RecordedStep inputs = inputs_before(step);
  inputs.during = step.during;
  inputs.worker = step.worker;
  inputs.sampled = step.sampled;
  inputs.output_of_step = step.output_of_step;
  inputs.drafts = step.drafts;
  inputs.inputs.grammar = step.inputs.grammar;
  inputs.inputs.spec_in_flight = step.inputs.spec_in_flight;
  inputs.inputs.pooled = step.inputs.pooled;
  inputs.transfers.parts_worker = step.transfers.parts_worker;
  return inputs;
}

RunPart part_of(std::string_view path) {
  const std::string_view key = key_of(path);
  if (path.starts_with("facts.changed")) return RunPart::page;
  if (is_one_of(key, {"tables", "loading", "facts"})) return RunPart::table;
  if (is_one_of(key,
                {"stopped", "held", "stored", "evicted", "cleared", "events", "stale_outputs"}))
    return RunPart::output;
  return RunPart::decision;
}

// The request that a path into a step names, by its number, its key, or as the value itself.
std::string request_at(const FieldDifference& found, const RecordedStep& step) {
  const std::string_view path = found.what, key = key_of(path);
  if (key == "scheduled" && path.size() > key.size()) {
    const auto index = std::strtoull(path.data() + key.size() + 1, nullptr, 10);
    return index < step.scheduled.size() ? step.scheduled[index].id : "";
  }
  if (is_one_of(key, {"running", "waiting", "preempted", "finished", "held", "stopped"})) {
    const auto name = OrderedJson::parse(found.recorded, nullptr, false);
    return name.is_string() ? name.get<std::string>() : "";
  }
  if (path.size() <= key.size() || path[key.size()] != '.') return "";
  const std::string_view rest = path.substr(key.size() + 1);
  std::set<std::string> names(step.running.begin(), step.running.end());
  for (const RecordedScheduled& row : step.scheduled) names.insert(row.id);
  std::string longest;
  for (const std::string& name : names) {
    const bool ends =
        rest.size() == name.size() ||
        (rest.size() > name.size() && (rest[name.size()] == '[' || rest[name.size()] == '.'));
    if (rest.starts_with(name) && ends && name.size() > longest.size()) longest = name;
  }
  return longest;
}

// "facts.changed[1].digest (page of block 7, tensor 0)"; other paths as they are.
std::string path_text(const std::string& path, const RecordedStep& step) {
  constexpr std::string_view kChanged = "facts.changed[";
  if (!path.starts_with(kChanged) || !step.facts) return path;
  const auto index = std::strtoull(path.c_str() + kChanged.size(), nullptr, 10);
  if (index >= step.facts->changed.size()) return path;
  const ChangedPage& page = step.facts->changed[index];
  return fmt::format("{} (page of block {}, tensor {})", path, index_of(page.block), page.tensor);
}

// Of two steps, or of their inputs only; `left` and `right` are the whole steps.
using HalfOf = RecordedStep (*)(const RecordedStep& step);
std::optional<RunDifference> difference_of(const RecordedStep& left, const RecordedStep& right,
                                           HalfOf half, bool is_input) {
  const std::string a = recording_step_line(half(left)), b = recording_step_line(half(right));
  if (a == b) return std::nullopt;
  const FieldDifference found = first_difference(a, b);
  std::string request = request_at(found, left);
  if (request.empty()) request = request_at({found.what, found.model, found.recorded}, right);
  return RunDifference{.step = left.step,
                       .part = is_input ? RunPart::input : part_of(found.what),
                       .what = path_text(found.what, left),
                       .left = found.recorded,
                       .right = found.model,
                       .request = std::move(request)};
}

// What is left where one file has a step that the other does not have.
RunDifference ends_first(std::int64_t step, bool left_ends, std::string end) {
  std::string there = fmt::format("step {}", step);
  if (left_ends) std::swap(there, end);
  return {.step = step, .part = RunPart::end, .what = "end", .left = there, .right = end};
}

// A file that was cut off is compared as far as it goes.
void note_cut_off(const SameRuns& same, std::int64_t step, std::vector<std::string>& notes) {
  for (std::size_t i = 0; i < same.runs.size(); ++i)
    if (!same.runs[i].cut_off.empty())
      notes.push_back(fmt::format("step {} and later: {} is {}", step, i == 0 ? "A" : "B",
                                  same.runs[i].cut_off));
}

Result<SameRuns> compare_recordings(const std::string& left, const std::string& right) {
  LS_ASSIGN_OR_RETURN(auto a, RecordingReader::open(left));
  LS_ASSIGN_OR_RETURN(auto b, RecordingReader::open(right));
  SameRuns same;
  same.runs[0] = {.file = left, .engine = a.header().engine.text(), .of = "recording"};
  same.runs[1] = {.file = right, .engine = b.header().engine.text(), .of = "recording"};
  add_header_differences(OrderedJson::parse(recording_header_line(a.header())),
                         OrderedJson::parse(recording_header_line(b.header())), "", same.headers);
  const Alignment alignment(a.header(), b.header(), same.not_compared);
  RecordedStep one, other;
  while (true) {
    LS_ASSIGN_OR_RETURN(const bool has_left, a.next(one));
    LS_ASSIGN_OR_RETURN(const bool has_right, b.next(other));
    same.runs[0].steps += has_left ? 1 : 0;
    same.runs[1].steps += has_right ? 1 : 0;
    if (!has_left) same.runs[0].cut_off = cut_off_text(a.end());
    if (!has_right) same.runs[1].cut_off = cut_off_text(b.end());
    const std::int64_t step = std::min(same.runs[0].steps, same.runs[1].steps);
    if (!has_left || !has_right) {
      note_cut_off(same, step, same.not_compared);
      const bool is_cut = !same.runs[0].cut_off.empty() || !same.runs[1].cut_off.empty();
      if (has_left != has_right && (has_left ? same.runs[1] : same.runs[0]).cut_off.empty()) {
        same.first = ends_first(step, has_right, "end of the recording");
      } else if (!is_cut) {
        const std::string ends[] = {recording_end_line(a.end()), recording_end_line(b.end())};
        if (ends[0] != ends[1]) {
          const FieldDifference found = first_difference(ends[0], ends[1]);
          same.first = {.step = step,
                        .part = RunPart::end,
                        .what = found.what,
                        .left = found.recorded,
                        .right = found.model};
        }
      }
      return same;
    }
    alignment.apply(one, other);
    if (one == other) continue;
    same.first = difference_of(one, other, without_inputs, false);
    // In the step of the difference, inputs after the decision may follow from it.
    if (!same.first_input)
      same.first_input = difference_of(one, other, same.first ? inputs_before : inputs_of, true);
    if (same.first) return same;
  }
}

// Step hashes.

template <class T>
const T* at(const std::vector<T>& list, std::size_t index) {
  return index < list.size() ? &list[index] : nullptr;
}

// The first table that differs, absent on one side if only the other schedules the request.
std::optional<RunDifference> table_difference(const StepHashes& left, const StepHashes& right) {
  for (std::size_t i = 0; i < std::max(left.tables.size(), right.tables.size()); ++i) {
    const HashedTable *a = at(left.tables, i), *b = at(right.tables, i);
    if (a != nullptr && b != nullptr && *a == *b) continue;
    const std::string request = (a != nullptr ? a : b)->request;
    RunDifference found{.step = left.step,
                        .part = RunPart::table,
                        .what = "tables." + request,
                        .left = "absent",
                        .right = "absent",
                        .request = request};
    if (a == nullptr || b == nullptr || a->request != b->request) {
      (a != nullptr ? found.left : found.right) = "present";
      if (a != nullptr && b != nullptr) found.right = "request " + b->request;
      return found;
    }
    std::size_t group = 0;
    while (at(a->groups, group) && at(b->groups, group) && a->groups[group] == b->groups[group])
      ++group;
    found.what += fmt::format("[{}]", group);
    if (at(a->groups, group)) found.left = a->groups[group];
    if (at(b->groups, group)) found.right = b->groups[group];
    return found;
  }
  return std::nullopt;
}

std::string page_text(const HashedPage& page) {
  return fmt::format("page of block {}, tensor {}, rank {}", page.block, page.tensor, page.rank);
}

std::optional<RunDifference> page_difference(const StepHashes& left, const StepHashes& right) {
  const auto key = [](const HashedPage& page) {
    return std::tuple(page.rank, page.tensor, page.block);
  };
  for (std::size_t i = 0; i < std::max(left.pages.size(), right.pages.size()); ++i) {
    const HashedPage *a = at(left.pages, i), *b = at(right.pages, i);
    if (a != nullptr && b != nullptr && *a == *b) continue;
    // Pages ascend: the lower one is missing on the other side.
    if (a != nullptr && b != nullptr && key(*a) != key(*b)) (key(*a) < key(*b) ? b : a) = nullptr;
    return RunDifference{.step = left.step,
                         .part = RunPart::page,
                         .what = page_text(a != nullptr ? *a : *b),
                         .left = a != nullptr ? a->fingerprint : "not written",
                         .right = b != nullptr ? b->fingerprint : "not written"};
  }
  return std::nullopt;
}

std::optional<RunDifference> difference_of(const StepHashes& left, const StepHashes& right,
                                           bool has_pages) {
  const auto tables = table_difference(left, right);
  if (left.decision != right.decision)
    return RunDifference{.step = left.step,
                         .part = RunPart::decision,
                         .what = "decision",
                         .left = left.decision,
                         .right = right.decision,
                         .request = tables ? tables->request : ""};
  if (tables) return tables;
  if (has_pages)
    if (auto page = page_difference(left, right)) return page;
  if (left.ended != right.ended)
    return RunDifference{.step = left.step,
                         .part = RunPart::output,
                         .what = "ended",
                         .left = OrderedJson(left.ended).dump(),
                         .right = OrderedJson(right.ended).dump()};
  return std::nullopt;
}

std::string end_text(const StepHashesEnd& end) {
  return end.check.empty() ? end.verdict : end.verdict + " " + end.check;
}

// What a run found wrong in the step that it does not have is the part that differs.
RunPart part_of_end(const StepHashesEnd& left, const StepHashesEnd& right) {
  const std::string& check = left.check.empty() ? right.check : left.check;
  if (check.starts_with("page")) return RunPart::page;
  if (check.find("table") != check.npos || check.find("slot") != check.npos) return RunPart::table;
  return RunPart::end;
}

// The ends of both, where no step differs. `step`: of the first file that ends.
void compare_ends(const StepHashesReader& a, const StepHashesReader& b, bool has_left,
                  bool has_right, SameRuns& same) {
  const StepHashesEnd none{};
  const StepHashesEnd& left = has_left ? none : a.end();
  const StepHashesEnd& right = has_right ? none : b.end();
  const std::int64_t step = std::min(same.runs[0].steps, same.runs[1].steps);
  for (const auto& [end, run] : {std::pair(&left, &same.runs[0]), std::pair(&right, &same.runs[1])})
    if (end->verdict == "interrupted")
      run->cut_off = fmt::format("interrupted before step {}", step);
  note_cut_off(same, step, same.not_compared);
  if (left.verdict == "interrupted" || right.verdict == "interrupted") return;
  if (has_left != has_right)
    same.first =
        ends_first(step, has_right, "end of the run: " + end_text(has_left ? right : left));
  else if (end_text(left) != end_text(right))
    same.first = {.step = step,
                  .part = RunPart::end,
                  .what = "end",
                  .left = end_text(left),
                  .right = end_text(right)};
  if (same.first) same.first->part = part_of_end(left, right);
}

Result<SameRuns> compare_hashes(const std::string& left, const std::string& right) {
  LS_ASSIGN_OR_RETURN(auto a, StepHashesReader::open(left));
  LS_ASSIGN_OR_RETURN(auto b, StepHashesReader::open(right));
  SameRuns same;
  const auto run_of = [](const std::string& file, const StepHashesHeader& header) {
    return ComparedRun{
        .file = file, .engine = header.engine, .of = "step hashes, backend " + header.backend};
  };
  same.runs = {run_of(left, a.header()), run_of(right, b.header())};
  const bool has_pages = a.header().has_pages && b.header().has_pages;
  const bool has_chain =
      a.header().has_pages == b.header().has_pages && a.header().engine == b.header().engine;
  if (a.header().has_pages != b.header().has_pages)
    same.not_compared.push_back(
        fmt::format("pages: {} ran without a backend", a.header().has_pages ? "B" : "A"));
  if (!has_chain)
    same.not_compared.push_back(
        "slot mappings, host blocks and reasons of ends: their hash is of one engine and backend");
  StepHashes one, other;
  while (true) {
    LS_ASSIGN_OR_RETURN(const bool has_left, a.next(one));
    LS_ASSIGN_OR_RETURN(const bool has_right, b.next(other));
    same.runs[0].steps += has_left ? 1 : 0;
    same.runs[1].steps += has_right ? 1 : 0;
    if (!has_left || !has_right) {
      compare_ends(a, b, has_left, has_right, same);
      return same;
    }
    same.first = difference_of(one, other, has_pages);
    if (!same.first && has_chain && one.hash != other.hash)
      same.first = {.step = one.step,
                    .part = RunPart::output,
                    .what = "hash (slot mappings, host blocks or reasons of ends)",
                    .left = one.hash,
                    .right = other.hash};
    if (same.first) return same;
  }
}

enum class Compared : std::uint8_t { recording, hashes };

Result<Compared> format_of(const std::string& path) {
  LS_RETURN_IF_ERROR(check_read_twice(path));
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  std::string_view line;
  LS_RETURN_IF_ERROR(lines.next(line));
  if (StepHashesReader::is_header(line)) return Compared::hashes;
  const auto json = OrderedJson::parse(line, nullptr, false);
  if (json.is_object() && json.contains("schedule_recording")) return Compared::recording;
  return fail(
      fmt::format("{}:1: neither a recording nor step hashes; write step hashes with "
                  "`lockstep replay FILE --hashes OUT`",
                  path));
}

}  // namespace

Result<SameRuns> compare_runs(const std::string& left, const std::string& right) {
  LS_ASSIGN_OR_RETURN(const Compared a, format_of(left));
  LS_ASSIGN_OR_RETURN(const Compared b, format_of(right));
  if (a != b)
    return fail(fmt::format("{} is a recording and {} has step hashes; compare two of one kind",
                            a == Compared::recording ? left : right,
                            a == Compared::recording ? right : left));
  return a == Compared::recording ? compare_recordings(left, right) : compare_hashes(left, right);
}

}  // namespace lockstep
