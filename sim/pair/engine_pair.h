// Two engines, one that prefills and one that decodes, with a network between them that delays,
// reorders, loses, repeats and damages what they say: prefill and decode apart, as vLLM's NIXL
// connector has it.
//
// A request goes to the prefill engine with one token to sample. When that has come, its blocks are
// kept and the decode engine is told of them; there the prompt is an external hit, its blocks are
// read over the network, and the request runs to its end. Blocks that never come are computed
// again, or the request fails, as kv_load_failure_policy says; one that failed is prefilled again,
// `attempts_max` times in all, and then refused with a reason.
//
// (1) Same options and client: same run, to the last packet.
// (2) Both engines decide by themselves, with pools and block ids of their own.
// (3) The first rule that the ledger finds broken ends the run (transfer_ledger.h).
// (4) When nothing moves any more and requests are left, the verdict is liveness.
//
// As vLLM truncates prompts for states, so a prompt is prefilled without its last token where a
// group has a window: the decode engine computes that token, and looks one token further back than
// the prefill engine keeps.
//
// Not simulated: states, several ranks, the sampled token of the prefill engine going anywhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sim/lockstep.h"
#include "sim/pair/network.h"
#include "sim/pair/transfer_ledger.h"
#include "sim/pair/transfer_protocol.h"

namespace lockstep {

inline constexpr Endpoint kPrefillEndpoint{0};
inline constexpr Endpoint kDecodeEndpoint{1};

struct PairOptions {
  // Both: engine vllm-0.22.1, the same groups; pools may differ.
  LockstepConfig prefill;
  LockstepConfig decode;
  NetworkOptions network;
  TransferTimes times;
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;
  std::int32_t attempts_max = 3;
  // Of a prompt's tokens, in whole blocks, that the prefill engine offers: caches may keep parts.
  std::int32_t offer_percent = 100;
  StepTimeModel step_time;
  std::int64_t steps_max = 0;  // of both engines together; 0: no limit
  bool is_apart = true;        // false: the decode engine does everything, nothing is transferred
  TransferDefect defect = TransferDefect::none;
};

struct RefusedRequest {
  std::string name;
  std::string why;
};

enum class PairVerdict : std::uint8_t {
  kept,      // every rule of the ledger
  broken,    // see PairReport::finding
  liveness,  // see the engines' summaries
};

struct PairReport {
  PairVerdict verdict = PairVerdict::kept;
  std::optional<TransferFinding> finding;
  bool is_cut_short = false;  // by steps_max
  std::int64_t requests = 0;
  std::int64_t finished_requests = 0;
  std::int64_t aborted_requests = 0;
  std::int64_t refused_requests = 0;
  std::int64_t prefilled_again = 0;     // attempts beyond the first
  std::vector<RefusedRequest> refused;  // the first few
  std::int64_t simulated_ns = 0;
  NetworkCounts network;
  TransferCounts transfers;
  std::int64_t blocks_checked = 0;  // deliveries that the ledger compared
  RunSummary prefill;
  RunSummary decode;

  std::int64_t steps() const { return prefill.steps + decode.steps; }
};

struct PairProgress {
  std::int64_t steps = 0;
  std::int64_t requests_ended = 0;
};

// `client`: what arrives and is sampled (make_trace_workload). Errors: configurations that are
// refused, a bad trace.
Result<PairReport> run_pair(const PairOptions& options, Workload& client,
                            const std::function<void(const PairProgress&)>& progress = {});

}  // namespace lockstep
