// What a KV connector moves in a step, block by block: the part of a decision that a scheduler does
// not show. The connector plans it (sim/connectors/transfer_planner.h).
//
// 1. A block is in `begun` once, in the step that gave it to its request, and no later than its
//    load. From there on nothing of a former owner lies in it.
// 2. Loads and stores are carried out in the step that names them: loads before it computes, stores
//    behind it.
// 3. Targets of the loads of a step are distinct, and so are those of its stores.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

struct BlockTransfer {
  RequestId request{};
  std::int32_t group = 0;
  std::int32_t entry = 0;  // of the request's block table
  BlockId block{};
  HostBlockId host{};
  std::int64_t num_tokens = 0;  // of the request: those in the block from here on are not meant
};

struct StepTransfers {
  std::vector<BlockTransfer> begun;
  // Host blocks that somebody else fills before the loads, with rows of the request's own tokens.
  std::vector<BlockTransfer> brought;
  // What a peer has sent, of each of `brought`; empty: rows that the request would have computed.
  std::vector<std::vector<std::uint8_t>> payloads;
  std::vector<BlockTransfer> loads;
  std::vector<BlockTransfer> stores;
  std::vector<BlockId> lost;     // should have been loaded, and the step's report says that they
                                 // were not
  std::vector<RequestId> held;   // finished, and their blocks are not free
  std::int64_t num_evicted = 0;  // host blocks given to another hash, since the start
  std::int64_t num_frees_delayed = 0;  // finished requests that kept their blocks, likewise

  void clear() { *this = {}; }
};

}  // namespace lockstep
