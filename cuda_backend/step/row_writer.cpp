#include "cuda_backend/step/row_writer.h"

#include <numeric>
#include <utility>

#include "reference/types/token_rows.h"

namespace lockstep::cuda {

RowWriter::RowWriter(Device& device, const LayerCaches& layers, const RowParts& parts,
                     std::int32_t max_tokens_per_step)
    : device_(device),
      layers_(layers),
      parts_(parts),
      encoder_inputs_(device),
      sink_inputs_(device) {
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
    : device_(device), layers_(layers), tables_(tables) {}

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

DraftPasses::DraftPasses(Device& device, const BackendConfig& config, const LayerCaches& layers,
                         const BlockTables& tables, RowWriter& writer)
    : device_(device),
      drafter_(config.drafter),
      layers_(layers),
      tables_(tables),
      writer_(writer) {}

void DraftPasses::run(const StepProgram& program) {
  if (program.draft_rows.empty()) return;
  const bool is_by_module = drafter_.shape == DraftShape::modules;
  positions_.host.clear();
  rows_.host.clear();
  contents_.host.clear();
  for (const DraftRow& row : program.draft_rows) add_first_pass(row);
  const auto num_first = static_cast<std::int32_t>(positions_.host.size());
  const auto num_requests = static_cast<std::int32_t>(program.draft_rows.size());
  for (std::int32_t pass = 0; pass < drafter_.num_drafts; ++pass)
    for (const DraftRow& row : program.draft_rows) {
      const bool is_long = is_by_module || pass == 0;
      const std::int32_t begin = row.first_content + (is_by_module ? pass * row.num_tokens
                                                      : pass == 0  ? 0
                                                                   : row.num_tokens + pass - 1);
      LS_CHECK(begin >= 0 && std::cmp_less_equal(begin + (is_long ? row.num_tokens : 1),
                                                 program.draft_contents.size()),
               "pass {}: contents from {} of {}", pass, begin, program.draft_contents.size());
      const auto from = program.draft_contents.begin() + begin;
      contents_.host.insert(contents_.host.end(), from, from + (is_long ? row.num_tokens : 1));
    }
  LS_CHECK(std::ssize(contents_.host) ==
               num_first * std::int64_t{is_by_module ? drafter_.num_drafts : 1} +
                   (is_by_module ? 0 : std::int64_t{drafter_.num_drafts - 1} * num_requests),
           "{} contents of {} passes", contents_.host.size(), drafter_.num_drafts);
  contents_.upload();
  const std::int32_t num_tokens = std::max(num_first, num_requests);
  writer_.reserve_inputs(num_tokens);
  slots_stride_ = std::max<std::int64_t>(slots_stride_, num_tokens);
  slots_.reserve(slots_stride_ * tables_.num_tables());
  positions_.upload();
  rows_.upload();
  map_slots(num_first, 0);
  write(0, 0, num_first, program);
  if (is_by_module) {
    for (std::int32_t module = 1; module < drafter_.num_drafts; ++module)
      write(module, std::int64_t{module} * num_first, num_first, program);
    return;
  }
  if (drafter_.num_drafts == 1) return;
  positions_.host.clear();
  rows_.host.clear();
  for (const DraftRow& row : program.draft_rows) {
    positions_.host.push_back(row.first_position + row.num_tokens - 1 - row.num_rejected);
    rows_.host.push_back(row.row);
  }
  positions_.upload();
  rows_.upload();
  for (std::int32_t pass = 1; pass < drafter_.num_drafts; ++pass) {
    map_slots(num_requests, 1);
    write(0, num_first + std::int64_t{pass - 1} * num_requests, num_requests, program);
  }
}

void DraftPasses::add_first_pass(const DraftRow& row) {
  for (std::int32_t i = 0; i < row.num_tokens; ++i) {
    positions_.host.push_back(row.first_position + i);
    rows_.host.push_back(row.row);
  }
}

void DraftPasses::map_slots(std::int32_t num_tokens, std::int32_t advance) {
  LS_CHECK(num_tokens <= slots_stride_, "{} tokens in a stride of {}", num_tokens, slots_stride_);
  device_.launch(device_.kernels().draft_slots,
                 DraftSlotsParams{.groups = tables_.tables(),
                                  .rows = rows_.data(),
                                  .positions = positions_.data(),
                                  .slots = slots_.data(),
                                  .slots_stride = slots_stride_,
                                  .num_groups = tables_.num_tables(),
                                  .num_tokens = num_tokens,
                                  .advance = advance,
                                  .last_position = drafter_.max_model_len - 1,
                                  .pad_slot = PAD_SLOT_ID},
                 [&](Operation& operation) {
                   operation.named("draft_slots").read_all(rows_, positions_);
                   tables_.read_tables(operation);
                   operation.write_all(positions_, slots_);
                 });
}

void DraftPasses::write(std::int32_t module, std::int64_t first_content, std::int32_t num_tokens,
                        const StepProgram& program) {
  // Up to the furthest position of the step's last pass.
  const auto add_written = [&](std::size_t layer, std::vector<MemoryRange>& ranges) {
    for (const DraftRow& row : program.draft_rows) {
      const std::int32_t end = std::min(row.first_position + row.num_tokens + drafter_.num_drafts,
                                        drafter_.max_model_len);
      for (const std::int32_t block :
           tables_.mirror().blocks(layers_.group_of_layer[layer], row.row, row.first_position, end))
        add_layer_ranges(layers_, layer, block, ranges);
    }
  };
  for (std::size_t layer = 0; layer < layers_.rows.size(); ++layer) {
    if (layers_.draft_module_of_layer[layer] != module) continue;
    const Slot* slots = slots_.data() + layers_.table_of_layer[layer] * slots_stride_;
    writer_.write_layer(layer,
                        {.contents = contents_.data() + first_content,
                         .contents_range = contents_.range(),
                         .slots = slots,
                         .slots_range = slots_.range(),
                         .num_made = num_tokens,
                         .num_written = num_tokens},
                        add_written);
  }
}

}  // namespace lockstep::cuda
