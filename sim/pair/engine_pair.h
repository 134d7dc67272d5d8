// Two engines, one that prefills and one that decodes, connected by a network that delays,
// reorders, loses, duplicates and corrupts messages: disaggregated prefill, as with vLLM's NIXL.
//
// A request goes to the prefill engine with one token to sample. When that token arrives, the
// engine holds the request's blocks and announces them to the decode engine. There the prompt is an
// external hit, its blocks are read over the network, and the request runs to its end. Blocks that
// never arrive are computed again, or the request fails, as kv_load_failure_policy requires. A
// failed request is prefilled again, `attempts_max` times in total, then refused with a reason.
//
// Invariants
// (1) Same options and client: same run, to the last packet.
// (2) Both engines decide independently, with their own pools and block ids.
// (3) The first rule that the ledger finds broken ends the run (transfer_ledger.h), and so does the
//     first divergence of an engine from its backend: `memory.divergence`.
// (4) When nothing moves and requests are left, the verdict is liveness.
// (5) With backends the run equals the run without: same decisions, same packets except their
//     bytes.
// (6) Each tensor parallel rank of an engine stages its part of a block. All parts travel as one
//     payload, and every rank of the other engine takes its own.
//
// Where a group has a window, the prompt is prefilled without its last token, as vLLM truncates
// prompts for states: the decode engine computes that token, and reads one token further back than
// the prefill engine keeps.
//
// Not simulated: states, other ranks, the use of the prefill engine's sampled token.
#pragma once

#include <cstdint>
#include <functional>

#include "sim/pair/network.h"
#include "sim/pair/pair_config.h"
#include "sim/pair/transfer_ledger.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/pair/travellers.h"

namespace lockstep {

inline constexpr Endpoint kPrefillEndpoint{0};
inline constexpr Endpoint kDecodeEndpoint{1};

enum class PairVerdict : std::uint8_t {
  kept,      // every rule of the ledger
  broken,    // see PairReport::finding
  liveness,  // see the engines' summaries
};

struct PairReport : TravellerCounts {
  PairVerdict verdict = PairVerdict::kept;
  std::optional<TransferFinding> finding;
  bool is_cut_short = false;  // by steps_max
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

// `client`: what arrives and is sampled. Errors: refused configurations, a bad trace.
Result<PairReport> run_pair(const PairOptions& options, Workload& client,
                            const std::function<void(const PairProgress&)>& progress = {});

}  // namespace lockstep
