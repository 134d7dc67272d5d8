#include "cuda_backend/step/row_writer.h"

#include <algorithm>

#include "cuda_backend/device/protocol.h"
#include "cuda_backend/step/step_batch.h"

namespace lockstep::cuda {

RowWriter::RowWriter(Device& device, const LayerCaches& layers, const RealCaches* real,
                     std::int32_t max_tokens_per_step)
    : device_(device), layers_(layers), real_(real) {
  for (int stream = 0; stream < device.num_streams(); ++stream) inputs_.emplace_back(device);
  for (std::size_t layer = 0; layer < layers.rows.size(); ++layer) {
    const std::int64_t heads = layers.rows[layer].num_kv_heads;
    max_token_bytes_ = std::max(max_token_bytes_, source_row_bytes(layer) * heads);
  }
  reserve_inputs(max_tokens_per_step);
}

void RowWriter::reserve_inputs(std::int64_t num_tokens) {
  for (Inputs& inputs : inputs_) {
    inputs.keys.reserve(num_tokens * max_token_bytes_);
    inputs.values.reserve(num_tokens * max_token_bytes_);
  }
}

void RowWriter::add_written(const StepProgram& program, std::size_t layer,
                            const BlockTables& tables, std::vector<MemoryRange>& ranges) const {
  for (const RowSlice& slice : program.rows)
    for (const std::int32_t block :
         tables.mirror().blocks(layers_.group_of_layer[layer], slice.row, slice.first_position,
                                slice.first_position + slice.num_tokens))
      add_block_ranges(layers_, layers_.tensor_of_layer[layer], block, ranges);
}

void RowWriter::write(const StepProgram& program, const DeviceArray<std::uint64_t>& contents,
                      const BlockTables& tables) {
  const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
  if (num_tokens == 0 && program.num_padded_tokens == 0) return;
  const std::int32_t size = step_batch(device_, program);
  const bool captured = device_.captures(size);
  const std::int32_t num_padded = captured ? size : std::max(num_tokens, program.num_padded_tokens);
  const std::int32_t num_made = captured ? size : num_tokens;
  reserve_inputs(num_padded);
  device_.run_captured("tokens' rows", size, [&] {
    for (std::size_t layer = 0; layer < layers_.rows.size(); ++layer)
      if (layers_.rows[layer].row_bytes != 0)
        write_layer(program, layer, contents, tables, {num_made, num_padded});
  });
}

void RowWriter::write_layer(const StepProgram& program, std::size_t layer,
                            const DeviceArray<std::uint64_t>& contents, const BlockTables& tables,
                            TokenCounts counts) {
  const RowCache& rows = layers_.rows[layer];
  const DType source = source_dtype(layer);
  const ShapeMasks masks = shape_masks(source);
  const Inputs& inputs = inputs_[layer % inputs_.size()];
  const std::int32_t group = layers_.group_of_layer[layer];
  device_.launch(device_.kernels().fill_rows,
                 FillRowsParams{.contents = contents.data(),
                                .key = inputs.keys.data(),
                                .value = inputs.values.data(),
                                .keep_mask = masks.keep,
                                .set_mask = masks.set,
                                .num_tokens = counts.filled,
                                .num_kv_heads = rows.num_kv_heads,
                                .num_parts = rows.num_parts,
                                .row_bytes = static_cast<std::int32_t>(source_row_bytes(layer)),
                                .layer = rows.layer,
                                .first_head = rows.first_head},
                 [&](Operation& operation) {
                   operation.named("fill_rows").read_all(contents);
                   operation.write_all(inputs.keys, inputs.values);
                 });
  const auto describe = [&](Operation& operation) {
    operation.named("write_rows").read_all(inputs.keys, inputs.values);
    operation.read(tables.slots_range(group));
    if (real_ != nullptr) operation.read(real_->scales_range());
    add_written(program, layer, tables, operation.writes);
  };
  if (real_ != nullptr)
    return device_.launch(device_.engine_kernels().write_parts,
                          real_->write(layer, inputs.keys.data(), inputs.values.data(),
                                       tables.slots(group), counts.written),
                          describe);
  device_.launch(device_.kernels().write_rows,
                 WriteRowsParams{.cache = rows,
                                 .key = inputs.keys.data(),
                                 .value = inputs.values.data(),
                                 .slots = tables.slots(group),
                                 .num_tokens = counts.written},
                 describe);
}

}  // namespace lockstep::cuda
