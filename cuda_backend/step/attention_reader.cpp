#include "cuda_backend/step/attention_reader.h"

#include <algorithm>

#include "base/check.h"
#include "cuda_backend/step/block_tables.h"

namespace lockstep::cuda {
namespace {

// Rows (positions times heads) that one CTA digests: long probes are shared by many.
constexpr std::int32_t kPieceRows = 4096;

// What the kernels can hold: see kLaneElements of paged_attention.cuh.
constexpr std::int32_t kMaxHeadSize = 1024;

// What pads a batch.
constexpr DigestPiece kNoPiece{.probe = 0, .row = -1, .layer_index = 0, .first = 0, .last = 0};
constexpr QueryItem kNoQuery{.content = 0,
                             .query_begin = 0,
                             .output_begin = 0,
                             .row = -1,
                             .layer_index = 0,
                             .first = 0,
                             .last = 0,
                             .gap_first = 0,
                             .gap = 0};

// As padded_head_size() of words.cuh.
std::int32_t query_row_floats(const RowCache& rows) { return (rows.head_size + 15) / 16 * 16; }

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
      digests_(device, "digests"),
      items_(device, "queries"),
      queries_(device, "query rows"),
      outputs_(device, "attention outputs") {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    layers_[layer].table = tables.kernel_table(layers.table_of_layer[layer]);
    layers_[layer].table_width = tables.kernel_table_width(layers.table_of_layer[layer]);
    if (sparse != nullptr && sparse->is_resident(layer)) {
      layers_[layer].table = sparse->residency(layer);
      layers_[layer].table_width = sparse->residency_width(layer);
      layers_[layer].away = sparse->away_of_layer(layer);
    }
    const std::int32_t heads = layers_[layer].num_kv_heads * layers_[layer].queries_per_kv;
    max_query_heads_ = std::max(max_query_heads_, heads);
    max_query_words_ = std::max(max_query_words_, heads * (query_row_floats(layers_[layer]) / 2));
  }
  device_layers_.upload(layers_);
}

// Complete rows that the rank has of a request's first `position` tokens.
std::int32_t AttentionReader::rows_before(std::int32_t layer, std::int32_t position) const {
  return tables_.rows_kept(caches_.group_of_layer[layer], position) /
         static_cast<std::int32_t>(layers_[layer].tokens_per_row.value);
}

void AttentionReader::launch_probes(const StepProgram& program) {
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
    device_.launch(device_.kernels().attention_digest,
                   DigestParams{.layers = device_layers_.data(),
                                .pieces = pieces_.data(),
                                .digests = digests_.data(),
                                .num_pieces = size,
                                .max_positions = max_positions},
                   [&](Operation& operation) {
                     operation.named("attention_digest")
                         .read_all(device_layers_, pieces_, digests_)
                         .write_all(digests_);
                     for (const AttentionProbe& probe : program.probes)
                       add_read(probe.row, probe.layer, probe.first, probe.last, operation);
                   });
  });
}

void AttentionReader::add_read(std::int32_t row, std::int32_t layer, std::int32_t first,
                               std::int32_t last, Operation& operation) const {
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

void AttentionReader::launch_queries(const StepProgram& program) {
  num_outputs_ = 0;
  if (program.queries.empty()) return;
  host_items_.clear();
  std::int64_t num_query_floats = 0;
  for (const AttentionQuery& query : program.queries) {
    const RowCache& rows = layers_[query.layer];
    LS_CHECK(rows.row_bytes > 0, "layer {} keeps no rows", query.layer);
    LS_CHECK(rows.head_size <= kMaxHeadSize, "head size {}", rows.head_size);
    const std::int32_t heads = rows.num_kv_heads * rows.queries_per_kv;
    const std::int32_t gap_first = std::max(query.first, query.gap_first);
    const std::int32_t gap = std::max(query.gap_last - gap_first, 0);
    host_items_.push_back({.content = query.content,
                           .query_begin = num_query_floats,
                           .output_begin = num_outputs_,
                           .row = query.row,
                           .layer_index = query.layer,
                           .first = rows_before(query.layer, query.first),
                           .last = rows_before(query.layer, query.last) - gap,
                           .gap_first = gap_first,
                           .gap = gap});
    num_query_floats += std::int64_t{heads} * query_row_floats(rows);
    num_outputs_ += std::int64_t{heads} * rows.head_size;
  }
  const auto count = static_cast<std::int32_t>(host_items_.size());
  const std::int32_t size = device_.padded_batch(count);
  host_items_.resize(std::max(count, size), kNoQuery);
  const AttentionParams params{.layers = device_layers_.data(),
                               .items = items_.upload(host_items_),
                               .queries = queries_.reserve(num_query_floats),
                               .outputs = outputs_.reserve(num_outputs_),
                               .num_items = size,
                               .max_query_heads = max_query_heads_,
                               .max_query_words = max_query_words_};
  device_.run_captured("queries", size, [&] {
    device_.launch(device_.kernels().fill_queries, params, [&](Operation& operation) {
      operation.named("fill_queries").read_all(device_layers_, items_).write_all(queries_);
    });
    device_.launch(device_.kernels().paged_attention, params, [&](Operation& operation) {
      operation.named("paged_attention")
          .read_all(device_layers_, items_, queries_)
          .write_all(outputs_);
      for (const AttentionQuery& query : program.queries)
        add_read(query.row, query.layer, query.first, query.last, operation);
    });
  });
}

void AttentionReader::read_back_probes(const StepProgram& program, StepReadback& readback) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  readback.digests.assign(program.probes.size(), 0);
  device_.download(readback.digests.data(), digests_.data(),
                   8 * static_cast<std::int64_t>(program.probes.size()));
}

void AttentionReader::read_back_queries(StepReadback& readback) {
  readback.outputs.resize(num_outputs_);
  device_.download(readback.outputs.data(), outputs_.data(), 4 * num_outputs_);
}

}  // namespace lockstep::cuda
