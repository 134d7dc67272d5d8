// lockstep relations [NAME...]: do runs that differ in something irrelevant to a request answer it
// identically?
//
// Generates cases and applies each relation to each: the changed case must give every request the
// same tokens (properties/relations/relations.h), and on a backend the same reads
// (backend_relations.h). No right answer is needed, so this finds errors that model and backend
// share.
//
// Not checked: whether an answer is right.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/options/decisions_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/known_findings.h"
#include "properties/relations/backend_relations.h"
#include "properties/relations/relations.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

struct RelationsOptions {
  std::vector<std::string> names;
  bool list = false;
  ReportOptions reports;
  std::string engine;  // empty: the default, or the profile nearest to the deciding engine
  std::string backend = "simt";
  std::uint64_t first_seed = 1;
  std::int64_t runs = 50;
  DecisionsOptions decisions;
};

// The engine that decides instead of the model, if any.
struct Deciding {
  std::shared_ptr<ForeignEngines> engines;  // null: the model
  DecisionsFactory decisions() const {
    return engines ? decisions_of(engines) : DecisionsFactory();
  }
};

// The outcome of one relation over all cases.
struct Held {
  Relation relation;
  bool is_of_answers = false;  // also compares tokens of the model language model
  std::int64_t applied = 0;    // generated cases that the relation changes
  std::int64_t compared = 0;   // places that both runs read on a backend
  std::int64_t pages = 0;      // steps after which all pages were compared
  std::int64_t refused = 0;    // changed cases that the backend or another engine refuses
  std::string refusal = {};    // message of the first refusal by another engine
  std::int64_t answered = 0;   // cases whose tokens or block ids were compared
  std::int64_t known = 0;      // cases broken by a finding of docs/findings.md
  std::uint64_t seed = 0;      // of the first breach
  std::string breach = {};     // what differs; empty: the relation holds
};

// Returns the named relations, all without a name. Errors: an unknown name.
Result<std::vector<Held>> chosen_relations(const std::vector<std::string>& names) {
  std::vector<Held> all;
  for (const Relation& relation : relations())
    all.push_back({.relation = relation, .is_of_answers = true});
  for (const Relation& relation : place_relations()) all.push_back({.relation = relation});
  if (names.empty()) return all;
  std::vector<Held> some;
  for (const std::string& name : names) {
    const auto found =
        std::ranges::find(all, name, [](const Held& held) { return held.relation.name; });
    if (found == all.end())
      return fail("unknown relation '{}'; `lockstep relations --list` lists them", name);
    some.push_back(*found);
  }
  return some;
}

// True if the run shows a finding of docs/findings.md: a breach in it is not a new failure.
bool is_known(const SavedCase& saved, const Deciding& deciding) {
  JudgeOptions options{.decisions = deciding.decisions(),
                       .invariants = deciding.engines == nullptr};
  return known_finding_of_run(saved, options) != nullptr;
}

// Records the first breach of a relation that is not explained by a known finding, in either case.
void note(const std::optional<Breach>& breach, const SavedCase& saved, std::uint64_t seed,
          const Deciding& deciding, Held& held) {
  if (!breach || !held.breach.empty()) return;
  if (is_known(saved, deciding) || is_known(*held.relation.change(saved), deciding)) {
    ++held.known;
    return;
  }
  held.seed = seed;
  held.breach = breach->what;
}

// Compares the tokens of a case and its changed form. Cases whose content the answering model does
// not cover are skipped.
Result<void> hold_answers(const SavedCase& saved, std::uint64_t seed, const Deciding& deciding,
                          Held& held) {
  if (held.is_of_answers && why_not_answered(saved).empty()) {
    const auto breach = check_relation(saved, held.relation, deciding.decisions());
    // A changed case may use something that another engine does not support.
    if (!breach && deciding.engines != nullptr) {
      if (++held.refused == 1) held.refusal = breach.error().message;
      return {};
    }
    LS_RETURN_IF_ERROR(breach);
    ++held.answered;
    note(*breach, saved, seed, deciding, held);
  }
  // Block ids are names, so the decisions must be the same too, name for name.
  if (held.relation.name == "shuffled blocks" && deciding.engines == nullptr) {
    LS_ASSIGN_OR_RETURN(const auto breach, check_shuffled_blocks(saved));
    ++held.answered;
    note(breach, saved, seed, deciding, held);
  }
  return {};
}

// True for relations that may be compared on a backend. "batch mates" removes requests, and planned
// outputs depend on a request's position in the trace.
bool is_for_devices(const Relation& relation) { return relation.name != "batch mates"; }

// Compares what attention reads on a backend in a case and its changed form. Cases without a step
// that a backend could execute are skipped.
Result<void> hold_on_devices(const SavedCase& saved, std::uint64_t seed, const Deciding& deciding,
                             Held& held) {
  if (deciding.engines != nullptr) return {};  // only below the model's decisions
  if (!is_for_devices(held.relation) || !why_not_read(saved).empty()) return {};
  LS_ASSIGN_OR_RETURN(const auto check, check_on_backend(saved, held.relation, make_simt_backend));
  if (!check) return {};
  held.refused += check->refused.empty() ? 0 : 1;
  held.compared += check->compared;
  held.pages += check->pages;
  note(check->breach, saved, seed, deciding, held);
  return {};
}

// Generates the cases, holds all relations to them, and returns the number of cases. A relation
// keeps only its first breach, but the later cases still count as applied.
Result<std::int64_t> hold_all(const RelationsOptions& options, const Deciding& deciding,
                              std::vector<Held>& all) {
  GeneratorOptions generator{.engine = options.engine, .backend = options.backend};
  // The other modes watch accesses, which a relation does not compare.
  generator.check = "fast";
  generator.never = unrelated_features();
  if (deciding.engines != nullptr) {
    generator.never.add(features_to_avoid(deciding.engines->hello()));
    limit_caches(deciding.engines->hello(), generator);
    // Only the model plans what a connector moves.
    generator.never.add({Feature::connector_peers, Feature::host_tier});
  }
  Progress progress("cases", options.runs);
  std::int64_t run = 0;
  for (; run < options.runs && !stop_requested(); ++run) {
    const std::uint64_t seed = options.first_seed + static_cast<std::uint64_t>(run);
    const SavedCase saved = generate_case(seed, generator);
    for (Held& held : all) {
      if (!held.relation.change(saved)) continue;
      ++held.applied;
      for (const auto hold : {hold_answers, hold_on_devices})
        if (auto done = hold(saved, seed, deciding, held); !done)
          return fail("seed {}, {}: {}", seed, held.relation.name, done.error().message);
    }
    progress.at(run + 1, saved.name);
  }
  return run;
}

bool has_compared(const Held& held) { return held.answered + held.compared + held.pages > 0; }

std::string why_not_compared(const Held& held) {
  return held.applied == 0 ? "applied to no case"
                           : fmt::format("compared nothing in {}", counted(held.applied, "case"));
}

// A relation that has compared nothing has shown nothing.
std::vector<std::string> not_checked_of(const std::vector<Held>& all) {
  std::vector<std::string> not_checked = {
      "whether an output is right: a relation only compares two runs"};
  for (const Held& held : all)
    if (!has_compared(held))
      not_checked.push_back(fmt::format("{}: {}", held.relation.name, why_not_compared(held)));
    else if (held.pages == 0)
      not_checked.push_back(fmt::format("{}: pages on a backend", held.relation.name));
  return not_checked;
}

std::string text_of(const std::vector<Held>& all) {
  std::string text;
  for (const Held& held : all) {
    text += fmt::format("{:<20} {:>5} cases, {:>9} positions, {:>6} steps with pages",
                        held.relation.name, held.applied, held.compared, held.pages);
    if (held.refused > 0)
      text += fmt::format("; {} refused by the {}", counted(held.refused, "case"),
                          held.refusal.empty() ? "device" : "engine: " + held.refusal);
    if (held.known > 0) text += fmt::format("; {} of known findings", counted(held.known, "case"));
    text += held.breach.empty()
                ? "\n"
                : fmt::format("\n  BROKEN with seed {}: {}\n", held.seed, held.breach);
  }
  return text;
}

std::string json_of(const std::vector<Held>& all) {
  nlohmann::ordered_json json;
  json["relations"] = nlohmann::ordered_json::array();
  for (const Held& held : all) {
    nlohmann::ordered_json entry = {
        {"name", held.relation.name},   {"says", held.relation.says},
        {"cases", held.applied},        {"places", held.compared},
        {"page_steps", held.pages},     {"refused", held.refused},
        {"known_findings", held.known}, {"compared", has_compared(held)},
        {"holds", held.breach.empty()}};
    if (!held.breach.empty()) {
      entry["seed"] = held.seed;
      entry["what"] = held.breach;
    }
    json["relations"].push_back(entry);
  }
  json["not_checked"] = not_checked_of(all);
  return json_text(json);
}

void add_items(const std::vector<Held>& all, CommandReport& report) {
  for (const Held& held : all) {
    ReportedItem item{.name = std::string(held.relation.name)};
    if (!held.breach.empty()) {
      item.kind = ItemKind::failed;
      item.check = "relations";
      item.line = fmt::format("relations {}: {}", held.relation.name, held.breach);
      item.again = report.again({.arguments = {std::string(held.relation.name)},
                                 .set = {{"--seed", std::to_string(held.seed)}, {"--runs", "1"}}});
    } else if (!has_compared(held)) {
      item.kind = ItemKind::skipped;
      item.line = why_not_compared(held);
    }
    report.add(std::move(item));
  }
}

Result<int> run_relations(RelationsOptions options, CommandReport& report) {
  watch_stop_signals();
  LS_ASSIGN_OR_RETURN(auto all, chosen_relations(options.names));
  if (options.list) {
    nlohmann::ordered_json json = {{"relations", nlohmann::ordered_json::array()}};
    for (const Held& held : all) {
      fmt::print("{:<20} {}\n", held.relation.name, held.relation.says);
      json["relations"].push_back({{"name", held.relation.name}, {"says", held.relation.says}});
    }
    if (report.wants_json()) report.set_json(json_text(json));
    return kExitAgreed;
  }
  LS_ASSIGN_OR_RETURN(const auto engines, open_decisions(options.decisions));
  if (engines != nullptr && options.engine.empty()) options.engine = profile_of(*engines);
  if (options.engine.empty()) options.engine = EngineConfig{}.engine;
  LS_ASSIGN_OR_RETURN(options.engine, engine_named("--engine", options.engine));
  // With an engine only relations of answers without connectors remain: the others need the model.
  if (engines != nullptr)
    std::erase_if(
        all, [](const Held& held) { return !held.is_of_answers || held.relation.of_connectors; });
  if (all.empty())
    return fail(
        "--decisions: none of the named relations applies without the model; they compare "
        "positions on a device or need connectors");
  LS_ASSIGN_OR_RETURN(const std::int64_t cases, hold_all(options, {engines}, all));
  fmt::print("{}", text_of(all));
  const auto broken =
      std::ranges::count_if(all, [](const Held& held) { return !held.breach.empty(); });
  fmt::print("\n{} of {} broken in {}\n", broken, counted(std::ssize(all), "relation"),
             counted(cases, "generated case"));
  fmt::print("{}", not_checked_text(not_checked_of(all)));
  if (report.wants_json()) report.set_json(json_of(all));
  add_items(all, report);
  return broken == 0 ? kExitAgreed : kExitDisagreed;
}

}  // namespace

void add_relations_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RelationsOptions>();
  CLI::App* command = app.add_subcommand(
      "relations", "Check that pairs of runs produce the same outputs for a request");
  command->add_option("NAME", options->names, "names of relations (all)");
  command->add_flag("--list", options->list, "describe the relations; run nothing");
  command->add_option("--seed", options->first_seed, "seed of the first case");
  command->add_option("--runs", options->runs, "number of generated cases")
      ->check(CLI::PositiveNumber);
  command->add_option("--engine", options->engine, "engine profile");
  command->add_option("--backend", options->backend, "none: only decisions")
      ->check(CLI::IsMember({"simt", "none"}));
  declare_decisions(*command, options->decisions);
  declare_reports(*command, options->reports, "the result as JSON");
  run_when_chosen(*command, options, exit_code, run_relations);
}

}  // namespace lockstep
