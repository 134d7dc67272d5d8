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
#include <map>
#include <string>

#include "sim/pair/paired_engine.h"
#include "sim/pair/transfer_ledger.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/pair/transfer_receiver.h"

namespace lockstep {

// The client's requests on their way through two engines: in which of them each is, in which
// attempt, and how it ends.
//
// (1) A request is prefilled with one token to sample, then decoded, under its own name. One that
//     fails for want of its blocks is prefilled again, `attempts_max` times in all.
// (2) Every request ends once, for its client and in the ledger.

struct RefusedRequest {
  std::string name;
  std::string why;
};

struct TravellerCounts {
  std::int64_t requests = 0;
  std::int64_t finished_requests = 0;
  std::int64_t aborted_requests = 0;
  std::int64_t refused_requests = 0;
  std::int64_t prefilled_again = 0;     // attempts beyond the first
  std::vector<RefusedRequest> refused;  // the first few

  std::int64_t ended() const { return finished_requests + aborted_requests + refused_requests; }
};

class Travellers {
 public:
  // All outlive it.
  Travellers(const PairOptions& options, Workload& client, TransferSender& sender,
             TransferReceiver& receiver, TransferLedger& ledger)
      : options_(options), client_(client), sender_(sender), receiver_(receiver), ledger_(ledger) {}
  // REQUIRES: before the first request arrives.
  void attach(PairedEngine& prefill, PairedEngine& decode) {
    prefill_ = &prefill;
    decode_ = &decode;
  }

  void arrived(RequestSpec spec, std::uint64_t ticket);
  // By its client. One that has ended is let be.
  void abort_request(const std::string& name);
  // What an engine says of a request that was given to it.
  void ended(const PairedEngine& engine, const std::string& name, FinishReason reason,
             std::int64_t now_ns);
  void refused(const PairedEngine& engine, const std::string& name, const Error& why);
  // Those whose blocks were lost in an engine that cannot compute them: they must not run.
  void take_out_failed();

  TransferId transfer_of(std::string_view name) const {
    return travellers_.find(name)->second.transfer;
  }
  bool is_empty() const { return travellers_.empty(); }
  const TravellerCounts& counts() const { return counts_; }

 private:
  struct Traveller {
    RequestSpec spec;
    std::uint64_t ticket = 0;  // the client's
    TransferId transfer;
    enum class Stage : std::uint8_t { prefill, decode } stage = Stage::prefill;
    bool was_aborted = false;  // by its client
  };
  void set_out(Traveller& traveller);
  void go_on(Traveller& traveller, std::int64_t now_ns);
  void decode_here(Traveller& traveller);
  void try_again(const std::string& name, const std::string& why);
  void end(const std::string& name, RequestEnd how, const std::string& why = {});
  std::int64_t num_prefilled(const Traveller& traveller) const;

  const PairOptions& options_;
  Workload& client_;
  TransferSender& sender_;
  TransferReceiver& receiver_;
  TransferLedger& ledger_;
  PairedEngine* prefill_ = nullptr;
  PairedEngine* decode_ = nullptr;
  std::map<std::string, Traveller, std::less<>> travellers_;
  TravellerCounts counts_;
};

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
