#include "cli/replay_flags.h"

#include <fmt/format.h>

#include <optional>

#include "sim/session/saved_run.h"

namespace lockstep {
namespace {

template <class T, class U>
void override_with(const std::optional<T>& given, U& value) {
  if (given) value = *given;
}

}  // namespace

void apply_engine_flags(const ReplayOptions& options, EngineConfig& engine) {
  override_with(options.engine, engine.engine);
  override_with(options.block_size, engine.block_size);
  override_with(options.max_num_seqs, engine.max_num_seqs);
  override_with(options.max_num_batched_tokens, engine.max_num_batched_tokens);
  override_with(options.max_model_len, engine.max_model_len);
  override_with(options.long_prefill_token_threshold, engine.long_prefill_token_threshold);
  override_with(options.enable_prefix_caching, engine.enable_prefix_caching);
  override_with(options.enable_chunked_prefill, engine.enable_chunked_prefill);
  override_with(options.reserve_full_isl, engine.scheduler_reserve_full_isl);
  override_with(options.async_scheduling, engine.async_scheduling);
  if (options.hash_algorithm || !options.cache_events_path.empty()) {
    engine.hash_algorithm = options.hash_algorithm == "content"       ? HashAlgorithm::content
                            : options.hash_algorithm == "xxhash_cbor" ? HashAlgorithm::xxhash_cbor
                                                                      : HashAlgorithm::sha256_cbor;
  }
  override_with(options.dcp, engine.dcp);
  override_with(options.pcp, engine.pcp);
  if (options.policy) {
    engine.policy =
        *options.policy == "priority" ? SchedulingPolicy::priority : SchedulingPolicy::fcfs;
  }
}

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

void apply_device_flags(const ReplayOptions& options, LockstepConfig& config) {
  BackendConfig& device = config.device;
  if (options.mutant) plant(config, *options.mutant);
  if (options.layout) device.layout = *cache_layout_from_name(*options.layout);
  override_with(options.queries_per_kv, device.queries_per_kv);
  override_with(options.num_streams, device.num_streams);
  override_with(options.delay_streams, device.delay_streams);
  override_with(options.max_cudagraph_capture_size, device.max_cudagraph_capture_size);
  if (options.numbers) device.numbers = *options.numbers == "real" ? Numbers::real : Numbers::words;
  override_with(options.seed, device.seed);
  override_with(options.tp, device.parallel.tp_size);
  override_with(options.pp, device.parallel.pp_size);
  override_with(options.cp_interleave, device.context.interleave);
  override_with(options.dp, config.data_parallel.dp_size);
  override_with(options.enforce_eager, config.data_parallel.enforce_eager);
  if (options.check) {
    device.check = *options.check == "hunt"    ? CheckMode::hunt
                   : *options.check == "check" ? CheckMode::check
                                               : CheckMode::fast;
  }
}

void apply_workload_flags(const ReplayOptions& options, TraceWorkloadOptions& workload) {
  override_with(options.step_base_ns, workload.step_time.base_ns);
  override_with(options.step_per_token_ns, workload.step_time.per_token_ns);
  override_with(options.seed, workload.seed);
}

Result<void> check_parallel(const LockstepConfig& config, std::string_view backend) {
  if (backend == "none" && !config.device.parallel.is_whole())
    return fail(
        "--tensor-parallel-size and --pipeline-parallel-size divide memory, and --backend none has "
        "none: decisions do not depend on them");
  if (config.data_parallel.dp_size == 1 && config.data_parallel.enforce_eager)
    return fail("--enforce-eager says how data parallel ranks pad; give --data-parallel-size too");
  return check_ranks(config);
}

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

}  // namespace lockstep
