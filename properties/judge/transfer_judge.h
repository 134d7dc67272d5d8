// Cases of two engines with a network between them, and of connector set-up: generated from
// choices, judged with or without a planted defect.
//
// Invariants
// (1) A case of `pair` agrees when the pair's ledger finds every rule kept, no engine diverges from
//     its backend, if it has one, and no request waits forever.
// (2) A case of `holds` plants nothing: vllm-0.22.1 itself may deadlock once blocks come from
//     elsewhere (docs/findings.md, 7 and 8). Without the defect the decode engine computes all
//     tokens.
// (3) A case of `connectors` agrees when the engine starts, and passes several groups only to
//     connectors that support them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/names.h"
#include "base/result.h"
#include "properties/generate/choices.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/plan_options.h"
#include "reference/types/view_types.h"
#include "sim/connectors/multi_connector.h"
#include "sim/pair/engine_pair.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

struct TransferCase {
  TransferSubject subject = TransferSubject::pair;
  bool has_pages = false;  // engines with backends
  PairOptions pair;
  Trace trace;
  MultiConnectorConfig connectors;
};

struct TransferOutcome {
  std::string check;  // empty: it agrees
  std::string what;
  bool failed() const { return !check.empty(); }
};

TransferCase generate_transfer(ChoiceSource& choices, const TransferBias& bias);
// `defect`: a mutant's id; empty: none. `backend`: of both engines, for cases with pages.
TransferOutcome judge_transfer(const TransferCase& transfer, std::string_view defect,
                               const BackendFactory& backend);
// The shortest head of its trace that fails the same check.
TransferCase shortest_failing(const TransferCase& transfer, std::string_view defect,
                              std::string_view check, const BackendFactory& backend);
std::string describe(const TransferCase& transfer);

// Judges memory plans: an engine's result of a plan (views and addresses, figures for its users)
// against the model. Nothing runs.
//
// Invariants
// (1) sim/check/plan_prover.h proves views by bytes; reference/plan/capacity.h computes the
//     figures.
// (2) A plan that the model refuses is `refused`, unless its refusal is the question.

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

// What an engine reports about a plan to its users and its kernels.
struct PlanFigures {
  std::int64_t capacity_tokens = 0;
  std::int64_t slot_buffer_rows = 0;  // of a buffer with a row for each slot of any group
  std::int64_t max_num_seqs = 0;      // that will run
  std::int64_t hit_step_tokens = 0;   // hits end at its multiples; 0: none ever
};

// Mistakes of real engines in these figures: wrong limits or a wrong plan as input, wrong figures
// as output.
enum class CapacityDefect : std::uint8_t {
  none,
  capacity_all_groups,  // vLLM 40384: groups of O(1) cost divide the capacity
  capacity_sliding,     // 40417: windows and chunks divide it
  routed_buffer,        // 37118: a slot-indexed buffer sized by the capacity
  state_blocks_capped,  // 38270: max_num_seqs lowered in silence to what the states allow
  cp_memory,            // 39949 review: ranks that share a context left out of the estimate
  hit_rate_pack,        // 35703: a pack's page treated as a longer block, which hits must fill
};

}  // namespace lockstep
template <>
inline constexpr char lockstep::kWordJoint<lockstep::CapacityDefect> = '-';
namespace lockstep {

// The figures of capacity_of() from an engine with the defect. Refused: more requests than there
// are state blocks.
Result<PlanFigures> planted_figures(const KVCacheConfig& plan, PlanOptions options,
                                    CapacityDefect defect);

// The engine under test, with a defect of that name planted; an empty name: none.
struct PlanSuspect {
  std::function<Result<PoolViews>(const KVCacheConfig& plan, AttentionBackend backend,
                                  CacheLayout layout, std::string_view defect)>
      views;
  std::function<std::int64_t(const TensorView& view, std::span<const std::int64_t> index,
                             std::string_view defect)>
      byte_offset;
};

struct PlanOutcome {
  bool refused = false;
  std::string check;  // "layout.bytes", "layout.refused", "capacity.tokens", ...; empty: agreed
  std::string what = {};
  bool failed() const { return !check.empty(); }
};

PlanOutcome judge_views(const PlanCase& plan, const PlanSuspect& suspect, std::string_view defect);
// defect: of CapacityDefect; empty: none.
PlanOutcome judge_figures(const PlanCase& plan, std::string_view defect);

}  // namespace lockstep
