// What a connector moves in a step, on both sides: written into the step's program, brought into
// the host tier where a peer brings it, and checked against the tokens of its own requests.
//
// (1) A load and a store are of the request's own tokens, row by row; anything else is a finding,
//     told as a Divergence of Phase::transfer.
// (2) A row that lies behind a block that should have been loaded and was not is void: the engine
//     drops what it computed, and nobody may count on what it wrote.
//
// (3) What a peer of several tensor parallel ranks has sent holds a block's bytes on each of its
//     ranks, in their order; a rank takes its own.
//
// Not checked: states, which the connectors here do not move; that the bytes arrive (the comparer).
#pragma once

#include <optional>
#include <span>
#include <utility>

#include "base/result.h"
#include "reference/memory/memory_model.h"
#include "sim/protocol/backend.h"
#include "sim/step/step_transfers.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

class TransferStep {
 public:
  TransferStep(MemoryModel& model, Worker& worker, Backend& backend, std::int32_t tp_rank)
      : model_(model), worker_(worker), backend_(backend), tp_rank_(tp_rank) {}

  // Loads and stores of the program, and the rows of what peers bring.
  Result<void> begin(const StepTransfers& transfers, StepProgram& program);
  // Before the program runs, and after it.
  std::optional<Divergence> check_loads(const StepTransfers& transfers, std::int64_t step) const;
  std::optional<Divergence> check_stores(const StepTransfers& transfers, std::int64_t step) const;

 private:
  std::span<const std::uint8_t> own_part(std::int32_t group,
                                         std::span<const std::uint8_t> payload) const;
  // Of the tokens in the block, whatever rank keeps them: [first, last).
  std::pair<std::int64_t, std::int64_t> positions_of(const BlockTransfer& block) const;
  bool keeps_any(const BlockTransfer& block) const;
  std::vector<ContentId> contents_of(const BlockTransfer& block) const;
  static Divergence gone(const BlockTransfer& block, std::string_view verb, std::int64_t step);
  std::optional<Divergence> check(std::span<const BlockTransfer> blocks, std::string_view verb,
                                  std::int64_t step) const;

  MemoryModel& model_;
  Worker& worker_;
  Backend& backend_;
  const std::int32_t tp_rank_;
};

// The content of a void row in place of that of its token.
ContentId void_content(ContentId content);

}  // namespace lockstep
