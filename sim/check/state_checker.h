// States of real numbers, backend against oracle: the results of the step's updates in their
// blocks, and the outputs of convolutions and recurrences. Kept inputs are compared bit for bit;
// recurrent states and outputs with doubles, within the distance of
// reference/memory/state_numbers.h.
//
// Invariants
// (1) Each update of a step is computed from the bytes that its chain started from, which were
//     compared before. So an error is that of one step, however old the request is.
// (2) A state within tolerance becomes what the memory model expects there, bit for bit: copies of
//     it, prefix hits on it and its page in later steps are compared exactly.
// Not checked here: the rest of a page, and pages that no update wrote (comparer.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/memory/memory_model.h"
#include "reference/memory/state_numbers.h"
#include "sim/check/diagnosis.h"
#include "sim/protocol/backend.h"
#include "sim/step/model_step.h"
#include "sim/verdict/checked.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

class StateChecker {
 public:
  StateChecker(MemoryModel& model, Backend& backend, const Diagnosis& diagnosis, RunSummary& counts)
      : model_(model), backend_(backend), diagnosis_(diagnosis), counts_(counts) {}

  // REQUIRES: states are real numbers; the model has applied the program, the backend has run it.
  Checked check(const StepProgram& program, const StepExpectation& expected,
                const StepReadback& readback);

 private:
  // One update on its way: what its block should hold, or held where numbers are near enough.
  struct Update {
    const StateUpdate* of = nullptr;
    const StateBefore* before = nullptr;
    std::vector<std::uint64_t> words;     // of the target
    std::size_t first_output = 0;         // in StepReadback::state_outputs
    std::span<const ContentId> contents;  // of the step's tokens from its first one on
  };
  // A chain of updates: one request's, in one group.
  using Chain = std::span<Update>;

  Checked check_chain(Chain chain);
  Checked check_inputs(Chain chain, const ModelLayer& layer, std::size_t state,
                       std::span<const std::vector<std::uint8_t>> pages, std::size_t output);
  Checked check_recurrence(Chain chain, const ModelLayer& layer, std::size_t state,
                           std::span<const std::vector<std::uint8_t>> pages, std::size_t output);
  Checked check_outputs(const Update& update, const ModelLayer& layer, std::size_t state,
                        const Bounded& expected, std::size_t output);
  // What an update starts from, of one state tensor; empty: zeros.
  std::span<const std::uint8_t> bytes_before(const StateWords& before, BlockId block,
                                             const ModelLayer& layer, std::size_t state) const;

  MemoryModel& model_;
  Backend& backend_;
  const Diagnosis& diagnosis_;
  RunSummary& counts_;
  const StepReadback* readback_ = nullptr;
  std::vector<Update> updates_;
};

}  // namespace lockstep
