#include "sim/report/plan_report.h"

#include <fmt/format.h>

#include "base/json_writer.h"
#include "base/number_text.h"
#include "reference/plan/grouping.h"
#include "reference/plan/page_size.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

std::string gib(std::int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return fmt::format(
      "{:.1f} %",
      whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string kind_text(const KVCacheSpec& spec) {
  if (is_state_kind(spec.kind)) return fmt::format("mamba {}", name_of(spec.mamba_cache_mode));
  if (is_sliding_window(spec.kind)) return fmt::format("window {}", spec.sliding_window);
  if (is_chunked(spec.kind)) return fmt::format("chunk {}", spec.attention_chunk_size);
  return std::string(name_of(spec.kind));
}

// All of a few names; of many the first and the last.
std::string names_text(const std::vector<std::string>& names) {
  if (names.size() <= 4) return fmt::format("{}", fmt::join(names, " "));
  return fmt::format("{} .. {}", names.front(), names.back());
}

// One past the last of the groups from `first` that are equal except for their layers' names.
std::size_t alike_until(const PlanReport& report, std::size_t w, std::size_t first) {
  const auto& groups = report.plan.workers[w].groups;
  std::size_t end = first + 1;
  while (end < groups.size() && groups[end].spec == groups[first].spec &&
         groups[end].layer_names.size() == groups[first].layer_names.size() &&
         !groups[first].is_uniform_type())
    ++end;
  return end;
}

std::string range_text(std::size_t first, std::size_t end) {
  return end - first == 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, end - 1);
}

void append_groups(const PlanReport& report, std::size_t w, std::string& out) {
  const KVCacheConfig& config = report.plan.workers[w];
  const Capacity& capacity = report.capacity[w];
  constexpr std::string_view kRow =
      "  {:>6} {:>6}  {:<12}{:>8}{:>8}{:>13}{:>8}{:>8}{:>8}{:>9}  {}\n";
  out += "\n" + fmt::format(fmt::runtime(kRow), "group", "layers", "keeps", "tokens", "kernel",
                            "page bytes", "used", "padding", "empty", "blocks/r", "first layer");
  const std::int64_t block_bytes = capacity.pool_bytes / capacity.num_blocks;
  for (std::size_t g = 0; g < config.groups.size();) {
    const KVCacheGroupSpec& group = config.groups[g];
    const GroupCapacity& figures = capacity.groups[g];
    const std::size_t end = alike_until(report, w, g);
    const std::string kernel =
        is_state_kind(group.spec.kind) ? "-" : with_commas(report.views[w].kernel_block_sizes[g]);
    out += fmt::format(
        fmt::runtime(kRow), range_text(g, end), group.layer_names.size(), kind_text(group.spec),
        with_commas(group.spec.block_size), kernel, with_commas(pool_page_size_bytes(group)),
        percent(figures.used_bytes, block_bytes), percent(figures.padding_bytes, block_bytes),
        percent(figures.pack_waste_bytes + figures.absent_layer_bytes, block_bytes),
        with_commas(figures.blocks_per_request),
        group.layer_names.empty() ? "none here" : group.layer_names.front());
    g = end;
  }
}

void append_views(const PlanReport& report, std::size_t w, std::string& out) {
  out += "\n  views of the first layer of each group, in elements\n";
  for (std::size_t g = 0; g < report.views[w].groups.size();) {
    const std::size_t end = alike_until(report, w, g);
    if (!report.views[w].groups[g].empty())
      for (const TensorView& view : report.views[w].groups[g].front().tensors)
        out += fmt::format("  {:>6}  {:<5} [{}]  strides [{}]  offset {}\n", range_text(g, end),
                           name_of(view.dtype), fmt::join(view.shape, ", "),
                           fmt::join(view.stride, ", "), view.storage_offset);
    g = end;
  }
}

void append_worker(const PlanReport& report, std::size_t w, std::string& out) {
  const KVCacheConfig& config = report.plan.workers[w];
  if (config.groups.empty()) {
    out += fmt::format("worker {}: keeps no cache\n", w);
    return;
  }
  const Capacity& capacity = report.capacity[w];
  std::int64_t allocated = 0;
  for (const KVCacheTensor& tensor : config.tensors) allocated += tensor.size_bytes;
  if (report.plan.workers.size() > 1) out += fmt::format("\nworker {}\n", w);
  out += fmt::format("  {} blocks in {} tensors, {} of {}; the null block is one of them\n",
                     with_commas(config.num_blocks), config.tensors.size(), gib(allocated),
                     gib(report.options.memory_bytes));
  const auto& sharers = config.tensors.front().shared_by;
  out += fmt::format("  tensor 0: {} bytes, {} layer{}: {}\n",
                     with_commas(config.tensors.front().size_bytes), sharers.size(),
                     sharers.size() == 1 ? "" : "s", names_text(sharers));
  append_groups(report, w, out);
  append_views(report, w, out);
  out += fmt::format(
      "\n  capacity {} tokens, {:.2f} requests of {} at once; {} bytes per token, {} fixed "
      "a request\n",
      with_commas(capacity.capacity_tokens), capacity.max_concurrency,
      with_commas(report.options.max_model_len),
      with_commas(static_cast<std::int64_t>(capacity.bytes_per_token)),
      with_commas(capacity.fixed_bytes_per_request));
  for (const Formula& formula : capacity.formulas)
    out += fmt::format("    {:<22} {}\n", formula.figure, formula.formula);
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
  out.key("block_size").integer_or_null(o.block_size);
  out.key("num_gpu_blocks_override").integer_or_null(o.num_gpu_blocks_override);
  out.key("max_num_seqs").integer_or_null(o.max_num_seqs);
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

Result<PlanReport> make_plan_report(const ModelSpec& model, const PlanOptions& options,
                                    CacheLayout layout, const LayerSpecs& extra) {
  PlanReport report;
  report.model = model.name;
  report.options = options;
  report.layout = layout;
  LS_ASSIGN_OR_RETURN(auto layers, layer_specs(model, options));
  layers.insert(layers.end(), extra.begin(), extra.end());
  LS_ASSIGN_OR_RETURN(report.plan, plan_memory(layers, options));
  for (const KVCacheConfig& worker : report.plan.workers) {
    LS_ASSIGN_OR_RETURN(report.pools.emplace_back(), pool_layout(worker, options.backend, layout));
    LS_ASSIGN_OR_RETURN(report.views.emplace_back(), pool_views(worker, options.backend, layout));
    report.capacity.push_back(worker.groups.empty() ? Capacity{} : capacity_of(worker, options));
  }
  return report;
}

std::string plan_table(const PlanReport& report) {
  const PlanOptions& o = report.options;
  std::string out = fmt::format(
      "{}: {} {}, tp {} pp {} dcp {} pcp {}, K/V {}, states {} (mode {}), packs of {}, {} drafts\n",
      report.model, name_of(o.backend), name_of(report.layout), o.tp, o.pp, o.dcp, o.pcp,
      o.kv_quant_mode == KVQuantMode::none ? name_of(o.kv_dtype) : name_of(o.kv_quant_mode),
      o.ssm_dtype ? name_of(*o.ssm_dtype) : "as the model", name_of(o.mamba_cache_mode),
      o.attn_pack, o.num_spec);
  const AlignedSizes& aligned = report.plan.aligned;
  out += fmt::format("  block size {}", with_commas(aligned.block_size));
  if (aligned.mamba_page_size_padded)
    out += fmt::format(", state pages padded to {} bytes",
                       with_commas(*aligned.mamba_page_size_padded));
  out += "\n";
  for (std::size_t w = 0; w < report.plan.workers.size(); ++w) append_worker(report, w, out);
  for (const std::string& warning : report.plan.warnings)
    out += fmt::format("\n  warning: {}\n", warning);
  return out;
}

// docs/planner.md lists its keys.
std::string plan_to_json(const PlanReport& report) {
  JsonWriter out;
  out.begin_object().integer("plan_report", 1).string("model", report.model);
  write_options(out, report);
  out.key("aligned").begin_object().integer("block_size", report.plan.aligned.block_size);
  out.key("mamba_block_size").integer_or_null(report.plan.aligned.mamba_block_size);
  out.key("mamba_page_size_padded").integer_or_null(report.plan.aligned.mamba_page_size_padded);
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
