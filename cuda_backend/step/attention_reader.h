// What attention reads: digests of probed ranges, and softmax outputs of queries, both through the
// block tables on the device.
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

  // REQUIRES: probes and queries name layers with rows.
  void launch_probes(const StepProgram& program);
  void launch_queries(const StepProgram& program);
  // Start the download of digests and of outputs; they are there after finish().
  void read_back_probes(const StepProgram& program, StepReadback& readback);
  void read_back_queries(StepReadback& readback);

 private:
  std::int32_t rows_before(std::int32_t layer, std::int32_t position) const;
  // What a look at positions [first, last) of a row reads.
  void add_read(std::int32_t row, std::int32_t layer, std::int32_t first, std::int32_t last,
                Operation& operation) const;

  Device& device_;
  const LayerCaches& caches_;
  const BlockTables& tables_;
  const SparsePages* const sparse_;  // null: no HiSparse
  std::vector<RowCache> layers_;     // with their tables
  // Of any layer: the shape of every batch of queries.
  std::int32_t max_query_heads_ = 0, max_query_words_ = 0;
  DeviceArray<RowCache> device_layers_;
  DeviceArray<DigestPiece> pieces_;
  DeviceArray<unsigned long long> digests_;
  DeviceArray<QueryItem> items_;
  DeviceArray<float> queries_;
  DeviceArray<float> outputs_;
  std::int64_t num_outputs_ = 0;  // floats of the last step
  // Host staging, kept from step to step.
  std::vector<DigestPiece> host_pieces_;
  std::vector<QueryItem> host_items_;
};

}  // namespace lockstep::cuda
