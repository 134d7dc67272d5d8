// The client's requests on their way through two engines: in which of them each is, in which
// attempt, and how it ends.
//
// (1) A request is prefilled with one token to sample, then decoded, under its own name. One that
//     fails for want of its blocks is prefilled again, `attempts_max` times in all.
// (2) Every request ends once, for its client and in the ledger.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "sim/pair/pair_config.h"
#include "sim/pair/paired_engine.h"
#include "sim/pair/transfer_ledger.h"
#include "sim/pair/transfer_receiver.h"
#include "sim/pair/transfer_sender.h"

namespace lockstep {

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

}  // namespace lockstep
