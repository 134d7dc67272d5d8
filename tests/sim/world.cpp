#include "tests/sim/world.h"

#include <fmt/core.h>

#include "reference/types/token_rows.h"

namespace lockstep {

KVCacheGroupSpec make_group(const std::string& prefix, int layers, KVCacheSpec spec) {
  KVCacheGroupSpec group;
  for (int i = 0; i < layers; ++i) group.layer_names.push_back(fmt::format("{}.{}", prefix, i));
  group.spec = std::move(spec);
  return group;
}

KVCacheSpec full_spec(std::int64_t block_size, DType dtype) {
  KVCacheSpec spec;
  spec.block_size = block_size;
  spec.num_kv_heads = 2;
  spec.head_size = 16;
  spec.dtype = dtype;
  return spec;
}

KVCacheSpec sliding_spec(std::int64_t window, std::int64_t block_size) {
  KVCacheSpec spec = full_spec(block_size);
  spec.kind = CacheKind::sliding_window;
  spec.sliding_window = window;
  return spec;
}

KVCacheSpec mamba_spec(MambaCacheMode mode, std::int64_t block_size) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.block_size = block_size;
  spec.states = {{{3, 8}, DType::bf16}, {{2, 5}, DType::fp32}};
  spec.mamba_cache_mode = mode;
  return spec;
}

Trace make_traffic(std::uint64_t seed, int num_requests) {
  Trace trace;
  trace.header.source = {.kind = "generated", .name = "world", .seed = seed};
  std::uint64_t state = seed;
  const auto random = [&](std::uint64_t n) { return splitmix64(state += 0x1234567) % n; };
  std::int64_t t_ns = 0;
  for (int i = 0; i < num_requests; ++i) {
    TraceRequest request;
    request.spec.name = fmt::format("r{}", i);
    if (random(3) != 0)
      request.spec.prompt.append(
          {TokenRun::Kind::seeded, 1 + random(3), 0, static_cast<std::uint32_t>(16 + random(90))});
    request.spec.prompt.append({TokenRun::Kind::seeded, 1000 + static_cast<std::uint64_t>(i), 0,
                                static_cast<std::uint32_t>(1 + random(30))});
    request.output.length = static_cast<std::int32_t>(1 + random(20));
    request.spec.max_tokens = request.output.length;
    request.spec.priority = static_cast<std::int32_t>(random(3));
    if (random(12) == 0) request.spec.cache_salt = "s";
    if (random(3) == 0) t_ns += static_cast<std::int64_t>(random(60'000'000));
    request.spec.arrival_ns = t_ns;
    if (random(10) == 0) request.abort = AbortPlan{.t_ns = t_ns + 30'000'000, .after_tokens = {}};
    if (random(10) == 1) request.abort = AbortPlan{.t_ns = {}, .after_tokens = 2};
    if (i > 4 && random(6) == 0) {
      request.after = {fmt::format("r{}", i - 1 - static_cast<int>(random(4)))};
      request.delay_ns = 1'000'000;
      request.spec.arrival_ns = 0;
      request.abort.reset();
    }
    trace.records.emplace_back(std::move(request));
    if (random(25) == 0) trace.records.emplace_back(TraceControl{.t_ns = t_ns});
  }
  return trace;
}

LockstepConfig make_world(std::vector<KVCacheGroupSpec> groups, std::int64_t num_blocks) {
  LockstepConfig config;
  config.engine.max_num_seqs = 4;
  config.engine.max_num_batched_tokens = 64;
  config.engine.max_model_len = 256;
  config.engine.block_size = static_cast<std::int32_t>(groups.front().spec.block_size);
  config.engine.scheduler_reserve_full_isl = false;
  for (const KVCacheGroupSpec& group : groups)
    if (group.spec.kind == CacheKind::mamba) {
      config.engine.mamba_cache_mode = group.spec.mamba_cache_mode;
      if (group.spec.mamba_cache_mode == MambaCacheMode::none)
        config.engine.enable_prefix_caching = false;
    }
  config.backend =
      make_backend_config(config.engine, *plan_for_groups(std::move(groups), num_blocks),
                          AttentionBackend::triton_attn);
  for (std::size_t g = 0; g < config.backend.plan.groups.size(); ++g)
    config.backend.kernel_block_sizes[g] = config.backend.plan.groups[g].spec.block_size;
  config.backend.queries_per_kv = 2;
  return config;
}

Result<RunReport> run_session(const LockstepConfig& config, SessionParts parts) {
  const auto session = Session::open(config, std::move(parts));
  if (!session) return tl::unexpected(session.error());
  return (*session)->run();
}

Result<RunReport> run_world(const LockstepConfig& config, const Trace& trace, Backend* backend,
                            StepObserver* observer) {
  SessionParts parts;
  parts.clients = make_trace_workload(
      trace, {.step_time = {}, .seed = 7, .num_spec_tokens = config.engine.num_spec_tokens});
  if (backend != nullptr) parts.borrowed = {backend};
  parts.attach = [observer](std::int32_t, Workload*) { return Onlooker{.observer = observer}; };
  return run_session(config, std::move(parts));
}

}  // namespace lockstep
