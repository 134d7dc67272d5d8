// A block of a plan to scale: lines of characters, or rectangles. The plan as a graph.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>

#include "base/json_writer.h"
#include "base/markup.h"
#include "base/number_text.h"
#include "reference/placement/worker_pages.h"
#include "sim/report/plan_report.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

constexpr std::int64_t kMapColumns = 96;
constexpr std::int64_t kSvgWidth = 960, kSvgLeft = 200, kSvgRow = 44;
constexpr char kSeveral = '#';

// A part of a block in drawings. Layers, or states, have the colours in turn.
struct Look {
  char symbol;
  std::string_view text;
  std::vector<std::string_view> colours;
};

const Look& look_of(const BlockRun& run) {
  static const std::map<PartKind, Look> looks = {
      {PartKind::k, {'K', "K", {"#4e79a7", "#2f5d8a"}}},
      {PartKind::v, {'V', "V", {"#a0cbe8", "#7fb2d9"}}},
      {PartKind::row, {'R', "rows", {"#4e79a7", "#2f5d8a"}}},
      {PartKind::state, {'s', "state", {"#59a14f", "#8cd17d", "#b6992d", "#f1ce63"}}},
      {PartKind::padding, {'.', "padding, or of other groups", {"#d3d3d3"}}},
      {PartKind::empty_place, {'-', "empty position of the pack", {"#ff9d9a"}}},
  };
  return looks.at(run.kind);
}

char symbol(const BlockRun& run) {
  const bool is_lettered = run.kind == PartKind::state && run.part < 8;
  return is_lettered ? static_cast<char>('a' + run.part) : look_of(run).symbol;
}

std::string_view colour(const BlockRun& run) {
  const auto& colours = look_of(run).colours;
  const std::int32_t turn = run.kind == PartKind::state ? run.part : std::max(run.layer, 0);
  return colours[static_cast<std::size_t>(turn) % colours.size()];
}

std::string kind_text(const BlockRun& run) {
  std::string text(look_of(run).text);
  if (run.kind == PartKind::state) text += fmt::format(" {}", run.part);
  return text;
}

// A way to fill a block, and the groups and tensors whose blocks are filled so.
struct Filling {
  std::vector<BlockRun> runs;
  std::set<std::size_t> groups, tensors;
  std::vector<const LayerMemory*> layers;  // of the first group in the first tensor
};

std::vector<Filling> fillings(const MemoryPlan& plan) {
  std::vector<Filling> all;
  for (std::size_t g = 0; g < plan.layers_per_page.size(); ++g)
    for (std::size_t t = 0; t < plan.tensor_size_bytes.size(); ++t) {
      auto runs = block_runs(plan, g, t);
      if (runs.empty()) continue;
      auto same = std::ranges::find(all, runs, &Filling::runs);
      if (same == all.end())
        same = all.insert(all.end(), {std::move(runs), {}, {}, layers_in(plan, g, t)});
      same->groups.insert(g);
      same->tensors.insert(t);
    }
  return all;
}

// "0-11", "3", "0, 2-4".
std::string numbers_text(const std::set<std::size_t>& numbers) {
  std::string text;
  for (auto at = numbers.begin(); at != numbers.end();) {
    const std::size_t first = *at;
    std::size_t end = first;
    for (; at != numbers.end() && *at == end; ++at) ++end;
    text += text.empty() ? "" : ", ";
    text += end - first == 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, end - 1);
  }
  return text;
}

// A bar of the bytes [begin, end): each column shows what most of it is, or # for no majority.
template <class SymbolOf>
std::string bar(const std::vector<BlockRun>& runs, std::int64_t begin, std::int64_t end,
                const SymbolOf& symbol_of) {
  std::string columns;
  for (std::int64_t column = 0; column < kMapColumns; ++column) {
    const std::int64_t from = begin + (end - begin) * column / kMapColumns;
    const std::int64_t to = std::max(from + 1, begin + (end - begin) * (column + 1) / kMapColumns);
    std::array<std::int64_t, 128> bytes{};
    for (auto at = std::ranges::upper_bound(runs, from, {}, &BlockRun::end);
         at != runs.end() && at->begin < to; ++at)
      bytes[static_cast<std::size_t>(symbol_of(*at))] +=
          std::min(to, at->end) - std::max(from, at->begin);
    const auto most = std::ranges::max_element(bytes);
    columns += 4 * *most >= 3 * (to - from) ? static_cast<char>(most - bytes.begin()) : kSeveral;
  }
  return columns;
}

// "a state 0: 73728 bytes; K: 540672 bytes in 33 runs".
std::string legend(const Filling& filling) {
  struct Total {
    BlockRun run;
    std::int64_t bytes = 0, runs = 0;
  };
  std::vector<Total> totals;
  for (const BlockRun& run : filling.runs) {
    auto same =
        std::ranges::find_if(totals, [&](const Total& t) { return symbol(t.run) == symbol(run); });
    if (same == totals.end()) same = totals.insert(totals.end(), {run, 0, 0});
    same->bytes += run.end - run.begin;
    ++same->runs;
  }
  std::string text;
  for (const Total& total : totals) {
    const bool is_named = total.run.kind == PartKind::k || total.run.kind == PartKind::v;
    text += fmt::format("{}{}{}: {} bytes", text.empty() ? "" : "; ", symbol(total.run),
                        is_named ? "" : " " + kind_text(total.run), total.bytes);
    if (total.runs > 1) text += fmt::format(" in {} runs", total.runs);
  }
  return text;
}

// The layer of each column; the first kernel block by itself, where a block has several.
std::string closer_lines(const Filling& filling) {
  const LayerMemory& layer = *filling.layers.front();
  const std::int64_t end = filling.runs.back().end;
  std::string out;
  if (filling.layers.size() > 1) {
    const auto letter = [](const BlockRun& run) {
      return run.layer < 0 ? ' ' : static_cast<char>('a' + run.layer % 26);
    };
    out += fmt::format("   {}\n  layers:", bar(filling.runs, 0, end, letter));
    constexpr std::size_t kNamedMax = 8;
    for (std::size_t i = 0; i < filling.layers.size(); ++i) {
      const bool is_named = filling.layers.size() <= kNamedMax || i + 1 == filling.layers.size();
      if (i == 0 || is_named)
        out += fmt::format(" {} {}", static_cast<char>('a' + i % 26), filling.layers[i]->name);
      else if (i == 1)
        out += " ..";
    }
    out += "\n";
  }
  const PartRows& part = layer.parts.front();
  const bool is_apart = layer.regions.size() > 1 || part.kernel_blocks == 1;
  if (is_apart || filling.layers.size() > 1) return out;
  return out + fmt::format("  the first of {} kernel blocks of {} rows, {} bytes:\n  |{}|\n",
                           part.kernel_blocks, part.rows, part.kernel_block_stride,
                           bar(filling.runs, 0, part.kernel_block_stride, symbol));
}

std::string stage_text(const PlanReport& report, std::size_t w) {
  return report.workers.size() > 1 ? fmt::format("stage {}, ", w) : std::string();
}

void append_svg_row(const Filling& filling, const std::string& stage, std::int64_t top,
                    std::string& out) {
  const double scale =
      static_cast<double>(kSvgWidth) / static_cast<double>(filling.runs.back().end);
  out += fmt::format("<text x=\"8\" y=\"{}\">{}groups {}, tensors {}</text>\n", top + 12, stage,
                     numbers_text(filling.groups), numbers_text(filling.tensors));
  out += fmt::format("<text x=\"8\" y=\"{}\" fill=\"#666666\">{}</text>\n", top + 27,
                     escaped_for_markup(filling.layers.front()->name));
  for (const BlockRun& run : filling.runs) {
    const std::string owner =
        run.layer < 0 ? "" : " of " + filling.layers[static_cast<std::size_t>(run.layer)]->name;
    out += fmt::format(
        "<rect x=\"{:.3f}\" y=\"{}\" width=\"{:.3f}\" height=\"30\" fill=\"{}\"><title>{}{}: bytes "
        "{} to {}</title></rect>\n",
        static_cast<double>(kSvgLeft) + static_cast<double>(run.begin) * scale, top,
        static_cast<double>(run.end - run.begin) * scale, colour(run),
        escaped_for_markup(kind_text(run)), escaped_for_markup(owner), run.begin, run.end);
  }
}

// A text in DOT's quotes.
std::string quoted(const std::string& text) {
  std::ostringstream out;
  out << std::quoted(text);
  return out.str();
}

}  // namespace

std::string plan_map(const PlanReport& report) {
  std::string out;
  for (std::size_t w = 0; w < report.workers.size(); ++w)
    for (const Filling& filling : fillings(report.workers[w].memory)) {
      const std::int64_t end = filling.runs.back().end;
      const bool is_pair = filling.runs.front().kind == PartKind::k;
      const bool is_after = is_pair && filling.layers.front()->regions.size() > 1;
      out += fmt::format(
          "{}{}a block of groups {} in tensors {}: {} bytes, a column is {:.0f}\n  |{}|\n"
          "  {}{}\n{}",
          out.empty() ? "" : "\n", stage_text(report, w), numbers_text(filling.groups),
          numbers_text(filling.tensors), end, static_cast<double>(end) / kMapColumns,
          bar(filling.runs, 0, end, symbol), legend(filling),
          is_after ? "; V follows the K of all blocks" : "", closer_lines(filling));
    }
  if (out.empty()) return "no cache to draw\n";
  return out + "\n# several in one column. A block belongs to one group at a time.\n";
}

std::string plan_svg(const PlanReport& report) {
  std::string rows;
  std::int64_t top = 36;
  for (std::size_t w = 0; w < report.workers.size(); ++w)
    for (const Filling& filling : fillings(report.workers[w].memory)) {
      append_svg_row(filling, stage_text(report, w), top, rows);
      top += kSvgRow;
    }
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
             "font-family=\"monospace\" font-size=\"12\">\n<text x=\"8\" y=\"20\">{}: what a block "
             "holds, by group</text>\n",
             kSvgLeft + kSvgWidth + 20, top + 24, escaped_for_markup(report.model)) +
         rows + "</svg>\n";
}

std::string plan_dot(const PlanReport& report) {
  std::string out = fmt::format("digraph {{\nrankdir=LR;\nlabel={};\n", quoted(report.model));
  const auto node = [&](const std::string& name, const std::string& label, const char* shape) {
    out += fmt::format("{} [label={}, shape={}];\n", quoted(name), quoted(label), shape);
  };
  for (std::size_t w = 0; w < report.workers.size(); ++w) {
    const std::string stage = stage_text(report, w);
    const WorkerReport& worker = report.workers[w];
    for (std::size_t g = 0; g < worker.groups.size(); ++g) {
      const std::string name = fmt::format("{}group {}", stage, g);
      node(name, fmt::format("{}: {}", name, worker.groups[g].label), "box");
      for (const std::string& layer : worker.groups[g].layers) {
        node(layer, layer, "ellipse");
        out += fmt::format("{} -> {};\n", quoted(name), quoted(layer));
      }
    }
    for (std::size_t t = 0; t < worker.tensors.size(); ++t) {
      const std::string name = fmt::format("{}tensor {}", stage, t);
      node(name, fmt::format("{}: {}", name, worker.tensors[t].label), "cylinder");
      for (const std::string& layer : worker.tensors[t].layers)
        out += fmt::format("{} -> {};\n", quoted(layer), quoted(name));
    }
  }
  return out + "}\n";
}

namespace {

// An array of objects under `key`; `write` adds the members of one.
template <class Rows, class Write>
void write_objects(JsonWriter& out, std::string_view key, const Rows& rows, const Write& write) {
  out.key(key).each(rows, [&](const auto& row) {
    out.begin_object();
    write(row);
    out.end_object();
  });
}

void write_aligned(JsonWriter& out, const AlignedSizes& aligned) {
  out.key("aligned").begin_object().integer("block_size", aligned.block_size);
  out.key("mamba_block_size").integer_or_null(aligned.mamba_block_size);
  out.key("mamba_page_size_padded").integer_or_null(aligned.mamba_page_size_padded);
  out.end_object();
}

void write_options(JsonWriter& out, const TensorDetails& details) {
  const PlanOptions& o = details.options;
  out.key("options").begin_object();
  out.string("backend", name_of(o.backend)).string("layout", name_of(details.layout));
  out.integer("tp", o.tp).integer("pp", o.pp).integer("dcp", o.dcp).integer("pcp", o.pcp);
  out.string("kv_dtype", name_of(o.kv_dtype)).string("kv_quant_mode", name_of(o.kv_quant_mode));
  out.key("ssm_dtype");
  o.ssm_dtype ? out.string(name_of(*o.ssm_dtype)) : out.null();
  out.string("mamba_cache_mode", name_of(o.mamba_cache_mode)).integer("num_spec", o.num_spec);
  out.integer("max_model_len", o.max_model_len);
  out.integer("max_num_batched_tokens", o.max_num_batched_tokens);
  out.boolean("async_scheduling", o.async_scheduling);
  out.integer("attn_pack", o.attn_pack).integer("memory_bytes", o.memory_bytes);
  out.key("block_size").integer_or_null(o.block_size);
  out.key("num_gpu_blocks_override").integer_or_null(o.num_gpu_blocks_override);
  out.key("max_num_seqs").integer_or_null(o.max_num_seqs);
  out.end_object();
}

void write_layout(JsonWriter& out, const LayerMemory& layer) {
  const PartRows& first = layer.parts.front();
  std::int64_t real_bytes = 0;
  for (const PartRows& part : layer.parts) real_bytes += bytes_of(part);
  out.key("layout").begin_object().integer("tensor", layer.tensor);
  out.integer("page_size_bytes", layer.page_bytes()).integer("real_page_size_bytes", real_bytes);
  out.integer("block_stride_bytes", first.block_stride);
  if (!layer.keeps_rows()) {
    out.key("state_offsets_bytes");
    out.each(layer.parts, [&](const PartRows& state) { out.integer(state.offset - layer.begin); });
  } else {
    const std::int64_t plane = first.rows * first.heads * first.row_bytes;
    out.string("pair_order", layer.regions.size() == 1 ? "in_page" : "kv_outermost");
    out.integer("base_offset_bytes", first.offset - layer.begin);
    out.integer("kernel_block_size", first.rows);
    out.integer("blocks_per_kv_block", first.kernel_blocks);
    out.integer("kernel_block_stride_bytes", first.kernel_block_stride);
    out.integer("kv_stride_bytes",
                layer.parts.size() == 1 ? plane : layer.parts.back().offset - first.offset);
    out.integer("token_stride_bytes", first.row_stride);
    out.integer("head_stride_bytes", first.head_stride);
  }
  out.end_object();
}

// Layers by name: where they lie, and how a kernel sees them.
void write_layers(JsonWriter& out, const TensorDetails& details, std::size_t w) {
  out.key("layers").begin_object();
  for (const LayerMemory& layer : details.pools[w].layers) {
    out.key(layer.name).begin_object().integer("group", static_cast<std::int64_t>(layer.group));
    write_layout(out, layer);
    const LayerViews& views = details.views[w].groups[layer.group][layer.layer];
    write_objects(out, "views", views.tensors, [&](const TensorView& view) {
      out.string("dtype", name_of(view.dtype)).key("shape").integers(view.shape);
      out.key("stride").integers(view.stride).integer("offset", view.storage_offset);
    });
    out.end_object();
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
  write_objects(out, "groups", capacity.groups, [&](const GroupCapacity& group) {
    out.string("kind", name_of(group.kind)).boolean("grows", group.grows);
    out.integer("blocks_per_request", group.blocks_per_request);
    out.integer("used_bytes", group.used_bytes).integer("padding_bytes", group.padding_bytes);
    out.integer("pack_waste_bytes", group.pack_waste_bytes);
    out.integer("absent_layer_bytes", group.absent_layer_bytes);
    out.integer("slot_address_space", group.slot_address_space);
  });
  out.key("formulas").begin_object();
  for (const Formula& formula : capacity.formulas) out.string(formula.figure, formula.formula);
  out.end_object().end_object();
}

void write_plan(JsonWriter& out, const TensorDetails& details, const PlanReport&) {
  write_options(out, details);
  write_aligned(out, details.plan.aligned);
  out.key("workers").begin_array();
  for (std::size_t w = 0; w < details.plan.workers.size(); ++w) {
    const KVCacheConfig& worker = details.plan.workers[w];
    write_kv_cache_config(out.begin_object().key("plan"), worker);
    out.key("kernel_block_sizes").integers(details.views[w].kernel_block_sizes);
    write_layers(out, details, w);
    if (!worker.groups.empty()) write_capacity(out, details.capacity[w]);
    out.end_object();
  }
  out.end_array();
}

void write_options(JsonWriter& out, const PlacementOptions& o) {
  out.key("options").begin_object();
  out.integer("tp", o.tp).integer("pp", o.pp).integer("dcp", o.dcp).integer("pcp", o.pcp);
  out.string("kv_dtype", o.format).string("mamba_cache_mode", name_of(o.mamba_cache_mode));
  out.integer("num_spec", o.num_spec).integer("max_model_len", o.max_model_len);
  out.integer("max_num_batched_tokens", o.max_num_batched_tokens);
  out.boolean("async_scheduling", o.async_scheduling);
  out.integer("memory_bytes", o.memory_bytes).key("block_size").integer_or_null(o.block_size);
  out.key("num_gpu_blocks_override").integer_or_null(o.num_gpu_blocks_override);
  out.boolean("disable_hybrid_kv_cache_manager", o.disable_hybrid_kv_cache_manager).end_object();
}

void write_page(JsonWriter& out, std::string_view name, const CachePage& page) {
  out.key(name).begin_object();
  out.integer("blocks", page.blocks).integer("heads", page.heads).integer("rows", page.rows);
  out.integer("content_bytes", page.content_bytes).integer("offset", page.offset);
  out.integer("block_stride", page.block_stride).integer("head_stride", page.head_stride);
  out.integer("row_stride", page.row_stride).end_object();
}

void write_groups(JsonWriter& out, const Placement& plan) {
  write_objects(out, "groups", plan.groups, [&](const KVCacheGroupSpec& group) {
    const KVCacheSpec& spec = group.spec;
    out.key("layers").strings(group.layer_names).boolean("is_uniform", group.is_uniform_type());
    out.string("type", planned_name_of(spec.kind)).integer("block_size", spec.block_size);
    out.integer("page_size_bytes", page_bytes(spec));
    out.integer("unpadded_page_size_bytes", unpadded_page_bytes(spec));
    out.key("hnc").integers(
        std::array{num_heads(spec), rows_of(spec, spec.block_size), content_bytes(spec)});
  });
  write_objects(out, "tensors", plan.tensors, [&](const PlacedTensor& tensor) {
    out.key("layers").strings(tensor.layers);
    out.integer("size", tensor.size_bytes).integer("offset", tensor.offset);
    out.integer("layer_stride", tensor.layer_stride).integer("block_stride", tensor.block_stride);
  });
}

void write_pages(JsonWriter& out, const WorkerPages& pages, const MemoryPlan& memory) {
  out.key("kernel_block_sizes").integers(pages.kernel_block_sizes);
  write_objects(
      out, "mapped_tables", pages.kernel_block_groups, [&](const KernelBlockGroup& group) {
        out.integer("group", static_cast<std::int64_t>(group.group)).string("first", group.first);
        out.integer("kernel_block_size", group.kernel_block_size);
        out.integer("kernel_block_stride", group.kernel_block_stride);
      });
  out.key("layers").begin_object();
  for (const LayerPage& layer : pages.layers) {
    out.key(layer.name).begin_object().integer("group", static_cast<std::int64_t>(layer.group));
    write_page(out, "page", layer.page);
    if (!(layer.bound == layer.page)) write_page(out, "bound", layer.bound);
    out.end_object();
  }
  out.end_object().key("block").begin_array();
  for (std::size_t g = 0; g < memory.layers_per_page.size(); ++g) {
    const auto layers = layers_in(memory, g, 0);
    out.each(row_runs(memory, g, 0), [&](const BlockRun& run) {
      out.begin_object().string("layer", layers[static_cast<std::size_t>(run.layer)]->name);
      if (run.kind == PartKind::state) out.integer("state", run.part);
      out.integer("begin", run.begin).integer("end", run.end).end_object();
    });
  }
  out.end_array();
}

void write_worker(JsonWriter& out, const Placement& plan, const WorkerPages& pages,
                  const WorkerReport& report) {
  out.begin_object().integer("num_blocks", plan.num_blocks);
  out.integer("bytes_per_block", bytes_per_block(plan.groups, plan.order));
  out.boolean("needs_zeroing", needs_zeroing(plan));
  write_groups(out, plan);
  write_pages(out, pages, report.memory);
  const auto write_region = [&](const OffloadRegion& region) {
    out.string("first", region.first).integer("address", region.begin);
    out.integer("block_stride", region.block_stride).integer("bytes", region.bytes);
  };
  write_objects(out, "simple_offload", simple_offload_regions(plan), write_region);
  write_objects(out, "offloading", offloading_regions(plan, pages), write_region);
  out.key("capacity").begin_object();
  out.key("max_concurrency").raw(fmt::format("{}", report.max_concurrency));
  out.integer("capacity_tokens", report.capacity_tokens).end_object();
  const auto write_finding = [&](const PlanFinding& finding) {
    out.string("rule", finding.rule).string("text", finding.text);
  };
  write_objects(out, "findings", report.proof.findings, write_finding);
  write_objects(out, "with_connectors", report.proof.with_connectors, write_finding);
  out.end_object();
}

void write_plan(JsonWriter& out, const ModelPlacement& placed, const PlanReport& report) {
  const PlacementStages& stages = placed.stages;
  out.string("engine", report.engine);
  write_options(out, placed.options);
  out.key("order").begin_object();
  if (stages.order)
    out.string("chosen", name_of(stages.order->order)).string("by", stages.order->by);
  out.key("supported");
  out.each(stages.supported, [&](CacheLayout order) { out.string(name_of(order)); }).end_object();
  write_aligned(out, report.aligned);
  out.key("workers").begin_array();
  for (std::size_t w = 0; w < stages.workers.size(); ++w)
    write_worker(out, stages.workers[w], placed.pages[w], report.workers[w]);
  out.end_array();
}

}  // namespace

std::string plan_to_json(const PlanReport& report) {
  JsonWriter out;
  out.begin_object().integer("plan_report", report.details.index() == 0 ? 1 : 2);
  out.string("model", report.model);
  std::visit([&](const auto& details) { write_plan(out, details, report); }, report.details);
  return out.key("warnings").strings(report.warnings).end_object().take_line();
}

}  // namespace lockstep
