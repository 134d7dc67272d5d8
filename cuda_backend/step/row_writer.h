// The rows of a step: for every layer that keeps rows, inputs are made from content ids and written
// into the cache through the group's slot mapping. And the way back: extraction of rows.
//
// Invariants:
// 1. Layers run one after the other and share the two input buffers, like the layers of a model.
//    With n streams there are n pairs of buffers, so n layers may run at the same time.
// 2. An input buffer has room for every token of a launch: num_made and num_written are at most the
//    reserved tokens.
// 3. Padded tokens take part in the write. Their slot skips them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/check.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/step/row_parts.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class RowWriter {
 public:
  struct Inputs {
    explicit Inputs(Device& device) : keys(device, "key inputs"), values(device, "value inputs") {}
    DeviceArray<std::byte> keys, values;
  };
  // Tokens whose rows are written through slots.
  struct Tokens {
    const std::uint64_t* contents;
    MemoryRange contents_range;
    const Slot* slots;
    MemoryRange slots_range;
    std::int32_t num_made, num_written;
    const Inputs* inputs = nullptr;  // buffers for the rows; null: the step's
  };

  RowWriter(Device& device, const LayerCaches& layers, const RowParts& parts,
            std::int32_t max_tokens_per_step);

  // Writes the rows of the scheduled tokens. contents: one per token, in device memory.
  void write(const StepProgram& program, const DeviceArray<std::uint64_t>& contents,
             const BlockTables& tables);
  // Writes the rows that encoders computed from `contents`: rule (21).
  void write_encoder_rows(const StepProgram& program, const DeviceArray<std::uint64_t>& contents,
                          const BlockTables& tables);
  // Writes the sinks, once, before the first read: rule (22).
  void write_sinks(const KVCacheConfig& plan);
  // Makes room for `num_tokens` tokens in the input buffers of every stream.
  void reserve_inputs(std::int64_t num_tokens);
  // Writes the rows of one layer. add_written(layer, ranges) adds the written memory.
  // REQUIRES: reserved room for the tokens.
  template <class AddWritten>
  void write_layer(std::size_t layer, const Tokens& tokens, const AddWritten& add_written);

 private:
  std::int64_t source_row_bytes(std::size_t layer) const {
    return itemsize_bytes(parts_.source_dtype(layer)) * std::int64_t{parts_.head_size(layer)};
  }
  // Bytes of K (or V) of the source rows of num_tokens tokens.
  std::int64_t source_bytes(std::size_t layer, std::int32_t num_tokens) const {
    const RowCache& rows = layers_.rows[layer];
    return source_rows(rows.token_rows, num_tokens) * source_row_bytes(layer) * rows.num_kv_heads;
  }
  static void reserve(Inputs& inputs, std::int64_t bytes) {
    inputs.keys.reserve(bytes);
    inputs.values.reserve(bytes);
  }
  // Adds the blocks of a layer that the step's tokens are written to.
  void add_written(const StepProgram& program, std::size_t layer, const BlockTables& tables,
                   std::vector<MemoryRange>& ranges) const;

  Device& device_;
  const LayerCaches& layers_;
  const RowParts& parts_;
  std::int64_t max_token_bytes_ = 0;  // of K (or V) of one token in any layer
  std::deque<Inputs> inputs_;         // one entry per stream
  Inputs encoder_inputs_, sink_inputs_;
  DeviceArray<std::uint64_t> sink_contents_{device_, "contents of sinks"};
  DeviceArray<Slot> sink_slots_{device_, "slots of sinks"};
};

template <class AddWritten>
void RowWriter::write_layer(std::size_t layer, const Tokens& tokens,
                            const AddWritten& add_written) {
  LS_CHECK(layer < layers_.rows.size() && layers_.rows[layer].row_bytes > 0, "layer {} of {}",
           layer, layers_.rows.size());
  const RowCache& rows = layers_.rows[layer];
  const ShapeMasks masks = parts_.source_masks(layer);
  const Inputs& inputs =
      tokens.inputs != nullptr ? *tokens.inputs : inputs_[layer % inputs_.size()];
  const MemoryRange room = inputs.keys.range();
  LS_CHECK(source_bytes(layer, std::max(tokens.num_made, tokens.num_written)) <=
               static_cast<std::int64_t>(room.end - room.begin),
           "layer {}: inputs of {} tokens in {} bytes", layer, tokens.num_written,
           room.end - room.begin);
  device_.launch(device_.kernels().fill_rows,
                 FillRowsParams{.contents = tokens.contents,
                                .key = inputs.keys.data(),
                                .value = inputs.values.data(),
                                .keep_mask = masks.keep,
                                .set_mask = masks.set,
                                .num_rows = source_rows(rows.token_rows, tokens.num_made),
                                .num_kv_heads = rows.num_kv_heads,
                                .num_parts = rows.num_parts,
                                .row_bytes = static_cast<std::int32_t>(source_row_bytes(layer)),
                                .layer = rows.layer,
                                .first_head = rows.first_head,
                                .token_rows = rows.token_rows},
                 [&](Operation& operation) {
                   operation.named("fill_rows").read(tokens.contents_range);
                   operation.write_all(inputs.keys, inputs.values);
                 });
  device_.launch(device_.engine_kernels().write_parts,
                 parts_.write(layer, inputs.keys.data(), inputs.values.data(), tokens.slots,
                              tokens.num_written),
                 [&](Operation& operation) {
                   operation.named("write_rows").read_all(inputs.keys, inputs.values);
                   operation.read(tokens.slots_range).read(parts_.scales_range());
                   add_written(layer, operation.writes);
                 });
}

// Gathers the rows of whole requests into contiguous memory: hidden states for a trainer.
//
// 1. Slots come from the block table of the layer's own group, token by token from 0, whichever
//    steps wrote the tokens.
// 2. A row has row_bytes. The page's padding is not read.
// 3. One extraction at a time uses gathered_.
class RowExtractor {
 public:
  RowExtractor(Device& device, const LayerCaches& layers, BlockTables& tables);

  // Fills readback.extracted. Waits for the device.
  // REQUIRES: extractions name layers with rows of one part.
  Result<void> run(const StepProgram& program, StepReadback& readback);

 private:
  void extract(const RowExtraction& extraction, const RowCache& rows, std::uint8_t* to);

  Device& device_;
  const LayerCaches& layers_;
  BlockTables& tables_;
  DeviceArray<std::byte> gathered_{device_, "extracted rows"};
  std::vector<std::int32_t> positions_, token_rows_;
};

// The passes of a draft model after a step: rule (24) of sim/protocol/backend.h. Each pass maps its
// tokens to slots and writes the rows of one module's layers, before the next pass starts.
//
// Invariants:
// 1. The first pass receives its positions. The device computes the positions of each later pass
//    from those of the previous one; a modules draft model has one set of positions for all.
// 2. Slots of the step's own tokens do not change.
// 3. Contents of a pass are contiguous, request by request.

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
  StagedItems<std::int32_t> positions_{device_, "draft positions"};
  StagedItems<std::int32_t> rows_{device_, "draft rows"};
  StagedItems<std::uint64_t> contents_{device_, "draft content ids"};
  DeviceArray<Slot> slots_{device_, "draft slots"};  // [num_tables, slots_stride_]
  std::int64_t slots_stride_ = 0;
};

}  // namespace lockstep::cuda
