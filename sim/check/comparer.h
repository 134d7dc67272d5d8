// Compares backend and model after every step: block tables and slot mappings in full, states of
// real numbers, the pages that the step wrote, the host blocks that it stored to,
// the results of its probes and queries, the backend's own reports, and untouched pages and host
// blocks in rotation; the pages of a block before it is allocated again; at the end, all pages and
// host blocks.
//
// Invariants
// (1) The first difference wins, in the order of Phase.
// (2) Every comparison is counted; nothing is compared with itself.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/memory/memory_model.h"
#include "reference/memory/state_numbers.h"
#include "sim/check/diagnosis.h"
#include "sim/protocol/backend.h"
#include "sim/step/model_step.h"
#include "sim/step/probe_planner.h"
#include "sim/verdict/divergence.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

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
// Not checked here: the rest of a page, and pages that no update wrote.

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

class Comparer {
 public:
  Comparer(const BackendConfig& config, MemoryModel& model, Worker& worker, Backend& backend,
           std::int64_t untouched_pages, RunSummary& counts);

  // Before the program runs: blocks that it poisons still hold what they should.
  // REQUIRES: the model has not applied the program yet.
  Checked check_reused(const StepProgram& program, std::span<const RequestId> requests);
  // After it has run on both sides.
  Checked check_step(const StepProgram& program, std::span<const RequestId> requests,
                     const StepExpectation& expected, const ProbePlanner& planner,
                     const StepReadback& readback, StateHashChain& chain);
  Checked check_all_pages();

 private:
  Checked check_tables(const StepProgram& program, std::span<const RequestId> requests,
                       const StepReadback& readback);
  Checked check_slots(const StepExpectation& expected, const StepReadback& readback,
                      StateHashChain& chain);
  Checked check_digests(const StepProgram& program, const ProbePlanner& planner,
                        const StepReadback& readback);
  Checked check_outputs(const StepProgram& program, const ProbePlanner& planner,
                        const StepReadback& readback);
  Checked check_hosts(std::span<const HostBlockId> hosts, StateHashChain* chain);
  Checked check_host_tier(StateHashChain& chain);
  Checked check_pages(Phase phase, std::span<const ModelPage> pages, StateHashChain* chain);
  std::span<const ModelPage> next_untouched();

  MemoryModel& model_;
  Worker& worker_;
  Backend& backend_;
  Diagnosis diagnosis_;
  StateChecker states_;
  const std::int64_t untouched_pages_;
  RunSummary& counts_;
  std::int64_t rotation_ = 0;       // over all pages of all tensors
  std::int64_t host_rotation_ = 0;  // over all blocks of the host tier
  std::vector<ModelPage> pages_;
  std::vector<PageId> page_ids_;
  std::vector<Fingerprint> fingerprints_;
};

}  // namespace lockstep
