// The KV connector of a recording: gives the recorded answers and reports.
//
// Invariants
// (1) A query that the recorded engine did not make is answered "query again"; the comparison sees
//     the query.
// (2) An answer that no engine can follow (more tokens than the request has) is an Error at the end
//     of the step.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_connector.h"
#include "sim/connectors/simulated_connector.h"
#include "sim/engine/workload.h"
#include "traces/formats/recording.h"

namespace lockstep {

// The iteration order of CPython (3.11 and later, PYTHONHASHSEED=0) over a set of names.
//
// vLLM frees the blocks of sent requests in the order of a set, and this order decides which blocks
// are allocated first. A recording holds such names sorted, so the order is computed as the
// recording's interpreter does: SipHash-1-3 with a zero key, open addressing in a table of 8
// entries and more (CPython: Python/pyhash.c, Objects/setobject.c).
//
// Not handled: sets that names were removed from, non-ASCII names.

std::uint64_t python_hash(std::string_view name);

// `names`, inserted one after the other into an empty set, in the set's order.
std::vector<std::string> in_python_set_order(const std::vector<std::string>& names);

// What a recording's connector said of itself.
KVConnectorTraits traits_of(const RecordedConnectorConfig& config);

// How the engine of a recording treats `connector`; null: it has none.
KVTransfer kv_transfer(const RecordingHeader& header, KVConnector* connector);

class RecordedConnector final : public KVConnector {
 public:
  // `step` is the recorded step that the loop is in; its content changes from step to step.
  RecordedConnector(const RecordedConnectorConfig& config, const RecordedStep& step)
      : traits_(traits_of(config)), step_(step) {}

  KVConnectorTraits traits() const override { return traits_; }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  bool request_finished(RequestId request, std::string_view name) override;
  void order_failed_requests(std::vector<RequestId>& requests) override;
  void order_published_requests(std::vector<std::string>& names) override {
    names = in_python_set_order(names);
  }

  // What the workers reported with this step's output, appended to `report`.
  Result<void> take_report(KVConnectorOutput& report);

 private:
  Result<RequestId> take(std::string_view key, const std::string& name);
  void begins(const std::string& name, RequestId request);
  std::vector<std::string> in_set_order(std::vector<std::string> names) const;
  // The step's transfers in the order in which the engine iterates its sets. vLLM's MultiConnector
  // fills its own set, part after part, each part's reports in the recorded order; a send joins it
  // with the report of its last part.
  std::vector<std::string> received() const;
  std::vector<std::string> sent() const;

  const KVConnectorTraits traits_;
  const RecordedStep& step_;
  struct Transfer {
    RequestId request{};
    std::int64_t number = 0;
  };
  std::map<std::string, Transfer, std::less<>> moving_;  // whose blocks are loaded or sent
  std::int64_t num_begun_ = 0;
  std::map<RequestId, std::string> names_;  // of the same, and of those asked about
  std::optional<Error> error_;
};

// The transfers of a recording whose decisions are followed: peers send the rows that its requests
// would have computed, in the steps that the recording names (PeerTransfers).
//
// (1) A load begins in the step that gives its request blocks after the recorded answer.
// (2) It completes, fails or loses blocks as the recorded report says, and so does a send.
class FollowedTransfers final : public TransferPlanner {
 public:
  // `step`: the recorded step that the loop is in. Both outlive this.
  FollowedTransfers(const RecordedStep& step, PeerTransfers& peers) : step_(step), peers_(peers) {}

  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  const RecordedStep& step_;
  PeerTransfers& peers_;
  std::int64_t num_frees_delayed_ = 0;
};

}  // namespace lockstep
