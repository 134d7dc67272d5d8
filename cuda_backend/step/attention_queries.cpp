#include "cuda_backend/step/attention_queries.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"

namespace lockstep::cuda {

// Rows (positions times heads) that one CTA digests: long probes are shared by many.
constexpr std::int32_t kPieceRows = 512;

// What pads a batch.
constexpr DigestPiece kNoPiece{.probe = 0, .row = -1, .layer_index = 0, .first = 0, .last = 0};

constexpr std::uint32_t kPartQuery = 2;

AttentionReader::AttentionReader(Device& device, const LayerCaches& layers,
                                 const BlockTables& tables, const SparsePages* sparse)
    : device_(device), caches_(layers), tables_(tables), sparse_(sparse), layers_(layers.rows) {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    layers_[layer].table = tables.kernel_table(layers.table_of_layer[layer]);
    layers_[layer].table_width = tables.kernel_table_width(layers.table_of_layer[layer]);
    if (sparse != nullptr && sparse->is_resident(layer)) {
      layers_[layer].table = sparse->residency(layer).entries;
      layers_[layer].table_width = sparse->residency(layer).width;
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
  pieces_.host.clear();
  std::int32_t max_positions = 0;
  for (std::size_t i = 0; i < program.probes.size(); ++i) {
    const AttentionProbe& probe = program.probes[i];
    const RowCache& rows = layers_[probe.layer];
    LS_CHECK(rows.row_bytes > 0, "layer {} keeps no rows", probe.layer);
    const std::int32_t step = std::max(1, kPieceRows / rows.num_kv_heads);
    const std::int32_t end = rows_before(probe.layer, probe.last);
    for (std::int32_t first = rows_before(probe.layer, probe.first); first < end; first += step) {
      const std::int32_t last = std::min(end, first + step);
      pieces_.host.push_back({static_cast<std::int32_t>(i), probe.row, probe.layer, first, last});
      max_positions = std::max(max_positions, last - first);
    }
  }
  const auto num_probes = static_cast<std::int64_t>(program.probes.size());
  digests_.reserve(num_probes);
  device_.zero(digests_.data(), 8 * num_probes);
  const auto count = static_cast<std::int32_t>(pieces_.host.size());
  const std::int32_t size = device_.padded_batch(count);
  if (device_.captures(size)) max_positions = kPieceRows;  // the shape of every batch
  pieces_.host.resize(std::max(count, size), kNoPiece);
  pieces_.upload();
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

AttentionQueries::AttentionQueries(Device& device, const BackendConfig& config,
                                   const LayerCaches& layers, const RowParts& parts,
                                   const BlockTables& tables, const AttentionReader& reader)
    : device_(device),
      is_real_(config.numbers == Numbers::real),
      layers_(layers),
      parts_(parts),
      tables_(tables),
      reader_(reader) {
  for (const KVCacheGroupSpec& group : config.plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      specs_.push_back(&group.layer_spec(i));
  LS_CHECK(specs_.size() == layers_.rows.size(), "{} specs of {} layers", specs_.size(),
           layers_.rows.size());
}

void AttentionQueries::launch(const StepProgram& program) {
  batches_.clear();
  num_outputs_ = 0;
  if (program.queries.empty()) return;
  gather(program);
  token_rows_.upload();
  queries_.upload();
  outputs_.reserve(num_outputs_);
  if (is_real_)
    positions_.upload();
  else
    ranges_.upload();
  std::int64_t num_partials = 0;
  for (const Batch& batch : batches_) {
    const std::int64_t splits = (batch.longest + split_keys() - 1) / split_keys();
    if (splits > 1)
      num_partials = std::max(num_partials, splits * batch.count * query_heads(batch.layer) *
                                                (2 + parts_.head_size(batch.layer)));
  }
  partials_.reserve(num_partials);
  for (const Batch& batch : batches_) attend(program, batch);
}

// Gathers the step's queries layer by layer, in the order of the layers' first queries.
void AttentionQueries::gather(const StepProgram& program) {
  positions_.host.clear();
  ranges_.host.clear();
  token_rows_.host.clear();
  queries_.host.clear();
  output_of_query_.assign(program.queries.size(), -1);
  for (std::size_t first = 0; first < program.queries.size(); ++first) {
    if (output_of_query_[first] >= 0) continue;
    const std::int32_t layer = program.queries[first].layer;
    LS_CHECK(layers_.rows[layer].row_bytes > 0, "layer {} keeps no rows", layer);
    batches_.push_back({.layer = layer,
                        .first = static_cast<std::int32_t>(token_rows_.host.size()),
                        .count = 0,
                        .longest = 0,
                        .query_begin = std::ssize(queries_.host),
                        .output_begin = num_outputs_});
    for (std::size_t i = first; i < program.queries.size(); ++i) {
      if (program.queries[i].layer != layer) continue;
      output_of_query_[i] = num_outputs_;
      add_query(program.queries[i]);
    }
  }
}

void AttentionQueries::add_query(const AttentionQuery& query) {
  const RowCache& rows = layers_.rows[query.layer];
  Batch& batch = batches_.back();
  ++batch.count;
  const auto rows_to = [&](std::int32_t position) {
    return reader_.rows_before(query.layer, position);
  };
  const std::int32_t gap_first = rows_to(std::max(query.first, query.gap_first));
  const std::int32_t gap = std::max(rows_to(query.gap_last) - gap_first, 0);
  const KeyRange keys{.first = rows_to(query.first),
                      .last = rows_to(query.last) - gap,
                      .gap_first = gap_first,
                      .gap = gap};
  batch.longest = std::max(batch.longest, keys.last - keys.first);
  positions_.host.push_back(keys.last - 1);
  ranges_.host.push_back(keys);
  token_rows_.host.push_back(query.row);
  const DType dtype = device_.query_dtype();
  const auto bytes =
      static_cast<std::size_t>(itemsize_bytes(dtype) * parts_.head_size(query.layer));
  for (std::int32_t head = 0; head < query_heads(query.layer); ++head) {
    queries_.host.resize(queries_.host.size() + bytes);
    const auto row = std::span(queries_.host).last(bytes);
    fill_row(query.content, rows.layer, kPartQuery,
             static_cast<std::uint32_t>(rows.first_query_head + head), dtype, row);
    if (is_real_) enlarge_query(query.content, dtype, row);
  }
  num_outputs_ += std::int64_t{query_heads(query.layer)} * parts_.head_size(query.layer);
}

void AttentionQueries::attend(const StepProgram& program, const Batch& batch) {
  const KVCacheSpec& spec = *specs_[batch.layer];
  const std::int32_t table = layers_.table_of_layer[batch.layer];
  const auto rows_in = [&](bool is_limited, std::int64_t tokens) {
    return is_limited ? static_cast<std::int32_t>(lockstep::cuda::rows_before(
                            layers_.rows[batch.layer].token_rows, tokens))
                      : 0;
  };
  SplitAttentionParams params{
      .key = parts_.key(batch.layer),
      .value = parts_.value(batch.layer),
      .queries = queries_.data() + batch.query_begin,
      .outputs = outputs_.data() + batch.output_begin,
      .partials = partials_.data(),
      .block_table = tables_.kernel_table(table),
      .token_rows = token_rows_.data() + batch.first,
      .positions = is_real_ ? positions_.data() + batch.first : nullptr,
      .seq_lens = nullptr,
      .table_width = tables_.kernel_table_width(table),
      .scale = 1.0f / std::sqrt(static_cast<float>(parts_.head_size(batch.layer))),
      .query_dtype = device_.query_dtype(),
      .causal = true,
      .window = rows_in(is_sliding_window(spec.kind), spec.sliding_window),
      .chunk = rows_in(is_chunked(spec.kind), spec.attention_chunk_size),
      .num_tokens = batch.count,
      .num_query_heads = query_heads(batch.layer),
      .num_splits = (batch.longest + split_keys() - 1) / split_keys(),
      .split_keys = split_keys()};
  if (!is_real_) {
    params.ranges = ranges_.data() + batch.first;
    params.rows = reader_.layer_on_device(batch.layer);
  }
  device_.launch(device_.engine_kernels().split_attention, params, [&](Operation& operation) {
    operation.named("split_attention")
        .read_all(queries_, positions_, ranges_, token_rows_, partials_)
        .read(parts_.scales_range())
        .write_all(outputs_, partials_);
    for (const AttentionQuery& query : program.queries)
      if (query.layer == batch.layer)
        reader_.add_read(query.row, query.layer, query.first, query.last, operation);
  });
}

void AttentionQueries::read_back(const StepProgram& program, StepReadback& readback) {
  readback.outputs.clear();
  if (program.queries.empty()) return;
  readback.outputs.resize(num_outputs_);
  float* to = readback.outputs.data();
  for (std::size_t i = 0; i < program.queries.size(); ++i) {
    const std::int32_t layer = program.queries[i].layer;
    const std::int64_t count = std::int64_t{query_heads(layer)} * parts_.head_size(layer);
    device_.download(to, outputs_.data() + output_of_query_[i], 4 * count);
    to += count;
  }
}

}  // namespace lockstep::cuda
