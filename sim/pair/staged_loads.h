// Blocks that have come over the network, on their way through a staging buffer in host memory to
// the pages of their requests: what the steps of a decode engine load.
//
// (1) A step brings as many blocks into the buffer as it has room for and loads them from there
//     before it computes; the next step uses the buffer anew.
// (2) Loads are served in the order in which they ended on the network, the blocks of each by their
//     places. A load is over in the step that loads the last of its blocks, and reported with it.
// (3) Of a load whose request has left nothing is loaded from then on.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "reference/types/kv_connector.h"
#include "sim/connectors/transfer_planner.h"
#include "sim/pair/transfer_protocol.h"

namespace lockstep {

struct ArrivedBlock {
  BlockTransfer block;  // its place in the buffer is chosen by the step that loads it
  std::vector<std::uint8_t> bytes;
};

class StagedLoads final : public TransferPlanner {
 public:
  // REQUIRES: room for a block.
  StagedLoads(std::int64_t capacity, TransferDefect defect);

  // A request was given the block for a load, in the step being decided.
  void begin(const BlockTransfer& block) { begun_.push_back(block); }
  // The load has ended on the network with these blocks. `invalid` never came.
  void add(RequestId request, std::vector<ArrivedBlock> blocks, std::vector<BlockId> invalid);
  // The request has left. False: nothing of it was waiting here.
  bool drop(RequestId request);
  bool is_empty() const { return waiting_.empty(); }

  // Chooses what the step that has just been decided loads; loads that are over with it, appended.
  void report(KVConnectorOutput& report);
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  struct Waiting {
    RequestId request{};
    std::vector<ArrivedBlock> blocks;
    std::vector<BlockId> invalid;
    std::size_t num_loaded = 0;
  };
  std::vector<std::uint8_t> seen_by_loads(std::size_t host, std::vector<std::uint8_t> bytes);

  const std::size_t capacity_;
  const TransferDefect defect_;
  std::vector<BlockTransfer> begun_;  // since the last plan
  std::deque<Waiting> waiting_;
  std::vector<ArrivedBlock> chosen_;                // for the step that was decided
  std::vector<std::vector<std::uint8_t>> written_;  // of a planted defect: last, by place
};

}  // namespace lockstep
