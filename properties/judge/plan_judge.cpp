#include "properties/judge/plan_judge.h"

#include <fmt/core.h>

#include <map>

#include "reference/plan/capacity.h"
#include "reference/plan/layout.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "sim/check/plan_prover.h"

namespace lockstep {
namespace {

// Of a pool with more blocks than this, the first and the last are looked at.
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

KVCacheSpec rows(CacheKind kind, std::int64_t heads, std::int64_t head_size,
                 std::int64_t block_size) {
  KVCacheSpec spec;
  spec.kind = kind;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.block_size = block_size;
  return spec;
}

// A convolution state in bf16 and a recurrent one in fp32: its size decides how long blocks get.
KVCacheSpec states_of(std::int64_t rows_of_eight) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.block_size = 0;
  spec.states = {{{3, 20}, DType::bf16}, {{rows_of_eight, 8}, DType::fp32}};
  return spec;
}

LayerSpecs draw_layers(ChoiceSource& choices, const PlanBias& bias) {
  LayerSpecs layers;
  const auto add = [&](const KVCacheSpec& spec, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i)
      layers.push_back({fmt::format("l{}", layers.size()), spec});
  };
  if (bias.states) {
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

// The limits of a plan that this case asks about.
Result<KVCacheConfig> planned(const PlanCase& plan, PlanOptions options) {
  LS_ASSIGN_OR_RETURN(auto made, plan_memory(plan.layers, options));
  return with_num_blocks(made.workers.front(), plan.num_blocks);
}

}  // namespace

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
      *pool, *layout, *views,
      [&](const TensorView& view, std::span<const std::int64_t> index) {
        return suspect.byte_offset(view, index, defect);
      },
      options);
  if (proof.holds()) return {};
  return found("layout.bytes", proof.findings.front().text);
}

PlanOutcome judge_figures(const PlanCase& plan, const PlanSuspect& suspect,
                          std::string_view defect) {
  PlanOptions without_limit = plan.options;
  without_limit.max_num_seqs.reset();
  const auto made = plan_memory(plan.layers, without_limit);
  if (!made) return plan_refusal(made.error());
  const KVCacheConfig& pool = made->workers.front();
  const auto figures = suspect.figures(pool, plan.options, defect);
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
        fmt::format("hits have a granularity of {} tokens where blocks allow {}: of a prompt of "
                    "{} tokens that is sent again, {} are found",
                    figures->hit_step_tokens, capacity.hit_step_tokens, plan.options.max_model_len,
                    resend_hit_tokens(capacity.hit_step_tokens, plan.options.max_model_len)));
  return {};
}

}  // namespace lockstep
