// lockstep layout --model NAME|FILE: how does an engine lay out a model's cache?
// lockstep model CONFIG --from vllm:DIR --out FILE: which layers does an installed engine build?
//
// `layout` prints the plan that an engine derives before the first token: groups, tensors, strides,
// capacity, and the proof that no two layers overlap (sim/report/plan_report.h). `capacity`
// compares many plans in one row each. `model` writes the layers as a model file, so that later
// plans need no engine.
//
// Not checked: kernels. The layout is derived, not executed.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "base/output_file.h"
#include "cli/commands.h"
#include "cli/options/engine_model.h"
#include "cli/options/layout_options.h"
#include "cli/options/output_option.h"
#include "cli/output/terminal.h"
#include "sim/report/plan_report.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

struct LayoutCommand {
  std::string model;
  std::string from;
  LayoutArguments arguments;
  bool map = false;  // draw a page to scale
  std::string svg_path;
  std::string dot_path;
  std::string json_path;
};

// Returns one layer that stores the hidden states of --hidden-states layers per token, for training
// a draft model; empty: none.
LayerSpecs extra_layers(const LayoutCommand& command, const ModelSpec& model) {
  if (command.arguments.hidden_state_layers == 0) return {};
  return {hidden_state_layer(command.arguments.hidden_state_layers, command.arguments.hidden_size,
                             model.dtype)};
}

// Refuses options of recurrent states that have no effect because the model has no states.
// `capacity` accepts them: it compares models with and without states.
Result<void> check_state_options(const LayoutArguments& a, const ModelSpec& model) {
  if (std::ranges::any_of(model.kinds,
                          [](const LayerKind& kind) { return is_state_kind(kind.spec.kind); }))
    return {};
  const std::pair<bool, std::string_view> options[] = {
      {!a.ssm_dtype.empty(), "--ssm-dtype"},
      {a.mamba_cache_mode != "none", "--mamba-cache-mode"},
      {a.plan.mamba_block_size.has_value(), "--mamba-block-size"}};
  for (const auto& [is_given, name] : options)
    if (is_given) return fail("{} needs a --model with states; {} has none", name, model.name);
  return {};
}

// Plans the model. Errors: what the engine's core or its worker refuses at startup.
Result<PlanReport> report_of(const LayoutCommand& command, const ModelSpec& model) {
  const LayoutArguments& a = command.arguments;
  LS_ASSIGN_OR_RETURN(const auto options, plan_options(a, model));
  LS_ASSIGN_OR_RETURN(auto report, make_plan_report(model, options, a.engine, a.layout,
                                                    extra_layers(command, model)));
  const auto warnings = plan_warnings(a, model, options, report.hit_step_tokens);
  report.warnings.insert(report.warnings.end(), warnings.begin(), warnings.end());
  return report;
}

struct ModelCommand {
  std::string config, from, path;
};

Result<int> write_model(const ModelCommand& command) {
  LS_ASSIGN_OR_RETURN(const std::string text, engine_model(command.config, command.from));
  LS_RETURN_IF_ERROR(write_output(command.path, text));
  // Parsed again for the counts of the message. engine_model() has refused a text that is not a
  // model file.
  LS_ASSIGN_OR_RETURN(const ModelSpec model, model_from_text(text, command.path));
  fmt::print("{}: {} layers with a cache, {} kinds, as {} builds them\n", command.path,
             model.layers.size(), model.kinds.size(), command.from);
  return kExitAgreed;
}

Result<int> layout(LayoutCommand command) {
  LS_RETURN_IF_ERROR(take_engine_model(command.model, command.from));
  LS_ASSIGN_OR_RETURN(const auto model, find_model(command.model));
  LS_RETURN_IF_ERROR(check_state_options(command.arguments, model));
  LS_ASSIGN_OR_RETURN(const auto report, report_of(command, model));
  fmt::print("{}", plan_table(report));
  for (const std::string& assumption : model.assumptions)
    fmt::print("  assumed from the config.json: {}\n", assumption);
  if (command.map) fmt::print("\n{}", plan_map(report));
  if (!command.svg_path.empty())
    LS_RETURN_IF_ERROR(write_output(command.svg_path, plan_svg(report)));
  if (!command.dot_path.empty())
    LS_RETURN_IF_ERROR(write_output(command.dot_path, plan_dot(report)));
  if (!command.json_path.empty())
    LS_RETURN_IF_ERROR(write_output(command.json_path, plan_to_json(report)));
  return kExitAgreed;
}

}  // namespace

void add_layout_command(CLI::App& app, int& exit_code) {
  auto command = std::make_shared<LayoutCommand>();
  CLI::App* sub = app.add_subcommand(
      "layout", "Show the memory plan of a model: groups, tensors, strides, capacity");
  LayoutArguments& a = command->arguments;
  sub->add_option("--model", command->model, "catalogue name, model file or config.json")
      ->required();
  declare_from(*sub, command->from);
  sub->add_option("--kv-dtype", a.kv_dtype, "auto (the checkpoint's), bf16, fp8, nvfp4, ...");
  sub->add_option("--mamba-cache-mode", a.mamba_cache_mode, "none, align or all");
  sub->add_option("--attn-pack", a.plan.attn_pack, "attention layers that share one page")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{4096}));
  add_layout_options(*sub, a);
  sub->add_flag("--map", command->map, "draw a page to scale");
  declare_output(*sub, "--svg", command->svg_path, "page map as SVG");
  declare_output(*sub, "--dot", command->dot_path, "graph of groups, layers and tensors as DOT");
  declare_output(*sub, "--json", command->json_path, "the plan as JSON");
  sub->callback([command, &exit_code] { exit_code = exit_status(layout(*command)); });
}

void add_model_command(CLI::App& app, int& exit_code) {
  auto command = std::make_shared<ModelCommand>();
  CLI::App* sub = app.add_subcommand(
      "model", "Write a model file with the layers that an installed engine builds");
  sub->add_option("CONFIG", command->config, "a config.json or its folder")->required();
  declare_from(*sub, command->from);
  sub->get_option("--from")->required();
  declare_output(*sub, "--out", command->path, "the model file")->required();
  sub->callback([command, &exit_code] { exit_code = exit_status(write_model(*command)); });
}

}  // namespace lockstep
