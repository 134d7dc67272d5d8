// The plan of overlaid memory as JSON; docs/planner.md lists its keys.
#include <fmt/format.h>

#include "base/json_writer.h"
#include "sim/report/placement_report.h"

namespace lockstep {
namespace {

void write_options(JsonWriter& out, const PlacementOptions& options) {
  out.key("options").begin_object();
  out.integer("tp", options.tp).integer("pp", options.pp);
  out.integer("dcp", options.dcp).integer("pcp", options.pcp);
  out.string("kv_dtype", options.kv_dtype);
  out.string("mamba_cache_mode", name_of(options.mamba_cache_mode));
  out.integer("num_spec", options.num_spec).integer("max_model_len", options.max_model_len);
  out.integer("max_num_batched_tokens", options.max_num_batched_tokens);
  out.integer("memory_bytes", options.memory_bytes);
  out.key("block_size").integer_or_null(options.block_size);
  out.key("num_gpu_blocks_override").integer_or_null(options.num_gpu_blocks_override);
  out.boolean("disable_hybrid_kv_cache_manager", options.disable_hybrid).end_object();
}

void write_placed_spec(JsonWriter& out, const KVCacheSpec& spec) {
  out.string("type", planned_name_of(spec.kind)).integer("block_size", spec.block_size);
  out.integer("page_size_bytes", page_bytes(spec));
  out.integer("unpadded_page_size_bytes", unpadded_page_bytes(spec));
  out.key("hnc").begin_array().integer(num_heads(spec)).integer(rows_of(spec, spec.block_size));
  out.integer(content_bytes(spec)).end_array();
}

void write_page(JsonWriter& out, std::string_view name, const CachePage& page) {
  out.key(name).begin_object();
  out.integer("blocks", page.blocks).integer("heads", page.heads).integer("rows", page.rows);
  out.integer("content_bytes", page.content_bytes).integer("offset", page.offset);
  out.integer("block_stride", page.block_stride).integer("head_stride", page.head_stride);
  out.integer("row_stride", page.row_stride).end_object();
}

void write_groups(JsonWriter& out, const Placement& plan) {
  out.key("groups").begin_array();
  for (const PlacedGroup& group : plan.groups) {
    out.begin_object().key("layers").strings(group.layer_names);
    out.boolean("is_uniform", group.is_uniform);
    write_placed_spec(out, group.spec);
    out.end_object();
  }
  out.end_array().key("tensors").begin_array();
  for (const PlacedTensor& tensor : plan.tensors) {
    out.begin_object().key("layers").strings(tensor.layers);
    out.integer("size", tensor.size_bytes).integer("offset", tensor.offset);
    out.integer("layer_stride", tensor.layer_stride).integer("block_stride", tensor.block_stride);
    out.end_object();
  }
  out.end_array();
}

void write_pages(JsonWriter& out, const Placement& plan, const WorkerPages& pages) {
  out.key("kernel_block_sizes").integers(pages.kernel_block_sizes);
  out.key("mapped_tables").begin_array();
  for (const KernelBlockGroup& group : pages.kernel_block_groups) {
    out.begin_object().integer("group", static_cast<std::int64_t>(group.group));
    out.string("first", group.first).integer("kernel_block_size", group.kernel_block_size);
    out.integer("kernel_block_stride", group.kernel_block_stride).end_object();
  }
  out.end_array().key("layers").begin_object();
  for (const LayerPage& layer : pages.layers) {
    out.key(layer.name).begin_object();
    out.integer("group", static_cast<std::int64_t>(layer.group));
    write_page(out, "page", layer.page);
    if (!(layer.bound == layer.page)) write_page(out, "bound", layer.bound);
    out.end_object();
  }
  out.end_object().key("block").begin_array();
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    out.begin_array();
    for (const BlockRun& run : block_runs(plan, pages, g)) {
      out.begin_object().string("layer", run.layer);
      if (run.state >= 0) out.integer("state", run.state);
      out.integer("begin", run.begin).integer("end", run.end).end_object();
    }
    out.end_array();
  }
  out.end_array();
}

void write_regions(JsonWriter& out, const char* key, const std::vector<OffloadRegion>& regions) {
  out.key(key).begin_array();
  for (const OffloadRegion& region : regions) {
    out.begin_object().string("first", region.first).integer("address", region.address);
    out.integer("block_stride", region.block_stride).integer("bytes", region.bytes).end_object();
  }
  out.end_array();
}

}  // namespace

std::string placement_to_json(const PlacementReport& report) {
  const PlacementStages& stages = report.placed.stages;
  JsonWriter out;
  out.begin_object().integer("plan_report", 2).string("model", report.model);
  out.string("engine", report.engine);
  write_options(out, report.placed.options);
  out.key("order").begin_object().string("chosen", name_of(stages.order->order));
  out.string("by", stages.order->by).key("supported").begin_array();
  for (const CacheLayout order : stages.supported) out.string(name_of(order));
  out.end_array().end_object();
  out.key("aligned").begin_object().integer("block_size", stages.alignment->block_size);
  out.integer("mamba_block_size", stages.alignment->mamba_block_size);
  out.key("mamba_page_size_padded").integer_or_null(stages.alignment->mamba_page_size_padded);
  out.end_object().key("workers").begin_array();
  for (std::size_t w = 0; w < stages.workers.size(); ++w) {
    const Placement& plan = stages.workers[w];
    out.begin_object().integer("num_blocks", plan.num_blocks);
    out.integer("bytes_per_block", bytes_per_block(plan.groups, plan.order));
    out.boolean("needs_zeroing", needs_zeroing(plan));
    write_groups(out, plan);
    write_pages(out, plan, report.placed.pages[w]);
    write_regions(out, "simple_offload", simple_offload_regions(plan));
    write_regions(out, "offloading", offloading_regions(plan, report.placed.pages[w]));
    out.key("capacity").begin_object();
    out.key("max_concurrency").raw(fmt::format("{}", report.capacity[w].max_concurrency));
    out.integer("capacity_tokens", report.capacity[w].tokens).end_object();
    const auto write_findings = [&](std::string_view key, const auto& findings) {
      out.key(key).begin_array();
      for (const PlacementFinding& finding : findings)
        out.begin_object().string("rule", finding.rule).string("text", finding.text).end_object();
      out.end_array();
    };
    write_findings("findings", report.proofs[w].findings);
    write_findings("with_connectors", report.proofs[w].with_connectors);
    out.end_object();
  }
  return out.end_array().key("warnings").strings(report.warnings).end_object().take_line();
}

}  // namespace lockstep
