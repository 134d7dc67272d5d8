// A plan report as one JSON object; docs/planner.md lists its keys.

#include <fmt/format.h>

#include "base/json_writer.h"
#include "reference/plan/page_size.h"
#include "sim/report/plan_report.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

void write_optional(JsonWriter& out, std::string_view key, std::optional<std::int64_t> value) {
  out.key(key);
  if (value)
    out.integer(*value);
  else
    out.null();
}

void write_options(JsonWriter& out, const PlanReport& report) {
  const PlanOptions& o = report.options;
  out.key("options").begin_object();
  out.string("backend", name_of(o.backend)).string("layout", name_of(report.layout));
  out.integer("tp", o.tp).integer("pp", o.pp).integer("dcp", o.dcp).integer("pcp", o.pcp);
  out.string("kv_dtype", name_of(o.kv_dtype)).string("kv_quant_mode", name_of(o.kv_quant_mode));
  out.key("ssm_dtype");
  if (o.ssm_dtype)
    out.string(name_of(*o.ssm_dtype));
  else
    out.null();
  out.string("mamba_cache_mode", name_of(o.mamba_cache_mode)).integer("num_spec", o.num_spec);
  out.integer("max_model_len", o.max_model_len);
  out.integer("max_num_batched_tokens", o.max_num_batched_tokens);
  out.integer("attn_pack", o.attn_pack).integer("memory_bytes", o.memory_bytes);
  write_optional(out, "block_size", o.block_size);
  write_optional(out, "num_gpu_blocks_override", o.num_gpu_blocks_override);
  write_optional(out, "max_num_seqs", o.max_num_seqs);
  out.end_object();
}

void write_layout(JsonWriter& out, const LayerLayout& layer) {
  out.begin_object().integer("tensor", layer.tensor_index);
  out.integer("page_size_bytes", layer.page_size_bytes);
  out.integer("real_page_size_bytes", layer.real_page_size_bytes);
  out.integer("block_stride_bytes", layer.block_stride_bytes);
  if (layer.num_kv == 0) {
    out.key("state_offsets_bytes").begin_array();
    for (const StateLayout& state : layer.states) out.integer(state.offset_bytes);
    out.end_array();
  } else {
    out.string("pair_order", layer.pair_order == PairOrder::in_page ? "in_page" : "kv_outermost");
    out.integer("base_offset_bytes", layer.base_offset_bytes);
    out.integer("kernel_block_size", layer.kernel_block_size);
    out.integer("blocks_per_kv_block", layer.blocks_per_kv_block);
    out.integer("kernel_block_stride_bytes", layer.kernel_block_stride_bytes);
    out.integer("kv_stride_bytes", layer.kv_stride_bytes);
    out.integer("token_stride_bytes", layer.token_stride_bytes);
    out.integer("head_stride_bytes", layer.head_stride_bytes);
  }
  out.end_object();
}

void write_view(JsonWriter& out, const TensorView& view) {
  out.begin_object().string("dtype", name_of(view.dtype));
  out.key("shape").integers(view.shape).key("stride").integers(view.stride);
  out.integer("offset", view.storage_offset).end_object();
}

// Layers by name: where they lie, and how a kernel sees them.
void write_layers(JsonWriter& out, const PlanReport& report, std::size_t w) {
  const KVCacheConfig& config = report.plan.workers[w];
  out.key("layers").begin_object();
  for (std::size_t g = 0; g < config.groups.size(); ++g)
    for (std::size_t i = 0; i < report.pools[w].groups[g].size(); ++i) {
      out.key(config.groups[g].layer_names[i]).begin_object();
      out.integer("group", static_cast<std::int64_t>(g)).key("layout");
      write_layout(out, report.pools[w].groups[g][i]);
      out.key("views").begin_array();
      for (const TensorView& view : report.views[w].groups[g][i].tensors) write_view(out, view);
      out.end_array().end_object();
    }
  out.end_object();
}

void write_capacity(JsonWriter& out, const Capacity& capacity) {
  out.key("capacity").begin_object();
  out.integer("num_blocks", capacity.num_blocks).integer("usable_blocks", capacity.usable_blocks);
  out.integer("blocks_per_request", capacity.blocks_per_request);
  out.key("max_concurrency").raw(fmt::format("{}", capacity.max_concurrency));
  out.integer("capacity_tokens", capacity.capacity_tokens);
  out.integer("growing_groups_tokens", capacity.growing_groups_tokens);
  out.integer("all_groups_tokens", capacity.all_groups_tokens);
  out.key("bytes_per_token").raw(fmt::format("{}", capacity.bytes_per_token));
  out.integer("fixed_bytes_per_request", capacity.fixed_bytes_per_request);
  out.integer("pool_bytes", capacity.pool_bytes);
  out.integer("slot_address_space", capacity.slot_address_space);
  out.key("groups").begin_array();
  for (const GroupCapacity& group : capacity.groups) {
    out.begin_object().string("kind", name_of(group.kind)).boolean("grows", group.grows);
    out.integer("blocks_per_request", group.blocks_per_request);
    out.integer("used_bytes", group.used_bytes).integer("padding_bytes", group.padding_bytes);
    out.integer("pack_waste_bytes", group.pack_waste_bytes);
    out.integer("absent_layer_bytes", group.absent_layer_bytes);
    out.integer("slot_address_space", group.slot_address_space).end_object();
  }
  out.end_array().key("formulas").begin_object();
  for (const Formula& formula : capacity.formulas) out.string(formula.figure, formula.formula);
  out.end_object().end_object();
}

}  // namespace

std::string plan_to_json(const PlanReport& report) {
  JsonWriter out;
  out.begin_object().integer("plan_report", 1).string("model", report.model);
  write_options(out, report);
  out.key("aligned").begin_object().integer("block_size", report.plan.aligned.block_size);
  write_optional(out, "mamba_block_size", report.plan.aligned.mamba_block_size);
  write_optional(out, "mamba_page_size_padded", report.plan.aligned.mamba_page_size_padded);
  out.end_object().key("workers").begin_array();
  for (std::size_t w = 0; w < report.plan.workers.size(); ++w) {
    out.begin_object().key("plan");
    write_kv_cache_config(out, report.plan.workers[w]);
    out.key("kernel_block_sizes").integers(report.views[w].kernel_block_sizes);
    write_layers(out, report, w);
    if (!report.plan.workers[w].groups.empty()) write_capacity(out, report.capacity[w]);
    out.end_object();
  }
  out.end_array().key("warnings").strings(report.plan.warnings).end_object();
  return out.take_line();
}

}  // namespace lockstep
