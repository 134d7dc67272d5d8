// A step's queries, answered by the attention kernel of an engine (kernels/split_attention.cuh):
// one launch per queried layer, decodes and tokens of prefill chunks in one batch.
//
// Invariants:
// 1. With real numbers the kernel derives the visible positions from the query's position and the
//    layer's kind (window, chunk); AttentionQuery::first only describes the read. With words it
//    reads exactly the query's range.
// 2. Real contexts are split, so most outputs are joined from partial ones. A context of words is
//    one split.
// 3. A rank of context parallelism attends over its own tokens, which are one context in its cache.
//    The answers of several ranks are not joined here.
// 4. outputs_ holds the answers layer by layer; read_back() restores the program's order.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/step/row_parts.h"
#include "cuda_backend/step/sparse_pages.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// Digests of probed ranges, read through the block tables on the device, and what every reader of
// rows needs: the layers with their tables, and which memory a range of positions is in.
//
// Invariants:
// 1. layers_ and its copy on the device are equal and do not change after construction.
// 2. A layer of resident pages has the table of residency; every other layer has the
//    block table of its group.
// 3. A batch of pieces is padded to a captured size with pieces of row -1.

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
  const SparsePages* const sparse_;  // null: no host pages
  std::vector<RowCache> layers_;     // with their tables
  DeviceArray<RowCache> device_layers_{device_, "layer caches"};
  StagedItems<DigestPiece> pieces_{device_, "probe pieces"};
  DeviceArray<unsigned long long> digests_{device_, "digests"};
};

class AttentionQueries {
 public:
  AttentionQueries(Device& device, const BackendConfig& config, const LayerCaches& layers,
                   const RowParts& parts, const BlockTables& tables, const AttentionReader& reader);

  // REQUIRES: queries name layers with rows of numbers.
  void launch(const StepProgram& program);
  // Starts the download of outputs; they are valid after finish().
  void read_back(const StepProgram& program, StepReadback& readback);

 private:
  // The queries of one layer: tokens [first, first + count) of the step's arrays.
  struct Batch {
    std::int32_t layer, first, count, longest;  // longest: positions that a query may see
    std::int64_t query_begin, output_begin;     // bytes, floats
  };
  std::int32_t query_heads(std::int32_t layer) const {
    return layers_.rows[layer].num_kv_heads * layers_.rows[layer].queries_per_kv;
  }
  // Keys of one CTA. Real numbers are split often, to check what joins the parts; words only so
  // that a long range occupies a GPU.
  std::int32_t split_keys() const { return is_real_ ? 32 : 512; }
  void gather(const StepProgram& program);
  void add_query(const AttentionQuery& query);
  void attend(const StepProgram& program, const Batch& batch);

  Device& device_;
  const bool is_real_;
  const LayerCaches& layers_;
  const RowParts& parts_;
  const BlockTables& tables_;
  const AttentionReader& reader_;
  std::vector<const KVCacheSpec*> specs_;  // of each layer
  StagedItems<std::int32_t> positions_{device_, "positions of queries"};
  StagedItems<std::int32_t> token_rows_{device_, "rows of queries"};
  StagedItems<KeyRange> ranges_{device_, "ranges of queries"};  // words
  StagedItems<std::byte> queries_{device_, "query rows"};
  DeviceArray<float> outputs_{device_, "attention outputs"};
  DeviceArray<float> partials_{device_, "partial attention"};
  // Of the step.
  std::vector<Batch> batches_;
  std::vector<std::int64_t> output_of_query_;  // floats, in the program's order
  std::int64_t num_outputs_ = 0;
};

}  // namespace lockstep::cuda
