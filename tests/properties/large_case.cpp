#include "tests/properties/large_case.h"

#include <fmt/format.h>

#include "base/check.h"
#include "reference/types/token_rows.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

KVCacheGroupSpec group_of(CacheKind kind, std::string_view name) {
  KVCacheGroupSpec group;
  group.layer_names = {fmt::format("{}.0", name), fmt::format("{}.1", name)};
  KVCacheSpec& spec = group.spec;
  spec.kind = kind;
  spec.block_size = 8;
  if (kind != CacheKind::mamba) {
    spec.num_kv_heads = 2;
    spec.head_size = 16;
  }
  if (kind == CacheKind::sliding_window) spec.sliding_window = 20;
  if (kind == CacheKind::mamba) {
    spec.states = {{{3, 8}, DType::bf16}, {{2, 5}, DType::fp32}};
    spec.mamba_cache_mode = MambaCacheMode::align;
  }
  return group;
}

TraceRequest request_of(std::int64_t i) {
  TraceRequest request;
  request.spec.name = fmt::format("request-{}", i);
  const auto random = [i](std::uint64_t salt, std::uint64_t n) {
    return splitmix64(static_cast<std::uint64_t>(i) * 977 + salt) % n;
  };
  request.spec.prompt.append({TokenRun::Kind::seeded, 500 + random(1, 3), 0,
                              static_cast<std::uint32_t>(8 + random(2, 40))});
  request.spec.prompt.append({TokenRun::Kind::seeded, 1000 + static_cast<std::uint64_t>(i), 3,
                              static_cast<std::uint32_t>(1 + random(3, 12))});
  request.output.length = static_cast<std::int32_t>(1 + random(4, 9));
  request.spec.max_tokens = request.output.length;
  request.spec.arrival_ns = i * 7'000'000;
  request.spec.priority = static_cast<std::int32_t>(random(5, 3));
  if (i % 5 == 1) request.spec.cache_salt = "salt";
  if (i % 7 == 2) request.abort = AbortPlan{.t_ns = {}, .after_tokens = 2};
  if (i % 4 == 3) {
    request.after = {fmt::format("request-{}", i - 1)};
    request.delay_ns = 1'000'000;
    request.spec.arrival_ns = 0;
  }
  return request;
}

}  // namespace

SavedCase large_case(std::int64_t num_requests) {
  SavedCase saved;
  saved.name = "large";
  EngineConfig& engine = saved.engine;
  engine.max_num_seqs = 6;
  engine.max_num_batched_tokens = 64;
  engine.max_model_len = 128;
  engine.block_size = 8;
  engine.policy = SchedulingPolicy::priority;
  engine.scheduler_reserve_full_isl = false;
  engine.long_prefill_token_threshold = 24;
  engine.mamba_cache_mode = MambaCacheMode::align;
  auto plan = plan_for_groups(
      {group_of(CacheKind::full_attention, "full"), group_of(CacheKind::sliding_window, "window"),
       group_of(CacheKind::mamba, "states")},
      40);
  LS_CHECK(plan, "{}", plan.error().message);
  saved.cache = *plan;
  saved.attention_backend = AttentionBackend::triton_attn;
  saved.kernel_block_sizes = {8, 8, 8};
  saved.layout = CacheLayout::HND;
  saved.seed = 11;
  saved.step_time.base_ns = 5'000'000;
  saved.budget.probe_rows = 4096;
  saved.trace.header.source = {.kind = "generated", .name = "large", .seed = 1};
  for (std::int64_t i = 0; i < num_requests; ++i) {
    saved.trace.records.emplace_back(request_of(i));
    if (i % 6 == 4) saved.trace.records.emplace_back(TraceControl{.t_ns = i * 7'000'000});
  }
  return saved;
}

SavedCase recorded(const SavedCase& saved) {
  SavedCase with = saved;
  Recording& recording = with.recording.emplace();
  auto decisions = Scheduler::create(saved.engine, saved.cache.groups, saved.cache.num_blocks);
  LS_CHECK(decisions, "{}", decisions.error().message);
  recording.header =
      recording_header(saved.engine, saved.cache.groups, saved.cache.num_blocks, *decisions);
  const auto workload = workload_of(saved);
  RunRecorder recorder(*workload,
                       [&](const RecordedStep& step) { recording.steps.push_back(step); });
  const LockstepConfig config = config_of(saved);
  const auto report = run_lockstep(config, {*decisions, recorder, {}, &recorder});
  LS_CHECK(report, "{}", report.error().message);
  recording.end = recorder.end();
  return with;
}

}  // namespace lockstep
