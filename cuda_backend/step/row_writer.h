// The K/V (latent, hidden-state) rows of a step: for every layer that keeps rows, inputs made from
// content ids, then written into the cache through the group's slot mapping.
//
// 1. Layers run one after the other and share the two input buffers, as the layers of a model do;
//    over n streams there are n pairs of buffers, so that n layers may run at once.
// 2. Padded tokens take part in the write and are skipped by their slot.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/step/real_caches.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class RowWriter {
 public:
  struct Inputs {
    explicit Inputs(Device& device) : keys(device, "key inputs"), values(device, "value inputs") {}
    DeviceArray<std::byte> keys, values;
  };
  // Tokens whose rows go through slots.
  struct Tokens {
    const std::uint64_t* contents;
    MemoryRange contents_range;
    const Slot* slots;
    MemoryRange slots_range;
    std::int32_t num_made, num_written;
    const Inputs* inputs = nullptr;  // to make them in; null: what the step's own are made in
  };

  // `real`: rows of numbers are written by an engine's kernel, quantised where the cache is; null:
  // rows are moved.
  RowWriter(Device& device, const LayerCaches& layers, const RealCaches* real,
            std::int32_t max_tokens_per_step);

  // contents: one for each scheduled token, in device memory.
  void write(const StepProgram& program, const DeviceArray<std::uint64_t>& contents,
             const BlockTables& tables);
  // Rule (21): what encoders have computed, `contents` of it.
  void write_encoder_rows(const StepProgram& program, const DeviceArray<std::uint64_t>& contents,
                          const BlockTables& tables);
  // Rule (22): once, before anything reads.
  void write_sinks(const KVCacheConfig& plan);
  // Room for so many tokens in what the rows of a layer are made in.
  void reserve_inputs(std::int64_t num_tokens);
  // add_written(layer, ranges): the memory that the rows go to.
  // REQUIRES: room for the tokens, in `tokens.inputs` or reserved here.
  template <class AddWritten>
  void write_layer(std::size_t layer, const Tokens& tokens, const AddWritten& add_written);

 private:
  // What the rows of a layer are made in.
  DType source_dtype(std::size_t layer) const {
    return real_ == nullptr ? layers_.rows[layer].dtype : real_->source_dtype(layer);
  }
  std::int64_t source_row_bytes(std::size_t layer) const {
    const std::int64_t elements =
        real_ == nullptr ? layers_.rows[layer].head_size : real_->head_size(layer);
    return itemsize_bytes(source_dtype(layer)) * elements;
  }
  static void reserve(Inputs& inputs, std::int64_t bytes) {
    inputs.keys.reserve(bytes);
    inputs.values.reserve(bytes);
  }
  // The blocks of a layer that the step's tokens go to.
  void add_written(const StepProgram& program, std::size_t layer, const BlockTables& tables,
                   std::vector<MemoryRange>& ranges) const;

  Device& device_;
  const LayerCaches& layers_;
  const RealCaches* real_;
  std::int64_t max_token_bytes_ = 0;  // of K (or V) of one token in any layer
  std::deque<Inputs> inputs_;         // one entry a stream
  Inputs encoder_inputs_, sink_inputs_;
  DeviceArray<std::uint64_t> sink_contents_;
  DeviceArray<Slot> sink_slots_;
};

template <class AddWritten>
void RowWriter::write_layer(std::size_t layer, const Tokens& tokens,
                            const AddWritten& add_written) {
  const RowCache& rows = layers_.rows[layer];
  const ShapeMasks masks = shape_masks(source_dtype(layer));
  const Inputs& inputs =
      tokens.inputs != nullptr ? *tokens.inputs : inputs_[layer % inputs_.size()];
  device_.launch(device_.kernels().fill_rows,
                 FillRowsParams{.contents = tokens.contents,
                                .key = inputs.keys.data(),
                                .value = inputs.values.data(),
                                .keep_mask = masks.keep,
                                .set_mask = masks.set,
                                .num_tokens = tokens.num_made,
                                .num_kv_heads = rows.num_kv_heads,
                                .num_parts = rows.num_parts,
                                .row_bytes = static_cast<std::int32_t>(source_row_bytes(layer)),
                                .layer = rows.layer,
                                .first_head = rows.first_head},
                 [&](Operation& operation) {
                   operation.named("fill_rows").read(tokens.contents_range);
                   operation.write_all(inputs.keys, inputs.values);
                 });
  const auto describe = [&](Operation& operation) {
    operation.named("write_rows").read_all(inputs.keys, inputs.values);
    operation.read(tokens.slots_range);
    if (real_ != nullptr) operation.read(real_->scales_range());
    add_written(layer, operation.writes);
  };
  if (real_ != nullptr)
    return device_.launch(device_.engine_kernels().write_parts,
                          real_->write(layer, inputs.keys.data(), inputs.values.data(),
                                       tokens.slots, tokens.num_written),
                          describe);
  device_.launch(device_.kernels().write_rows,
                 WriteRowsParams{.cache = rows,
                                 .key = inputs.keys.data(),
                                 .value = inputs.values.data(),
                                 .slots = tokens.slots,
                                 .num_tokens = tokens.num_written},
                 describe);
}

// Rows of whole requests gathered out of the cache into contiguous memory: hidden states on their
// way to a trainer.
//
// 1. Slots come from the block table of the layer's own group, token by token from 0 on, whatever
//    steps the tokens were written in.
// 2. A row is row_bytes long wherever it lies; the page's padding is not read.
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
