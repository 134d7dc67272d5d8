// A step's queries answered by the attention kernel of an engine (kernels/split_attention.cuh):
// one launch for each layer that is asked, decodes and tokens of prefill chunks in one batch.
//
// 1. What a query may see follows from its position and the layer's kind (window, chunk), and is
//    worked out by the kernel; AttentionQuery::first is not looked at, but to say what is read.
// 2. Contexts are split, so that most outputs are joined from partial ones.
// 3. A rank of context parallelism attends over the tokens that it keeps, which are one context in
//    its own cache. What several ranks answer is not joined here.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/step/real_caches.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class RealAttention {
 public:
  RealAttention(Device& device, const BackendConfig& config, const LayerCaches& layers,
                const RealCaches& caches, const BlockTables& tables);

  // REQUIRES: queries name layers with rows of numbers.
  void launch(const StepProgram& program);
  // Starts the download of outputs; they are there after finish().
  void read_back(const StepProgram& program, StepReadback& readback);

 private:
  // The queries of one layer: tokens [first, first + count) of the step's arrays.
  struct Batch {
    std::int32_t layer, first, count, longest;  // longest: positions that a query may see
    std::int64_t query_begin, output_begin;     // floats
  };
  std::int32_t query_heads(std::int32_t layer) const {
    return layers_.rows[layer].num_kv_heads * layers_.rows[layer].queries_per_kv;
  }
  void gather(const StepProgram& program);
  void add_query(const AttentionQuery& query);
  void attend(const StepProgram& program, const Batch& batch);

  Device& device_;
  const BackendConfig& config_;
  const LayerCaches& layers_;
  const RealCaches& caches_;
  const BlockTables& tables_;
  std::vector<const KVCacheSpec*> specs_;  // of each layer
  DeviceArray<std::int32_t> positions_, token_rows_;
  DeviceArray<float> queries_, outputs_, partials_;
  // Of the step.
  std::vector<Batch> batches_;
  std::vector<std::int64_t> output_of_query_;  // floats, in the program's order
  std::vector<std::int32_t> host_positions_, host_token_rows_;
  std::vector<float> host_queries_;
  std::int64_t num_outputs_ = 0;
};

}  // namespace lockstep::cuda
