// Digests of probed ranges, read through the block tables on the device, and what every reader of
// rows needs: the layers with their tables, and which memory a range of positions is in.
//
// Invariants:
// 1. layers_ and its copy on the device are equal and do not change after construction.
// 2. A layer of resident pages (HiSparse) has the table of residency; every other layer has the
//    block table of its group.
// 3. A batch of pieces is padded to a captured size with pieces of row -1.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/step/sparse_pages.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class AttentionReader {
 public:
  AttentionReader(Device& device, const LayerCaches& layers, const BlockTables& tables,
                  const SparsePages* sparse);

  // REQUIRES: probes name layers with rows.
  void launch(const StepProgram& program);
  // Starts the download of digests; they are valid after finish().
  void read_back(const StepProgram& program, StepReadback& readback);

  // The layer with its table, in device memory.
  const RowCache* layer_on_device(std::int32_t layer) const {
    return device_layers_.data() + layer;
  }
  // Complete rows that the rank has of a request's first `position` tokens.
  std::int32_t rows_before(std::int32_t layer, std::int32_t position) const;
  // Adds the memory that positions [first, last) of a row are read from.
  void add_read(std::int32_t row, std::int32_t layer, std::int32_t first, std::int32_t last,
                Operation& operation) const;

 private:
  Device& device_;
  const LayerCaches& caches_;
  const BlockTables& tables_;
  const SparsePages* const sparse_;  // null: no HiSparse
  std::vector<RowCache> layers_;     // with their tables
  DeviceArray<RowCache> device_layers_;
  DeviceArray<DigestPiece> pieces_;
  DeviceArray<unsigned long long> digests_;
  // Host staging, kept from step to step.
  std::vector<DigestPiece> host_pieces_;
};

}  // namespace lockstep::cuda
