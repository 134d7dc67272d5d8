#include "cli/options/replay_options.h"
#include "cli/options/kernels_option.h"
#include "cli/options/output_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/data_root.h"
#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "reference/plan/capacity.h"
#include "sim/step/backend_config.h"

namespace lockstep {
namespace {

// Declares a flag as one or two options: `flag` sets it, `no_flag` resets it. Both mark it as
// given, so that an input that already sets it can refuse it.
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

// Declares an option with a value. A text that the field does not accept is stored in
// `out.refused`, which prepare_replay() reports: the first one is kept.
CLI::Option* declare_value(CLI::App& command, const RunField& field, GivenRun& out) {
  const std::string flag(field.flag);
  const std::string help = fmt::format(
      fmt::runtime(field.help), value_text(field, out.has(field.name) ? out.spec : RunSpec{}));
  switch (field.kind) {
    case FieldKind::number:
      // help: meaning of the value; error message: its range
      return command
          .add_option_function<std::int64_t>(
              flag,
              [&out, &field](std::int64_t number) {
                field.set_number(out.spec, number);
                out.add(field);
              },
              help)
          ->check(CLI::Range(field.at_least, field.at_most).description(""))
          ->type_name("N");
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
  // A command may preset a field before it declares the options; the help then shows that value as
  // the default.
  if (out.has(field.name) && !field.default_text.empty())
    option->default_str(value_text(field, out.spec));
  else if (!field.default_text.empty())
    option->default_str(std::string(field.default_text));
  if (!field.value_name.empty()) option->type_name(std::string(field.value_name));
  option->group(std::string(field.group));
}

// Makes a backend of this program. The check modes and delayed streams need the CPU executor, so
// with one of them "auto" never chooses the GPU.
Result<std::unique_ptr<Backend>> make_backend(std::string_view name, const BackendConfig& config) {
  if (name == "none") {
    if (config.check != CheckMode::fast || !config.mutant.empty() || config.num_streams > 1 ||
        config.delay_streams || config.max_cudagraph_capture_size > 0 ||
        config.numbers != Numbers::words)
      return fail(
          "--check, --mutant, --streams, --delay-streams, --graphs and --numbers need a backend; "
          "--backend none runs only the model");
    return std::unique_ptr<Backend>();
  }
  if (name != "auto" && name != "cuda" && name != "simt")
    return fail(
        "--backend {}: expected auto, cuda, simt, none, your kernels (FILE.so), vllm[:DIR] "
        "or worker:COMMAND",
        name);
  // With one stream there is no order to change.
  if (config.delay_streams && config.num_streams < 2)
    return fail(
        "--delay-streams reorders operations of different streams; give --streams 2 or more");
  const bool on_cpu = config.check != CheckMode::fast || config.delay_streams;
  if (name == "cuda" || (name == "auto" && !on_cpu && gpu_available()))
    return make_gpu_backend(config);
  return make_simt_backend(config);
}

// Sets the faults of the run: a given list, or one generated from a seed. A seed gives at most one
// fault per four requests (but up to 6 for few, and never more than 1,000), within about two steps
// per request. A fault that shrinks the pool leaves the blocks of one longest request.
Result<void> plan_faults(PreparedReplay& prepared) {
  RunSpec& run = prepared.run;
  const std::string& given = run.recipe.faults;
  if (given.empty()) return {};
  // A text that is a whole number is a seed; a list of faults never is.
  std::uint64_t seed = 0;
  const char* const end = given.data() + given.size();
  const auto [behind, error] = std::from_chars(given.data(), end, seed);
  if (error == std::errc() && behind == end) {
    SeededChoices choices(seed);
    const FaultRoom room{
        .steps = std::max<std::int64_t>(32, 2 * prepared.num_records),
        .faults_max = std::clamp<std::int64_t>(prepared.num_records / 4, 6, 1'000),
        .blocks_of_request = planned_blocks_of_request(run.engine, run.cache.groups)};
    run.faults = faults_of(draw_faults(choices, room));
    return {};
  }
  const Result<FaultPlan> plan = fault_plan_from_text(given);
  if (!plan) return fail("--faults: {}", plan.error().message);
  run.faults = faults_of(*plan);
  return {};
}

}  // namespace

CLI::Validator sample_by_name() {
  return CLI::Validator(
      [](std::string& file) {
        std::error_code error;
        const auto sample = data_root() / "traces" / "samples" / file;
        if (!std::filesystem::exists(file, error) &&
            std::filesystem::is_regular_file(sample, error))
          file = sample.string();
        return std::string();
      },
      "");
}

std::string given_for_one_engine(const ReplayOptions& options) {
  const std::pair<bool, std::string_view> given[] = {
      {!options.decisions.decisions.empty(), "--decisions"},
      {options.decisions.conforms, "--conform"},
      {options.decisions.audit_policy != "on", "--audit-policy"},
      {!options.worker.runner.empty(), "--runner"},
      {!options.worker.states.empty(), "--states"},
      {!options.worker.plant.empty(), "--plant"},
      {!options.perfetto_path.empty(), "--perfetto"},
      {!options.cache_events_path.empty(), "--cache-events"},
      {!options.hidden_states_dir.empty(), "--hidden-states"},
      {!options.hashes_path.empty(), "--hashes"},
      {!options.facts_path.empty(), "--save-facts"}};
  for (const auto& [is_given, name] : given)
    if (is_given) return std::string(name);
  return {};
}

ReplayRequest request_of(const ReplayOptions& options) {
  ImportOptions import = options.import;
  import.shards = options.shards;
  return {.file = options.file,
          .run = options.run,
          .import = std::move(import),
          .tells_cache_events = !options.cache_events_path.empty(),
          .num_threads = options.jobs,
          .draws = !options.report_path.empty() || !options.perfetto_path.empty(),
          .saves = !options.save_dir.empty()};
}

void declare_import(CLI::App& command, ImportOptions& options) {
  command
      .add_option_function<std::string>(
          "--import",
          [&options](const std::string& text) {
            auto given = import_options_from_text(text);
            if (!given) throw CLI::ValidationError("--import", given.error().message);
            options = *given;
          },
          "how to read another tool's trace: block=N (tokens per id), time=ms|s, "
          "turns=whole|added, zero=one|skip|refuse (requests without output), arrival=closed (all "
          "at once), torn=skip (a truncated last row)")
      ->type_name("LIST");
}

void declare_replay_options(CLI::App& command, ReplayOptions& o) {
  command
      .add_option_function<std::vector<std::string>>(
          "FILE",
          [&o](const std::vector<std::string>& files) {
            o.file = files.front();
            o.shards.assign(files.begin() + 1, files.end());
          },
          "request trace, trace of another tool (several files: its shards, in order), benchmark, "
          "recording or saved case; or the name of a bundled sample")
      ->required()
      ->transform(sample_by_name());
  declare_import(command, o.import);
  for (const RunField& field : run_fields()) declare_field(command, field, o.run);
  declare_decisions(command, o.decisions);
  declare_checks(command, o.decisions);
  declare_worker(command, o.worker);
  declare_kernels(command,
                  [&o](const std::string& backend) { o.run.set_text("backend", backend); });
  o.jobs = static_cast<std::int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  command.add_option("--jobs", o.jobs, "threads of a replay with pages; no effect on the result")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->group("Run");
  const std::string group = "Output";
  declare_output(command, "--report", o.report_path, "HTML page of the run")->group(group);
  declare_output(command, "--perfetto", o.perfetto_path,
                 "trace for ui.perfetto.dev: a track per request, steps, hits, blocks")
      ->group(group);
  declare_reports(command, o.reports, "the result as JSON", group);
  declare_output_folder(
      command, "--hidden-states", o.hidden_states_dir,
      "existing folder for the hidden states of finished requests, one file each (docs/formats.md)")
      ->group(group);
  declare_output(command, "--cache-events", o.cache_events_path,
                 "JSON lines: blocks stored in and removed from the prefix cache, step by step")
      ->group(group);
  declare_output(command, "--hashes", o.hashes_path,
                 "hashes of each step, for `lockstep same` (docs/formats.md)")
      ->group(group);
  declare_output(
      command, "--save-facts", o.facts_path,
      "the recording with what the engine's own worker did, for `lockstep audit` (docs/formats.md)")
      ->group(group);
  // --shrink writes into the folder of --save, so it requires the option.
  CLI::Option* save =
      declare_output_folder(command, "--save", o.save_dir, "folder for the case of a failing run")
          ->group(group);
  command.add_flag("--shrink", o.shrink, "shrink the saved case, into the same folder")
      ->needs(save)
      ->group(group);
  command.add_option("--shrink-seconds", o.shrink_seconds, "time limit for shrinking; 0: none")
      ->needs(save)
      ->check(CLI::NonNegativeNumber)
      ->type_name("S")
      ->group(group);
}

// Steps between two reports of all block tables by another engine, as in recordings of vLLM: whole
// tables are large, and every step already reports its changes. --conform compares tables in every
// step, and a host tier stores the blocks that they name.
constexpr std::int64_t kStepsPerTableShown = 8;

BackendFactory replay_backend(std::string name) {
  if (is_engine_worker(name)) return worker_factory(name, {});
  if (is_user_kernels(name)) return kernels_factory(name);
  return [name = std::move(name)](const BackendConfig& own) { return make_backend(name, own); };
}

Result<OpenReplay> open_replay(ReplayRequest request,
                               const std::shared_ptr<ForeignEngines>& engines,
                               const BackendOf& backend_of, bool conforms, AuditedRules rules) {
  request.other_engine = engines != nullptr;
  LS_ASSIGN_OR_RETURN(auto prepared, prepare_replay(request));
  OpenReplay replay{std::move(prepared), nullptr, {}, nullptr};
  LS_RETURN_IF_ERROR(plan_faults(replay));
  // Planned before the session opens, and kept in `run` so that a saved case repeats them.
  replay.parts.faults = replay.run.faults;
  if (backend_of) {
    LS_ASSIGN_OR_RETURN(replay.parts.backend, backend_of(replay));
  } else {
    replay.parts.backend = replay_backend(replay.run.backend);
  }
  const bool reads_tables = conforms || replay.config.connector.has(ConnectorKind::host);
  if (engines != nullptr)
    replay.parts.decisions = decisions_of(engines, reads_tables ? 1 : kStepsPerTableShown);
  if (conforms && replay.config.data_parallel.dp_size > 1)
    return fail("--conform compares the model with one engine, not with data parallel ranks");
  const bool has_connector =
      !replay.config.connector.parts.empty() || replay.parts.clients->connector() != nullptr;
  // Hits with a connector are not the cache's own, and another engine's are not explained by the
  // model.
  const bool audits =
      engines != nullptr || (RunAudit::counts_hits_of(replay.config) && !has_connector);
  // Their recorders are between the loop and the workload, so they see what the engine receives.
  if (audits)
    replay.parts.attach = [&replay, conforms](std::int32_t, Workload* workload) {
      RunAudit& audit = *replay.audits.emplace_back(std::make_unique<RunAudit>(*workload));
      if (!conforms) return Onlooker{.workload = &audit.workload(), .observer = &audit};
      replay.conforming = std::make_unique<ConformingRun>(audit.workload());
      return Onlooker{.workload = &replay.conforming->workload(),
                      .observer = replay.conforming.get()};
    };
  auto session = Session::open(replay.config, std::move(replay.parts));
  if (!session) return fail("{}: {}", request.file, session.error().message);
  replay.session = std::move(*session);
  const AuditScope scope = engines != nullptr ? scope_of(*engines) : AuditScope::hits_only;
  for (std::size_t i = 0; i < replay.audits.size(); ++i)
    replay.audits[i]->open(replay.config, *replay.session->engines()[i].decisions, scope, rules);
  if (!conforms) return replay;
  LS_RETURN_IF_ERROR(
      replay.conforming->open(replay.config, *replay.session->engines().front().decisions));
  replay.session->observe(0, *replay.audits.front());
  return replay;
}

}  // namespace lockstep
