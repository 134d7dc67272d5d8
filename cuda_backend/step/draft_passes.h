// The passes of a draft model after a step: rule (24) of sim/protocol/backend.h. Each pass maps its
// tokens to slots and writes the rows of one module's layers, before the next pass starts.
//
// Invariants:
// 1. The first pass receives its positions. The device computes the positions of each later pass
//    from those of the previous one; a modules draft model has one set of positions for all.
// 2. Slots of the step's own tokens do not change.
// 3. Contents of a pass are contiguous, request by request.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/step/row_writer.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class DraftPasses {
 public:
  DraftPasses(Device& device, const BackendConfig& config, const LayerCaches& layers,
              const BlockTables& tables, RowWriter& writer);

  void run(const StepProgram& program);

 private:
  void add_first_pass(const DraftRow& row);
  void map_slots(std::int32_t num_tokens, std::int32_t advance);
  void write(std::int32_t module, std::int64_t first_content, std::int32_t num_tokens,
             const StepProgram& program);

  Device& device_;
  const DrafterConfig drafter_;
  const LayerCaches& layers_;
  const BlockTables& tables_;
  RowWriter& writer_;
  DeviceArray<std::int32_t> positions_, rows_;
  DeviceArray<std::uint64_t> contents_;
  DeviceArray<Slot> slots_;  // [num_tables, slots_stride_]
  std::int64_t slots_stride_ = 0;
  // Host staging, kept from step to step.
  std::vector<std::int32_t> host_positions_, host_rows_;
  std::vector<std::uint64_t> host_contents_;
};

}  // namespace lockstep::cuda
