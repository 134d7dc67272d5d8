// Rows of whole requests gathered out of the cache into contiguous memory: hidden states on their
// way to a trainer.
//
// 1. Slots come from the block table of the layer's own group, token by token from 0 on, whatever
//    steps the tokens were written in.
// 2. A row is row_bytes long wherever it lies; the page's padding is not read.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/device/device_array.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class RowExtractor {
 public:
  RowExtractor(Device& device, const LayerCaches& layers, BlockTables& tables);

  // Fills readback.extracted. Downloads, so it waits for the device.
  // REQUIRES: extractions name layers with rows of one part.
  Result<void> run(const StepProgram& program, StepReadback& readback);

 private:
  void extract(const RowExtraction& extraction, const RowCache& rows, std::uint8_t* to);

  Device& device_;
  const LayerCaches& layers_;
  BlockTables& tables_;
  DeviceArray<std::byte> gathered_;
  std::vector<std::int32_t> positions_, token_rows_;
};

}  // namespace lockstep::cuda
