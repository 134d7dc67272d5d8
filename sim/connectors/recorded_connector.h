// The KV connector of a recording: gives the recorded answers and reports to a scheduler that
// decides by itself. The comparison then shows whether the scheduler asks for the same things and
// does the same with the answers.
//
// Invariants
// (1) A query that the recorded engine did not make is answered "query again"; the comparison sees
//     the query.
// (2) An answer that no engine can follow (more tokens than the request has) is an Error at the end
//     of the step.
// (3) A report names only requests whose load or send this connector has seen begin. Any other name
//     is an Error: the recording and the run have separated.
//
// Not checked: whether the recorded answers are plausible, such as a prefix that no peer had.
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
// Not handled: sets that names were removed from, non-ASCII names, sets of more than 50,000 names
// (CPython grows those by a smaller factor).

// Returns hash(name) of CPython as an unsigned number; 0 for the empty string.
std::uint64_t python_hash(std::string_view name);

// Returns `names` in the iteration order of a set into which they were inserted in this order. The
// insertion order matters where hashes collide; duplicates are dropped.
std::vector<std::string> in_python_set_order(const std::vector<std::string>& names);

// Returns the traits that the recorded connector declared. kv_role "kv_both" makes it producer and
// consumer.
KVConnectorTraits traits_of(const RecordedConnectorConfig& config);

// Returns how the recorded engine treats `connector`: the connector and the policy for failed
// loads. `connector` null: the engine has none.
KVTransfer kv_transfer(const RecordingHeader& header, KVConnector* connector);

class RecordedConnector final : public KVConnector {
 public:
  // `step`: the recorded step that the loop is in; its content changes from step to step. Outlives
  // this.
  RecordedConnector(const RecordedConnectorConfig& config, const RecordedStep& step)
      : traits_(traits_of(config)), step_(step) {}

  KVConnectorTraits traits() const override { return traits_; }
  // Returns the recorded answer to the query. "Query again" if the step has no answer for the name,
  // or one for a different local hit: the different hit is then the first difference to report.
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  // True if the recorded step holds the request's blocks.
  bool request_finished(RequestId request, std::string_view name) override;
  // Sorts requests into the order in which the recorded engine stopped them.
  void order_failed_requests(std::vector<RequestId>& requests) override;
  void order_published_requests(std::vector<std::string>& names) override {
    names = in_python_set_order(names);
  }

  // Appends to `report` what the workers reported with this step's output. Errors: a name of which
  // nothing is in transfer; an earlier answer that no engine can follow.
  Result<void> take_report(KVConnectorOutput& report);

 private:
  // Returns the request in transfer under a recorded name. `key`: field of the recording, for the
  // error.
  Result<RequestId> take(std::string_view key, const std::string& name);
  // Records that a load or send of the request begins. A later transfer of one name replaces the
  // earlier one and moves to the end of the order.
  void begins(const std::string& name, RequestId request);
  std::vector<std::string> in_set_order(std::vector<std::string> names) const;
  // Return the step's transfers in the order in which the engine iterates its sets. vLLM's
  // MultiConnector fills its own set, part after part, each part's reports in the recorded order; a
  // send joins it with the report of its last part.
  std::vector<std::string> received() const;
  std::vector<std::string> sent() const;

  const KVConnectorTraits traits_;
  const RecordedStep& step_;
  // A load or send in flight, with its position in the order begun.
  struct Transfer {
    RequestId request{};
    std::int64_t number = 0;
  };
  std::map<std::string, Transfer, std::less<>> moving_;  // by name: loads and sends
  std::int64_t num_begun_ = 0;
  std::map<RequestId, std::string> names_;  // of these, and of queried requests
  std::optional<Error> error_;
};

// The transfers of a recording whose decisions are followed rather than compared: peers send the
// rows that its requests would have computed, in the steps that the recording names
// (PeerTransfers).
//
// (1) A load begins in the step that gives its request blocks after the recorded answer.
// (2) It completes, fails or loses blocks as the recorded report states, and so does a send.
class FollowedTransfers final : public TransferPlanner {
 public:
  // `step`: the recorded step that the loop is in. Both outlive this.
  FollowedTransfers(const RecordedStep& step, PeerTransfers& peers) : step_(step), peers_(peers) {}

  // Plans the step's transfers from the recorded answers and reports. Overwrites transfers.lost
  // with the recorded invalid blocks.
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  const RecordedStep& step_;
  PeerTransfers& peers_;
  std::int64_t num_frees_delayed_ = 0;  // of earlier steps
};

}  // namespace lockstep
