// A connector's transfers in a step, on both sides: written into the step's program, received into
// the host tier from a peer, and checked against the tokens of its own requests.
//
// Invariants
// (1) A load or store covers the request's own tokens, row by row. Anything else is a finding,
//     reported as a Divergence of Phase::transfer.
// (2) A row after a block whose load failed is void: the engine drops what it computed, and no
//     request may use what it wrote.
// (3) A block from a peer of several tensor parallel ranks holds the bytes of each rank, in rank
//     order. Each rank takes its own.
//
// Not checked: states, which these connectors do not move; that the bytes arrive (the comparer).
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/memory/memory_model.h"
#include "reference/types/scheduler_types.h"
#include "sim/protocol/backend.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

// One block that a connector moves, as its request's table has it.
struct BlockTransfer {
  RequestId request{};
  std::int32_t group = 0;
  std::int32_t entry = 0;  // in the request's block table
  BlockId block{};
  HostBlockId host{};
  std::int64_t num_tokens = 0;  // of the request; later tokens of the block do not count
};

// What a KV connector moves in a step, block by block: the part of a decision that a scheduler does
// not show. The connector plans it (sim/engine/workload.h).
//
// Invariants
// (1) A block is in `begun` once, in the step that gave it to its request, and no later than its
//     load. From then on it holds nothing of a previous owner.
// (2) Loads and stores run in the step that names them: loads before it computes, stores after it.
// (3) Targets of the loads of a step are distinct, and so are those of its stores.
struct StepTransfers {
  std::vector<BlockTransfer> begun;
  // Host blocks that a peer fills before the loads, with rows of the request's own tokens.
  std::vector<BlockTransfer> brought;
  // Bytes that a peer has sent for each entry of `brought`. Empty: the bytes that the request
  // itself would have computed.
  std::vector<std::vector<std::uint8_t>> payloads;
  std::vector<BlockTransfer> loads;
  std::vector<BlockTransfer> stores;
  std::vector<BlockId> lost;           // blocks whose load failed, from the step's report
  std::vector<RequestId> held;         // finished, and their blocks are not free
  std::int64_t num_evicted = 0;        // host blocks given to another hash, since the start
  std::int64_t num_frees_delayed = 0;  // finished requests that kept their blocks, in total

  void clear() { *this = {}; }
};

// Moves a step's blocks on both sides, model and backend, and checks them.
class TransferStep {
 public:
  TransferStep(MemoryModel& model, Worker& worker, Backend& backend, std::int32_t tp_rank)
      : model_(model), worker_(worker), backend_(backend), tp_rank_(tp_rank) {}

  // Writes loads and stores into the program, and received blocks into both host tiers. Errors: a
  // backend that cannot write its host blocks.
  Result<void> begin(const StepTransfers& transfers, StepProgram& program);
  // Checks that host blocks hold the tokens of their requests: loads before the program runs,
  // stores after it.
  Checked check_loads(const StepTransfers& transfers, std::int64_t step) const;
  Checked check_stores(const StepTransfers& transfers, std::int64_t step) const;

 private:
  // Returns this rank's bytes of a payload that has the parts of all tensor parallel ranks.
  std::span<const std::uint8_t> own_part(std::int32_t group,
                                         std::span<const std::uint8_t> payload) const;
  // Returns the positions [first, last) of the tokens in the block, over all ranks that share them.
  std::pair<std::int64_t, std::int64_t> positions_of(const BlockTransfer& block) const;
  // Returns true if this rank keeps a token of the block.
  bool keeps_any(const BlockTransfer& block) const;
  std::vector<ContentId> contents_of(const BlockTransfer& block) const;
  static Divergence gone(const BlockTransfer& block, std::string_view verb, std::int64_t step);
  Checked check(std::span<const BlockTransfer> blocks, std::string_view verb,
                std::int64_t step) const;

  MemoryModel& model_;
  Worker& worker_;
  Backend& backend_;
  const std::int32_t tp_rank_;
};

// Returns the content of a void row, rule (2). It differs from every token's, so a request that
// reads the row is a finding.
ContentId void_content(ContentId content);

}  // namespace lockstep
