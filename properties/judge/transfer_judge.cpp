#include "properties/judge/transfer_judge.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "reference/plan/capacity.h"
#include "reference/plan/layout.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "reference/profiles/releases.h"
#include "sim/check/plan_prover.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

// Small blocks make many transfers of few tokens; 48 tokens are 12 blocks per request.
constexpr std::int32_t kBlockSize = 4;
constexpr std::int32_t kPromptMax = 40;
constexpr std::int32_t kOutputMax = 8;
constexpr std::int32_t kLongest = kPromptMax + kOutputMax;

// Configures one of the two engines: one group of two layers of full attention, at most 4 requests
// and 32 tokens per step. connector_profile() is the release that pairs are modelled with.
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

// Generates 2 to 14 requests. Their prompts start with one of three token sequences, so that caches
// on both sides overlap. Arrivals are up to 40 ms apart, half of them simultaneous. A tenth is
// aborted 30 ms after arrival, when a transfer may be in flight.
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

// Generates a network. Every fault has a probability below 25 percent, so most transfers still
// complete. A straggler arrives 100 ms late, after all retries.
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

// Generates up to three connector classes, with or without an offloading backend, which adds one
// more.
MultiConnectorConfig generate_connectors(ChoiceSource& choices) {
  MultiConnectorConfig config;
  config.offloads = choices.chance(30);
  const auto classes = connector_classes();
  for (std::int64_t i = choices.below(4); i > 0; --i)
    config.connectors.push_back(classes[choices.below(std::ssize(classes))]);
  return config;
}

// Makes the backend of one engine; null without pages. The staging buffer is the backend's host
// tier.
Result<std::unique_ptr<Backend>> backend_for(const TransferCase& transfer, LockstepConfig& config,
                                             const BackendFactory& backend) {
  if (!transfer.has_pages) return std::unique_ptr<Backend>();
  LS_CHECK(backend != nullptr, "a case with pages is judged without a backend");
  config.backend.num_host_blocks = transfer.pair.staging_blocks;
  return backend(config.backend);
}

// Runs the pair and returns its first finding. An error of the set-up is reported as a failed check
// "refused", so that a search does not mistake it for agreement.
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

// Judges the deadlocks that vllm-0.22.1 has once blocks come from elsewhere. With a defect's name
// the transfers take place; without, the decode engine computes everything. A deadlock of the other
// kind does not count: the two mutants must be told apart.
TransferOutcome judge_holds(const TransferCase& transfer, std::string_view defect) {
  TransferCase apart = transfer;
  apart.pair.is_apart = !defect.empty();
  TransferOutcome outcome = judge_pair(apart, TransferDefect::none, {});
  const bool other_kind =
      (defect == "hold-head-of-line" && outcome.check == "liveness.partial_load") ||
      (defect == "hold-partial-deadlock" && outcome.check == "liveness.head_of_line");
  return other_kind ? TransferOutcome{} : outcome;
}

// Sets up the connectors and checks the rule about hybrid groups. An offloading backend adds its
// connector last, so a check before that would miss it.
TransferOutcome judge_connectors(const MultiConnectorConfig& config, std::string_view defect) {
  const MultiConnectorDefect planted =
      defect_from_name<MultiConnectorDefect>(defect).value_or(MultiConnectorDefect::none);
  const Result<MultiConnectorSetup> setup = set_up_connectors(config, planted);
  if (!setup) return {"connector.start", setup.error().message};
  for (const ConnectorClass& part : setup->connectors)
    if (setup->hybrid_groups && !part.supports_hybrid_groups)
      return {"connector.hybrid_groups",
              fmt::format("{} is handed several KV cache groups, and takes one", part.name)};
  return {};
}

}  // namespace

// A tight decode pool holds one request of 48 tokens (12 blocks) and at most 5 blocks more.
// offer_percent then lets half of the cases load only a part, which is what two half-loaded
// requests need to block each other.
TransferCase generate_transfer(ChoiceSource& choices, const TransferBias& bias) {
  TransferCase transfer{.subject = bias.subject, .pair = {}, .trace = {}, .connectors = {}};
  if (bias.subject == TransferSubject::connectors) {
    transfer.connectors = generate_connectors(choices);
    return transfer;
  }
  transfer.pair.prefill = engine_of(64);
  transfer.pair.decode = engine_of(bias.tight ? 1 + kLongest / kBlockSize + choices.below(6) : 64);
  transfer.pair.network = generate_network(choices);
  // 5 ms per retry, 3 retries, a lease of 1 s: a straggler exceeds the retries and not the lease.
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
  const auto planted = defect_from_name<TransferDefect>(defect);
  LS_CHECK(planted || defect.empty(), "there is no defect {} of transfers", defect);
  return judge_pair(transfer, planted.value_or(TransferDefect::none), backend);
}

// Prefixes are tried in ascending order, so the first that fails is the shortest. A binary search
// could miss it: a longer trace need not fail.
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

// Loss and duplication are shown because most defects of the protocol need one of them.
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

namespace {

// In larger pools only the first and last block are proved: addresses are linear in the block.
constexpr std::int64_t kBlocksProved = 64;

PlanOutcome plan_refusal(const Error& error) {
  PlanOutcome outcome;
  outcome.refused = true;
  outcome.what = error.message;
  return outcome;
}

PlanOutcome found(std::string check, std::string what) {
  return {.refused = false, .check = std::move(check), .what = std::move(what)};
}

// Makes the spec of attention layers. A block size of 0 lets the planner choose.
KVCacheSpec rows(CacheKind kind, std::int64_t heads, std::int64_t head_size,
                 std::int64_t block_size) {
  KVCacheSpec spec;
  spec.kind = kind;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.block_size = block_size;
  return spec;
}

// Makes the spec of layers with a convolution state in bf16 and a recurrent state in fp32.
// `rows_of_eight` sets the size of the recurrent state, and with it the block size of attention:
// its page must hold the state page.
KVCacheSpec states_of(std::int64_t rows_of_eight) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.block_size = 0;
  spec.states = {{{3, 20}, DType::bf16}, {{rows_of_eight, 8}, DType::fp32}};
  return spec;
}

// Generates the layers that the bias requests. There is always full attention, which a hybrid needs
// and which a pack consists of.
LayerSpecs draw_layers(ChoiceSource& choices, const PlanBias& bias) {
  LayerSpecs layers;
  const auto add = [&](const KVCacheSpec& spec, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i)
      layers.push_back({fmt::format("l{}", layers.size()), spec});
  };
  if (bias.states) {
    // 250 rows of 8 floats (8,000 bytes) exceed the smallest kernel block of attention (16 tokens
    // of 128 bytes), so blocks span several. 1,200 rows keep that true for a page that several
    // attention layers share.
    const std::int64_t least = bias.packed ? 1200 : bias.split_blocks ? 250 : 20;
    add(states_of(least + choices.below(least / 4)), choices.between(1, 3) + (bias.packed ? 5 : 0));
  }
  add(rows(CacheKind::full_attention, 2, 16, 0), bias.packed ? choices.between(5, 7) : 1);
  if (bias.windows) {
    KVCacheSpec window = rows(CacheKind::sliding_window, 2, 16, 0);
    window.sliding_window = choices.between(2, 40);
    add(window, choices.between(1, 3));
  }
  if (bias.hidden_states)
    layers.push_back(hidden_state_layer(choices.between(1, 3), 16, DType::bf16));
  return layers;
}

// Plans the layers, and sets the number of blocks that the case checks. Errors: the model refuses
// the plan.
Result<KVCacheConfig> planned(const PlanCase& plan, PlanOptions options) {
  LS_ASSIGN_OR_RETURN(auto made, plan_memory(plan.layers, options));
  return with_num_blocks(made.workers.front(), plan.num_blocks);
}

}  // namespace

// Choices are made in a fixed order. Unused ones are not made, so the bias is part of what
// determines a plan.
PlanCase generate_plan(ChoiceSource& choices, const PlanBias& bias) {
  PlanCase plan;
  plan.layers = draw_layers(choices, bias);
  plan.layout = choices.one_of({CacheLayout::NHD, CacheLayout::HND});
  plan.num_blocks = bias.num_blocks != 0 ? bias.num_blocks : choices.between(2, 4);
  plan.options.backend = choices.one_of(
      {AttentionBackend::flash_attn, AttentionBackend::flashinfer, AttentionBackend::triton_attn});
  plan.options.attn_pack = bias.packed ? choices.between(2, 4) : 1;
  plan.options.max_model_len = choices.one_of<std::int64_t>({64, 128, 512});
  plan.options.max_num_batched_tokens = choices.one_of<std::int64_t>({64, 16});
  if (bias.aligned_states) plan.options.mamba_cache_mode = MambaCacheMode::align;
  if (bias.ranks) plan.options.dcp = choices.between(2, 4);
  // Kinds that share a pool need more blocks than plain attention, and many_requests must exceed
  // the state blocks: 401 to 500 requests against at most 400 blocks.
  if (bias.windows || bias.ranks || bias.many_requests || bias.states)
    plan.options.num_gpu_blocks_override = choices.between(100, 400);
  else
    plan.options.num_gpu_blocks_override = 200;
  if (bias.many_requests) plan.options.max_num_seqs = 401 + choices.below(100);
  return plan;
}

std::string describe(const PlanCase& plan) {
  std::map<CacheKind, int> layers;
  for (const NamedSpec& layer : plan.layers) ++layers[layer.spec.kind];
  std::string text;
  for (const auto& [kind, count] : layers)
    text += fmt::format("{}{} of {}", text.empty() ? "layers: " : ", ", count, name_of(kind));
  return fmt::format("{}; {}, {}, {} blocks", text, name_of(plan.options.backend),
                     name_of(plan.layout), plan.num_blocks);
}

// The model's own refusal ends the case; a refusal of only the suspect is a failure.
PlanOutcome judge_views(const PlanCase& plan, const PlanSuspect& suspect, std::string_view defect) {
  const auto pool = planned(plan, plan.options);
  if (!pool) return plan_refusal(pool.error());
  const auto layout = pool_layout(*pool, plan.options.backend, plan.layout);
  if (!layout) return plan_refusal(layout.error());
  const auto views = suspect.views(*pool, plan.options.backend, plan.layout, defect);
  if (!views)
    return found("layout.refused",
                 fmt::format("a plan that has a layout is refused: {}", views.error().message));
  ProofOptions options;
  if (pool->num_blocks > kBlocksProved)
    options.blocks = {BlockId{0}, BlockId{static_cast<std::int32_t>(pool->num_blocks - 1)}};
  const PlanProof proof = prove_views(
      *layout, *views,
      [&](const TensorView& view, std::span<const std::int64_t> index) {
        return suspect.byte_offset(view, index, defect);
      },
      options);
  if (proof.holds()) return {};
  return found("layout.bytes", proof.findings.front().text);
}

Result<PlanFigures> planted_figures(const KVCacheConfig& plan, PlanOptions options,
                                    CapacityDefect defect) {
  PlanFigures figures{.max_num_seqs = options.max_num_seqs.value_or(1)};
  // Each request needs a state block of its own, so more requests than blocks cannot run.
  if (std::ranges::any_of(plan.groups, [](const auto& g) { return is_state_kind(g.spec.kind); })) {
    if (defect == CapacityDefect::state_blocks_capped)
      figures.max_num_seqs = std::min(figures.max_num_seqs, plan.num_blocks);
    if (figures.max_num_seqs > plan.num_blocks)
      return fail("{} requests at once need a state block each and there are {}",
                  figures.max_num_seqs, plan.num_blocks);
  }
  // Without its ranks the engine counts each one as if it stored all tokens.
  if (defect == CapacityDefect::cp_memory) options.dcp = options.pcp = 1;
  const Capacity capacity = capacity_of(plan, options);
  figures.capacity_tokens = capacity.capacity_tokens;
  figures.slot_buffer_rows = capacity.slot_address_space;
  figures.hit_step_tokens = capacity.hit_step_tokens;
  KVCacheConfig other = plan;
  // Groups of states do not divide the capacity in this defect.
  if (defect == CapacityDefect::capacity_sliding)
    std::erase_if(other.groups, [](const KVCacheGroupSpec& group) {
      return is_state_kind(group.spec.kind) && group.spec.mamba_cache_mode != MambaCacheMode::all;
    });
  if (defect == CapacityDefect::capacity_all_groups || defect == CapacityDefect::capacity_sliding)
    figures.capacity_tokens = other.groups.empty() ? 0 : tokens_of_groups(other, options, false);
  if (defect == CapacityDefect::routed_buffer) figures.slot_buffer_rows = figures.capacity_tokens;
  // A pack of N layers shares one page; an engine with this defect treats it as a block of N times
  // the tokens.
  if (defect == CapacityDefect::hit_rate_pack) {
    for (KVCacheGroupSpec& group : other.groups) group.spec.block_size *= group.layers_per_page;
    figures.hit_step_tokens = capacity_of(other, options).hit_step_tokens;
  }
  return figures;
}

// The plan without the limit must exist, or there are no figures to compare. The plan with the
// limit tells whether the model refuses.
PlanOutcome judge_figures(const PlanCase& plan, std::string_view defect) {
  PlanOptions without_limit = plan.options;
  without_limit.max_num_seqs.reset();
  const auto made = plan_memory(plan.layers, without_limit);
  if (!made) return plan_refusal(made.error());
  const KVCacheConfig& pool = made->workers.front();
  const auto figures =
      planted_figures(pool, plan.options,
                      defect.empty() ? CapacityDefect::none : *from_name<CapacityDefect>(defect));
  const bool refuses = !plan_memory(plan.layers, plan.options).has_value();
  if (figures.has_value() == refuses)
    return found("capacity.refusal",
                 refuses
                     ? fmt::format("{} requests at once are taken, or fewer of them in silence, "
                                   "where {} blocks hold no state for each",
                                   *plan.options.max_num_seqs, pool.num_blocks)
                     : fmt::format("a plan that holds is refused: {}", figures.error().message));
  if (refuses) return {};
  const Capacity capacity = capacity_of(pool, plan.options);
  if (figures->capacity_tokens != capacity.capacity_tokens)
    return found("capacity.tokens",
                 fmt::format("{} tokens are reported where the pool holds {}",
                             figures->capacity_tokens, capacity.capacity_tokens));
  if (figures->slot_buffer_rows != capacity.slot_address_space)
    return found("capacity.slot_rows",
                 fmt::format("a buffer of {} rows is indexed by slots up to {}",
                             figures->slot_buffer_rows, capacity.slot_address_space - 1));
  if (figures->hit_step_tokens != capacity.hit_step_tokens)
    return found(
        "capacity.hit_step",
        fmt::format("hits have a granularity of {} tokens where blocks allow {}: of a prompt of {} "
                    "tokens that is sent again, {} are found",
                    figures->hit_step_tokens, capacity.hit_step_tokens, plan.options.max_model_len,
                    resend_hit_tokens(capacity.hit_step_tokens, plan.options.max_model_len)));
  return {};
}

}  // namespace lockstep
