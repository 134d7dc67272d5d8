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

// What a KV connector moves in a step, block by block: the part of a decision that a scheduler does
// not show. The connector plans it (sim/engine/workload.h).
//
// 1. A block is in `begun` once, in the step that gave it to its request, and no later than its
//    load. From there on nothing of a former owner lies in it.
// 2. Loads and stores are carried out in the step that names them: loads before it computes, stores
//    behind it.
// 3. Targets of the loads of a step are distinct, and so are those of its stores.

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
  // Host blocks that a peer fills before the loads, with rows of the request's own tokens.
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

class TransferStep {
 public:
  TransferStep(MemoryModel& model, Worker& worker, Backend& backend, std::int32_t tp_rank)
      : model_(model), worker_(worker), backend_(backend), tp_rank_(tp_rank) {}

  // Loads and stores of the program, and the rows of what peers bring.
  Result<void> begin(const StepTransfers& transfers, StepProgram& program);
  // Before the program runs, and after it.
  Checked check_loads(const StepTransfers& transfers, std::int64_t step) const;
  Checked check_stores(const StepTransfers& transfers, std::int64_t step) const;

 private:
  std::span<const std::uint8_t> own_part(std::int32_t group,
                                         std::span<const std::uint8_t> payload) const;
  // Of the tokens in the block, whatever rank keeps them: [first, last).
  std::pair<std::int64_t, std::int64_t> positions_of(const BlockTransfer& block) const;
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

// The content of a void row in place of that of its token.
ContentId void_content(ContentId content);

}  // namespace lockstep
