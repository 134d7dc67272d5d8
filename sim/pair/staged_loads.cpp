#include "sim/pair/staged_loads.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep {

StagedLoads::StagedLoads(std::int64_t capacity, TransferDefect defect)
    : capacity_(static_cast<std::size_t>(capacity)), defect_(defect) {
  LS_CHECK(capacity > 0, "a staging buffer of {} blocks", capacity);
}

void StagedLoads::add(RequestId request, std::vector<ArrivedBlock> blocks,
                      std::vector<BlockId> invalid) {
  waiting_.push_back({request, std::move(blocks), std::move(invalid), 0});
}

bool StagedLoads::drop(RequestId request) {
  return std::erase_if(waiting_, [&](const Waiting& load) { return load.request == request; }) > 0;
}

void StagedLoads::report(KVConnectorOutput& report) {
  LS_CHECK(chosen_.empty(), "{} blocks of the last step were never planned", chosen_.size());
  while (!waiting_.empty()) {
    Waiting& load = waiting_.front();
    for (; load.num_loaded < load.blocks.size() && chosen_.size() < capacity_; ++load.num_loaded)
      chosen_.push_back(std::move(load.blocks[load.num_loaded]));
    if (load.num_loaded < load.blocks.size()) return;
    report.finished_recving.push_back(load.request);
    report.invalid_block_ids.insert(report.invalid_block_ids.end(), load.invalid.begin(),
                                    load.invalid.end());
    waiting_.pop_front();
  }
}

void StagedLoads::plan(const DecidedStep&, StepTransfers& transfers) {
  transfers.begun = std::exchange(begun_, {});
  for (std::size_t host = 0; host < chosen_.size(); ++host) {
    auto& [block, bytes] = chosen_[host];
    block.host = HostBlockId{static_cast<std::int32_t>(host)};
    transfers.brought.push_back(block);
    transfers.loads.push_back(block);
    transfers.payloads.push_back(seen_by_loads(host, std::move(bytes)));
  }
  chosen_.clear();
}

// What lies in the buffer when the loads run. With a planted defect they run before the bytes have
// got there, and find those of the step before.
std::vector<std::uint8_t> StagedLoads::seen_by_loads(std::size_t host,
                                                     std::vector<std::uint8_t> bytes) {
  if (defect_ != TransferDefect::load_before_arrival) return bytes;
  written_.resize(std::max(written_.size(), host + 1));
  std::vector<std::uint8_t> before = written_[host];
  before.resize(bytes.size());
  written_[host] = std::move(bytes);
  return before;
}

}  // namespace lockstep
