#include "cuda_backend/step/row_extractor.h"

#include <numeric>

#include "base/check.h"

namespace lockstep::cuda {

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
    if (auto done = device_.finish(); !done) return done;  // the buffer is used again
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
                     add_block_ranges(layers_, layers_.tensor_of_layer[extraction.layer], block,
                                      operation.reads);
                 });
  device_.download(to, gathered, size);
}

}  // namespace lockstep::cuda
