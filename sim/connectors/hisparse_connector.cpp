#include "sim/connectors/hisparse_connector.h"

#include <utility>

namespace lockstep {

HiSparseConnector::HiSparseConnector(const HiSparseWorkerOptions& options)
    : delay_steps_max_(options.delay_steps_max),
      random_(options.seed, "hisparse"),
      num_workers_(static_cast<std::int32_t>(random_.between(1, 2))) {}

void HiSparseConnector::start_pages(const HiSparseCommand& command) {
  started_ = std::exchange(next_, {});
  for (const PageTransfer& transfer : command.transfers)
    (transfer.restores ? started_ : next_).push_back(transfer.id);
}

KVConnectorOutput HiSparseConnector::report() {
  KVConnectorOutput report;
  for (const std::int64_t id : std::exchange(started_, {})) {
    report.enqueued.push_back({id, num_workers_});
    for (std::int32_t worker = 0; worker < num_workers_; ++worker)
      moving_[id].push_back(step_ + random_.between(0, delay_steps_max_));
  }
  for (auto& [id, due] : moving_) {
    const auto done = std::erase_if(due, [&](std::int64_t step) { return step <= step_; });
    if (done > 0) report.completed.push_back({id, static_cast<std::int32_t>(done)});
  }
  std::erase_if(moving_, [](const auto& transfer) { return transfer.second.empty(); });
  ++step_;
  return report;
}

}  // namespace lockstep
