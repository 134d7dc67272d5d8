// The K/V (latent, hidden-state) rows of a step: for every layer that keeps rows, inputs made from
// content ids, then written into the cache through the group's slot mapping.
//
// 1. Layers run one after the other and share the two input buffers, as the layers of a model do.
// 2. Padded tokens take part in the write and are skipped by their slot.
#pragma once

#include <cstdint>

#include "cuda_backend/block_tables.h"
#include "cuda_backend/device.h"
#include "cuda_backend/device_array.h"
#include "cuda_backend/layer_caches.h"
#include "sim/backend.h"

namespace lockstep::cuda {

class RowWriter {
 public:
  RowWriter(Device& device, const LayerCaches& layers, std::int32_t max_tokens_per_step);

  // contents: one for each scheduled token, in device memory.
  void write(const StepProgram& program, const std::uint64_t* contents, const BlockTables& tables);

 private:
  void reserve_inputs(std::int64_t num_tokens);

  Device& device_;
  const LayerCaches& layers_;
  std::int64_t max_token_bytes_ = 0;  // of K (or V) of one token in any layer
  DeviceArray<std::byte> keys_;
  DeviceArray<std::byte> values_;
};

}  // namespace lockstep::cuda
