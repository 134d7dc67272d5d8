// Compares backend and memory model after every step: block tables and slot mappings in full,
// states of real numbers, the pages and host blocks that the step wrote, and the results of its
// probes and queries. Untouched pages and host blocks follow in rotation, a few per step. Pages of
// a block are also compared before the block is allocated again, and all pages and host blocks
// after the last step.
//
// Invariants
// (1) The first difference ends the check. The order is that of Phase, with one exception: state
//     outputs (Phase::state_output) are compared together with the states, before written pages.
// (2) Every comparison is counted in RunSummary, and the two sides are computed independently:
//     expected values never come from the backend, except settled states (StateChecker, invariant
//     2).
// (3) Only expected values enter the StateHashChain. Except for settled states, the chain of a case
//     does not depend on the backend.
//
// Not checked here: whether the decision is sound (sim/step/program_builder.h) and whether
// hidden-state files are right (sim/hidden_states/hidden_states.h).
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

// Compares states of real numbers with the oracle: the results of the step's updates in their
// blocks, and the outputs of convolutions and recurrences. Kept inputs of convolutions are only
// moved, so they are compared bit for bit. Recurrent states and outputs are compared with doubles,
// within the distance of reference/memory/state_numbers.h.
//
// Invariants
// (1) Each update of a step is computed from the bytes that its chain started from, which an
//     earlier step compared. An error is therefore that of one step, however old the request is.
// (2) A state within tolerance becomes what the memory model expects there, bit for bit. Copies of
//     it, prefix hits on it and its page in later steps are compared exactly.
// Not checked here: the rest of a page, and pages that no update wrote.

class StateChecker {
 public:
  StateChecker(MemoryModel& model, Backend& backend, const Diagnosis& diagnosis, RunSummary& counts)
      : model_(model), backend_(backend), diagnosis_(diagnosis), counts_(counts) {}

  // REQUIRES: states are real numbers; the model has applied the program, the backend has run it.
  // Errors: the number of state outputs differs from what the program's updates produce.
  Checked check(const StepProgram& program, const StepExpectation& expected,
                const StepReadback& readback);
  // Tokens of updates, counted per group: rule (15) reads back the outputs of some.
  std::int64_t tokens_read() const { return tokens_read_; }
  std::int64_t tokens_left_out() const { return tokens_left_out_; }

 private:
  // One update in progress. Its words start as the target's earlier bytes, because an update leaves
  // parts of a block unchanged (rows of kept inputs that it does not fill). They become the
  // expected bytes (convolutions) or the backend's bytes within tolerance (recurrences).
  struct Update {
    // The update in the program, and the words that it started from. Both outlive the check.
    const StateUpdate* of = nullptr;
    const StateBefore* before = nullptr;
    std::vector<std::uint64_t> words;     // expected words of the target, all layers of the group
    std::size_t next_output = 0;          // index in StepReadback::state_outputs
    std::span<const ContentId> contents;  // of the step's tokens, from the update's first one
  };
  // Consecutive updates of one request in one group, in one pass over the step's tokens: a
  // checkpoint, mode `all`, or the verified tokens followed by one update per draft.
  using Chain = std::span<Update>;

  // Checks every layer and state tensor of the chain's group, then stores the states in the model.
  Checked check_chain(Chain chain);
  // Checks the kept inputs of one convolution state bit for bit, and its output within tolerance.
  // `pages`: one per update of the chain.
  Checked check_inputs(Chain chain, const ModelLayer& layer, std::size_t state,
                       std::span<const std::vector<std::uint8_t>> pages);
  // Checks one recurrent state and its outputs with one recurrence in doubles over the whole chain.
  Checked check_recurrence(Chain chain, const ModelLayer& layer, std::size_t state,
                           std::span<const std::vector<std::uint8_t>> pages);
  // Compares the update's next outputs, those of its token `token`. NaN never passes.
  Checked check_outputs(Update& update, const ModelLayer& layer, std::size_t state,
                        std::int32_t token, const Bounded& expected);
  // Bytes of one state tensor that an update starts from; empty: zeros. `before` is null if the
  // update starts from zeros or from what another update of the same step leaves in `block`.
  std::span<const std::uint8_t> bytes_before(const StateWords& before, BlockId block,
                                             const ModelLayer& layer, std::size_t state) const;

  MemoryModel& model_;
  Backend& backend_;
  const Diagnosis& diagnosis_;
  RunSummary& counts_;
  std::int64_t tokens_read_ = 0, tokens_left_out_ = 0;
  // Of the step that check() works on; both are reused from step to step.
  const StepReadback* readback_ = nullptr;
  std::vector<Update> updates_;
};

// The comparison of one rank's backend with its memory model. The two sides must have executed the
// same program when check_step() runs; Comparer reads the backend but never changes its memory,
// except that a diagnosis executes probes.
class Comparer {
 public:
  // `untouched_pages`: pages and host blocks per step that are compared in rotation, at most. All
  // references must outlive the comparer.
  Comparer(const BackendConfig& config, MemoryModel& model, Worker& worker, Backend& backend,
           std::int64_t untouched_pages, RunSummary& counts);

  // Compares the pages of blocks that the program poisons, before the program runs. Finds a write
  // to a cached block that nothing reads again: the poison would hide it.
  // REQUIRES: neither side has applied the program.
  Checked check_reused(const StepProgram& program, std::span<const RequestId> requests);
  // Compares everything that a step shows, after the program has run on both sides. Adds the
  // expected slots and the fingerprints of written pages and host blocks to `chain`. Errors: a
  // readback with wrong sizes, or a failed device.
  Checked check_step(const StepProgram& program, std::span<const RequestId> requests,
                     const StepExpectation& expected, const ProbePlanner& planner,
                     const StepReadback& readback, StateHashChain& chain);
  // Compares every page and every host block. Reads the whole cache once, so it runs only after the
  // last step.
  Checked check_all_pages();
  const StateChecker& states() const { return states_; }

 private:
  // Compares the tables of scheduled rows in length and content. Rows that the step does not
  // schedule are compared when it schedules them next.
  Checked check_tables(const StepProgram& program, std::span<const RequestId> requests,
                       const StepReadback& readback);
  // Compares slot mappings, padding included. State groups have none.
  Checked check_slots(const StepExpectation& expected, const StepReadback& readback,
                      StateHashChain& chain);
  // Compares digests of probes. A sum of hashes, so equality is exact and order does not matter.
  Checked check_digests(const StepProgram& program, const ProbePlanner& planner,
                        const StepReadback& readback);
  // Compares outputs of attention queries within the tolerance that each query carries.
  Checked check_outputs(const StepProgram& program, const ProbePlanner& planner,
                        const StepReadback& readback);
  // Compares fingerprints of host blocks; adds them to `chain` unless it is null.
  Checked check_hosts(std::span<const HostBlockId> hosts, StateHashChain* chain);
  // Compares the host blocks that the step stored to, then the next ones in rotation.
  Checked check_host_tier(StateHashChain& chain);
  // Compares fingerprints of pages; adds them to `chain` unless it is null. `pages` may be pages_.
  Checked check_pages(Phase phase, std::span<const ModelPage> pages, StateHashChain* chain);
  // Next pages in rotation, in the order of tensors and blocks, without those that the step wrote.
  std::span<const ModelPage> next_untouched();

  MemoryModel& model_;
  Worker& worker_;
  Backend& backend_;
  Diagnosis diagnosis_;
  StateChecker states_;
  const std::int64_t untouched_pages_;
  RunSummary& counts_;
  std::int64_t rotation_ = 0;       // next page, over all pages of all tensors
  std::int64_t host_rotation_ = 0;  // next block of the host tier
  // Buffers, reused to avoid an allocation per step.
  std::vector<ModelPage> pages_;
  std::vector<PageId> page_ids_;
  std::vector<Fingerprint> fingerprints_;
};

}  // namespace lockstep
