// lockstep capacity MODEL...: how many tokens and requests do models hold, in which mode, packing
// and dtype?
//
// One row per combination of --kv-dtype, --mamba-cache-mode and --attn-pack. A combination that the
// planner refuses has its reason in the row, and the other rows are still printed. `lockstep
// layout` shows one plan in full.
//
// Not checked: anything at run time. The figures are the planner's, and no cache is allocated.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/output_file.h"
#include "cli/commands.h"
#include "cli/options/engine_model.h"
#include "cli/options/layout_options.h"
#include "cli/options/output_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "sim/report/plan_report.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using OrderedJson = nlohmann::ordered_json;

struct CapacityCommand {
  std::vector<std::string> models;
  std::string from;  // engine that builds the layers; empty: the reader of config.json
  std::vector<std::string> kv_dtypes{"auto"};
  std::vector<std::string> modes{"none"};
  std::vector<std::int64_t> packs{1};
  std::int64_t prompt_tokens = 2000;  // length of the prompt that is sent twice
  LayoutArguments arguments;
  std::string json_path;
};

// The results of all combinations, for the JSON.
struct Comparison {
  std::set<std::string> warnings;
  OrderedJson rows = OrderedJson::array();
};

void print_head() {
  fmt::print("{:<26}{:<8}{:<6}{:>5}{:>8}{:>9}{:>12}{:>12}{:>8}{:>10}{:>9}{:>9}{:>8}\n", "model",
             "K/V", "mode", "pack", "tokens", "blocks", "capacity", "older", "at once", "bytes/tok",
             "padding", "empty", "resend");
}

// Shares of the blocks of one request of max_model_len that are padding, and that no layer fills;
// and the capacity by the formula before vLLM 40384. "-": the planner of overlaid groups has no
// such figures.
struct Waste {
  std::string older = "-", padding = "-", empty = "-";
};

Waste waste_of(const PlanReport& report) {
  const auto* details = std::get_if<TensorDetails>(&report.details);
  if (details == nullptr) return {};
  const Capacity& capacity = details->capacity.front();
  std::int64_t padding = 0, empty = 0;
  for (const GroupCapacity& group : capacity.groups) {
    padding += group.blocks_per_request * group.padding_bytes;
    empty += group.blocks_per_request * (group.pack_waste_bytes + group.absent_layer_bytes);
  }
  const std::int64_t all =
      capacity.blocks_per_request * (capacity.pool_bytes / capacity.num_blocks);
  return {with_commas(capacity.all_groups_tokens), percent_text(padding, all),
          percent_text(empty, all)};
}

// Returns the bytes per token. Without overlay: what one more token of a request costs, so groups
// of fixed size do not count. With overlay: the whole pool divided by its capacity, since a block
// belongs to one group at a time. `tightest`: the stage that limits the capacity.
std::int64_t bytes_per_token(const PlanReport& report, const WorkerReport& tightest) {
  if (const auto* details = std::get_if<TensorDetails>(&report.details))
    return static_cast<std::int64_t>(details->capacity.front().bytes_per_token);
  // All stages have the same number of blocks, so the largest block determines the memory.
  const auto& widest = *std::ranges::max_element(report.workers, {}, &WorkerReport::block_bytes);
  return static_cast<std::int64_t>(
      static_cast<double>(widest.block_bytes * tightest.num_blocks) /
      static_cast<double>(std::max<std::int64_t>(1, tightest.capacity_tokens)));
}

// Prints the table row of a plan and adds its figures to the JSON `row`. `head`: the first columns.
// With overlay the pipeline stage of the smallest capacity represents the plan.
void add_row(const PlanReport& report, const std::string& head, std::int64_t prompt_tokens,
             OrderedJson& row) {
  const bool is_overlaid = std::holds_alternative<ModelPlacement>(report.details);
  const WorkerReport& worker =
      is_overlaid ? *std::ranges::min_element(report.workers, {}, &WorkerReport::capacity_tokens)
                  : report.workers.front();
  const Waste waste = waste_of(report);
  const std::int64_t token_bytes = bytes_per_token(report, worker);
  const std::int64_t resend_tokens = std::max<std::int64_t>(
      resend_hit_tokens(report.hit_step_tokens, prompt_tokens) - report.replayed_tokens, 0);
  row["block_size"] = report.aligned.block_size;
  row["num_blocks"] = worker.num_blocks;
  row["capacity_tokens"] = worker.capacity_tokens;
  row["max_concurrency"] = worker.max_concurrency;
  row["bytes_per_token"] = token_bytes;
  row["resend_hit_tokens"] = resend_tokens;
  fmt::print("{}{:>8}{:>9}{:>12}{:>12}{:>8.2f} {:>9}{:>9}{:>9}{:>8}\n", head,
             with_commas(report.aligned.block_size), with_commas(worker.num_blocks),
             with_commas(worker.capacity_tokens), waste.older, worker.max_concurrency,
             with_commas(token_bytes), waste.padding, waste.empty,
             percent_text(resend_tokens, prompt_tokens));
}

// Plans one model in every combination. A refusal is a row; errors are options that no combination
// can have.
Result<void> compare_model(const std::string& name, const CapacityCommand& command,
                           Comparison& comparison) {
  LS_ASSIGN_OR_RETURN(const auto model, find_model(name));
  if (model.layers.empty()) {
    fmt::print("{:<26}no layer keeps a cache\n", model.name);
    comparison.rows.push_back({{"model", model.name}, {"refused", "no layer keeps a cache"}});
    return {};
  }
  // A copy, because the loops overwrite the three options that vary.
  LayoutArguments a = command.arguments;
  for (const std::string& dtype : command.kv_dtypes)
    for (const std::string& mode : command.modes)
      for (std::int64_t pack : command.packs) {
        a.kv_dtype = dtype;
        a.mamba_cache_mode = mode;
        a.plan.attn_pack = pack;
        LS_ASSIGN_OR_RETURN(const auto options, plan_options(a, model));
        const std::string head =
            fmt::format("{:<26}{:<8}{:<6}{:>5}", model.name, dtype.substr(0, 7), mode, pack);
        const auto report = make_plan_report(model, options, a.engine, a.layout);
        OrderedJson& row = comparison.rows.emplace_back(OrderedJson{
            {"model", model.name}, {"kv_dtype", dtype}, {"mode", mode}, {"pack", pack}});
        if (!report || std::ranges::all_of(report->workers, [](const WorkerReport& worker) {
              return worker.num_blocks == 0;
            })) {
          row["refused"] = report ? "keeps no cache" : report.error().message;
          fmt::print("{}  {}\n", head, row["refused"].get<std::string>());
          continue;
        }
        add_row(*report, head, command.prompt_tokens, row);
        for (const std::string& warning : plan_warnings(a, model, options, report->hit_step_tokens))
          comparison.warnings.insert(fmt::format("{}: {}", model.name, warning));
      }
  for (const std::string& assumption : model.assumptions)
    fmt::print("  assumed from the config.json: {}\n", assumption);
  return {};
}

Result<int> capacity(CapacityCommand command) {
  for (std::string& model : command.models)
    LS_RETURN_IF_ERROR(take_engine_model(model, command.from));
  // Only the error is of interest here: an unknown release is refused before the table's head is
  // printed.
  LS_RETURN_IF_ERROR(is_placed(command.arguments));
  Comparison comparison;
  fmt::print("Planned by the rules of {}.\n\n", command.arguments.engine);
  print_head();
  for (const std::string& name : command.models.empty() ? model_names() : command.models)
    LS_RETURN_IF_ERROR(compare_model(name, command, comparison));
  fmt::print(
      "\ntokens: per block. capacity: num_blocks / blocks per request * max_model_len. older: "
      "num_blocks // all\ngroups * smallest block size, which is wrong with state groups and "
      "windows. padding and empty: share of\nthe blocks of one request of max_model_len; empty "
      "counts tensors and pack positions without a layer.\nresend: prefix hit of a second request "
      "with the same prompt of {} tokens.\n",
      with_commas(command.prompt_tokens));
  for (const std::string& warning : comparison.warnings) fmt::print("warning: {}\n", warning);
  if (!command.json_path.empty())
    LS_RETURN_IF_ERROR(
        write_output(command.json_path, json_text({{"engine", command.arguments.engine},
                                                   {"prompt_tokens", command.prompt_tokens},
                                                   {"models", comparison.rows},
                                                   {"warnings", comparison.warnings}})));
  return kExitAgreed;
}

}  // namespace

void add_capacity_command(CLI::App& app, int& exit_code) {
  auto command = std::make_shared<CapacityCommand>();
  CLI::App* sub = app.add_subcommand(
      "capacity", "Compare the cache capacity of models, modes, packings and dtypes");
  sub->add_option("models", command->models,
                  "catalogue names or model files (the whole catalogue)");
  sub->add_option("--kv-dtype", command->kv_dtypes, "cache dtypes, separated by commas")
      ->delimiter(',');
  sub->add_option("--mamba-cache-mode", command->modes, "modes, separated by commas")
      ->delimiter(',');
  sub->add_option("--attn-pack", command->packs, "attention layers per page, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{4096}));
  sub->add_option("--prompt-tokens", command->prompt_tokens, "prompt tokens of the resend column")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  declare_from(*sub, command->from);
  add_layout_options(*sub, command->arguments);
  declare_output(*sub, "--json", command->json_path, "the comparison as JSON");
  sub->callback([command, &exit_code] { exit_code = exit_status(capacity(*command)); });
}

}  // namespace lockstep
