// Judges memory plans: an engine's result of a plan (views and addresses, figures for its users)
// against the model. Nothing runs.
//
// Invariants
// (1) sim/check/plan_prover.h proves views by bytes; reference/plan/capacity.h computes the
//     figures.
// (2) A plan that the model refuses is `refused`, unless its refusal is the question.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "properties/generate/choices.h"
#include "properties/generate/generator.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/plan_options.h"
#include "reference/types/view_types.h"

namespace lockstep {

struct PlanCase {
  LayerSpecs layers;
  PlanOptions options;
  CacheLayout layout = CacheLayout::NHD;
  std::int64_t num_blocks = 2;
};
// Same choices and bias, same plan.
PlanCase generate_plan(ChoiceSource& choices, const PlanBias& bias);
// "2 layers of full_attention, 3 of mamba; flash_attn, NHD, 2 blocks"
std::string describe(const PlanCase& plan);

struct PlanFigures {
  std::int64_t capacity_tokens = 0;
  std::int64_t slot_buffer_rows = 0;
  std::int64_t max_num_seqs = 0;
  std::int64_t hit_step_tokens = 0;
};

// The engine under test, with a defect of that name planted; an empty name: none.
struct PlanSuspect {
  std::function<Result<PoolViews>(const KVCacheConfig& plan, AttentionBackend backend,
                                  CacheLayout layout, std::string_view defect)>
      views;
  std::function<std::int64_t(const TensorView& view, std::span<const std::int64_t> index,
                             std::string_view defect)>
      byte_offset;
  std::function<Result<PlanFigures>(const KVCacheConfig& plan, const PlanOptions& options,
                                    std::string_view defect)>
      figures;
};

struct PlanOutcome {
  bool refused = false;
  std::string check;  // "layout.bytes", "layout.refused", "capacity.tokens", ...; empty: agreed
  std::string what = {};
  bool failed() const { return !check.empty(); }
};

PlanOutcome judge_views(const PlanCase& plan, const PlanSuspect& suspect, std::string_view defect);
PlanOutcome judge_figures(const PlanCase& plan, const PlanSuspect& suspect,
                          std::string_view defect);

}  // namespace lockstep
