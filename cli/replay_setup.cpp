#include "cli/replay_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <utility>

#include "cli/replay_backend.h"
#include "cli/replay_cache.h"
#include "cli/replay_connector.h"
#include "cli/replay_flags.h"
#include "cli/terminal.h"
#include "properties/generate/generator.h"
#include "properties/invariants/planned_need.h"
#include "reference/profiles/engine_profile.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/saved_run.h"

namespace lockstep {
namespace {

// The requests of another reader, and no more than `limit` of them.
class LimitedTrace final : public TraceReader {
 public:
  LimitedTrace(std::unique_ptr<TraceReader> reader, std::int64_t limit)
      : reader_(std::move(reader)), left_(limit) {}

  const TraceHeader& header() const override { return reader_->header(); }
  Result<bool> next(TraceRecord& record) override {
    if (left_ == 0) return false;
    Result<bool> more = reader_->next(record);
    if (more && *more && std::holds_alternative<TraceRequest>(record)) --left_;
    return more;
  }

 private:
  std::unique_ptr<TraceReader> reader_;
  std::int64_t left_;
};

Result<std::unique_ptr<TraceReader>> open_limited(const ReplayOptions& options) {
  Result<std::unique_ptr<TraceReader>> reader = open_trace(options.file);
  if (!reader || options.limit_requests == 0) return reader;
  return std::make_unique<LimitedTrace>(std::move(*reader), options.limit_requests);
}

// What the defaults depend on: the whole trace, read once before the run.
struct TraceNeeds {
  std::int64_t num_records = 0;
  std::int64_t longest_request = 1;  // tokens, prompt and output
};

Result<TraceNeeds> scan(TraceReader& reader) {
  TraceNeeds needs;
  TraceRecord record;
  for (;;) {
    const Result<bool> more = reader.next(record);
    if (!more) return tl::unexpected(more.error());
    if (!*more) return needs;
    ++needs.num_records;
    if (const auto* request = std::get_if<TraceRequest>(&record)) {
      const std::int64_t tokens = request->spec.prompt.size() + request->spec.max_tokens;
      needs.longest_request = std::max(needs.longest_request, tokens);
    }
  }
}

// The rest is the same for every kind of file: a plan, a device, a source of decisions.
Result<void> finish(const ReplayOptions& options, const EngineConfig& engine,
                    Result<KVCacheConfig> plan, PreparedReplay& prepared) {
  if (!plan) return tl::unexpected(plan.error());
  if (find_engine_profile(engine.engine) == nullptr)
    return fail(fmt::format("--engine: there is no profile {}; known: {}", engine.engine,
                            engine_profile_names()));
  prepared.config.engine = engine;
  AttentionBackend attention = attention_backend_for(*plan);
  if (options.attention_backend)
    attention = *attention_backend_from_name(*options.attention_backend);
  else if (attention == AttentionBackend::any_size)
    prepared.chosen.push_back("attention backend any_size: no shipped one takes blocks this small");
  prepared.config.device = make_backend_config(engine, std::move(*plan), attention);
  apply_device_flags(options, prepared.config);
  return {};
}

// A list as it is given, or one of a seed: a fault for every few requests, over the time in which
// they come, and a pool pinched to one of the longest.
Result<void> plan_faults(const ReplayOptions& options, PreparedReplay& prepared) {
  if (!options.faults) return {};
  std::uint64_t seed = 0;
  const char* const end = options.faults->data() + options.faults->size();
  const auto [behind, error] = std::from_chars(options.faults->data(), end, seed);
  if (error == std::errc() && behind == end) {
    SeededChoices choices(seed);
    const FaultRoom room{.steps = std::max<std::int64_t>(32, 2 * prepared.num_records),
                         .faults_max = std::clamp<std::int64_t>(prepared.num_records / 4, 6, 1'000),
                         .blocks_of_request = planned_blocks_of_request(
                             prepared.config.engine, prepared.config.device.plan.groups)};
    prepared.faults = faults_of(draw_faults(choices, room));
    return {};
  }
  const Result<FaultPlan> plan = fault_plan_from_text(*options.faults);
  if (!plan) return fail(fmt::format("--faults: {}", plan.error().message));
  prepared.faults = faults_of(*plan);
  return {};
}

Result<void> prepare_trace(const ReplayOptions& options, PreparedReplay& prepared) {
  if (const std::string given = options.contradicts_model(); options.model && !given.empty()) {
    return fail(
        fmt::format("--model {} says its layers itself; leave {} out", *options.model, given));
  }
  auto first_pass = open_limited(options);
  if (!first_pass) return tl::unexpected(first_pass.error());
  const Result<TraceNeeds> needs = scan(**first_pass);
  if (!needs) return tl::unexpected(needs.error());
  prepared.num_records = needs->num_records;

  EngineConfig engine;
  std::optional<std::int64_t> num_blocks = options.num_blocks;
  bool says_max_model_len = options.max_model_len.has_value();
  if (const auto& hints = (*first_pass)->header().engine) {
    engine = hints->options.config;
    const auto& given = hints->options.given;
    says_max_model_len |= std::find(given.begin(), given.end(), "max_model_len") != given.end();
    if (!num_blocks) num_blocks = hints->num_blocks;
  }
  apply_engine_flags(options, engine);
  if (!says_max_model_len) {
    engine.max_model_len = static_cast<std::int32_t>(needs->longest_request);
    prepared.chosen.push_back(fmt::format("max_model_len {}, the longest request of the trace",
                                          with_commas(engine.max_model_len)));
  }
  if (Result<void> sound = check_engine(engine); !sound) return sound;
  const auto start = start_connector(options);
  if (!start) return tl::unexpected(start.error());
  auto plan = plan_replay_cache(options, num_blocks, start->hybrid_groups, engine, prepared.chosen);
  if (Result<void> done = finish(options, engine, std::move(plan), prepared); !done) return done;

  TraceWorkloadOptions& workload = prepared.workload_options;
  apply_workload_flags(options, workload);
  auto second_pass = open_limited(options);
  if (!second_pass) return tl::unexpected(second_pass.error());
  LockstepConfig& config = prepared.config;
  if (auto done = finish_connector(options, start->connector, config); !done) return done;
  prepared.parts.clients = make_trace_workload(std::move(*second_pass), workload);
  return plan_faults(options, prepared);
}

Result<void> prepare_benchmark(const ReplayOptions& options, PreparedReplay& prepared) {
  const std::string given = options.contradicts_recording();
  if (!given.empty()) {
    return fail(fmt::format("{}: the benchmark says its configuration itself; leave {} out",
                            options.file, given));
  }
  Result<BenchmarkFile> benchmark = read_benchmark_file(options.file);
  if (!benchmark) return tl::unexpected(benchmark.error());
  prepared.num_records = static_cast<std::int64_t>(benchmark->requests.size());
  prepared.totals = benchmark->totals;
  const EngineConfig& engine = benchmark->options.config;
  auto plan = plan_for_groups(benchmark->groups, benchmark->num_blocks);
  if (Result<void> done = finish(options, engine, std::move(plan), prepared); !done) return done;
  auto reader = open_trace(options.file);
  if (!reader) return tl::unexpected(reader.error());
  prepared.parts.clients = make_trace_workload(std::move(*reader), prepared.workload_options);
  return {};
}

Result<void> prepare_recording(const ReplayOptions& options, PreparedReplay& prepared) {
  const std::string given = options.contradicts_recording();
  if (!given.empty()) {
    return fail(fmt::format("{}: the recording says its configuration itself; leave {} out",
                            options.file, given));
  }
  Result<RecordingReader> reader = RecordingReader::open(options.file);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader& header = reader->header();
  const auto policy = kv_transfer(header, nullptr).kv_load_failure_policy;
  const EngineConfig& engine = header.options.config;
  auto plan = plan_for_groups(header.groups, header.num_blocks);
  if (Result<void> done = finish(options, engine, std::move(plan), prepared); !done) return done;
  prepared.config.connector.load_failure_policy = policy;
  prepared.parts.clients = make_recording_workload(std::move(*reader));
  return {};
}

Result<void> prepare_saved_case(const ReplayOptions& options, PreparedReplay& prepared,
                                std::string& backend) {
  const std::string given = options.contradicts_saved_case();
  if (!given.empty()) {
    return fail(
        fmt::format("{}: a saved case says everything itself; leave {} out", options.file, given));
  }
  Result<SavedCase> saved = read_saved_case(options.file);
  if (!saved) return tl::unexpected(saved.error());
  prepared.config = config_of(*saved);
  if (saved->recording && prepared.config.data_parallel.dp_size > 1)
    return fail(fmt::format("{}: data_parallel_size: a recording is one engine's", options.file));
  apply_device_flags(options, prepared.config);
  prepared.workload_options = workload_options_of(*saved);
  prepared.expected = saved->expected;
  prepared.num_records = static_cast<std::int64_t>(saved->recording ? saved->recording->steps.size()
                                                                    : saved->trace.records.size());
  if (backend == "auto") backend = saved->backend;
  prepared.parts = parts_of(*saved);
  prepared.faults = saved->faults;
  return {};
}

Result<void> prepare_by_format(const ReplayOptions& options, PreparedReplay& prepared,
                               std::string& backend) {
  switch (prepared.format) {
    case FileFormat::benchmark:
      return prepare_benchmark(options, prepared);
    case FileFormat::recording:
      return prepare_recording(options, prepared);
    case FileFormat::saved_case:
      return prepare_saved_case(options, prepared, backend);
    default:
      return prepare_trace(options, prepared);
  }
}

// What a case repeats: the records, or the recorded steps, up to the end of the run.
Result<void> keep_trace(const ReplayOptions& options, std::int64_t count, SavedCase& saved) {
  auto reader = open_limited(options);
  if (!reader) return tl::unexpected(reader.error());
  Result<Trace> trace = read_all(**reader);
  if (!trace) return tl::unexpected(trace.error());
  saved.trace = std::move(*trace);
  keep_records(saved.trace, count);
  return {};
}

Result<void> keep_recording(const std::string& path, std::int64_t count, SavedCase& saved) {
  Result<Recording> recording = read_recording(path);
  if (!recording) return tl::unexpected(recording.error());
  const auto steps = static_cast<std::size_t>(count);
  if (steps < recording->steps.size()) {
    recording->steps.resize(steps);
    recording->end = RecordingEnd{.steps = count, .unfinished = {}};
  }
  saved.recording = std::move(*recording);
  return {};
}

}  // namespace

Result<PreparedReplay> prepare_replay(const ReplayOptions& options) {
  const Result<FileFormat> format = detect_format(options.file);
  if (!format) return tl::unexpected(format.error());
  PreparedReplay prepared;
  prepared.format = *format;
  std::string backend_name = options.backend;
  if (Result<void> done = prepare_by_format(options, prepared, backend_name); !done) {
    return tl::unexpected(done.error());
  }
  LockstepConfig& config = prepared.config;
  if (auto sound = check_cache_events(options, config.engine); !sound)
    return tl::unexpected(sound.error());
  config.draw = !options.report_path.empty();
  if (auto sound = check_connector(config.connector, config.device.plan); !sound)
    return tl::unexpected(sound.error());
  const bool is_connected =
      !config.connector.parts.empty() || prepared.parts.clients->connector() != nullptr;
  config.device.num_host_blocks =
      is_connected ? num_host_blocks(config.connector, config.device.plan) : options.staging_blocks;
  if (auto sound = check_parallel(config, backend_name); !sound)
    return tl::unexpected(sound.error());
  prepared.parts.connector_seed = prepared.workload_options.seed;
  prepared.parts.faults = prepared.faults;
  prepared.parts.backend = [backend_name](const BackendConfig& own) {
    return make_backend(backend_name, own);
  };
  return prepared;
}

Result<void> open_session(const ReplayOptions& options, PreparedReplay& prepared) {
  auto session = Session::open(prepared.config, std::move(prepared.parts));
  if (session) {
    prepared.session = std::move(*session);
    return {};
  }
  return fail(fmt::format("{}{}", prepared.faults.empty() ? "" : options.file + ": ",
                          session.error().message));
}

Result<std::string> save_replay(const ReplayOptions& options, const PreparedReplay& prepared,
                                const RunReport& report) {
  namespace fs = std::filesystem;
  const std::string name =
      fmt::format("{}-step{}", fs::path(options.file).stem().string(), report.summary.steps);
  SavedCase saved = save_case(name, prepared.config, prepared.workload_options, report.summary);
  saved.faults = prepared.faults;
  Result<void> filled = prepared.format == FileFormat::recording
                            ? keep_recording(options.file, report.records_consumed, saved)
                            : keep_trace(options, report.records_consumed, saved);
  if (!filled) return tl::unexpected(filled.error());

  std::error_code error;
  fs::create_directories(options.save_dir, error);
  if (error) return fail(fmt::format("{}: {}", options.save_dir, error.message()));
  const std::string path = (fs::path(options.save_dir) / (name + ".case.jsonl")).string();
  if (Result<void> written = write_saved_case(path, saved); !written) {
    return tl::unexpected(written.error());
  }
  return path;
}

}  // namespace lockstep
