// lockstep engines [ENGINE]: which releases and policies are modelled, and what did each release
// change?
//
// Without an argument: what each release changed, and what is and is not modelled. With one: every
// policy of that profile. --markdown prints docs/reference/releases.md, so that the page cannot
// differ from the tables in reference/profiles/.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/number_text.h"
#include "base/output_file.h"
#include "cli/commands.h"
#include "cli/options/output_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "properties/explain/explain_text.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "reference/types/engine_config.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

struct EnginesOptions {
  std::string engine;
  std::string json_path;
  bool as_markdown = false;
};

// A policy that a release changes, and its previous value.
struct Changed {
  const Policy* policy = nullptr;
  std::int64_t before = 0;
  PolicyChange now;
};

// Returns the policies that `release` changed. The first entry of a history is the oldest release's
// value and not a change.
std::vector<Changed> changes_of(const Release& release) {
  std::vector<Changed> changes;
  for (const Policy& policy : policies())
    for (std::size_t i = 1; i < policy.history.size(); ++i)
      if (policy.history[i].release == release.name)
        changes.push_back({&policy, policy.history[i - 1].value, policy.history[i]});
  return changes;
}

std::string pull_request_text(const PolicyChange& change) {
  return change.pull_request == 0 ? "" : fmt::format(" (#{})", change.pull_request);
}

// Returns what is not modelled, once per run of releases that share one text: "Not modelled of
// vllm-0.20.2 to vllm-0.25.1:". Texts are shared if they are the same array, so comparing their
// addresses is enough.
std::string not_modelled_text() {
  std::string text;
  for (std::size_t i = 0; i < releases().size();) {
    std::size_t end = i + 1;
    while (end < releases().size() &&
           releases()[end].not_modelled.data() == releases()[i].not_modelled.data())
      ++end;
    text += fmt::format("\nNot modelled in {}{}:\n", releases()[i].name,
                        end - i > 1 ? fmt::format(" to {}", releases()[end - 1].name) : "");
    for (const std::string_view line : releases()[i].not_modelled)
      text += fmt::format("  - {}\n", line);
    i = end;
  }
  return text;
}

std::string change_log_text() {
  std::string text;
  for (const Release& release : releases()) {
    const std::vector<Changed> changes = changes_of(release);
    text += fmt::format("\n{}{}{}\n", release.name,
                        release.equals.empty() ? "" : fmt::format(" (and {})", release.equals),
                        &release == &releases().front() ? ""
                        : changes.empty()               ? ": decides as the previous release"
                                                        : "");
    for (const Changed& change : changes)
      text +=
          fmt::format("  {}: {} -> {}{}\n", change.policy->name, change.policy->word(change.before),
                      change.policy->word(change.now.value), pull_request_text(change.now)) +
          wrapped("    ", std::string(change.policy->effect));
  }
  return text;
}

void print_engines() {
  fmt::print(
      "Engine profiles: `--engine NAME` decides as that vLLM release does;\n"
      "`--engine NAME,POLICY=VALUE` changes a policy of it. The default is {}.\n"
      "What each release changes:\n"
      "{}",
      EngineConfig{}.engine, change_log_text());
  fmt::print("\nModelled in every profile:\n");
  for (const std::string_view line : modelled()) fmt::print("  - {}\n", line);
  fmt::print("{}", not_modelled_text());
}

// Prints one profile: each policy with its value and all possible values, and the findings that it
// shows.
void print_engine(const EngineProfile& profile) {
  fmt::print("{}\nPages: {}; planned as vLLM 0.22.1 plans them.\n", profile.name,
             name_of(profile.release->page_format));
  std::string_view chapter;
  for (const Policy& policy : policies()) {
    if (policy.chapter != chapter) fmt::print("\n{}\n", policy.chapter);
    chapter = policy.chapter;
    fmt::print("  {:<36} {:<24} of {}\n", policy.name, policy.word(policy.get(profile)),
               joined(policy.values, &PolicyValue::word, " | "));
  }
  fmt::print("\nFindings of docs/findings.md that it can show:");
  for (const FindingPolicies& finding : finding_policies())
    if (can_show(profile, finding)) fmt::print(" {}", finding.finding);
  fmt::print("\n");
}

// "`policy` = word and `other` is not word": what makes a finding possible.
std::string needs_text(const FindingPolicies& finding) {
  std::string text;
  for (const auto& [policy, word, is_other] : finding.needs)
    text += fmt::format("{}`{}` {} {}", text.empty() ? "" : " and ", policy,
                        is_other ? "is not" : "=", word);
  return text.empty() ? "no policy: every release" : text;
}

// Returns the generated part of docs/reference/releases.md: the change log, and a table of findings
// by release. x: the profile shows it. ?: its policies make it possible, but the model of that
// release cannot show it.
std::string markdown() {
  std::string text;
  for (const Release& release : releases()) {
    const std::vector<Changed> changes = changes_of(release);
    text += fmt::format("### {}{}\n", release.name,
                        release.equals.empty() ? "" : fmt::format(" (and {})", release.equals));
    if (&release == &releases().front())
      text += "The oldest profile. The sections below list what each release changed.\n";
    else if (changes.empty())
      text += "Decides as the previous release.\n";
    for (const Changed& change : changes)
      text += fmt::format("- `{}`: {} → {}{}\\\n", change.policy->name,
                          change.policy->word(change.before), change.policy->word(change.now.value),
                          pull_request_text(change.now)) +
              wrapped("  ", std::string(change.policy->effect));
    text += "\n";
  }
  text += "### Findings by release\n| 0. |";
  for (const Release& release : releases())
    text += fmt::format(" {} |", release.name.substr(release.name.find('.') + 1, 2));
  text += "\n|---|";
  for (std::size_t i = 0; i < releases().size(); ++i) text += "---|";
  text += "\n";
  for (const FindingPolicies& finding : finding_policies()) {
    text += fmt::format("| {} |", finding.finding);
    for (const EngineProfile& profile : engine_profiles())
      text += can_show(profile, finding) ? " x |" : is_possible(profile, finding) ? " ? |" : "  |";
    text += "\n";
  }
  text += "\nThe policies that make them possible:\n\n";
  for (const FindingPolicies& finding : finding_policies())
    text += wrapped(fmt::format("- {}: ", finding.finding), needs_text(finding));
  return text;
}

// Returns {default, releases, policies}: each policy with its values, its history by release, and
// its effect on a user.
std::string to_json() {
  using Json = nlohmann::ordered_json;
  Json json = {
      {"default", EngineConfig{}.engine}, {"releases", Json::array()}, {"policies", Json::array()}};
  for (const Release& release : releases())
    json["releases"].push_back({{"name", release.name},
                                {"equals", release.equals},
                                {"pages", name_of(release.page_format)},
                                {"not_modelled", release.not_modelled}});
  for (const Policy& policy : policies()) {
    Json values = Json::array(), history = Json::array();
    for (const PolicyValue& value : policy.values) values.push_back(value.word);
    for (const PolicyChange& change : policy.history) {
      Json entry = {{"release", change.release}, {"value", policy.word(change.value)}};
      if (change.pull_request != 0) entry["pull_request"] = change.pull_request;
      history.push_back(std::move(entry));
    }
    json["policies"].push_back({{"name", policy.name},
                                {"chapter", policy.chapter},
                                {"values", std::move(values)},
                                {"history", std::move(history)},
                                {"effect", policy.effect},
                                {"shown_by", policy.shown_by}});
  }
  return json_text(json);
}

Result<int> show_engines(const EnginesOptions& options) {
  if (!options.engine.empty()) {
    LS_ASSIGN_OR_RETURN(const std::string name, engine_named("ENGINE", options.engine));
    print_engine(engine_profile(name));
  } else if (options.as_markdown) {
    fmt::print("{}", markdown());
  } else {
    print_engines();
  }
  if (!options.json_path.empty()) LS_RETURN_IF_ERROR(write_output(options.json_path, to_json()));
  return kExitAgreed;
}

}  // namespace

void add_engines_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<EnginesOptions>();
  CLI::App* command = app.add_subcommand(
      "engines", "List the engine profiles, what each release changed, and what is modelled");
  command->add_option("ENGINE", options->engine, "profile or engine file whose policies to list");
  command->add_flag("--markdown", options->as_markdown, "print docs/reference/releases.md");
  declare_output(*command, "--json", options->json_path, "the table of policies as JSON");
  command->callback([options, &exit_code] { exit_code = exit_status(show_engines(*options)); });
}

}  // namespace lockstep
