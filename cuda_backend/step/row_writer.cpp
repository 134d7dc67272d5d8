#include "cuda_backend/step/row_writer.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "cuda_backend/step/block_tables.h"

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
      add_layer_ranges(layers_, layer, block, ranges);
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
      if (layers_.rows[layer].row_bytes != 0 && layers_.draft_module_of_layer[layer] < 0)
        write_layer(layer,
                    {.contents = contents.data(),
                     .contents_range = contents.range(),
                     .slots = tables.slots(layers_.table_of_layer[layer]),
                     .slots_range = tables.slots_range(layers_.table_of_layer[layer]),
                     .num_made = num_made,
                     .num_written = num_padded},
                    [&](std::size_t written, std::vector<MemoryRange>& ranges) {
                      add_written(program, written, tables, ranges);
                    });
  });
}

RowExtractor::RowExtractor(Device& device, const LayerCaches& layers, BlockTables& tables)
    : device_(device), layers_(layers), tables_(tables), gathered_(device, "extracted rows") {}

Result<void> RowExtractor::run(const StepProgram& program, StepReadback& readback) {
  std::int64_t total = 0;
  const auto size_of = [&](const RowExtraction& extraction) {
    const RowCache& rows = layers_.rows[extraction.layer];
    return std::int64_t{extraction.num_tokens} * rows.num_kv_heads * rows.row_bytes;
  };
  for (const RowExtraction& extraction : program.extractions) total += size_of(extraction);
  readback.extracted.resize(total);
  std::uint8_t* to = readback.extracted.data();
  for (const RowExtraction& extraction : program.extractions) {
    const RowCache& rows = layers_.rows[extraction.layer];
    LS_CHECK(rows.row_bytes > 0 && rows.num_parts == 1, "layer {} keeps {} parts of {} bytes",
             extraction.layer, rows.num_parts, rows.row_bytes);
    extract(extraction, rows, to);
    LS_RETURN_IF_ERROR(device_.finish());  // the buffer is used again
    to += size_of(extraction);
  }
  return {};
}

void RowExtractor::extract(const RowExtraction& extraction, const RowCache& rows,
                           std::uint8_t* to) {
  positions_.resize(extraction.num_tokens);
  std::iota(positions_.begin(), positions_.end(), 0);
  token_rows_.assign(extraction.num_tokens, extraction.row);
  tables_.map_tokens(positions_, token_rows_, extraction.num_tokens);
  const std::int64_t size =
      std::int64_t{extraction.num_tokens} * rows.num_kv_heads * rows.row_bytes;
  std::byte* gathered = gathered_.reserve(size);
  device_.launch(device_.kernels().gather_rows,
                 GatherRowsParams{.cache = rows,
                                  .slots = tables_.slots(layers_.group_of_layer[extraction.layer]),
                                  .key = gathered,
                                  .value = nullptr,
                                  .num_tokens = extraction.num_tokens},
                 [&](Operation& operation) {
                   const std::int32_t group = layers_.group_of_layer[extraction.layer];
                   operation.named("gather_rows").read(tables_.slots_range(group));
                   operation.write_all(gathered_);
                   for (const std::int32_t block :
                        tables_.mirror().blocks(group, extraction.row, 0, extraction.num_tokens))
                     add_layer_ranges(layers_, extraction.layer, block, operation.reads);
                 });
  device_.download(to, gathered, size);
}

}  // namespace lockstep::cuda
