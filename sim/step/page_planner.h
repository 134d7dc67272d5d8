// The host pages of a step: rule (25) of sim/protocol/backend.h. Writes what the scheduler sends
// to workers into the step's program, chooses the reads in place of an indexer, and applies both to
// the memory model.
//
// Invariants
// (1) A page is on the device in every resident group, or in none.
// (2) A row reads pages that only the host has from the host, through its hot region when it
//     decodes. Its tokens decide which rows it reads: some stay for several steps, others change.
//     An engine's indexer chooses by attention scores.
// (3) Rows go to the host in the step that writes them (eager_host_mirror, the engine's default); a
//     transfer to the host then moves nothing.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "reference/memory/memory_model.h"
#include "reference/types/scheduler_types.h"
#include "sim/protocol/step_program.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

// The rows that a hot region of host pages holds: rule (25) of sim/protocol/backend.h. A region's
// slots are in the order of their last use, at first by number.
//
// Invariants
// (1) A read position that is in the region is used in its slot.
// (2) Every other position takes the first slot of the order that the read does not use.
// (3) Afterwards the used slots follow all others, in the order of the read.
//
// A function of the reads only: an indexer chooses which rows are read.

class HotRegions {
 public:
  struct Swap {
    std::int32_t position = 0;  // copied from the host
    std::int32_t slot = 0;      // its slot in the region from now on
    bool operator==(const Swap&) const = default;
  };

  // Empties the region of a row of the batch.
  void clear(std::int32_t row) { regions_.erase(row); }
  // Reads positions through the region and returns the copies that this needs, in read order.
  // REQUIRES: positions are distinct and at most num_slots, which is constant until clear().
  std::vector<Swap> read(std::int32_t row, std::int64_t num_slots,
                         std::span<const std::int32_t> positions);

 private:
  struct Region {
    std::vector<std::int32_t> order;             // slots, least recently used first
    std::vector<std::int32_t> positions;         // by slot; -1: none
    std::map<std::int32_t, std::int32_t> slots;  // by position
  };
  std::map<std::int32_t, Region> regions_;  // by row
};

class PagePlanner {
 public:
  // `num_spec_tokens`: drafts of a request in a step.
  PagePlanner(std::int32_t num_spec_tokens, MemoryModel& model, Worker& worker);

  // Adds the step's host page work to its program. Does nothing without a page source. REQUIRES:
  // the program has tables and rows; `requests` are those of its rows.
  Checked plan(const SchedulerOutput& decision, std::span<const RequestId> requests,
               StepProgram& program);
  // Applies mirrors and copies to the memory model. REQUIRES: the program's tokens are written.
  Checked apply(const StepProgram& program, std::span<const RequestId> requests);

 private:
  Checked add_residency(const HostPageRow& row, WorkerRequest& request, StepProgram& program);
  Checked add_mirrors(const HostPageRow& row, const WorkerRequest& request, StepProgram& program);
  Checked add_hot_reads(const RowSlice& slice, const WorkerRequest& request, StepProgram& program);
  // Returns the positions below `end` that only the host has, ascending.
  std::vector<std::int32_t> away(const WorkerRequest& request, std::int64_t end) const;
  // Returns the size of the request's hot region in slots; 0: it has none.
  std::int64_t num_hot_slots(const WorkerRequest& request) const;
  Checked mirror(const StepProgram& program, const HostMirror& mirror);
  Checked swap_in(const StepProgram& program, const HotRead& read, const WorkerRequest& request);

  const std::int32_t num_spec_tokens_;
  MemoryModel& model_;
  Worker& worker_;
  std::vector<std::int32_t> resident_, hot_;  // groups
  std::int32_t source_ = -1;
  HotRegions regions_;
};

}  // namespace lockstep
