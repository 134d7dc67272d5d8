#include "cuda_backend/step/row_writer.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "cuda_backend/step/block_tables.h"
#include "reference/types/token_run.h"

namespace lockstep::cuda {

RowWriter::RowWriter(Device& device, const LayerCaches& layers, const RowParts& parts,
                     std::int32_t max_tokens_per_step)
    : device_(device),
      layers_(layers),
      parts_(parts),
      encoder_inputs_(device),
      sink_inputs_(device),
      sink_contents_(device, "contents of sinks"),
      sink_slots_(device, "slots of sinks") {
  for (int stream = 0; stream < device.num_streams(); ++stream) inputs_.emplace_back(device);
  LS_CHECK(!inputs_.empty(), "{} streams", device.num_streams());
  for (std::size_t layer = 0; layer < layers.rows.size(); ++layer)
    max_token_bytes_ = std::max(max_token_bytes_, source_bytes(layer, 1));
  reserve_inputs(max_tokens_per_step);
}

void RowWriter::reserve_inputs(std::int64_t num_tokens) {
  for (Inputs& inputs : inputs_) reserve(inputs, num_tokens * max_token_bytes_);
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
      if (layers_.rows[layer].row_bytes != 0 && layers_.draft_module_of_layer[layer] < 0 &&
          tables.takes_tokens(layers_.table_of_layer[layer]))
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

void RowWriter::write_encoder_rows(const StepProgram& program,
                                   const DeviceArray<std::uint64_t>& contents,
                                   const BlockTables& tables) {
  const auto count = static_cast<std::int32_t>(program.encoder_contents.size());
  if (count == 0) return;
  reserve(encoder_inputs_, count * max_token_bytes_);
  for (std::size_t layer = 0; layer < layers_.rows.size(); ++layer) {
    const std::int32_t group = layers_.group_of_layer[layer];
    if (!tables.is_encoder(group)) continue;
    write_layer(layer,
                {.contents = contents.data(),
                 .contents_range = contents.range(),
                 .slots = tables.slots(group),
                 .slots_range = tables.slots_range(group),
                 .num_made = count,
                 .num_written = count,
                 .inputs = &encoder_inputs_},
                [&](std::size_t written, std::vector<MemoryRange>& ranges) {
                  for (const EncoderSlice& slice : program.encoder_slices)
                    for (const std::int32_t block :
                         tables.mirror().blocks(group, slice.row, 0, slice.num_rows))
                      add_layer_ranges(layers_, written, block, ranges);
                });
  }
}

// The engine's worker relies on the scheduler to reserve the first blocks for sinks
// (vllm/model_executor/layers/attention/static_sink_attention.py).
void RowWriter::write_sinks(const KVCacheConfig& plan) {
  for (std::size_t layer = 0; layer < layers_.rows.size(); ++layer) {
    const KVCacheSpec& spec = plan.groups[layers_.group_of_layer[layer]].spec;
    if (spec.sink_len == 0) continue;
    std::vector<std::uint64_t> contents;
    std::vector<Slot> slots;
    for (std::int64_t i = 0; i < spec.sink_len; ++i) {
      contents.push_back(splitmix64(0x73696E6B00000000ull + static_cast<std::uint64_t>(i)));
      slots.push_back(spec.block_size + i);
    }
    const auto count = static_cast<std::int32_t>(spec.sink_len);
    reserve(sink_inputs_, count * max_token_bytes_);
    sink_contents_.upload(contents);
    sink_slots_.upload(slots);
    write_layer(layer,
                {.contents = sink_contents_.data(),
                 .contents_range = sink_contents_.range(),
                 .slots = sink_slots_.data(),
                 .slots_range = sink_slots_.range(),
                 .num_made = count,
                 .num_written = count,
                 .inputs = &sink_inputs_},
                [&](std::size_t written, std::vector<MemoryRange>& ranges) {
                  for (std::int64_t block = 1; block <= spec.sink_len / spec.block_size; ++block)
                    add_layer_ranges(layers_, written, static_cast<std::int32_t>(block), ranges);
                });
  }
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
  LS_CHECK(to == readback.extracted.data() + total, "{} bytes of extractions", total);
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
