// lockstep diff-engines [TRACE] [--model NAME]: what does an upgrade from one release to another
// change?
//
// Two profiles: where their decisions on a trace first differ, field by field, and the totals of
// both. More than two, or a range: what each stage costs the trace, and which policy causes it.
// With --model: the model's memory under each of them.
//
// After the first difference the two runs are different runs, so step n of one no longer
// corresponds to step n of the other. Only the first difference of each field has a meaning.
//
// Not checked: pages, and answers. No backend runs, and outputs are planned by the trace.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/output_file.h"
#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/options/layout_options.h"
#include "cli/options/replay_options.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "reference/profiles/releases.h"
#include "sim/conform/upgrade.h"
#include "sim/report/memory_diff.h"
#include "sim/session/session.h"
#include "sim/setup/replay_setup.h"
#include "sim/verdict/run_summary.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

// The options of a replay, since both engines run the same trace, and those of a comparison.
struct DiffOptions {
  ReplayOptions replay;
  std::vector<std::string> engines;
  std::string memory = "40GiB";  // bytes per worker for --model's cache, as text
};

// The memory of --model under each engine, and the options that all of them share.
struct MemoryDiff {
  ModelSpec model;
  PlanOptions options;
  std::vector<ReleaseMemory> releases;
};

// Plans the memory of --model under each engine. block_size and num_blocks are passed on only if
// the command line gives them; otherwise each planner chooses its own. max_model_len defaults to
// the model's, at most 32,768.
Result<MemoryDiff> diff_memory(const DiffOptions& options,
                               const std::vector<std::string>& engines) {
  const GivenRun& given = options.replay.run;
  const RunSpec& run = given.spec;
  MemoryDiff diff;
  LS_ASSIGN_OR_RETURN(diff.model, find_model(run.recipe.model));
  PlanOptions& plan = diff.options;
  LS_ASSIGN_OR_RETURN(plan.memory_bytes, parse_size("--memory", options.memory));
  const ElementType type = *element_type_from_name(run.recipe.dtype);
  plan.kv_dtype = type.dtype;
  plan.kv_quant_mode = type.mode;
  if (!given.has("dtype")) LS_RETURN_IF_ERROR(take_checkpoint_format(diff.model, plan));
  plan.backend = run.attention_backend;
  plan.tp = run.tensor_parallel_size;
  plan.pp = run.pipeline_parallel_size;
  plan.dcp = run.engine.dcp;
  plan.pcp = run.engine.pcp;
  plan.mamba_cache_mode = run.engine.mamba_cache_mode;
  plan.disable_hybrid_kv_cache_manager = run.recipe.disable_hybrid_kv_cache_manager;
  plan.max_num_batched_tokens = run.engine.max_num_batched_tokens;
  plan.max_model_len = given.has("max_model_len")
                           ? run.engine.max_model_len
                           : std::min<std::int64_t>(diff.model.max_model_len, 32768);
  if (given.has("block_size")) plan.block_size = run.engine.block_size;
  if (given.has("num_blocks")) plan.num_gpu_blocks_override = run.cache.num_blocks;
  LS_RETURN_IF_ERROR(take_model(diff.model, plan));
  LS_ASSIGN_OR_RETURN(
      diff.releases,
      memory_of_releases(diff.model, plan, given.has("mamba_cache_mode"), run.engine, engines));
  return diff;
}

nlohmann::ordered_json json_of(const MemoryDiff& diff) {
  using Json = nlohmann::ordered_json;
  Json json = {{"model", diff.model.name},
               {"memory_bytes", diff.options.memory_bytes},
               {"max_model_len", diff.options.max_model_len},
               {"releases", Json::array()}};
  for (const ReleaseMemory& one : diff.releases) {
    Json entry = {{"engine", one.engine}};
    if (one.by_older_planner) entry["by_older_planner"] = true;
    if (!one.refused.empty()) {
      entry["refused"] = one.refused;
    } else {
      if (!one.order.empty()) entry["order"] = one.order;
      entry["mamba_cache_mode"] = name_of(one.states);
      entry["groups"] = one.groups;
      entry["block_size"] = one.block_size;
      entry["num_blocks"] = one.num_blocks;
      entry["bytes_per_block"] = one.bytes_per_block;
      entry["capacity_tokens"] = one.capacity_tokens;
      entry["max_concurrency"] = one.at_once;
    }
    json["releases"].push_back(std::move(entry));
  }
  return json;
}

std::string text_of(const nlohmann::ordered_json& json) { return json_text(json); }

// A workload that can be started any number of times, and the configuration that all engines get.
struct Prepared {
  LockstepConfig config;
  MakeWorkload make_workload;
};

// Returns a recording's requests as a trace. Every step takes 1 ms on its clock, whatever it
// schedules, so that a request arrives before the step at which it was recorded, under the first
// engine. Recorded outputs keep their lengths.
Result<Prepared> requests_of_recording(const ReplayOptions& options, const Recording& recording,
                                       LockstepConfig config) {
  constexpr std::int64_t kStepNs = 1'000'000;
  Result<Trace> trace = trace_of(recording, kStepNs);
  if (!trace) return fail("{}: {}", options.file, trace.error().message);
  TraceWorkloadOptions workload{.step_time = {.base_ns = kStepNs, .per_token_ns = 0},
                                .num_spec_tokens = config.engine.num_spec_tokens,
                                .async_scheduling = config.engine.async_scheduling};
  auto shared = std::make_shared<const Trace>(std::move(*trace));
  return Prepared{std::move(config), [shared, workload]() -> Result<std::unique_ptr<Workload>> {
                    return make_trace_workload(shared, workload);
                  }};
}

// Reads the trace without a backend. Errors: a saved case, which contains one run with one engine.
Result<Prepared> prepare(ReplayOptions options) {
  options.run.set_text("backend", "none");
  LS_ASSIGN_OR_RETURN(auto replay, prepare_replay(request_of(options)));
  if (replay.format == FileFormat::saved_case)
    return fail("{}: a saved case is one run; use `lockstep replay`", options.file);
  if (replay.recording != nullptr)
    return requests_of_recording(options, *replay.recording, std::move(replay.config));
  return Prepared{
      std::move(replay.config),
      [trace = std::move(replay.trace), workload = workload_options_of(replay.run)]()
          -> Result<std::unique_ptr<Workload>> { return make_trace_workload(trace, workload); }};
}

// A row: the figure of each engine, and the difference or "=".
void print_row(std::string_view what, std::int64_t left, std::int64_t right) {
  fmt::print("  {:<22}{:>18}{:>18}{:>14}\n", what, with_commas(left), with_commas(right),
             left == right ? std::string("=") : fmt::format("{:+}", right - left));
}

void print_totals(const EngineDiff& diff) {
  const RunSummary& l = diff.sides[0].summary;
  const RunSummary& r = diff.sides[1].summary;
  fmt::print("  {:<22}{:>18}{:>18}{:>14}\n", "", diff.sides[0].engine, diff.sides[1].engine,
             "difference");
  print_row("steps", l.steps, r.steps);
  print_row("request-steps", l.request_steps, r.request_steps);
  print_row("scheduled tokens", l.scheduled_tokens, r.scheduled_tokens);
  print_row("prompt tokens hit", l.cached_tokens, r.cached_tokens);
  print_row("requests with a hit", l.hits, r.hits);
  print_row("preemptions", l.preemptions, r.preemptions);
  print_row("hashes stored", l.stored, r.stored);
  print_row("hashes evicted", l.evictions, r.evictions);
  print_row("requests finished", l.finished_requests, r.finished_requests);
  print_row("requests stuck", l.stuck_total, r.stuck_total);
}

// Prints the first difference of each field, and the first step that differs as each engine decided
// it.
void print_partings(const EngineDiff& diff) {
  const std::optional<std::int64_t> first = diff.first_step();
  if (!first) {
    fmt::print("\nThe decisions are the same in every step{}.\n",
               stop_requested() ? " that both engines ran" : "");
    return;
  }
  fmt::print("\nFirst difference in each field:\n");
  for (std::size_t f = 0; f < kNumDecisionFields; ++f) {
    const auto& step = diff.first_difference[f];
    fmt::print("  {:<12}{}\n", name_of(static_cast<DecisionField>(f)),
               step ? fmt::format("step {}", with_commas(*step)) : "none");
  }
  for (const EngineSide& side : diff.sides)
    if (!side.first_parting.empty())
      fmt::print("\nStep {} of {}:\n{}", with_commas(*first), side.engine, side.first_parting);
}

nlohmann::ordered_json json_of(const EngineDiff& diff) {
  using Json = nlohmann::ordered_json;
  Json json;
  for (const EngineSide& side : diff.sides) json["engines"][side.engine] = json_of(side.summary);
  for (std::size_t f = 0; f < kNumDecisionFields; ++f) {
    const auto& step = diff.first_difference[f];
    json["first_difference"][std::string(name_of(static_cast<DecisionField>(f)))] =
        step ? Json(*step) : Json(nullptr);
  }
  return json;
}

// Refuses options of a replay that have no meaning here.
Result<void> check_options(const ReplayOptions& options) {
  const std::pair<bool, std::string_view> useless[] = {
      {options.run.has("engine"), "--engine"}, {options.run.has("backend"), "--backend"},
      {options.run.has("check"), "--check"},   {options.run.has("mutants"), "--mutant"},
      {options.run.has("faults"), "--faults"}, {!options.save_dir.empty(), "--save"}};
  const std::string also = given_for_one_engine(options);
  if (!also.empty()) return fail("{}: diff-engines compares only profiles; omit it", also);
  for (const auto& [given, name] : useless)
    if (given) return fail("{}: diff-engines compares only decisions; omit it", name);
  return {};
}

// Replaces each range vllm-A..vllm-B by its releases. Errors: an unknown name, fewer than two
// engines.
Result<std::vector<std::string>> engines_of(const std::vector<std::string>& named) {
  std::vector<std::string> engines;
  for (const std::string& name : named) {
    if (name.find("..") == std::string::npos) {
      LS_ASSIGN_OR_RETURN(engines.emplace_back(), engine_named("--engines", name));
      continue;
    }
    const auto range = releases_in(name);
    if (!range) return fail("--engines " + range.error().message);
    for (const Release& release : *range) engines.emplace_back(release.name);
  }
  if (engines.size() < 2) return fail("--engines: give at least two engines");
  return engines;
}

// Returns a figure, or "=" if it equals that of the previous stage. Null: there is no previous
// stage.
std::string figure(std::int64_t value, const std::int64_t* before) {
  return before != nullptr && value == *before ? "=" : with_commas(value);
}

// Prints a table with a row per stage. A stage that refuses the configuration has its reason, and
// the next one is compared with the last stage that ran.
void print_stages(const std::vector<UpgradeStage>& stages) {
  std::size_t widest = 0;
  for (const UpgradeStage& stage : stages) widest = std::max(widest, stage.engine.size());
  fmt::print("  {:<{}}", "", widest);
  for (const CostColumn& column : cost_columns()) fmt::print("{:>19}", column.name);
  fmt::print("\n");
  const UpgradeStage* before = nullptr;
  for (const UpgradeStage& stage : stages) {
    fmt::print("  {:<{}}", stage.engine, widest);
    if (!stage.refused.empty()) {
      fmt::print("  does not start: {}\n", stage.refused);
      continue;
    }
    for (const auto& [name, member] : cost_columns())
      fmt::print("{:>19}", figure(stage.costs.*member,
                                  before == nullptr ? nullptr : &(before->costs.*member)));
    fmt::print("\n");
    before = &stage;
  }
}

// Names for each stage the policies that change the costs by themselves. If there is none although
// the costs differ, only several policies together do it.
void print_reasons(const std::vector<UpgradeStage>& stages) {
  const UpgradeStage* before = nullptr;
  for (const UpgradeStage& stage : stages) {
    if (!stage.refused.empty()) continue;
    if (before != nullptr && stage.costs != before->costs) {
      fmt::print("\n{}: {}\n", stage.engine, change_text(before->costs, stage.costs));
      for (const PolicyCost& cost : stage.because)
        fmt::print("  {} = {} alone: {}\n    {}\n", cost.policy->name,
                   cost.policy->word(cost.value), change_text(before->costs, cost.costs),
                   cost.policy->effect);
      if (stage.because.empty()) fmt::print("  No single policy explains it.\n");
    }
    before = &stage;
  }
}

nlohmann::ordered_json json_of(const EngineCosts& costs) {
  return {{"steps", costs.steps},
          {"cached_tokens", costs.cached_tokens},
          {"preemptions", costs.preemptions},
          {"evictions", costs.evictions},
          {"peak_blocks", costs.peak_blocks},
          {"finished_requests", costs.finished_requests}};
}

// [{engine, refused} or {engine, costs, because: [{policy, value, costs}]}]
nlohmann::ordered_json json_of(const std::vector<UpgradeStage>& stages) {
  using Json = nlohmann::ordered_json;
  Json json = {{"engines", Json::array()}};
  for (const UpgradeStage& stage : stages) {
    Json entry = {{"engine", stage.engine}};
    if (!stage.refused.empty()) {
      entry["refused"] = stage.refused;
    } else {
      entry["costs"] = json_of(stage.costs);
      entry["because"] = Json::array();
      for (const PolicyCost& cost : stage.because)
        entry["because"].push_back({{"policy", cost.policy->name},
                                    {"value", cost.policy->word(cost.value)},
                                    {"costs", json_of(cost.costs)}});
    }
    json["engines"].push_back(std::move(entry));
  }
  return json;
}

// Adds the memory of --model, if any, and sets the command's JSON.
void report_json(nlohmann::ordered_json json, const std::optional<MemoryDiff>& memory,
                 CommandReport& report) {
  if (memory) json["memory"] = json_of(*memory);
  if (report.wants_json()) report.set_json(text_of(json));
}

// Reports only the memory, without a trace. Differences are the result and not a failure: exit
// status 0.
int report_memory(const MemoryDiff& memory, CommandReport& report) {
  report_json(nlohmann::ordered_json::object(), memory, report);
  report.add({.name = memory.model.name, .file = memory.model.name});
  return kExitAgreed;
}

// Runs the trace under each of more than two engines. Exit status 1 if any stage costs something
// else, or does not start.
Result<int> follow_upgrade(const DiffOptions& options, const std::vector<std::string>& engines,
                           Prepared prepared, const std::optional<MemoryDiff>& memory,
                           CommandReport& report) {
  Progress progress("running", 0);
  std::int64_t runs = 0;
  LS_ASSIGN_OR_RETURN(
      const auto stages,
      upgrade_costs(std::move(prepared.config), engines, prepared.make_workload,
                    [&](const std::string& engine) { progress.at(++runs, engine); }));
  fmt::print("{}\n\n", options.replay.file);
  print_stages(stages);
  print_reasons(stages);
  report_json(json_of(stages), memory, report);
  if (!options.replay.report_path.empty())
    LS_RETURN_IF_ERROR(
        write_output(options.replay.report_path, upgrade_page(options.replay.file, stages)));
  const bool is_same = std::ranges::all_of(stages, [&](const UpgradeStage& stage) {
    return stage.refused.empty() && stage.costs == stages.front().costs;
  });
  report.add_run({.name = fmt::format("{} to {}", engines.front(), engines.back()),
                  .kind = is_same ? ItemKind::passed : ItemKind::failed,
                  .check = is_same ? "" : "diff-engines",
                  .line = is_same ? "" : "diff-engines: the upgrade changes the cost of the trace",
                  .file = options.replay.file});
  return is_same ? kExitAgreed : kExitDisagreed;
}

Result<int> diff(const DiffOptions& options, CommandReport& report) {
  watch_stop_signals();
  LS_RETURN_IF_ERROR(check_options(options.replay));
  LS_ASSIGN_OR_RETURN(const auto engines, engines_of(options.engines));
  std::optional<MemoryDiff> memory;
  if (options.replay.run.has("model")) {
    LS_ASSIGN_OR_RETURN(memory, diff_memory(options, engines));
    fmt::print("{}", memory_table(memory->model, memory->options, memory->releases));
    for (const std::string& assumption : memory->model.assumptions)
      fmt::print("  assumed from the config.json: {}\n", assumption);
    fmt::print("\n");
  }
  if (options.replay.file.empty()) {
    if (!memory) return fail("diff-engines needs a FILE, a --model to compare memory, or both");
    return report_memory(*memory, report);
  }
  LS_ASSIGN_OR_RETURN(auto prepared, prepare(options.replay));
  if (engines.size() > 2)
    return follow_upgrade(options, engines, std::move(prepared), memory, report);
  if (!options.replay.report_path.empty())
    return fail("--report draws the cost of an upgrade: name more than two engines, or a range");
  LS_ASSIGN_OR_RETURN(
      const EngineDiff found,
      diff_engines(std::move(prepared.config), {engines[0], engines[1]}, prepared.make_workload));
  fmt::print("{}\n\n", options.replay.file);
  if (!stop_requested()) print_totals(found);  // of runs of different lengths otherwise
  print_partings(found);
  report_json(json_of(found), memory, report);
  ReportedItem item{.name = fmt::format("{} and {}", engines[0], engines[1]),
                    .file = options.replay.file};
  if (const auto step = found.first_step()) {
    item.kind = ItemKind::failed;
    item.check = "diff-engines";
    item.line = fmt::format("diff-engines step {}: {} and {} decide differently", *step, engines[0],
                            engines[1]);
  }
  report.add_run(std::move(item));
  return found.first_step() ? kExitDisagreed : kExitAgreed;
}

}  // namespace

void add_diff_engines_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<DiffOptions>();
  options->engines = {connector_profile().name, engine_profiles().back().name};
  CLI::App* command = app.add_subcommand(
      "diff-engines",
      "Compare engine profiles: their decisions on a trace, its cost, a model's memory");
  command->add_option("--engines", options->engines,
                      fmt::format("two profiles ({} and {}): where they differ first; more of "
                                  "them, or a range vllm-A..vllm-B: what each one changes",
                                  options->engines[0], options->engines[1]));
  declare_replay_options(*command, options->replay);
  command->get_option("FILE")->required(false);
  command
      ->add_option("--memory", options->memory,
                   "cache memory of --model per worker: 40GiB, 512MiB or bytes")
      ->capture_default_str();
  run_when_chosen(*command, options->replay.reports, exit_code,
                  [options](CommandReport& report) { return diff(*options, report); });
}

}  // namespace lockstep
