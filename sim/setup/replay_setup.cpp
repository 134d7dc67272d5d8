#include "sim/setup/replay_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/number_text.h"
#include "reference/plan/limits.h"
#include "reference/profiles/engine_profile.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/saved_run.h"
#include "sim/setup/planned_cache.h"

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

Result<std::unique_ptr<TraceReader>> open_limited(const ReplayRequest& request) {
  Result<std::unique_ptr<TraceReader>> reader = open_trace(request.file);
  if (!reader || request.run.spec.recipe.limit_requests == 0) return reader;
  return std::make_unique<LimitedTrace>(std::move(*reader), request.run.spec.recipe.limit_requests);
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
Result<void> finish(const ReplayRequest& request, Result<KVCacheConfig> plan,
                    PreparedReplay& prepared) {
  if (!plan) return tl::unexpected(plan.error());
  RunSpec& run = prepared.run;
  if (find_engine_profile(run.engine.engine) == nullptr)
    return fail(fmt::format("--engine: there is no profile {}; known: {}", run.engine.engine,
                            engine_profile_names()));
  run.cache = std::move(*plan);
  if (!request.run.has("attention_backend")) {
    run.attention_backend = attention_backend_for(run.cache);
    if (run.attention_backend == AttentionBackend::any_size)
      prepared.chosen.push_back(
          "attention backend any_size: no shipped one takes blocks this small");
  }
  if (auto sound = size_host_tier(request.run, run); !sound) return sound;
  prepared.config = config_of(run);
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
Result<void> check_cache_events(const ReplayRequest& request, const EngineConfig& engine) {
  if (!request.tells_cache_events) return {};
  if (engine.hash_algorithm == HashAlgorithm::content)
    return fail(
        "--cache-events needs block hashes of the engine: a trace with --hash-algorithm "
        "sha256_cbor or xxhash_cbor, or a file whose configuration says so");
  if (!engine.enable_prefix_caching)
    return fail("--cache-events with prefix caching off: there would be no event");
  return {};
}

Result<void> prepare_trace(const ReplayRequest& request, PreparedReplay& prepared) {
  const GivenRun& given = request.run;
  RunSpec& run = prepared.run;
  if (const std::string flag = given.first_said_by(kByModel); given.has("model") && !flag.empty())
    return fail(fmt::format("--model {} says its layers itself; leave {} out",
                            given.spec.recipe.model, flag));
  auto first_pass = open_limited(request);
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
  if (request.tells_cache_events && !given.has("hash_algorithm"))
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
  if (Result<void> done = finish(request, std::move(plan), prepared); !done) return done;
  const LockstepConfig& config = prepared.config;
  if (auto sound = check_connector(config.connector, config.device.plan); !sound) return sound;

  auto second_pass = open_limited(request);
  if (!second_pass) return tl::unexpected(second_pass.error());
  prepared.parts.clients = make_trace_workload(std::move(*second_pass), workload_options_of(run));
  return {};
}

Result<void> prepare_benchmark(const ReplayRequest& request, PreparedReplay& prepared) {
  const std::string flag = request.run.first_said_by(kByRecording);
  if (!flag.empty())
    return fail(fmt::format("{}: the benchmark says its configuration itself; leave {} out",
                            request.file, flag));
  Result<BenchmarkFile> benchmark = read_benchmark_file(request.file);
  if (!benchmark) return tl::unexpected(benchmark.error());
  prepared.num_records = static_cast<std::int64_t>(benchmark->requests.size());
  prepared.totals = benchmark->totals;
  request.run.apply_to(prepared.run);
  prepared.run.engine = benchmark->options.config;
  auto plan = plan_for_groups(benchmark->groups, benchmark->num_blocks);
  if (Result<void> done = finish(request, std::move(plan), prepared); !done) return done;
  auto reader = open_trace(request.file);
  if (!reader) return tl::unexpected(reader.error());
  prepared.parts.clients =
      make_trace_workload(std::move(*reader), workload_options_of(prepared.run));
  return {};
}

Result<void> prepare_recording(const ReplayRequest& request, PreparedReplay& prepared) {
  const std::string flag = request.run.first_said_by(kByRecording);
  if (!flag.empty())
    return fail(fmt::format("{}: the recording says its configuration itself; leave {} out",
                            request.file, flag));
  Result<RecordingReader> reader = RecordingReader::open(request.file);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader header = reader->header();
  if (auto sound = check_limits(header.options.config, header.groups, header.num_blocks); !sound)
    return fail(fmt::format("{}:1: {}", request.file, sound.error().message));
  request.run.apply_to(prepared.run);
  prepared.run.engine = header.options.config;
  prepared.run.connector.load_failure_policy = kv_transfer(header, nullptr).kv_load_failure_policy;
  auto plan = plan_for_groups(header.groups, header.num_blocks);
  if (Result<void> done = finish(request, std::move(plan), prepared); !done)
    return fail(fmt::format("{}:1: {}", request.file, done.error().message));
  prepared.parts.clients = make_recording_workload(std::move(*reader));
  return {};
}

Result<void> prepare_saved_case(const ReplayRequest& request, PreparedReplay& prepared) {
  std::string flag = request.run.first_said_by(kBySavedCase);
  if (flag.empty() && request.saves) flag = "--save";
  if (!flag.empty())
    return fail(
        fmt::format("{}: a saved case says everything itself; leave {} out", request.file, flag));
  Result<SavedCase> saved = read_saved_case(request.file);
  if (!saved) return tl::unexpected(saved.error());
  if (request.run.has("check")) saved->check = request.run.spec.check;
  if (request.run.has("backend") && request.run.spec.backend != "auto")
    saved->backend = request.run.spec.backend;
  prepared.run = *saved;
  prepared.config = config_of(*saved);
  if (saved->recording && prepared.config.data_parallel.dp_size > 1)
    return fail(fmt::format("{}: data_parallel_size: a recording is one engine's", request.file));
  prepared.expected = saved->expected;
  prepared.num_records = static_cast<std::int64_t>(saved->recording ? saved->recording->steps.size()
                                                                    : saved->trace.records.size());
  prepared.parts = parts_of(*saved);
  return {};
}

Result<void> prepare_by_format(const ReplayRequest& request, PreparedReplay& prepared) {
  switch (prepared.format) {
    case FileFormat::benchmark:
      return prepare_benchmark(request, prepared);
    case FileFormat::recording:
      return prepare_recording(request, prepared);
    case FileFormat::saved_case:
      return prepare_saved_case(request, prepared);
    default:
      return prepare_trace(request, prepared);
  }
}

// What a case repeats: the records, or the recorded steps, up to the end of the run.
Result<void> keep_trace(const ReplayRequest& request, std::int64_t count, SavedCase& saved) {
  auto reader = open_limited(request);
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

Result<PreparedReplay> prepare_replay(const ReplayRequest& request) {
  const Result<FileFormat> format = detect_format(request.file);
  if (!format) return tl::unexpected(format.error());
  PreparedReplay prepared;
  prepared.format = *format;
  if (!request.run.refused.empty()) return fail(request.run.refused);
  prepared.run.backend = "auto";
  prepared.run.check = CheckMode::fast;
  if (Result<void> done = prepare_by_format(request, prepared); !done)
    return tl::unexpected(done.error());
  LockstepConfig& config = prepared.config;
  if (auto sound = check_cache_events(request, config.engine); !sound)
    return tl::unexpected(sound.error());
  config.draw = request.draws;
  if (auto sound = check_connector(config.connector, config.device.plan); !sound)
    return tl::unexpected(sound.error());
  const bool is_connected =
      !config.connector.parts.empty() || prepared.parts.clients->connector() != nullptr;
  config.device.num_host_blocks =
      is_connected ? num_host_blocks(config.connector, config.device.plan) : request.staging_blocks;
  if (auto sound = check_parallel(config, prepared.run.backend); !sound)
    return tl::unexpected(sound.error());
  prepared.parts.connector_seed = prepared.run.seed;
  return prepared;
}

Result<SavedCase> case_of(const ReplayRequest& request, const PreparedReplay& prepared,
                          const RunReport& report) {
  const std::string name = fmt::format(
      "{}-step{}", std::filesystem::path(request.file).stem().string(), report.summary.steps);
  SavedCase saved = case_of(name, prepared.run, report.summary);
  Result<void> filled = prepared.format == FileFormat::recording
                            ? keep_recording(request.file, report.records_consumed, saved)
                            : keep_trace(request, report.records_consumed, saved);
  if (!filled) return tl::unexpected(filled.error());
  return saved;
}

}  // namespace lockstep
