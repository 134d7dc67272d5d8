#include "sim/connectors/multi_transfers.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace lockstep {
namespace {

void append(std::vector<BlockTransfer>&& from, std::int64_t first_host,
            std::vector<BlockTransfer>& to) {
  for (BlockTransfer& block : from) {
    block.host = HostBlockId{static_cast<std::int32_t>(index_of(block.host) + first_host)};
    to.push_back(block);
  }
}

}  // namespace

std::vector<KVConnector*> MultiTransfers::connectors_of(const std::vector<TransferPart>& parts) {
  std::vector<KVConnector*> connectors;
  for (const TransferPart& part : parts) connectors.push_back(part.connector);
  return connectors;
}

KVConnectorOutput MultiTransfers::report() {
  reports_.clear();
  for (const TransferPart& part : parts_) reports_.push_back(part.workers->report());
  return connector_.merge(reports_);
}

bool MultiTransfers::is_busy() const {
  return std::ranges::any_of(parts_, [](const auto& part) { return part.workers->is_busy(); });
}

void MultiTransfers::plan(const DecidedStep& step, StepTransfers& transfers) {
  LS_CHECK(reports_.size() == parts_.size(), "{} reports of {} parts", reports_.size(),
           parts_.size());
  std::int64_t first_host = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    StepTransfers own;
    own.lost = transfers.lost;
    parts_[i].transfers->plan({.decision = step.decision,
                               .decisions = step.decisions,
                               .report = reports_[i],
                               .block_tokens = step.block_tokens},
                              own);
    LS_CHECK(own.payloads.empty(), "part {} brings bytes of its own", i);
    append(std::move(own.begun), first_host, transfers.begun);
    append(std::move(own.brought), first_host, transfers.brought);
    append(std::move(own.loads), first_host, transfers.loads);
    append(std::move(own.stores), first_host, transfers.stores);
    transfers.num_evicted += own.num_evicted;
    first_host += parts_[i].num_host_blocks;
  }
  transfers.num_frees_delayed = connector_.num_frees_delayed();
}

}  // namespace lockstep
