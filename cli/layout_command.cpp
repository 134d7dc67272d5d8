// lockstep layout --model NAME|FILE: what an engine works out before the first token.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "base/atomic_file.h"
#include "cli/commands.h"
#include "cli/options/layout_options.h"
#include "cli/terminal.h"
#include "sim/report/placement_report.h"
#include "sim/report/plan_report.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

struct LayoutCommand {
  std::string model;
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
  return make_plan_report(model, options, *layout, extra_layers(command, model));
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
    if (!path.empty()) LS_RETURN_IF_ERROR(write_file_atomically(path, text));
  return kExitAgreed;
}

Result<int> placed(const LayoutCommand& command, const ModelSpec& model) {
  LS_ASSIGN_OR_RETURN(const auto options, plan_options(command.arguments, model));
  LS_ASSIGN_OR_RETURN(
      const auto report,
      make_placement_report(model, options, command.arguments.engine, command.arguments.layout,
                            extra_layers(command, model)));
  return tell(command, model, placement_table(report),
              {placement_map(report), placement_svg(report), placement_dot(report),
               placement_to_json(report)});
}

Result<int> layout(const LayoutCommand& command) {
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
  sub->add_option("--kv-dtype", a.kv_dtype, "auto (as the checkpoint asks), bf16, fp8, nvfp4, ...");
  sub->add_option("--mamba-cache-mode", a.mamba_cache_mode, "none, align or all");
  sub->add_option("--attn-pack", a.attn_pack, "attention layers that share one page")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{4096}));
  add_layout_options(*sub, a);
  sub->add_flag("--map", command->map, "draw a page to scale");
  sub->add_option("--svg", command->svg_path, "write the drawing as a picture");
  sub->add_option("--dot", command->dot_path, "write the graph of groups, layers and tensors");
  sub->add_option("--json", command->json_path, "write everything");
  sub->callback([command, &exit_code] { exit_code = exit_status(layout(*command)); });
}

}  // namespace lockstep
