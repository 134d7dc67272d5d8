#include "cuda_backend/step/real_attention.h"

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

RealAttention::RealAttention(Device& device, const BackendConfig& config, const LayerCaches& layers,
                             const RealCaches& caches, const BlockTables& tables)
    : device_(device),
      config_(config),
      layers_(layers),
      caches_(caches),
      tables_(tables),
      positions_(device, "positions of queries"),
      token_rows_(device, "rows of queries"),
      queries_(device, "query rows"),
      outputs_(device, "attention outputs"),
      partials_(device, "partial attention") {
  for (const KVCacheGroupSpec& group : config_.plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      specs_.push_back(&group.layer_spec(i));
  LS_CHECK(specs_.size() == layers_.rows.size(), "{} specs of {} layers", specs_.size(),
           layers_.rows.size());
}

void RealAttention::launch(const StepProgram& program) {
  if (program.queries.empty()) return;
  gather(program);
  positions_.upload(host_positions_);
  token_rows_.upload(host_token_rows_);
  queries_.upload(host_queries_);
  outputs_.reserve(num_outputs_);
  std::int64_t num_partials = 0;
  for (const Batch& batch : batches_) {
    const std::int64_t splits = (batch.longest + kSplitKeys - 1) / kSplitKeys;
    num_partials = std::max(num_partials, splits * batch.count * query_heads(batch.layer) *
                                              (2 + caches_.head_size(batch.layer)));
  }
  partials_.reserve(num_partials);
  for (const Batch& batch : batches_) attend(program, batch);
}

// The step's queries, layer by layer in the order in which layers are asked first.
void RealAttention::gather(const StepProgram& program) {
  batches_.clear();
  host_positions_.clear();
  host_token_rows_.clear();
  host_queries_.clear();
  output_of_query_.assign(program.queries.size(), -1);
  num_outputs_ = 0;
  for (std::size_t first = 0; first < program.queries.size(); ++first) {
    if (output_of_query_[first] >= 0) continue;
    const std::int32_t layer = program.queries[first].layer;
    LS_CHECK(layers_.rows[layer].row_bytes > 0, "layer {} keeps no rows", layer);
    batches_.push_back({.layer = layer,
                        .first = static_cast<std::int32_t>(host_positions_.size()),
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

void RealAttention::add_query(const AttentionQuery& query) {
  const RowCache& rows = layers_.rows[query.layer];
  Batch& batch = batches_.back();
  ++batch.count;
  const std::int32_t group = layers_.group_of_layer[query.layer];
  const std::int32_t last = tables_.rows_kept(group, query.last);
  batch.longest = std::max(batch.longest, last - tables_.rows_kept(group, query.first));
  host_positions_.push_back(last - 1);
  host_token_rows_.push_back(query.row);
  const auto d = static_cast<std::size_t>(caches_.head_size(query.layer));
  for (std::int32_t head = 0; head < query_heads(query.layer); ++head) {
    host_queries_.resize(host_queries_.size() + d);
    fill_row(query.content, rows.layer, kPartQuery,
             static_cast<std::uint32_t>(rows.first_query_head + head), DType::fp32,
             std::as_writable_bytes(std::span(host_queries_).last(d)));
  }
  num_outputs_ += std::int64_t{query_heads(query.layer)} * caches_.head_size(query.layer);
}

void RealAttention::attend(const StepProgram& program, const Batch& batch) {
  const KVCacheSpec& spec = *specs_[batch.layer];
  const std::int32_t group = layers_.group_of_layer[batch.layer];
  const SplitAttentionParams params{
      .key = caches_.key(batch.layer),
      .value = caches_.value(batch.layer),
      .queries = reinterpret_cast<const std::byte*>(queries_.data() + batch.query_begin),
      .outputs = outputs_.data() + batch.output_begin,
      .partials = partials_.data(),
      .block_table = tables_.kernel_table(group),
      .token_rows = token_rows_.data() + batch.first,
      .positions = positions_.data() + batch.first,
      .seq_lens = nullptr,
      .table_width = tables_.kernel_table_width(group),
      .scale = 1.0f / std::sqrt(static_cast<float>(caches_.head_size(batch.layer))),
      .query_dtype = DType::fp32,
      .causal = true,
      .window = spec.kind == CacheKind::sliding_window
                    ? static_cast<std::int32_t>(spec.sliding_window)
                    : 0,
      .chunk = spec.kind == CacheKind::chunked_local
                   ? static_cast<std::int32_t>(spec.attention_chunk_size)
                   : 0,
      .num_tokens = batch.count,
      .num_query_heads = query_heads(batch.layer),
      .num_splits = (batch.longest + kSplitKeys - 1) / kSplitKeys,
      .split_keys = kSplitKeys};
  device_.launch(device_.engine_kernels().split_attention, params, [&](Operation& operation) {
    operation.named("split_attention")
        .read_all(queries_, positions_, token_rows_, partials_)
        .read(caches_.scales_range())
        .read(tables_.table_range(group))
        .write_all(outputs_, partials_);
    for (const AttentionQuery& query : program.queries)
      if (query.layer == batch.layer)
        for (const std::int32_t block :
             tables_.mirror().blocks(group, query.row, query.first, query.last))
          add_layer_ranges(layers_, batch.layer, block, operation.reads);
  });
}

void RealAttention::read_back(const StepProgram& program, StepReadback& readback) {
  readback.outputs.clear();
  if (program.queries.empty()) return;
  readback.outputs.resize(num_outputs_);
  float* to = readback.outputs.data();
  for (std::size_t i = 0; i < program.queries.size(); ++i) {
    const std::int32_t layer = program.queries[i].layer;
    const std::int64_t count = std::int64_t{query_heads(layer)} * caches_.head_size(layer);
    device_.download(to, outputs_.data() + output_of_query_[i], 4 * count);
    to += count;
  }
}

}  // namespace lockstep::cuda
