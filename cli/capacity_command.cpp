// lockstep capacity MODEL...: models, modes, packings and dtypes side by side.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <set>

#include "cli/commands.h"
#include "cli/options/engine_model.h"
#include "cli/options/layout_options.h"
#include "cli/output/terminal.h"
#include "sim/report/placement_report.h"
#include "sim/report/plan_report.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

struct CapacityCommand {
  std::vector<std::string> models;
  std::string from;
  std::vector<std::string> kv_dtypes{"auto"};
  std::vector<std::string> modes{"none"};
  std::vector<std::int64_t> packs{1};
  std::int64_t prompt_tokens = 2000;
  LayoutArguments arguments;
};

void print_head() {
  fmt::print("{:<26}{:<8}{:<6}{:>5}{:>8}{:>9}{:>12}{:>12}{:>8}{:>10}{:>9}{:>9}{:>8}\n", "model",
             "K/V", "mode", "pack", "tokens", "blocks", "capacity", "older", "at once", "bytes/tok",
             "padding", "empty", "resend");
}

// Bytes of a pool in which each group owns its share of a longest request.
struct Waste {
  std::int64_t all = 0;
  std::int64_t padding = 0;
  std::int64_t empty = 0;
};

Waste waste_of(const Capacity& capacity) {
  Waste waste;
  for (const GroupCapacity& group : capacity.groups) {
    waste.padding += group.blocks_per_request * group.padding_bytes;
    waste.empty += group.blocks_per_request * (group.pack_waste_bytes + group.absent_layer_bytes);
  }
  waste.all = capacity.blocks_per_request * (capacity.pool_bytes / capacity.num_blocks);
  return waste;
}

void print_row(const PlanReport& report, const LayoutArguments& a, std::int64_t prompt_tokens) {
  const Capacity& c = report.capacity.front();
  const Waste waste = waste_of(c);
  fmt::print("{:<26}{:<8}{:<6}{:>5}{:>8}{:>9}{:>12}{:>12}{:>8.2f}{:>10}{:>9}{:>9}{:>8}\n",
             report.model, a.kv_dtype.substr(0, 7), a.mamba_cache_mode, a.attn_pack,
             with_commas(report.plan.aligned.block_size), with_commas(c.num_blocks),
             with_commas(c.capacity_tokens), with_commas(c.all_groups_tokens), c.max_concurrency,
             with_commas(static_cast<std::int64_t>(c.bytes_per_token)),
             percent_text(waste.padding, waste.all), percent_text(waste.empty, waste.all),
             percent_text(resend_hit_tokens(c.hit_step_tokens, prompt_tokens), prompt_tokens));
}

std::set<std::string> warnings_of(const ModelSpec& model, const PlanOptions& options,
                                  const LayoutArguments& a, std::int64_t hit_step) {
  std::set<std::string> named;
  for (const std::string& warning : plan_warnings(a, model, options, hit_step))
    named.insert(fmt::format("{}: {}", model.name, warning));
  return named;
}

// The engine's own figures; it keeps no others.
void print_placed(const ModelSpec& model, const PlanOptions& options, const LayoutArguments& a,
                  std::int64_t prompt_tokens, std::set<std::string>& warnings) {
  const auto report = make_placement_report(model, options, a.engine, a.layout);
  const std::string head = fmt::format("{:<26}{:<8}{:<6}{:>5}", model.name, a.kv_dtype.substr(0, 7),
                                       a.mamba_cache_mode, a.attn_pack);
  if (!report) return fmt::print("{}  {}\n", head, report.error().message);
  // Every stage has as many blocks; the largest of its blocks rules.
  const Placement& plan = report->placed.stages.workers.front();
  std::int64_t block_bytes = 0;
  for (const Placement& stage : report->placed.stages.workers)
    block_bytes = std::max(block_bytes, bytes_per_block(stage.groups, stage.order));
  const PlacementCapacity& capacity =
      *std::ranges::min_element(report->capacity, {}, &PlacementCapacity::tokens);
  const double per_token = static_cast<double>(block_bytes * plan.num_blocks) /
                           static_cast<double>(std::max<std::int64_t>(1, capacity.tokens));
  const std::int64_t step = hit_step_tokens(report->placed);
  warnings.merge(warnings_of(model, options, a, step));
  fmt::print("{}{:>8}{:>9}{:>12}{:>12}{:>8.2f}{:>10}{:>9}{:>9}{:>8}\n", head,
             with_commas(report->placed.stages.alignment->block_size), with_commas(plan.num_blocks),
             with_commas(capacity.tokens), "-", capacity.max_concurrency,
             with_commas(static_cast<std::int64_t>(per_token)), "-", "-",
             percent_text(resend_hit_tokens(step, prompt_tokens), prompt_tokens));
}

// One model in every combination; a combination that is refused says why in its row.
Result<void> compare_model(const std::string& name, const CapacityCommand& command,
                           std::set<std::string>& warnings) {
  LS_ASSIGN_OR_RETURN(const auto model, find_model(name));
  if (model.layers.empty()) {
    fmt::print("{:<26}an encoder; its layers keep no cache\n", model.name);
    return {};
  }
  LayoutArguments a = command.arguments;
  for (const std::string& dtype : command.kv_dtypes)
    for (const std::string& mode : command.modes)
      for (std::int64_t pack : command.packs) {
        a.kv_dtype = dtype;
        a.mamba_cache_mode = mode;
        a.attn_pack = pack;
        LS_ASSIGN_OR_RETURN(const auto options, plan_options(a, model));
        LS_ASSIGN_OR_RETURN(const bool overlays, is_placed(a));
        if (overlays) {
          print_placed(model, options, a, command.prompt_tokens, warnings);
          continue;
        }
        const auto report = make_plan_report(model, options, CacheLayout::NHD);
        if (report && !report->plan.workers.front().groups.empty()) {
          print_row(*report, a, command.prompt_tokens);
          warnings.merge(warnings_of(model, options, a, report->capacity.front().hit_step_tokens));
        } else
          fmt::print("{:<26}{:<8}{:<6}{:>5}  {}\n", model.name, dtype.substr(0, 7), mode, pack,
                     report ? "keeps no cache" : report.error().message);
      }
  for (const std::string& assumption : model.assumptions)
    fmt::print("  assumed from the config.json: {}\n", assumption);
  return {};
}

Result<int> capacity(CapacityCommand command) {
  for (std::string& model : command.models)
    LS_RETURN_IF_ERROR(take_engine_model(model, command.from));
  std::set<std::string> warnings;
  print_head();
  for (const std::string& name : command.models.empty() ? model_names() : command.models)
    LS_RETURN_IF_ERROR(compare_model(name, command, warnings));
  fmt::print(
      "\ntokens: of one block. capacity: num_blocks / blocks a request * max_model_len. older: "
      "num_blocks // all\ngroups * smallest block size, which state groups and windows divide "
      "wrongly. empty: tensors and places of\npacks where a group has no layer. padding and "
      "empty: of the blocks of one longest request.\nresend: what a second request with the "
      "same prompt of {} tokens hits.\n",
      with_commas(command.prompt_tokens));
  for (const std::string& warning : warnings) fmt::print("warning: {}\n", warning);
  return kExitAgreed;
}

}  // namespace

void add_capacity_command(CLI::App& app, int& exit_code) {
  auto command = std::make_shared<CapacityCommand>();
  CLI::App* sub =
      app.add_subcommand("capacity", "Compare what models, modes, packings and dtypes can hold");
  sub->add_option("models", command->models, "names or files (all of the catalogue)");
  sub->add_option("--kv-dtype", command->kv_dtypes, "one or more, with commas")->delimiter(',');
  sub->add_option("--mamba-cache-mode", command->modes, "one or more, with commas")->delimiter(',');
  sub->add_option("--attn-pack", command->packs, "one or more, with commas")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{4096}));
  sub->add_option("--prompt-tokens", command->prompt_tokens,
                  "a prompt's length, for what a resend of it hits")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  declare_from(*sub, command->from);
  add_layout_options(*sub, command->arguments);
  sub->callback([command, &exit_code] { exit_code = exit_status(capacity(*command)); });
}

}  // namespace lockstep
