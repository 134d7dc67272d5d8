// lockstep layout --model NAME|FILE: what an engine works out before the first token.
// lockstep model CONFIG --from vllm:DIR --out FILE: the layers that an engine builds.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "base/output_file.h"
#include "cli/commands.h"
#include "cli/options/engine_model.h"
#include "cli/options/layout_options.h"
#include "cli/options/output_option.h"
#include "cli/output/terminal.h"
#include "sim/report/placement_report.h"
#include "sim/report/plan_report.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

struct LayoutCommand {
  std::string model;
  std::string from;
  LayoutArguments arguments;
  bool map = false;
  std::string svg_path;
  std::string dot_path;
  std::string json_path;
};

LayerSpecs extra_layers(const LayoutCommand& command, const ModelSpec& model) {
  if (command.arguments.hidden_state_layers == 0) return {};
  return {hidden_state_layer(command.arguments.hidden_state_layers, command.arguments.hidden_size,
                             model.dtype)};
}

Result<PlanReport> report_of(const LayoutCommand& command, const ModelSpec& model) {
  LS_ASSIGN_OR_RETURN(const auto options, plan_options(command.arguments, model));
  const auto layout = cache_layout_from_name(command.arguments.layout);
  if (!layout || is_overlaid(*layout))
    return fail(fmt::format("--layout: '{}' is not NHD or HND; --engine vllm-0.33.0 has six orders",
                            command.arguments.layout));
  LS_ASSIGN_OR_RETURN(auto report,
                      make_plan_report(model, options, *layout, extra_layers(command, model)));
  const auto warnings =
      plan_warnings(command.arguments, model, options, report.capacity.front().hit_step_tokens);
  report.plan.warnings.insert(report.plan.warnings.end(), warnings.begin(), warnings.end());
  return report;
}

struct Drawings {
  std::string map, svg, dot, json;
};

Result<int> tell(const LayoutCommand& command, const ModelSpec& model, const std::string& table,
                 const Drawings& drawn) {
  fmt::print("{}", table);
  for (const std::string& assumption : model.assumptions)
    fmt::print("  assumed from the config.json: {}\n", assumption);
  if (command.map) fmt::print("\n{}", drawn.map);
  for (const auto& [path, text] :
       {std::pair{command.svg_path, drawn.svg}, std::pair{command.dot_path, drawn.dot},
        std::pair{command.json_path, drawn.json}})
    if (!path.empty()) LS_RETURN_IF_ERROR(write_output(path, text));
  return kExitAgreed;
}

Result<int> placed(const LayoutCommand& command, const ModelSpec& model) {
  LS_ASSIGN_OR_RETURN(const auto options, plan_options(command.arguments, model));
  LS_ASSIGN_OR_RETURN(
      auto report, make_placement_report(model, options, command.arguments.engine,
                                         command.arguments.layout, extra_layers(command, model)));
  report.warnings =
      plan_warnings(command.arguments, model, options, hit_step_tokens(report.placed));
  return tell(command, model, placement_table(report),
              {placement_map(report), placement_svg(report), placement_dot(report),
               placement_to_json(report)});
}

struct ModelCommand {
  std::string config, from, path;
};

Result<int> write_model(const ModelCommand& command) {
  LS_ASSIGN_OR_RETURN(const std::string text, engine_model(command.config, command.from));
  LS_RETURN_IF_ERROR(write_output(command.path, text));
  LS_ASSIGN_OR_RETURN(const ModelSpec model, model_from_text(text, command.path));
  fmt::print("{}: {} layers with a cache, {} kinds, as {} builds them\n", command.path,
             model.layers.size(), model.kinds.size(), command.from);
  return kExitAgreed;
}

Result<int> layout(LayoutCommand command) {
  LS_RETURN_IF_ERROR(take_engine_model(command.model, command.from));
  LS_ASSIGN_OR_RETURN(const bool overlays, is_placed(command.arguments));
  LS_ASSIGN_OR_RETURN(const auto model, find_model(command.model));
  if (model.layers.empty() && command.arguments.hidden_state_layers == 0) {
    fmt::print("{}: an encoder; its layers keep no cache\n", model.name);
    return kExitAgreed;
  }
  if (overlays) return placed(command, model);
  LS_ASSIGN_OR_RETURN(const auto report, report_of(command, model));
  return tell(command, model, plan_table(report),
              {plan_map(report), plan_svg(report), plan_dot(report), plan_to_json(report)});
}

}  // namespace

void add_layout_command(CLI::App& app, int& exit_code) {
  auto command = std::make_shared<LayoutCommand>();
  CLI::App* sub = app.add_subcommand(
      "layout", "Show the memory plan of a model: groups, tensors, strides, capacity");
  LayoutArguments& a = command->arguments;
  sub->add_option("--model", command->model,
                  "a name of the catalogue, a model file or a config.json")
      ->required();
  declare_from(*sub, command->from);
  sub->add_option("--kv-dtype", a.kv_dtype, "auto (as the checkpoint asks), bf16, fp8, nvfp4, ...");
  sub->add_option("--mamba-cache-mode", a.mamba_cache_mode, "none, align or all");
  sub->add_option("--attn-pack", a.attn_pack, "attention layers that share one page")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{4096}));
  add_layout_options(*sub, a);
  sub->add_flag("--map", command->map, "draw a page to scale");
  declare_output(*sub, "--svg", command->svg_path, "write the drawing as a picture");
  declare_output(*sub, "--dot", command->dot_path, "write the graph of groups, layers, tensors");
  declare_output(*sub, "--json", command->json_path, "write everything");
  sub->callback([command, &exit_code] { exit_code = exit_status(layout(*command)); });
}

void add_model_command(CLI::App& app, int& exit_code) {
  auto command = std::make_shared<ModelCommand>();
  CLI::App* sub = app.add_subcommand(
      "model", "Write a model file of the layers that an installed engine builds");
  sub->add_option("CONFIG", command->config, "a config.json or its folder")->required();
  declare_from(*sub, command->from);
  sub->get_option("--from")->required();
  declare_output(*sub, "--out", command->path, "the model file")->required();
  sub->callback([command, &exit_code] { exit_code = exit_status(write_model(*command)); });
}

}  // namespace lockstep
