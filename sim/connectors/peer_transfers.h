// What moves when a KV connector's peers are unknown: they send the rows that the request would
// have computed, and take what they are sent. Stands before the connector and sees its answers.
//
// (1) A load within the step is carried out in the step, a longer one in the step whose report says
//     that it is over. Blocks that are reported invalid are not loaded.
// (2) What a request sends is stored in the step whose report says that it has been sent: the last
//     one in which its blocks are its own.
// (3) Peers that take one KV cache group move blocks of the first, whatever there is.
// (4) A block's place in the host tier has its own number, so the tier is as large as the pool.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "reference/types/kv_connector.h"
#include "sim/engine/transfer_planner.h"

namespace lockstep {

// The blocks in which positions [first, last) of a request lie, in every group; null ones left out.
// Host blocks are for the caller to choose.
std::vector<BlockTransfer> blocks_of(const DecidedStep& step, RequestId request, std::int64_t first,
                                     std::int64_t last);

class PeerTransfers final : public KVConnector, public TransferPlanner {
 public:
  // `connector` outlives this.
  explicit PeerTransfers(KVConnector& connector, bool takes_several_groups = true)
      : connector_(connector), takes_several_groups_(takes_several_groups) {}

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  bool request_finished(RequestId request, std::string_view name) override;
  void order_failed_requests(std::vector<RequestId>& requests) override {
    connector_.order_failed_requests(requests);
  }

  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  struct Load {
    RequestId request{};
    std::int64_t first = 0, last = 0;  // tokens
    bool is_async = false;
  };
  std::vector<BlockTransfer> moved(std::vector<BlockTransfer> blocks) const;
  void carry_out(const std::vector<BlockTransfer>& blocks, StepTransfers& transfers);
  void send(const DecidedStep& step, RequestId request, StepTransfers& transfers);

  KVConnector& connector_;
  const bool takes_several_groups_;
  std::map<RequestId, Load> asked_;  // the last question of each
  std::vector<Load> begun_;          // since the last plan
  std::map<RequestId, std::vector<BlockTransfer>> loading_;
  std::set<BlockId> lost_;  // of loads under way
  std::int64_t num_frees_delayed_ = 0;
};

}  // namespace lockstep
