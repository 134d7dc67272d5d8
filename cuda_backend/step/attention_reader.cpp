#include "cuda_backend/step/attention_reader.h"

#include <algorithm>

#include "base/check.h"
#include "cuda_backend/step/block_tables.h"

namespace lockstep::cuda {
namespace {

// Rows (positions times heads) that one CTA digests: long probes are shared by many.
constexpr std::int32_t kPieceRows = 4096;

// What pads a batch.
constexpr DigestPiece kNoPiece{.probe = 0, .row = -1, .layer_index = 0, .first = 0, .last = 0};

}  // namespace

AttentionReader::AttentionReader(Device& device, const LayerCaches& layers,
                                 const BlockTables& tables, const SparsePages* sparse)
    : device_(device),
      caches_(layers),
      tables_(tables),
      sparse_(sparse),
      layers_(layers.rows),
      device_layers_(device, "layer caches"),
      pieces_(device, "probe pieces"),
      digests_(device, "digests") {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    layers_[layer].table = tables.kernel_table(layers.table_of_layer[layer]);
    layers_[layer].table_width = tables.kernel_table_width(layers.table_of_layer[layer]);
    if (sparse != nullptr && sparse->is_resident(layer)) {
      layers_[layer].table = sparse->residency(layer);
      layers_[layer].table_width = sparse->residency_width(layer);
      layers_[layer].away = sparse->away_of_layer(layer);
    }
  }
  device_layers_.upload(layers_);
}

std::int32_t AttentionReader::rows_before(std::int32_t layer, std::int32_t position) const {
  return static_cast<std::int32_t>(lockstep::cuda::rows_before(
      layers_[layer].token_rows, tables_.rows_kept(caches_.group_of_layer[layer], position)));
}

void AttentionReader::launch(const StepProgram& program) {
  if (program.probes.empty()) return;
  host_pieces_.clear();
  std::int32_t max_positions = 0;
  for (std::size_t i = 0; i < program.probes.size(); ++i) {
    const AttentionProbe& probe = program.probes[i];
    const RowCache& rows = layers_[probe.layer];
    LS_CHECK(rows.row_bytes > 0, "layer {} keeps no rows", probe.layer);
    const std::int32_t step = std::max(1, kPieceRows / rows.num_kv_heads);
    const std::int32_t end = rows_before(probe.layer, probe.last);
    for (std::int32_t first = rows_before(probe.layer, probe.first); first < end; first += step) {
      const std::int32_t last = std::min(end, first + step);
      host_pieces_.push_back({static_cast<std::int32_t>(i), probe.row, probe.layer, first, last});
      max_positions = std::max(max_positions, last - first);
    }
  }
  const auto num_probes = static_cast<std::int64_t>(program.probes.size());
  digests_.reserve(num_probes);
  device_.zero(digests_.data(), 8 * num_probes);
  const auto count = static_cast<std::int32_t>(host_pieces_.size());
  const std::int32_t size = device_.padded_batch(count);
  if (device_.captures(size)) max_positions = kPieceRows;  // the shape of every batch
  host_pieces_.resize(std::max(count, size), kNoPiece);
  pieces_.upload(host_pieces_);
  device_.run_captured("probes", size, [&] {
    device_.launch(
        device_.kernels().attention_digest,
        DigestParams{.layers = device_layers_.data(),
                     .pieces = pieces_.data(),
                     .digests = digests_.data(),
                     .num_pieces = size,
                     .max_positions = max_positions},
        [&](Operation& operation) {
          operation.named("attention_digest").read_all(pieces_, digests_).write_all(digests_);
          for (const AttentionProbe& probe : program.probes)
            add_read(probe.row, probe.layer, probe.first, probe.last, operation);
        });
  });
}

void AttentionReader::add_read(std::int32_t row, std::int32_t layer, std::int32_t first,
                               std::int32_t last, Operation& operation) const {
  operation.read(device_layers_.range());
  const std::int32_t group = caches_.group_of_layer[layer];
  if (sparse_ != nullptr && sparse_->is_resident(static_cast<std::size_t>(layer)))
    return sparse_->add_reads(operation);
  operation.read(tables_.table_range(caches_.table_of_layer[layer]));
  const RowCache& rows = layers_[layer];
  const auto per_block = static_cast<std::int32_t>(rows.block_size.value);
  const std::int32_t sinks = rows.sink_blocks * per_block;
  if (sinks > 0 && first < sinks) {
    const std::int32_t size = rows.first_sink_block * per_block;  // of a manager block
    for (std::int32_t block = 1 + first / size; block <= 1 + (std::min(last, sinks) - 1) / size;
         ++block)
      add_layer_ranges(caches_, layer, block, operation.reads);
  }
  for (const std::int32_t block :
       tables_.mirror().blocks(group, row, std::max(first - sinks, 0), std::max(last - sinks, 0)))
    add_layer_ranges(caches_, layer, block, operation.reads);
}

void AttentionReader::read_back(const StepProgram& program, StepReadback& readback) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  readback.digests.assign(program.probes.size(), 0);
  device_.download(readback.digests.data(), digests_.data(),
                   8 * static_cast<std::int64_t>(program.probes.size()));
}

}  // namespace lockstep::cuda
