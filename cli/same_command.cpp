// lockstep same A B: where do two runs first differ?
//
// Compares two recordings, or two files of step hashes from `lockstep replay --hashes`, step by
// step (sim/recording/same_runs.h). Within a step a decision comes before a table, a table before a
// page, inputs last: the first difference is the nearest to the cause. Use it to compare two
// machines, two builds, or an engine before and after a change.
//
// Not compared: times, and what only one of the files has; the output lists the latter.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "sim/recording/same_runs.h"

namespace lockstep {
namespace {

struct SameOptions {
  std::string left, right;
  ReportOptions reports;
};

constexpr std::size_t kValueShown = 200;  // characters of a value on the terminal; JSON has all

std::string short_value(const std::string& value) {
  return value.size() <= kValueShown ? value : value.substr(0, kValueShown) + "...";
}

std::string values_text(const std::string& what, const std::string& left,
                        const std::string& right) {
  return fmt::format("  {}: A {}, B {}\n", what, short_value(left), short_value(right));
}

std::string text_of(const RunDifference& found) {
  return values_text(found.what, found.left, found.right);
}

// For the article: "an output", "a decision".
bool is_vowel(char letter) { return std::string_view("aeiou").find(letter) != std::string::npos; }

std::string place_of(const RunDifference& found) {
  return fmt::format("step {}{}", found.step,
                     found.request.empty() ? "" : ", request " + on_one_line(found.request));
}

// A difference of decisions outranks one of inputs, and that one a difference of headers.
std::string verdict_text(const SameRuns& same) {
  if (same.first)
    return fmt::format("Verdict: different. The first difference is {} {}, in {}:\n{}",
                       is_vowel(name_of(same.first->part).front()) ? "an" : "a",
                       name_of(same.first->part), place_of(*same.first), text_of(*same.first));
  if (same.first_input)
    return "Verdict: different inputs, the same decisions in every step that was compared.\n";
  if (!same.headers.empty()) return "Verdict: different headers, the same steps.\n";
  return fmt::format("Verdict: the same. {} compared equal.\n",
                     counted(std::min(same.runs[0].steps, same.runs[1].steps), "step"));
}

std::string text_of(const SameRuns& same) {
  std::string text;
  for (std::size_t i = 0; i < same.runs.size(); ++i) {
    const ComparedRun& run = same.runs[i];
    text += fmt::format("{}: {} ({} of {}{})\n", i == 0 ? "A" : "B", run.file, run.of, run.engine,
                        run.cut_off.empty() ? "" : ", " + run.cut_off);
  }
  if (!same.headers.empty()) text += "Headers differ:\n";
  for (const FieldDifference& field : same.headers)
    text += values_text(field.what, field.recorded, field.model);
  if (same.first_input)
    text += fmt::format("Inputs differ first in {}:\n{}", place_of(*same.first_input),
                        text_of(*same.first_input));
  return text + not_checked_text(same.not_compared) + "\n" + verdict_text(same);
}

nlohmann::ordered_json json_of(const std::optional<RunDifference>& found) {
  if (!found) return nullptr;
  return {{"step", found->step}, {"part", name_of(found->part)},
          {"what", found->what}, {"a", found->left},
          {"b", found->right},   {"request", found->request}};
}

std::string json_of(const SameRuns& same) {
  using Json = nlohmann::ordered_json;
  Json json = {{"same", same.same()}, {"runs", Json::array()}, {"headers", Json::array()}};
  for (const ComparedRun& run : same.runs)
    json["runs"].push_back({{"file", run.file},
                            {"engine", run.engine},
                            {"of", run.of},
                            {"steps_read", run.steps},
                            {"cut_off", run.cut_off}});
  for (const FieldDifference& field : same.headers)
    json["headers"].push_back({{"what", field.what}, {"a", field.recorded}, {"b", field.model}});
  json["first"] = json_of(same.first);
  json["first_input"] = json_of(same.first_input);
  json["not_checked"] = same.not_compared;
  return json_text(json);
}

// Returns the two runs as one item, failed if anything differs.
ReportedItem item_of(const SameOptions& options, const SameRuns& same, const CommandReport& out) {
  ReportedItem item{.name = options.left + " and " + options.right, .file = options.left};
  if (same.same()) return item;
  item.kind = ItemKind::failed;
  item.check = "same";
  item.details = text_of(same);
  item.again = out.again();
  const auto& found = same.first ? same.first : same.first_input;
  item.line = found ? stable_line(fmt::format("same.{}", name_of(found->part)), found->step,
                                  found->request, found->what)
                    : fmt::format("same.header {}", same.headers.front().what);
  return item;
}

Result<int> compare(const SameOptions& options, CommandReport& out) {
  LS_ASSIGN_OR_RETURN(const SameRuns same, compare_runs(options.left, options.right));
  for (const ComparedRun& run : same.runs)
    if (same.same() && run.steps == 0 && !run.cut_off.empty())
      return fail("{} is {}: no step was compared", run.file, run.cut_off);
  fmt::print("{}", text_of(same));
  if (out.wants_json()) out.set_json(json_of(same));
  out.add(item_of(options, same, out));
  return same.same() ? kExitAgreed : kExitDisagreed;
}

}  // namespace

void add_same_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<SameOptions>();
  CLI::App* command = app.add_subcommand(
      "same", "Find the first step, decision, table or page in which two runs differ");
  command->footer(
      "A and B: two recordings, or two files written by `lockstep replay FILE --hashes OUT`.\n"
      "Exit status: 0 the same; 1 different; 2 a file is refused.");
  command->add_option("A", options->left, "recording or step hashes")->required();
  command->add_option("B", options->right, "the same of another run")->required();
  declare_reports(*command, options->reports, "the result as JSON");
  run_when_chosen(*command, options, exit_code, compare);
}

}  // namespace lockstep
