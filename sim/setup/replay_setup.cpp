#include "sim/setup/replay_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/number_text.h"
#include "reference/plan/limits.h"
#include "reference/plan/model_spec.h"
#include "sim/connectors/connect.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"
#include "sim/step/backend_config.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

// Reads the trace up to its limit_requests-th request; 0: all of it. Events after that request,
// such as aborts of earlier requests, are also cut off.
Result<void> read_trace(const ReplayRequest& request, ReplayInput& input) {
  LS_ASSIGN_OR_RETURN(const auto reader, open_trace(request.file, input.format, request.import));
  const std::int64_t limit = request.run.spec.recipe.limit_requests;
  auto trace = std::make_shared<Trace>();
  trace->header = reader->header();
  TraceRecord record;
  for (std::int64_t requests = 0; limit == 0 || requests < limit;) {
    LS_ASSIGN_OR_RETURN(const bool more, reader->next(record));
    if (!more) break;
    if (std::holds_alternative<TraceRequest>(record)) ++requests;
    trace->records.push_back(std::move(record));
  }
  // A trace of Lockstep may be empty on purpose.
  if (trace->records.empty() && input.format >= FileFormat::mooncake)
    return fail("{}: found no request; expected at least one", request.file);
  input.assumed = reader->assumed();
  input.trace = std::move(trace);
  return {};
}

// Stores a parsed file, or returns its error.
template <class T>
Result<void> keep(Result<T> parsed, std::shared_ptr<const T>& kept) {
  if (!parsed) return tl::unexpected(parsed.error());
  kept = std::make_shared<const T>(std::move(*parsed));
  return {};
}

// Reads the file as its format. All formats that are not named here are request traces, this
// project's or imported.
Result<void> parse(const ReplayRequest& request, ReplayInput& input) {
  LS_RETURN_IF_ERROR(check_import(request.file, input.format, request.import));
  switch (input.format) {
    case FileFormat::benchmark:
      LS_RETURN_IF_ERROR(keep(read_benchmark_file(request.file), input.benchmark));
      return keep(read_all(*requests_of(*input.benchmark, request.file)), input.trace);
    case FileFormat::recording:
      return keep(read_recorded_steps(request.file), input.recording);
    case FileFormat::saved_case:
      return keep(read_saved_case(request.file), input.saved);
    default:
      return read_trace(request, input);
  }
}

// Returns the largest sum of prompt and output over the trace's requests, in tokens; 1 without
// requests. Errors: a sum above kTokensMax.
Result<std::int32_t> longest_request(const std::string& file, const Trace& trace) {
  std::int64_t longest = 1;
  for (const TraceRecord& record : trace.records)
    if (const auto* request = std::get_if<TraceRequest>(&record)) {
      const std::int64_t tokens = request->spec.prompt.size() + request->spec.max_tokens;
      if (tokens > kTokensMax)
        return fail("{}: request {} has {} tokens of prompt and output; at most {}", file,
                    request->spec.name, with_commas(tokens), with_commas(kTokensMax));
      longest = std::max(longest, tokens);
    }
  return static_cast<std::int32_t>(longest);
}

// Makes the trace the run's arrivals. REQUIRES: prepared.run is complete, since its seed, drafts
// and step time enter the workload.
void take_trace(std::shared_ptr<const Trace> trace, PreparedReplay& prepared) {
  prepared.num_records = std::ssize(trace->records);
  prepared.trace = std::move(trace);
  prepared.parts.clients = make_trace_workload(prepared.trace, workload_options_of(prepared.run));
}

// Refuses combinations with which the engine does not start. The messages name command line
// options, because a recording's configuration has already started an engine.
Result<void> check_engine(const EngineConfig& engine) {
  LS_RETURN_IF_ERROR(check_step(engine.max_num_batched_tokens, engine.max_num_seqs));
  if (!engine.enable_chunked_prefill && engine.max_num_batched_tokens < engine.max_model_len)
    return fail(
        "--no-chunked-prefill with --max-num-batched-tokens {} below --max-model-len {}: the "
        "longest prompts would never fit into a step",
        engine.max_num_batched_tokens, engine.max_model_len);
  if (engine.long_prefill_token_threshold > engine.max_model_len)
    return fail("--long-prefill-token-threshold {} is more than --max-model-len {}",
                engine.long_prefill_token_threshold, engine.max_model_len);
  return {};
}

// Options that say more about a connector that is not there.
Result<void> check_alone(const GivenRun& given) {
  if (given.has("host_blocks")) return fail("--host-blocks needs a host tier: --connector host");
  if (given.has("transfer_delay_steps"))
    return fail("--transfer-delay needs --connector host, or hisparse");
  for (const char* name : {"load_failed_percent", "kv_load_failure_policy"})
    if (given.has(name))
      return fail("{} needs a connector whose loads may fail: --connector", run_field(name).flag);
  return {};
}

// Before there is a plan: whether the engine may give its connectors several KV cache groups.
// Refused: options that need a connector or another one, several groups that the user insists on
// and a part does not take.
Result<bool> hybrid_groups_of(const GivenRun& given, const RunSpec& run) {
  std::optional<bool> wants;
  if (given.has("disable_hybrid_kv_cache_manager"))
    wants = !run.recipe.disable_hybrid_kv_cache_manager;
  if (!given.has("connector")) {
    LS_RETURN_IF_ERROR(check_alone(given));
    return wants.value_or(true);
  }
  const bool has_host = run.connector.has(ConnectorKind::host);
  if (given.has("host_blocks") && !has_host)
    return fail("--host-blocks needs a host tier: --connector host");
  if (given.has("transfer_delay_steps") && !has_host &&
      !run.connector.has(ConnectorKind::page_workers))
    return fail("--transfer-delay needs a host tier or HiSparse: --connector host, hisparse");
  ConnectorConfig connector;
  static_cast<ConnectorSpec&>(connector) = run.connector;
  if (!run.mutants.empty())
    if (const auto defect = defect_from_name<MultiConnectorDefect>(run.mutants.front()))
      connector.setup_defect = *defect;
  const Result<bool> hybrid = hybrid_groups_of(connector, wants);
  if (!hybrid)
    return fail("--connector {}: {}", connector_parts_text(run.connector.parts),
                hybrid.error().message);
  return hybrid;
}

// Completes the spec with its plan and derives the configuration: the part that all kinds of files
// share. A model of an overlaid layout has already chosen its attention backend with the plan.
Result<void> finish(const ReplayRequest& request, Result<KVCacheConfig> plan,
                    PreparedReplay& prepared) {
  RunSpec& run = prepared.run;
  LS_ASSIGN_OR_RETURN(run.cache, std::move(plan));
  LS_ASSIGN_OR_RETURN(run.engine.engine, engine_named("engine", run.engine.engine));
  const bool is_chosen = !run.recipe.model.empty() && is_overlaid(run.layout);
  if (!request.run.has("attention_backend") && !is_chosen) {
    run.attention_backend = is_engine_worker(run.backend) ? worker_attention_backend(run.cache)
                                                          : attention_backend_for(run.cache);
    if (run.attention_backend == AttentionBackend::any_size)
      prepared.chosen.push_back(
          "attention backend any_size: no shipped one takes blocks this small");
  }
  if (request.run.has("draft_acceptance_percent") && run.engine.num_spec_tokens == 0)
    return fail("--draft-acceptance needs drafts: num_spec_tokens in the trace's engine hints");
  if (request.run.has("short_drafts_percent") &&
      (run.engine.num_spec_tokens == 0 || run.engine.async_scheduling))
    return fail(
        "--short-drafts needs drafts that the engine knows: num_spec_tokens in the trace's engine "
        "hints, and no asynchronous scheduling");
  // A host tier is as large as the pool unless --host-blocks says more.
  if (run.connector.has(ConnectorKind::host) && !request.run.has("host_blocks"))
    run.connector.num_host_blocks = run.cache.num_blocks;
  // Planning may have switched chunked prefill off.
  if (has_cross_attention(run.cache.groups)) LS_RETURN_IF_ERROR(check_engine(run.engine));
  prepared.config = config_of(run);
  return {};
}

// Events carry the engine's own block hashes. Only a run of a trace computes them on request; other
// files must be configured for them. Only the model reports events.
Result<void> check_cache_events(const ReplayRequest& request, const PreparedReplay& prepared) {
  if (!request.tells_cache_events) return {};
  const EngineConfig& engine = prepared.config.engine;
  if (request.other_engine || (prepared.recording && prepared.run.decide == Decides::recording))
    return fail("--cache-events lists the model's events, and here {} decides; {}",
                request.other_engine ? "another engine" : "the recording",
                request.other_engine ? "omit --decisions" : "add --decide model");
  if (engine.hash_algorithm == HashAlgorithm::content)
    return fail(
        "--cache-events needs block hashes of the engine: a trace with --hash-algorithm "
        "sha256_cbor or xxhash_cbor, or a file whose configuration sets it");
  if (!engine.enable_prefix_caching)
    return fail("--cache-events with prefix caching off: there would be no event");
  return {};
}

// Returns true if the trace's hints set the option.
bool says(const std::vector<std::string>& hinted, std::string_view name) {
  return std::ranges::find(hinted, name) != hinted.end();
}

// The release's defaults for options that are not set. A trace's hints describe the engine that it
// was made for, so they do not apply to a model named on the command line.
void take_serving_defaults(const GivenRun& given, const std::vector<std::string>& hinted,
                           PreparedReplay& prepared) {
  RunSpec& run = prepared.run;
  const ServingDefaults defaults = serving_defaults(run.engine);
  RunSpec server = run;
  server.engine.async_scheduling = defaults.async_scheduling;
  server.engine.scheduler_reserve_full_isl = defaults.scheduler_reserve_full_isl;
  server.engine.prefix_cache_retention_interval = defaults.prefix_cache_retention_interval;
  for (const char* name :
       {"async_scheduling", "scheduler_reserve_full_isl", "prefix_cache_retention_interval"}) {
    const RunField& field = run_field(name);
    const char* said_by = "release";
    if (given.has(name))
      said_by = "command line";
    else if (!given.has("model") && says(hinted, name))
      said_by = "trace";
    else
      field.copy(server, run);
    prepared.served.push_back({.name = name,
                               .value = value_text(field, run),
                               .by_default = value_text(field, server),
                               .said_by = said_by});
  }
}

// Layers come from --model or from single options, never from both: a mixture would be neither
// model. Options of one kind that are given with the other are refused first.
Result<void> resolve_trace(const ReplayRequest& request, const ReplayInput& input,
                           PreparedReplay& prepared) {
  const GivenRun& given = request.run;
  RunSpec& run = prepared.run;
  if (const std::string flag = given.first_said_by(kByModel); given.has("model") && !flag.empty())
    return fail("--model {} defines its own layers; omit {}", given.spec.recipe.model, flag);
  for (const char* name : {"mamba_cache_mode", "prefill_checkpoints"}) {
    const RunField& field = run_field(name);
    if (given.has(name) && !given.has("model"))
      return fail("{} needs a --model with states",
                  field.flag.empty() ? field.no_flag : field.flag);
  }
  if (given.has("layers_per_group") && !given.has("model"))
    return fail("--layers-per-group needs a --model; equal layers are --layers");
  if (given.has("layers_per_group") && given.has("hisparse_host_gib"))
    return fail("--layers-per-group: HiSparse's groups need all of their layers; omit it");
  if (given.has("hisparse_host_gib") && !given.has("model"))
    return fail("--hisparse-host-gib needs a --model with sparse attention");
  if (given.has("hisparse_device_buffer") && !given.has("hisparse_host_gib"))
    return fail("--hisparse-device-buffer needs --hisparse-host-gib");
  prepared.chosen = input.assumed;
  CacheWishes wishes{.num_blocks = {},
                     .says_block_size = given.has("block_size"),
                     .as_served = request.as_served,
                     .says_cache_mode = given.has("mamba_cache_mode")};
  std::vector<std::string> hinted;
  if (const auto& hints = input.trace->header.engine) {
    run.engine = hints->options.config;
    hinted = hints->options.given;
    wishes.num_blocks = hints->num_blocks;
  }
  given.apply_to(run);
  if (request.as_served) take_serving_defaults(given, hinted, prepared);
  if (given.has("num_blocks")) wishes.num_blocks = run.cache.num_blocks;
  // Cache events need the engine's hashes; sha256_cbor is reproducible between processes.
  if (request.tells_cache_events && !given.has("hash_algorithm"))
    run.engine.hash_algorithm = HashAlgorithm::sha256_cbor;
  if (!given.has("max_model_len") && !says(hinted, "max_model_len")) {
    LS_ASSIGN_OR_RETURN(run.engine.max_model_len, longest_request(request.file, *input.trace));
    prepared.chosen.push_back(fmt::format("max_model_len {}, the longest request of the trace",
                                          with_commas(run.engine.max_model_len)));
  }
  LS_RETURN_IF_ERROR(check_engine(run.engine));
  LS_ASSIGN_OR_RETURN(wishes.hybrid_groups, hybrid_groups_of(given, run));
  auto plan = plan_replay_cache(run, wishes, prepared.chosen, prepared.served);
  LS_RETURN_IF_ERROR(finish(request, std::move(plan), prepared));
  take_trace(input.trace, prepared);
  return {};
}

// A benchmark states its totals for exactly one configuration, so options of the engine are
// refused.
Result<void> resolve_benchmark(const ReplayRequest& request, const ReplayInput& input,
                               PreparedReplay& prepared) {
  const std::string flag = request.run.first_said_by(kByRecording);
  if (!flag.empty())
    return fail("{}: the benchmark has its own configuration; omit {}", request.file, flag);
  const BenchmarkFile& benchmark = *input.benchmark;
  prepared.totals = benchmark.totals;
  request.run.apply_to(prepared.run);
  prepared.run.engine = benchmark.options.config;
  auto plan = plan_for_groups(benchmark.groups, benchmark.num_blocks);
  LS_RETURN_IF_ERROR(finish(request, std::move(plan), prepared));
  take_trace(input.trace, prepared);
  return {};
}

// Returns why this run cannot follow the recording's decisions; empty: it can. With a backend,
// memory adds its own requirements.
std::string why_not_followed(const RecordingHeader& header, const PreparedReplay& prepared) {
  RunTraits traits = {RunTrait::other_engine};
  traits.add_if(header.connector.has_value(), RunTrait::connector);
  traits.add_if(prepared.run.backend != "none", RunTrait::backend);
  const RunFacts facts = facts_of(prepared.config).with(traits);
  const auto sound =
      prepared.run.backend == "none" ? supported(facts) : supported_with_memory(facts);
  return sound ? std::string() : sound.error().message;
}

// Sets what decides: another engine, the recording, or the model. The recording is the default. The
// model decides on request, or if the recording cannot be followed; the latter is an error after an
// explicit --decide recording.
Result<void> take_decider(const ReplayRequest& request, const RecordingHeader& header,
                          PreparedReplay& prepared) {
  Decides& decide = prepared.run.decide;
  const bool is_given = request.run.has("decide");
  if (request.other_engine || (is_given && decide == Decides::model)) {
    decide = Decides::model;
    if (request.other_engine) return {};
    return check_profile(request.file, header.options.config.engine);
  }
  decide = Decides::recording;
  const std::string why_not = why_not_followed(header, prepared);
  if (why_not.empty()) return {};
  if (is_given) return fail("--decide recording: " + why_not);
  LS_RETURN_IF_ERROR(check_profile(request.file, header.options.config.engine));
  decide = Decides::model;
  prepared.chosen.push_back(
      fmt::format("--decide model, as the recorded decisions cannot be followed: {}", why_not));
  return {};
}

// A recording fixes engine, groups and number of blocks. Its errors name line 1, the header.
Result<void> resolve_recording(const ReplayRequest& request, const ReplayInput& input,
                               PreparedReplay& prepared) {
  const std::string flag = request.run.first_said_by(kByRecording);
  if (!flag.empty())
    return fail("{}: the recording has its own configuration; omit {}", request.file, flag);
  const RecordingHeader& header = input.recording->header;
  if (auto sound = check_limits(header.options.config, header.groups, header.num_blocks); !sound)
    return fail("{}:1: {}", request.file, sound.error().message);
  request.run.apply_to(prepared.run);
  prepared.run.engine = header.options.config;
  const std::string named = header.engine.text();
  if (header.engine.name == "vllm" && named != prepared.run.engine.engine)
    prepared.chosen.push_back(
        fmt::format("rules of {}: {} has no profile", prepared.run.engine.engine, named));
  // Decisions of an unknown engine can be followed, but its memory needs the rules of some release.
  if (std::string profile = profile_for_memory(header); profile != prepared.run.engine.engine) {
    prepared.chosen.push_back(
        fmt::format("memory of {}: {} has no profile", profile, prepared.run.engine.engine));
    prepared.run.engine.engine = std::move(profile);
  }
  prepared.run.connector.load_failure_policy = kv_transfer(header, nullptr).kv_load_failure_policy;
  auto plan = plan_for_groups(header.groups, header.num_blocks);
  if (!plan && prepared.run.backend == "none")
    // Without a backend the groups suffice: no tensor is read.
    plan = unplaced_plan(header.groups, header.num_blocks);
  if (!plan)
    return fail("{}:1: {}; --backend none needs no plan", request.file, plan.error().message);
  if (Result<void> done = finish(request, std::move(plan), prepared); !done)
    return fail("{}:1: {}", request.file, done.error().message);
  LS_RETURN_IF_ERROR(take_decider(request, header, prepared));
  prepared.recording = input.recording;
  prepared.cut_off = cut_off_text(input.recording->end);
  if (prepared.run.decide == Decides::model) {
    prepared.parts.clients = make_recording_workload(input.recording, request.file);
    return {};
  }
  auto followed = follow_recording(input.recording, request.file);
  prepared.parts.clients = std::move(followed.clients);
  prepared.parts.decisions = std::move(followed.decisions);
  return {};
}

Result<void> resolve_saved_case(const ReplayRequest& request, const ReplayInput& input,
                                PreparedReplay& prepared) {
  LS_RETURN_IF_ERROR(check_options_of_saved_case(request));
  SavedCase saved = *input.saved;
  LS_RETURN_IF_ERROR(check_profile(request.file, saved.engine.engine));
  if (request.other_engine) saved.decide = Decides::model;
  if (request.run.has("check")) saved.check = request.run.spec.check;
  if (request.run.has("backend") && request.run.spec.backend != "auto")
    saved.backend = request.run.spec.backend;
  if (is_engine_worker(saved.backend))
    saved.attention_backend = worker_attention_backend(saved.cache);
  if (saved.backend == "none" || is_user_kernels(saved.backend))
    saved.check = CheckMode::fast;  // modes check the executor's kernels, and none of them run
  prepared.run = saved;
  prepared.config = config_of(saved);
  if (saved.recording && prepared.config.data_parallel.dp_size > 1)
    return fail("{}: data_parallel_size: a recording is one engine's", request.file);
  prepared.cut_off = cut_off_text(saved);
  prepared.expected = saved.expected;
  prepared.decided_by = saved.decided_by;
  prepared.worked_by = saved.worked_by;
  prepared.num_records = static_cast<std::int64_t>(saved.recording ? saved.recording->steps.size()
                                                                   : saved.trace.records.size());
  prepared.parts = parts_of(saved);
  return {};
}

// The order matters only for a benchmark, which also has a trace.
Result<void> resolve_by_format(const ReplayRequest& request, const ReplayInput& input,
                               PreparedReplay& prepared) {
  if (input.benchmark) return resolve_benchmark(request, input, prepared);
  if (input.recording) return resolve_recording(request, input, prepared);
  if (input.saved) return resolve_saved_case(request, input, prepared);
  return resolve_trace(request, input, prepared);
}

// Keeps the recorded steps up to the end of the run. The shortened recording gets its own end
// marker, so that a replay does not expect further steps.
void keep_recording(const std::string& path, Recording recording, std::int64_t count,
                    SavedCase& saved) {
  const auto steps = static_cast<std::size_t>(count);
  if (steps < recording.steps.size()) {
    recording.steps.resize(steps);
    recording.end = RecordingEnd{.steps = count, .unfinished = {}};
  }
  saved.recording = std::move(recording);
  saved.trace.header.source = {
      .kind = "recording", .name = std::filesystem::path(path).filename().string(), .seed = {}};
}

}  // namespace

Result<void> check_options_of_saved_case(const ReplayRequest& request) {
  std::string flag = request.run.first_said_by(kBySavedCase);
  if (flag.empty() && request.saves) flag = "--save";
  if (flag.empty()) return {};
  return fail("{}: a saved case has its own configuration; omit {}", request.file, flag);
}

Result<ReplayInput> read_input(const ReplayRequest& request) {
  ReplayInput input;
  LS_ASSIGN_OR_RETURN(input.format, detect_format(request.file));
  // Formats from mooncake on are those of other tools, which may split a trace into shards.
  if (!request.import.shards.empty() && input.format < FileFormat::mooncake)
    return fail("{}: a {} is one file; several must be shards of one trace of another tool",
                request.file, name_of(input.format));
  LS_RETURN_IF_ERROR(parse(request, input));
  return input;
}

Result<PreparedReplay> prepare_replay(const ReplayRequest& request) {
  LS_ASSIGN_OR_RETURN(const ReplayInput input, read_input(request));
  return resolve_replay(request, input);
}

Result<PreparedReplay> resolve_replay(ReplayRequest request, const ReplayInput& input) {
  PreparedReplay prepared;
  prepared.format = input.format;
  if (!request.run.refused.empty()) return fail(request.run.refused);
  if (std::string& engine = request.run.spec.engine.engine; request.run.has("engine")) {
    LS_ASSIGN_OR_RETURN(engine, engine_named("--engine", engine));
  }
  prepared.run.backend = "auto";
  prepared.run.check = CheckMode::fast;
  LS_RETURN_IF_ERROR(resolve_by_format(request, input, prepared));
  LockstepConfig& config = prepared.config;
  LS_RETURN_IF_ERROR(check_cache_events(request, prepared));
  config.draw = request.draws;
  config.backend.num_threads = request.num_threads;
  // Host blocks belong to the connector. Without one, only a pair of engines has a staging buffer.
  const bool is_connected =
      !config.connector.parts.empty() || prepared.parts.clients->connector() != nullptr;
  config.backend.num_host_blocks =
      is_connected ? num_host_blocks(config.connector, config.engine, config.backend.plan)
                   : request.staging_blocks;
  if (prepared.run.backend == "none" && !config.backend.parallel.is_whole())
    return fail(
        "--tensor-parallel-size and --pipeline-parallel-size divide memory, and --backend none has "
        "none; decisions do not depend on them");
  if (config.data_parallel.dp_size == 1 && config.data_parallel.enforce_eager)
    return fail("--enforce-eager sets how data parallel ranks pad; also give --data-parallel-size");
  RunTraits more;
  more.add_if(is_connected, RunTrait::connector);
  more.add_if(request.other_engine || prepared.parts.decisions, RunTrait::other_engine);
  more.add_if(request.other_engine, RunTrait::live_engine);
  LS_RETURN_IF_ERROR(check_setup(config, more));
  prepared.parts.connector_seed = prepared.run.seed;
  return prepared;
}

std::string profile_for_memory(const RecordingHeader& header) {
  const std::string& own = header.options.config.engine;
  return find_engine_profile(own) != nullptr ? own : EngineConfig().engine;
}

Result<void> check_profile(const std::string& path, const std::string& engine) {
  const auto name = engine_named(path + ":1: engine", engine);
  if (name) return {};
  return fail(name.error().message +
              ". The model decides as a release; without --decide model the recorded decisions are "
              "followed");
}

// Returns the step of the divergence, of the first different decision, or the last step.
static std::int64_t failing_step(const RunSummary& summary) {
  if (summary.divergence) return summary.divergence->step;
  return summary.mismatch ? summary.mismatch->step : summary.steps;
}

SavedCase case_of(const ReplayRequest& request, const PreparedReplay& prepared,
                  const RunReport& report) {
  const std::string name =
      fmt::format("{}-step{}", std::filesystem::path(request.file).stem().string(),
                  failing_step(report.summary));
  SavedCase saved = case_of(name, prepared.run, report.summary);
  if (prepared.trace == nullptr) {
    keep_recording(request.file, *prepared.recording, report.records_consumed, saved);
  } else {
    saved.trace = *prepared.trace;
    keep_records(saved.trace, report.records_consumed);
  }
  return saved;
}

}  // namespace lockstep
