#include "cuda_backend/step/attention_queries.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/step/block_tables.h"

namespace lockstep::cuda {
namespace {

constexpr std::int32_t kSplitKeys = 32;
constexpr std::uint32_t kPartQuery = 2;

}  // namespace

AttentionQueries::AttentionQueries(Device& device, const BackendConfig& config,
                                   const LayerCaches& layers, const RowParts& parts,
                                   const BlockTables& tables, const AttentionReader& reader)
    : device_(device),
      is_real_(config.numbers == Numbers::real),
      layers_(layers),
      parts_(parts),
      tables_(tables),
      reader_(reader),
      positions_(device, "positions of queries"),
      token_rows_(device, "rows of queries"),
      ranges_(device, "ranges of queries"),
      queries_(device, "query rows"),
      outputs_(device, "attention outputs"),
      partials_(device, "partial attention") {
  for (const KVCacheGroupSpec& group : config.plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      specs_.push_back(&group.layer_spec(i));
  LS_CHECK(specs_.size() == layers_.rows.size(), "{} specs of {} layers", specs_.size(),
           layers_.rows.size());
}

std::int32_t AttentionQueries::split_keys(const Batch& batch) const {
  return is_real_ ? kSplitKeys : std::max(batch.longest, 1);
}

void AttentionQueries::launch(const StepProgram& program) {
  batches_.clear();
  num_outputs_ = 0;
  if (program.queries.empty()) return;
  gather(program);
  token_rows_.upload(host_token_rows_);
  queries_.upload(host_queries_);
  outputs_.reserve(num_outputs_);
  if (is_real_) {
    positions_.upload(host_positions_);
  } else {
    ranges_.upload(host_ranges_);
  }
  std::int64_t num_partials = 0;
  for (const Batch& batch : batches_) {
    const std::int64_t splits = (batch.longest + split_keys(batch) - 1) / split_keys(batch);
    if (splits > 1)
      num_partials = std::max(num_partials, splits * batch.count * query_heads(batch.layer) *
                                                (2 + parts_.head_size(batch.layer)));
  }
  partials_.reserve(num_partials);
  for (const Batch& batch : batches_) attend(program, batch);
}

// Gathers the step's queries layer by layer, in the order of the layers' first queries.
void AttentionQueries::gather(const StepProgram& program) {
  host_positions_.clear();
  host_ranges_.clear();
  host_token_rows_.clear();
  host_queries_.clear();
  output_of_query_.assign(program.queries.size(), -1);
  for (std::size_t first = 0; first < program.queries.size(); ++first) {
    if (output_of_query_[first] >= 0) continue;
    const std::int32_t layer = program.queries[first].layer;
    LS_CHECK(layers_.rows[layer].row_bytes > 0, "layer {} keeps no rows", layer);
    batches_.push_back({.layer = layer,
                        .first = static_cast<std::int32_t>(host_token_rows_.size()),
                        .count = 0,
                        .longest = 0,
                        .query_begin = std::ssize(host_queries_),
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
  host_positions_.push_back(keys.last - 1);
  host_ranges_.push_back(keys);
  host_token_rows_.push_back(query.row);
  const DType dtype = device_.query_dtype();
  const auto bytes =
      static_cast<std::size_t>(itemsize_bytes(dtype) * parts_.head_size(query.layer));
  for (std::int32_t head = 0; head < query_heads(query.layer); ++head) {
    host_queries_.resize(host_queries_.size() + bytes);
    fill_row(query.content, rows.layer, kPartQuery,
             static_cast<std::uint32_t>(rows.first_query_head + head), dtype,
             std::span(host_queries_).last(bytes));
  }
  num_outputs_ += std::int64_t{query_heads(query.layer)} * parts_.head_size(query.layer);
}

void AttentionQueries::attend(const StepProgram& program, const Batch& batch) {
  const KVCacheSpec& spec = *specs_[batch.layer];
  const std::int32_t table = layers_.table_of_layer[batch.layer];
  const std::int32_t keys = split_keys(batch);
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
      .num_splits = (batch.longest + keys - 1) / keys,
      .split_keys = keys};
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
