// Cases of two engines with a network between them, of deadlocks by held blocks, and of connector
// set-up: generated from choices, judged with or without a planted defect. Each case has a subject,
// which decides what is run.
//
// Invariants
// (1) A case of `pair` agrees if the pair's ledger finds every rule kept, no engine diverges from
//     its backend, and no request waits forever.
// (2) A case of `holds` plants nothing: vllm-0.22.1 itself may deadlock once blocks come from
//     elsewhere (docs/findings.md, 7 and 8). Without the defect the decode engine computes all
//     tokens itself.
// (3) A case of `connectors` agrees if the engine starts and passes several groups only to
//     connectors that support them.
// (4) The same choices and bias give the same case.
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

// A case. Only the fields of its subject are used: `connectors` for TransferSubject::connectors,
// the others otherwise.
struct TransferCase {
  TransferSubject subject = TransferSubject::pair;
  bool has_pages = false;  // true: both engines have backends, and real pages are sent
  // Both engines, without their backends.
  PairOptions pair;
  Trace trace;
  MultiConnectorConfig connectors;
};

struct TransferOutcome {
  std::string check;  // the failed check; empty: the case agrees
  std::string what;
  bool failed() const { return !check.empty(); }
};

// Generates a case: two equal engines of 4-token blocks, 2 to 14 requests of at most 48 tokens, and
// a network that loses, repeats and delays messages.
TransferCase generate_transfer(ChoiceSource& choices, const TransferBias& bias);
// Judges the case. `defect`: the id of a mutant; empty: none. `backend`: for both engines; required
// if the case has pages. A pair that cannot be set up fails with check "refused".
TransferOutcome judge_transfer(const TransferCase& transfer, std::string_view defect,
                               const BackendFactory& backend);
// Returns the case with the shortest prefix of its trace that still fails `check` and agrees
// without the defect. Each candidate is judged twice. If there is none, the case itself.
TransferCase shortest_failing(const TransferCase& transfer, std::string_view defect,
                              std::string_view check, const BackendFactory& backend);
// Formats a case in one line, for lists of mutants.
std::string describe(const TransferCase& transfer);

// Judges memory plans: an engine's result of a plan (views, addresses, and the figures for its
// users) against the model. Nothing runs.
//
// Invariants
// (1) sim/check/plan_prover.h proves the views byte by byte; reference/plan/capacity.h computes the
//     figures.
// (2) A plan that the model refuses is `refused`, unless the refusal is what the case checks.

// A model's layers and the options to plan them with.
struct PlanCase {
  LayerSpecs layers;
  PlanOptions options;
  CacheLayout layout = CacheLayout::NHD;
  // Blocks of the planned pool, null block included.
  std::int64_t num_blocks = 2;
};
// Generates a plan. The same choices and bias give the same plan.
PlanCase generate_plan(ChoiceSource& choices, const PlanBias& bias);
// Formats a plan in one line: "layers: 2 of full_attention, 3 of mamba; flash_attn, NHD, 2 blocks".
std::string describe(const PlanCase& plan);

// The figures about a plan that an engine reports to its users and its kernels.
struct PlanFigures {
  // Tokens that the pool holds at full use.
  std::int64_t capacity_tokens = 0;
  std::int64_t slot_buffer_rows = 0;  // rows of a buffer with one row per slot of any group
  std::int64_t max_num_seqs = 0;      // requests that may run at once
  std::int64_t hit_step_tokens = 0;   // hits end at multiples of it; 0: there are no hits
};

// Mistakes of real engines in these figures, planted on request: wrong limits or a wrong plan as
// input, or wrong figures as output. The numbers are pull requests of vLLM.
enum class CapacityDefect : std::uint8_t {
  none,
  capacity_all_groups,  // 40384: groups of O(1) cost divide the capacity
  capacity_sliding,     // 40417: windows and chunks divide it
  routed_buffer,        // 37118: a slot-indexed buffer sized by the capacity
  state_blocks_capped,  // 38270: max_num_seqs silently lowered to what the states allow
  cp_memory,            // 39949 review: ranks that share a context left out of the estimate
  hit_rate_pack,        // 35703: a pack counts as one longer block, which a hit must fill
};

}  // namespace lockstep
template <>
inline constexpr char lockstep::kWordJoint<lockstep::CapacityDefect> = '-';
namespace lockstep {

// Returns the figures of an engine with the defect. Errors: more requests than state blocks, where
// the engine would refuse to start.
Result<PlanFigures> planted_figures(const KVCacheConfig& plan, PlanOptions options,
                                    CapacityDefect defect);

// The engine under test. Both functions receive the name of the defect to plant; empty: none.
struct PlanSuspect {
  // Derives the views of a plan's layers. Errors: the engine refuses the plan.
  std::function<Result<PoolViews>(const KVCacheConfig& plan, AttentionBackend backend,
                                  CacheLayout layout, std::string_view defect)>
      views;
  // Returns the byte in the pool of an element of a view.
  std::function<std::int64_t(const TensorView& view, std::span<const std::int64_t> index,
                             std::string_view defect)>
      byte_offset;
};

struct PlanOutcome {
  // True: the model refuses the plan, so there is no verdict.
  bool refused = false;
  std::string check;  // "layout.bytes", "capacity.tokens", ...; empty: agreed
  std::string what = {};
  bool failed() const { return !check.empty(); }
};

// Checks every byte of the views. In pools of more than 64 blocks only the first and the last block
// are checked.
PlanOutcome judge_views(const PlanCase& plan, const PlanSuspect& suspect, std::string_view defect);
// Checks the figures, and that engine and model agree on refusing the plan. `defect`: a name of
// CapacityDefect; empty: none. REQUIRES: `defect` is one of those.
PlanOutcome judge_figures(const PlanCase& plan, std::string_view defect);

}  // namespace lockstep
