// A MultiConnector with the workers of its parts and what they move, as one connector.
//
// (1) Each part plans with the report of its own workers; what any part has lost is known to all
//     (StepTransfers::lost).
// (2) Host blocks of a part are its own: they follow those of the parts before it.
// (3) A request whose blocks are kept is counted once, however many parts keep them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sim/connectors/multi_connector.h"
#include "sim/connectors/transfer_planner.h"
#include "sim/connectors/worker_connector.h"

namespace lockstep {

struct TransferPart {
  KVConnector* connector = nullptr;
  WorkerConnector* workers = nullptr;
  TransferPlanner* transfers = nullptr;
  std::int64_t num_host_blocks = 0;
};

class MultiTransfers final : public WorkerConnector, public TransferPlanner {
 public:
  // The parts outlive it. REQUIRES: at least one.
  explicit MultiTransfers(std::vector<TransferPart> parts, bool async_scheduling = false)
      : parts_(std::move(parts)), connector_(connectors_of(parts_), async_scheduling) {}

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    return connector_.get_num_new_matched_tokens(query);
  }
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override {
    connector_.update_state_after_alloc(request, blocks, num_external_tokens);
  }
  bool request_finished(RequestId request, std::string_view name) override {
    return connector_.request_finished(request, name);
  }
  bool is_loading(RequestId request) const { return connector_.is_loading(request); }

  KVConnectorOutput report() override;
  bool is_busy() const override;
  // REQUIRES: report() of the same step before.
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  static std::vector<KVConnector*> connectors_of(const std::vector<TransferPart>& parts);

  const std::vector<TransferPart> parts_;
  MultiConnector connector_;
  std::vector<KVConnectorOutput> reports_;
};

}  // namespace lockstep
