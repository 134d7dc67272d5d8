#include "properties/judge/transfer_judge.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

constexpr std::int32_t kBlockSize = 4;
constexpr std::int32_t kPromptMax = 40;
constexpr std::int32_t kOutputMax = 8;
constexpr std::int32_t kLongest = kPromptMax + kOutputMax;

LockstepConfig engine_of(std::int64_t num_blocks) {
  LockstepConfig config;
  config.engine.engine = connector_profile().name;
  config.engine.block_size = kBlockSize;
  config.engine.max_num_seqs = 4;
  config.engine.max_num_batched_tokens = 32;
  config.engine.max_model_len = kLongest;
  KVCacheGroupSpec group;
  group.layer_names = {"layers.0", "layers.1"};
  group.spec.block_size = kBlockSize;
  group.spec.num_kv_heads = 1;
  group.spec.head_size = 16;
  auto plan = plan_for_groups({group}, num_blocks);
  LS_CHECK(plan.has_value(), "a pool of {} blocks: {}", num_blocks, plan.error().message);
  config.backend = make_backend_config(config.engine, std::move(*plan), AttentionBackend::any_size);
  return config;
}

Trace generate_requests(ChoiceSource& choices) {
  Trace trace;
  std::int64_t t_ns = 0;
  const std::int64_t num_requests = choices.between(2, 14);
  for (std::int64_t i = 0; i < num_requests; ++i) {
    TraceRequest request;
    request.spec.name = fmt::format("r{}", i);
    request.spec.prompt.append({TokenRun::Kind::seeded,
                                static_cast<std::uint64_t>(choices.below(3)), 0,
                                static_cast<std::uint32_t>(choices.between(1, kPromptMax))});
    request.output.length = static_cast<std::int32_t>(choices.between(1, kOutputMax));
    request.spec.max_tokens = request.output.length;
    if (choices.chance(50)) t_ns += choices.below(40'000'000);
    request.spec.arrival_ns = t_ns;
    if (choices.chance(10))
      request.abort = AbortPlan{.t_ns = t_ns + 30'000'000, .after_tokens = {}};
    trace.records.emplace_back(std::move(request));
  }
  return trace;
}

NetworkOptions generate_network(ChoiceSource& choices) {
  const auto percent = [&] { return static_cast<std::int32_t>(choices.below(25)); };
  return {.seed = static_cast<std::uint64_t>(choices.below(1'000'000)),
          .loss_percent = percent(),
          .duplicate_percent = percent(),
          .damage_percent = percent(),
          .straggler_percent = percent(),
          .straggler_ns = 100'000'000,
          .dead_percent = percent(),
          .slow_percent = percent()};
}

MultiConnectorConfig generate_connectors(ChoiceSource& choices) {
  MultiConnectorConfig config;
  config.offloads = choices.chance(30);
  const auto classes = connector_classes();
  for (std::int64_t i = choices.below(4); i > 0; --i)
    config.connectors.push_back(classes[choices.below(std::ssize(classes))]);
  return config;
}

Result<std::unique_ptr<Backend>> backend_for(const TransferCase& transfer, LockstepConfig& config,
                                             const BackendFactory& backend) {
  if (!transfer.has_pages) return std::unique_ptr<Backend>();
  LS_CHECK(backend != nullptr, "a case with pages is judged without a backend");
  config.backend.num_host_blocks = transfer.pair.staging_blocks;
  return backend(config.backend);
}

TransferOutcome judge_pair(const TransferCase& transfer, TransferDefect defect,
                           const BackendFactory& backend) {
  PairOptions options = transfer.pair;
  options.defect = defect;
  const auto prefill = backend_for(transfer, options.prefill, backend);
  if (!prefill) return {"refused", prefill.error().message};
  const auto decode = backend_for(transfer, options.decode, backend);
  if (!decode) return {"refused", decode.error().message};
  if (*prefill) options.prefill_ranks = {prefill->get()};
  if (*decode) options.decode_ranks = {decode->get()};
  const auto client = make_trace_workload(transfer.trace, {.step_time = {}, .seed = 1});
  const auto report = run_pair(options, *client);
  if (!report) return {"refused", report.error().message};
  if (report->finding) return {report->finding->check, report->finding->what};
  if (report->verdict != PairVerdict::liveness) return {};
  const RunSummary& stuck =
      report->decode.verdict == Verdict::liveness ? report->decode : report->prefill;
  if (stuck.wait_cycle.empty()) return {"liveness", "requests wait forever, without a cycle"};
  return {stuck.cycle_head_holds_blocks ? "liveness.partial_load" : "liveness.head_of_line",
          stuck.wait_cycle};
}

// What vllm-0.22.1 itself does once blocks come from elsewhere.
TransferOutcome judge_holds(const TransferCase& transfer, std::string_view defect) {
  TransferCase apart = transfer;
  apart.pair.is_apart = !defect.empty();
  TransferOutcome outcome = judge_pair(apart, TransferDefect::none, {});
  const bool other_kind =
      (defect == "hold-head-of-line" && outcome.check == "liveness.partial_load") ||
      (defect == "hold-partial-deadlock" && outcome.check == "liveness.head_of_line");
  return other_kind ? TransferOutcome{} : outcome;
}

TransferOutcome judge_connectors(const MultiConnectorConfig& config, std::string_view defect) {
  const MultiConnectorDefect planted =
      multi_connector_defect_from_name(defect).value_or(MultiConnectorDefect::none);
  const Result<MultiConnectorSetup> setup = set_up_connectors(config, planted);
  if (!setup) return {"connector.start", setup.error().message};
  for (const ConnectorClass& part : setup->connectors)
    if (setup->hybrid_groups && !part.supports_hybrid_groups)
      return {"connector.hybrid_groups",
              fmt::format("{} is handed several KV cache groups, and takes one", part.name)};
  return {};
}

}  // namespace

TransferCase generate_transfer(ChoiceSource& choices, const TransferBias& bias) {
  TransferCase transfer{.subject = bias.subject, .pair = {}, .trace = {}, .connectors = {}};
  if (bias.subject == TransferSubject::connectors) {
    transfer.connectors = generate_connectors(choices);
    return transfer;
  }
  transfer.pair.prefill = engine_of(64);
  transfer.pair.decode = engine_of(bias.tight ? 1 + kLongest / kBlockSize + choices.below(6) : 64);
  transfer.pair.network = generate_network(choices);
  transfer.pair.times = {.retry_ns = 5'000'000, .retries_max = 3, .lease_ns = 1'000'000'000};
  transfer.has_pages = bias.has_pages;
  if (bias.has_pages) transfer.pair.staging_blocks = choices.between(1, 8);
  if (bias.tight) transfer.pair.offer_percent = choices.chance(50) ? 100 : 50;
  if (bias.fails_requests) transfer.pair.load_failure_policy = KVLoadFailurePolicy::fail;
  transfer.trace = generate_requests(choices);
  return transfer;
}

TransferOutcome judge_transfer(const TransferCase& transfer, std::string_view defect,
                               const BackendFactory& backend) {
  if (transfer.subject == TransferSubject::connectors)
    return judge_connectors(transfer.connectors, defect);
  if (transfer.subject == TransferSubject::holds) return judge_holds(transfer, defect);
  const auto planted = transfer_defect_from_name(defect);
  LS_CHECK(planted || defect.empty(), "there is no defect {} of transfers", defect);
  return judge_pair(transfer, planted.value_or(TransferDefect::none), backend);
}

TransferCase shortest_failing(const TransferCase& transfer, std::string_view defect,
                              std::string_view check, const BackendFactory& backend) {
  TransferCase shortest = transfer;
  for (std::size_t n = 1; n < transfer.trace.records.size(); ++n) {
    shortest.trace.records.assign(transfer.trace.records.begin(),
                                  transfer.trace.records.begin() + static_cast<std::ptrdiff_t>(n));
    if (judge_transfer(shortest, defect, backend).check == check &&
        !judge_transfer(shortest, {}, backend).failed())
      return shortest;
  }
  return transfer;
}

std::string describe(const TransferCase& transfer) {
  if (transfer.subject == TransferSubject::connectors) {
    std::string text = transfer.connectors.offloads ? "offloading to the host" : "";
    for (const ConnectorClass& part : transfer.connectors.connectors)
      text += (text.empty() ? "" : ", ") + part.name;
    return text;
  }
  const NetworkOptions& network = transfer.pair.network;
  return fmt::format("{} requests, {} and {} blocks, {} % lost, {} % twice",
                     transfer.trace.records.size(), transfer.pair.prefill.backend.plan.num_blocks,
                     transfer.pair.decode.backend.plan.num_blocks, network.loss_percent,
                     network.duplicate_percent);
}

}  // namespace lockstep
