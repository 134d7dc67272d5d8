// Compares backend and model after every step: block tables and slot mappings in full, states of
// real numbers (state_checker.h), the pages that the step wrote, the host blocks that it stored to,
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
#include "sim/check/diagnosis.h"
#include "sim/check/state_checker.h"
#include "sim/protocol/backend.h"
#include "sim/step/model_step.h"
#include "sim/step/probe_planner.h"
#include "sim/verdict/checked.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

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
