#include "cli/replay_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <utility>

#include "cli/replay_backend.h"
#include "cli/replay_cache.h"
#include "cli/replay_connector.h"
#include "cli/terminal.h"
#include "properties/generate/fault_generator.h"
#include "properties/invariants/planned_need.h"
#include "reference/profiles/engine_profile.h"
#include "sim/connectors/recorded_connector.h"
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
  if (!reader || options.run.spec.recipe.limit_requests == 0) return reader;
  return std::make_unique<LimitedTrace>(std::move(*reader), options.run.spec.recipe.limit_requests);
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

// The rest is the same for every kind of file.
Result<void> finish(const ReplayOptions& options, Result<KVCacheConfig> plan,
                    PreparedReplay& prepared) {
  if (!plan) return tl::unexpected(plan.error());
  RunSpec& run = prepared.run;
  if (find_engine_profile(run.engine.engine) == nullptr)
    return fail(fmt::format("--engine: there is no profile {}; known: {}", run.engine.engine,
                            engine_profile_names()));
  run.cache = std::move(*plan);
  if (!options.run.has("attention_backend")) {
    run.attention_backend = attention_backend_for(run.cache);
    if (run.attention_backend == AttentionBackend::any_size)
      prepared.chosen.push_back(
          "attention backend any_size: no shipped one takes blocks this small");
  }
  if (auto sound = size_host_tier(options.run, run); !sound) return sound;
  prepared.config = config_of(run);
  return {};
}

// A list as it is given, or one of a seed: a fault for every few requests, over the time in which
// they come, and a pool pinched to one of the longest.
Result<void> plan_faults(PreparedReplay& prepared) {
  RunSpec& run = prepared.run;
  const std::string& given = run.recipe.faults;
  if (given.empty()) return {};
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
  if (!plan) return fail(fmt::format("--faults: {}", plan.error().message));
  run.faults = faults_of(*plan);
  return {};
}

// Combinations that the engine refuses to start with.
Result<void> check_engine(const EngineConfig& engine) {
  if (engine.max_num_batched_tokens < engine.max_num_seqs) {
    return fail(
        fmt::format("--max-num-batched-tokens {} is less than --max-num-seqs {}: a step could not "
                    "give every running request its one token",
                    engine.max_num_batched_tokens, engine.max_num_seqs));
  }
  if (!engine.enable_chunked_prefill && engine.max_num_batched_tokens < engine.max_model_len) {
    return fail(fmt::format(
        "--no-chunked-prefill with --max-num-batched-tokens {} below --max-model-len {}: the "
        "longest prompts would never fit into a step",
        engine.max_num_batched_tokens, engine.max_model_len));
  }
  if (engine.long_prefill_token_threshold > engine.max_model_len) {
    return fail(fmt::format("--long-prefill-token-threshold {} is more than --max-model-len {}",
                            engine.long_prefill_token_threshold, engine.max_model_len));
  }
  return {};
}

// What several ranks or engines cannot be asked.
Result<void> check_parallel(const LockstepConfig& config, std::string_view backend) {
  if (backend == "none" && !config.device.parallel.is_whole())
    return fail(
        "--tensor-parallel-size and --pipeline-parallel-size divide memory, and --backend none has "
        "none: decisions do not depend on them");
  if (config.data_parallel.dp_size == 1 && config.data_parallel.enforce_eager)
    return fail("--enforce-eager says how data parallel ranks pad; give --data-parallel-size too");
  return check_ranks(config);
}

// Events are told in the engine's own hashes, which only a trace's run can be asked to make.
Result<void> check_cache_events(const ReplayOptions& options, const EngineConfig& engine) {
  if (options.cache_events_path.empty()) return {};
  if (engine.hash_algorithm == HashAlgorithm::content)
    return fail(
        "--cache-events needs block hashes of the engine: a trace with --hash-algorithm "
        "sha256_cbor or xxhash_cbor, or a file whose configuration says so");
  if (!engine.enable_prefix_caching)
    return fail("--cache-events with prefix caching off: there would be no event");
  return {};
}

Result<void> prepare_trace(const ReplayOptions& options, PreparedReplay& prepared) {
  const GivenRun& given = options.run;
  RunSpec& run = prepared.run;
  if (const std::string flag = given.first_said_by(kByModel); given.has("model") && !flag.empty())
    return fail(fmt::format("--model {} says its layers itself; leave {} out",
                            given.spec.recipe.model, flag));
  auto first_pass = open_limited(options);
  if (!first_pass) return tl::unexpected(first_pass.error());
  const Result<TraceNeeds> needs = scan(**first_pass);
  if (!needs) return tl::unexpected(needs.error());
  prepared.num_records = needs->num_records;

  CacheWishes wishes{.num_blocks = {}, .says_block_size = given.has("block_size")};
  bool says_max_model_len = given.has("max_model_len");
  if (const auto& hints = (*first_pass)->header().engine) {
    run.engine = hints->options.config;
    const auto& hinted = hints->options.given;
    says_max_model_len |= std::ranges::find(hinted, "max_model_len") != hinted.end();
    wishes.num_blocks = hints->num_blocks;
  }
  given.apply_to(run);
  if (given.has("num_blocks")) wishes.num_blocks = run.cache.num_blocks;
  if (!options.cache_events_path.empty() && !given.has("hash_algorithm"))
    run.engine.hash_algorithm = HashAlgorithm::sha256_cbor;
  if (!says_max_model_len) {
    run.engine.max_model_len = static_cast<std::int32_t>(needs->longest_request);
    prepared.chosen.push_back(fmt::format("max_model_len {}, the longest request of the trace",
                                          with_commas(run.engine.max_model_len)));
  }
  if (Result<void> sound = check_engine(run.engine); !sound) return sound;
  const Result<bool> hybrid_groups = hybrid_groups_of(given, run);
  if (!hybrid_groups) return tl::unexpected(hybrid_groups.error());
  wishes.hybrid_groups = *hybrid_groups;
  auto plan = plan_replay_cache(run, wishes, prepared.chosen);
  if (Result<void> done = finish(options, std::move(plan), prepared); !done) return done;
  const LockstepConfig& config = prepared.config;
  if (auto sound = check_connector(config.connector, config.device.plan); !sound) return sound;

  auto second_pass = open_limited(options);
  if (!second_pass) return tl::unexpected(second_pass.error());
  prepared.parts.clients = make_trace_workload(std::move(*second_pass), workload_options_of(run));
  return plan_faults(prepared);
}

Result<void> prepare_benchmark(const ReplayOptions& options, PreparedReplay& prepared) {
  const std::string flag = options.run.first_said_by(kByRecording);
  if (!flag.empty())
    return fail(fmt::format("{}: the benchmark says its configuration itself; leave {} out",
                            options.file, flag));
  Result<BenchmarkFile> benchmark = read_benchmark_file(options.file);
  if (!benchmark) return tl::unexpected(benchmark.error());
  prepared.num_records = static_cast<std::int64_t>(benchmark->requests.size());
  prepared.totals = benchmark->totals;
  options.run.apply_to(prepared.run);
  prepared.run.engine = benchmark->options.config;
  auto plan = plan_for_groups(benchmark->groups, benchmark->num_blocks);
  if (Result<void> done = finish(options, std::move(plan), prepared); !done) return done;
  auto reader = open_trace(options.file);
  if (!reader) return tl::unexpected(reader.error());
  prepared.parts.clients =
      make_trace_workload(std::move(*reader), workload_options_of(prepared.run));
  return {};
}

Result<void> prepare_recording(const ReplayOptions& options, PreparedReplay& prepared) {
  const std::string flag = options.run.first_said_by(kByRecording);
  if (!flag.empty())
    return fail(fmt::format("{}: the recording says its configuration itself; leave {} out",
                            options.file, flag));
  Result<RecordingReader> reader = RecordingReader::open(options.file);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader& header = reader->header();
  options.run.apply_to(prepared.run);
  prepared.run.engine = header.options.config;
  prepared.run.connector.load_failure_policy = kv_transfer(header, nullptr).kv_load_failure_policy;
  auto plan = plan_for_groups(header.groups, header.num_blocks);
  if (Result<void> done = finish(options, std::move(plan), prepared); !done) return done;
  prepared.parts.clients = make_recording_workload(std::move(*reader));
  return {};
}

Result<void> prepare_saved_case(const ReplayOptions& options, PreparedReplay& prepared) {
  std::string flag = options.run.first_said_by(kBySavedCase);
  if (flag.empty() && !options.save_dir.empty()) flag = "--save";
  if (!flag.empty())
    return fail(
        fmt::format("{}: a saved case says everything itself; leave {} out", options.file, flag));
  Result<SavedCase> saved = read_saved_case(options.file);
  if (!saved) return tl::unexpected(saved.error());
  if (options.run.has("check")) saved->check = options.run.spec.check;
  if (options.run.has("backend") && options.run.spec.backend != "auto")
    saved->backend = options.run.spec.backend;
  prepared.run = *saved;
  prepared.config = config_of(*saved);
  if (saved->recording && prepared.config.data_parallel.dp_size > 1)
    return fail(fmt::format("{}: data_parallel_size: a recording is one engine's", options.file));
  prepared.expected = saved->expected;
  prepared.num_records = static_cast<std::int64_t>(saved->recording ? saved->recording->steps.size()
                                                                    : saved->trace.records.size());
  prepared.parts = parts_of(*saved);
  return {};
}

Result<void> prepare_by_format(const ReplayOptions& options, PreparedReplay& prepared) {
  switch (prepared.format) {
    case FileFormat::benchmark:
      return prepare_benchmark(options, prepared);
    case FileFormat::recording:
      return prepare_recording(options, prepared);
    case FileFormat::saved_case:
      return prepare_saved_case(options, prepared);
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
  if (!options.run.refused.empty()) return fail(options.run.refused);
  prepared.run.backend = "auto";
  prepared.run.check = CheckMode::fast;
  if (Result<void> done = prepare_by_format(options, prepared); !done)
    return tl::unexpected(done.error());
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
  if (auto sound = check_parallel(config, prepared.run.backend); !sound)
    return tl::unexpected(sound.error());
  prepared.parts.connector_seed = prepared.run.seed;
  prepared.parts.faults = prepared.run.faults;
  prepared.parts.backend = [name = prepared.run.backend](const BackendConfig& own) {
    return make_backend(name, own);
  };
  return prepared;
}

Result<void> open_session(const ReplayOptions& options, PreparedReplay& prepared) {
  auto session = Session::open(prepared.config, std::move(prepared.parts));
  if (session) {
    prepared.session = std::move(*session);
    return {};
  }
  return fail(fmt::format("{}{}", prepared.run.faults.empty() ? "" : options.file + ": ",
                          session.error().message));
}

Result<std::string> save_replay(const ReplayOptions& options, const PreparedReplay& prepared,
                                const RunReport& report) {
  namespace fs = std::filesystem;
  const std::string name =
      fmt::format("{}-step{}", fs::path(options.file).stem().string(), report.summary.steps);
  SavedCase saved = case_of(name, prepared.run, report.summary);
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
