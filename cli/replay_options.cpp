#include "cli/replay_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <vector>

namespace lockstep {
namespace {

void declare_switch(CLI::App& command, const RunField& field, GivenRun& out) {
  const auto add = [&](std::string_view flag, std::string_view help, bool sets) {
    if (flag.empty()) return;
    command
        .add_flag_callback(
            std::string(flag),
            [&out, &field, sets] {
              field.set_number(out.spec, sets ? 1 : 0);
              out.add(field);
            },
            std::string(help))
        ->group(std::string(field.group));
  };
  add(field.flag, field.help, true);
  add(field.no_flag, field.no_help, false);
}

CLI::Option* declare_value(CLI::App& command, const RunField& field, GivenRun& out) {
  const std::string flag(field.flag);
  const std::string help = fmt::format(fmt::runtime(field.help), value_text(field, RunSpec{}));
  switch (field.kind) {
    case FieldKind::number: {
      CLI::Range range(field.at_least, field.at_most);
      range.description("");  // the help says what a value means, an error what it may be
      return command
          .add_option_function<std::int64_t>(
              flag,
              [&out, &field](std::int64_t number) {
                field.set_number(out.spec, number);
                out.add(field);
              },
              help)
          ->check(range)
          ->type_name("N");
    }
    case FieldKind::uint64:
      return command.add_option_function<std::uint64_t>(
          flag,
          [&out, &field](std::uint64_t number) {
            field.set_uint64(out.spec, number);
            out.add(field);
          },
          help);
    default:
      return command.add_option_function<std::string>(
          flag,
          [&out, &field](const std::string& text) {
            if (!field.set_text(out.spec, text) && out.refused.empty())
              out.refused = fmt::format("{} {}: expected {}", field.flag, text, field.expected);
            out.add(field);
          },
          help);
  }
}

void declare_field(CLI::App& command, const RunField& field, GivenRun& out) {
  if (field.kind == FieldKind::flag) return declare_switch(command, field, out);
  if (field.flag.empty()) return;
  CLI::Option* option = declare_value(command, field, out);
  if (!field.choices.empty())
    option->check(
        CLI::IsMember(std::vector<std::string>(field.choices.begin(), field.choices.end())));
  if (field.value_is_optional) option->expected(0, 1);
  if (out.has(field.name))
    option->default_str(value_text(field, out.spec));
  else if (!field.default_text.empty())
    option->default_str(std::string(field.default_text));
  if (!field.value_name.empty()) option->type_name(std::string(field.value_name));
  option->group(std::string(field.group));
}

}  // namespace

ReplayRequest request_of(const ReplayOptions& options) {
  return {.file = options.file,
          .run = options.run,
          .tells_cache_events = !options.cache_events_path.empty(),
          .draws = !options.report_path.empty(),
          .saves = !options.save_dir.empty()};
}

void declare_replay_options(CLI::App& command, ReplayOptions& o) {
  command
      .add_option("FILE", o.file,
                  "request trace, Mooncake JSONL, Azure CSV, benchmark, recording or saved case")
      ->required();
  for (const RunField& field : run_fields()) declare_field(command, field, o.run);
  const std::string group = "Output";
  command.add_option("--report", o.report_path, "one HTML page that draws the run")->group(group);
  command.add_option("--json", o.json_path, "the result as JSON")->group(group);
  command
      .add_option("--hidden-states", o.hidden_states_dir,
                  "a folder for the hidden states of finished requests, a file each, whole as soon "
                  "as it is there (docs/formats.md)")
      ->type_name("DIR")
      ->group(group);
  command
      .add_option("--cache-events", o.cache_events_path,
                  "JSON lines: blocks stored in and removed from the prefix cache, step by step")
      ->group(group);
  CLI::Option* save =
      command.add_option("--save", o.save_dir, "folder that a divergence is saved to, as a case")
          ->group(group);
  command.add_flag("--shrink", o.shrink, "make the saved case as small as it goes, beside it")
      ->needs(save)
      ->group(group);
}

}  // namespace lockstep
