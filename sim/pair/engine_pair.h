// Two engines, one that prefills and one that decodes, connected by a network that delays,
// reorders, loses, duplicates and corrupts messages: disaggregated prefill, as with vLLM's NIXL
// connector.
//
// The prefill engine computes the prompt and samples one token. It then holds the request's blocks,
// and the pair announces them to the decode engine. There the prompt is an external hit: the engine
// reads the blocks over the network and generates the output. If a block never arrives, the decode
// engine recomputes it or fails the request, as kv_load_failure_policy requires. A failed request
// is prefilled again, `attempts_max` times in total, then refused with a reason.
//
// Invariants
// (1) Equal options and an equal client produce the same run, packet by packet.
// (2) Each engine decides independently, with its own pool and block ids.
// (3) The first rule that the ledger finds broken ends the run (transfer_ledger.h). So does the
//     first divergence of an engine from its backend, reported as `memory.divergence`.
// (4) If nothing can happen and unfinished requests remain, the verdict is liveness.
// (5) A run with backends makes the same decisions as a run without. It also sends the same
//     packets, except for their payloads.
// (6) Each tensor parallel rank of an engine stages its part of a block. All parts travel as one
//     payload, in rank order, and each rank of the other engine receives the part of its own index.
//
// If a group has a sliding window, the prompt is prefilled without its last token, as vLLM
// truncates prompts for recurrent states (0.22.1, nixl/scheduler.py,
// _truncate_mamba_request_for_prefill()). The decode engine always computes the last prompt token
// itself. That token's window starts one token before the window that the prefill engine has kept
// after the whole prompt.
//
// Not simulated: recurrent states, ranks of other kinds, any use of the token that the prefill
// engine samples.
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

// A request that ended without an answer, and the reason given to its client.
struct RefusedRequest {
  std::string name;
  std::string why;
};

// Outcomes of the requests that the client has sent. requests - ended() requests are still live.
struct TravellerCounts {
  std::int64_t requests = 0;
  std::int64_t finished_requests = 0;
  std::int64_t aborted_requests = 0;
  std::int64_t refused_requests = 0;
  std::int64_t prefilled_again = 0;     // attempts after the first, all requests
  std::vector<RefusedRequest> refused;  // at most kRefusedNamed of them

  std::int64_t ended() const { return finished_requests + aborted_requests + refused_requests; }
};

// Tracks the client's requests through both engines: the stage, the attempt, and the outcome of
// each request.
//
// Invariants
// (1) A request is prefilled with one token to sample, then decoded, under the same name. If the
//     decode engine loses its blocks, it is prefilled again, `attempts_max` times in total.
// (2) Every request ends exactly once, for its client and in the ledger.
// (3) A live request is in one engine only, the engine of its stage. Only that engine receives an
//     abort.
class Travellers {
 public:
  // REQUIRES: all arguments outlive the object.
  Travellers(const PairOptions& options, Workload& client, TransferSender& sender,
             TransferReceiver& receiver, TransferLedger& ledger)
      : options_(options), client_(client), sender_(sender), receiver_(receiver), ledger_(ledger) {}
  // REQUIRES: before the first request arrives.
  void attach(PairedEngine& prefill, PairedEngine& decode) {
    prefill_ = &prefill;
    decode_ = &decode;
  }

  // Sends a new request to its first engine. `ticket` identifies it to the client. REQUIRES: no
  // live request has the same name.
  void arrived(RequestSpec spec, std::uint64_t ticket);
  // Aborts a request for its client. Does nothing if the request has already ended: the client may
  // disconnect late.
  void abort_request(const std::string& name);
  // Handles the end of a request in one engine: moves it to the decode engine, retries it, or ends
  // it for the client. `now_ns` is the end of the step in which it ended.
  void ended(const PairedEngine& engine, const std::string& name, FinishReason reason,
             std::int64_t now_ns);
  // Ends a request that `engine` did not admit. A refusal is final: another attempt would also be
  // refused.
  void refused(const PairedEngine& engine, const std::string& name, const Error& why);
  // Aborts the requests whose blocks are lost in an engine that cannot recompute them. REQUIRES:
  // called before the decode engine's next step, or that step computes with missing blocks.
  void take_out_failed();

  // Returns the current attempt of a request. REQUIRES: the request is live.
  TransferId transfer_of(std::string_view name) const {
    return travellers_.find(name)->second.transfer;
  }
  bool is_empty() const { return travellers_.empty(); }
  const TravellerCounts& counts() const { return counts_; }

 private:
  struct Traveller {
    RequestSpec spec;
    std::uint64_t ticket = 0;  // the client's id of the request
    TransferId transfer;       // number of the request, current attempt
    enum class Stage : std::uint8_t { prefill, decode } stage = Stage::prefill;
    bool was_aborted = false;  // True if its client aborted it; such a request is not retried
  };
  // Starts the next attempt: prefill if there is anything to transfer, else decode only.
  void set_out(Traveller& traveller);
  // Announces the held blocks to the decode engine and adds the request there.
  void go_on(Traveller& traveller, std::int64_t now_ns);
  // Adds the request to the decode engine.
  void decode_here(Traveller& traveller);
  // Starts another attempt, or refuses the request with `why` after the last one.
  void try_again(const std::string& name, const std::string& why);
  // Reports the outcome to the ledger and the client, and erases the request.
  void end(const std::string& name, RequestEnd how, const std::string& why = {});
  // Tokens that the prefill engine computes: the prompt, or the prompt without its last token.
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
  broken,    // a rule of the ledger, see PairReport::finding
  liveness,  // unfinished requests wait forever, see the engines' summaries
};

// Result of a run. `finding` is set exactly if the verdict is `broken`. A run that is cut short is
// not checked for unfinished requests, so its verdict may be `kept` with live requests.
struct PairReport : TravellerCounts {
  PairVerdict verdict = PairVerdict::kept;
  std::optional<TransferFinding> finding;
  bool is_cut_short = false;      // by steps_max or a stop signal
  std::int64_t simulated_ns = 0;  // virtual time of the last event
  NetworkCounts network;
  TransferCounts transfers;
  std::int64_t blocks_checked = 0;  // deliveries that the ledger compared
  RunSummary prefill;
  RunSummary decode;

  std::int64_t steps() const { return prefill.steps + decode.steps; }
};

// Progress so far, of both engines together.
struct PairProgress {
  std::int64_t steps = 0;
  std::int64_t requests_ended = 0;
};

// Runs both engines until the client has no further arrivals and nothing can happen, until the
// first finding, until steps_max or a stop signal. `client` supplies the requests, their aborts and
// the decode engine's sampled tokens. Calls `progress` after each turn. Errors: a refused
// configuration (check_pair()), an invalid trace, a backend that fails.
Result<PairReport> run_pair(const PairOptions& options, Workload& client,
                            const std::function<void(const PairProgress&)>& progress = {});

}  // namespace lockstep
