#include "sim/report/placement_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/number_text.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

std::string backend_for(const NamedSpec& layer, AttentionBackend chosen) {
  const KVCacheSpec& spec = layer.spec;
  const bool chose_rows =
      chosen == AttentionBackend::triton_mla || chosen == AttentionBackend::flashmla;
  if (spec.kind == CacheKind::mamba) return "mamba2";  // backends of states ask for the same
  if (spec.kind == CacheKind::hidden_state) return "cache_only";
  if (has_single_rows(spec)) {
    if (layer.name.ends_with("indexer")) return "indexer_v32";
    if (spec.cache_dtype_str == "fp8_ds_mla") return "flashmla_sparse";
    return std::string(name_of(chose_rows ? chosen : AttentionBackend::triton_mla));
  }
  return std::string(name_of(chose_rows ? AttentionBackend::triton_attn : chosen));
}

Result<PlacementLayer> layer_of(const NamedSpec& named, AttentionBackend chosen) {
  const KVCacheSpec& given = named.spec;
  PlacementLayer layer{.name = named.name, .spec = CacheSpec{}, .backend = {}};
  CacheSpec& spec = *layer.spec;
  switch (given.kind) {
    case CacheKind::full_attention:
      spec.type = SpecType::full;
      break;
    case CacheKind::mla:
      spec.type = SpecType::mla;
      break;
    case CacheKind::sliding_window:
      spec.type = SpecType::sliding_window;
      break;
    case CacheKind::chunked_local:
      spec.type = SpecType::chunked_local;
      break;
    case CacheKind::mamba:
      spec.type = SpecType::mamba;
      break;
    case CacheKind::hidden_state:
      spec.type = SpecType::hidden_state;
      break;
    default:
      return fail(fmt::format("{}: layers of kind {} are planned from recordings alone", named.name,
                              name_of(given.kind)));
  }
  if (given.model_version == "deepseek_v4" || given.compress_ratio > 1 ||
      (given.kind == CacheKind::sliding_window && given.mla_rows))
    return fail(fmt::format("{}: compressed rows are planned from recordings alone", named.name));
  layer.backend = backend_for(named, chosen);
  spec.dtype = given.dtype;
  spec.states = given.states;
  spec.block_size = 1;
  spec.dcp_sharded = true;
  if (given.kind == CacheKind::mamba) {
    spec.dcp_sharded = false;
    return layer;
  }
  spec.num_kv_heads = given.num_kv_heads;
  spec.head_size = given.head_size;
  if (!has_single_rows(given)) spec.head_size_v = head_size_v(given);
  if (given.kind == CacheKind::hidden_state)
    spec.state_content_bytes = given.head_size * itemsize_bytes(given.dtype);
  if (given.sliding_window != 0) spec.sliding_window = given.sliding_window;
  if (given.attention_chunk_size != 0) spec.attention_chunk_size = given.attention_chunk_size;
  return layer;
}

std::string format_name(const PlanOptions& options, const LayerSpecs& layers) {
  const auto in_bytes = std::ranges::find_if(
      layers, [](const NamedSpec& layer) { return !layer.spec.cache_dtype_str.empty(); });
  if (in_bytes != layers.end()) return in_bytes->spec.cache_dtype_str;
  switch (options.kv_quant_mode) {
    case KVQuantMode::int8_per_token_head:
      return "int8_per_token_head";
    case KVQuantMode::fp8_per_token_head:
      return "fp8_per_token_head";
    case KVQuantMode::nvfp4:
      return "nvfp4";
    default:
      break;
  }
  switch (options.kv_dtype) {
    case DType::fp8_e4m3:
      return "fp8";
    case DType::fp8_e5m2:
      return "fp8_e5m2";
    case DType::fp16:
      return "float16";
    default:
      return "auto";
  }
}

PlacementOptions placement_options(const PlanOptions& given, const LayerSpecs& layers,
                                   DType model_dtype, const std::string& order) {
  PlacementOptions options;
  options.tp = given.tp;
  options.dcp = given.dcp;
  options.pcp = given.pcp;
  options.kv_dtype = format_name(given, layers);
  options.model_dtype = model_dtype;
  options.device = DeviceFamily::sm90;
  options.memory_bytes = given.memory_bytes;
  options.max_model_len = given.max_model_len;
  options.max_num_batched_tokens = given.max_num_batched_tokens;
  options.block_size = given.block_size;
  options.num_gpu_blocks_override = given.num_gpu_blocks_override;
  options.disable_hybrid = given.disable_hybrid_kv_cache_manager;
  options.mamba_cache_mode = given.mamba_cache_mode;
  options.prefix_caching = given.mamba_cache_mode != MambaCacheMode::none;
  options.num_spec = given.num_spec;
  if (given.num_spec > 0) options.spec_method = "mtp";
  if (!order.empty() && order != "NHD") options.order = order;
  return options;
}

std::string share_text(std::int64_t part, std::int64_t whole) {
  return fmt::format("{:.1f} %", 100.0 * static_cast<double>(part) /
                                     static_cast<double>(std::max<std::int64_t>(1, whole)));
}

std::string gib_text(std::int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

std::string kind_of_rows(const CacheSpec& spec) {
  if (spec.sliding_window) return fmt::format("window {}", *spec.sliding_window);
  if (spec.attention_chunk_size) return fmt::format("chunk {}", *spec.attention_chunk_size);
  if (spec.type == SpecType::mamba) return fmt::format("mamba {}", name_of(spec.mamba_cache_mode));
  return std::string(name_of(spec.type));
}

std::string orders_text(const std::vector<CacheOrder>& orders) {
  std::vector<std::string_view> names;
  for (const CacheOrder order : orders) names.push_back(name_of(order));
  return fmt::format("{}", fmt::join(names, " "));
}

std::int64_t kernel_size_of(const PlacementReport& report, const std::string& layer) {
  const auto at = std::ranges::find(report.pages.layers, layer, &LayerPage::name);
  if (at == report.pages.layers.end()) return 0;
  return at->page.rows * at->spec.tokens_per_state;
}

void append_placed_groups(const PlacementReport& report, std::string& out) {
  constexpr std::string_view kRow = "  {:>6} {:>6}  {:<12}{:>8}{:>8}{:>13}{:>8}  {:<20}{}\n";
  out += "\n" + fmt::format(fmt::runtime(kRow), "group", "layers", "keeps", "tokens", "kernel",
                            "page bytes", "padding", "[H, N, C]", "first layer");
  const Placement& plan = report.stages.workers.front();
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const PlacedGroup& group = plan.groups[g];
    std::vector<const CacheSpec*> told;
    for (const std::string& name : group.layer_names) {
      const CacheSpec& spec = group.layer_spec(name);
      if (std::ranges::any_of(told, [&](const CacheSpec* one) { return *one == spec; })) continue;
      told.push_back(&spec);
      const auto layers = std::ranges::count_if(group.layer_names, [&](const std::string& other) {
        return group.layer_spec(other) == spec;
      });
      out += fmt::format(
          fmt::runtime(kRow), g, layers, kind_of_rows(spec), with_commas(spec.block_size),
          spec.type == SpecType::mamba ? "-" : with_commas(kernel_size_of(report, name)),
          with_commas(page_bytes(spec)),
          share_text(page_bytes(spec) - unpadded_page_bytes(spec), page_bytes(spec)),
          fmt::format("[{}, {}, {}]", num_heads(spec), rows_of(spec, spec.block_size),
                      content_bytes(spec)),
          name);
    }
  }
}

void append_placed_tensors(const PlacementReport& report, std::string& out) {
  constexpr std::string_view kRow = "  {:>16}{:>18}{:>16}{:>8}  {}\n";
  out += "\n" + fmt::format(fmt::runtime(kRow), "offset", "layer stride", "block stride", "layers",
                            "first layer");
  const auto& tensors = report.stages.workers.front().tensors;
  constexpr std::size_t kToldMax = 24;
  for (std::size_t t = 0; t < std::min(tensors.size(), kToldMax); ++t)
    out += fmt::format(fmt::runtime(kRow), with_commas(tensors[t].offset),
                       with_commas(tensors[t].layer_stride), with_commas(tensors[t].block_stride),
                       tensors[t].layers.size(), tensors[t].layers.front());
  if (tensors.size() > kToldMax)
    out += fmt::format("  and {} tensors more\n", tensors.size() - kToldMax);
}

Result<PlacementProof> proof_of(const PlacementReport& report) {
  constexpr std::int64_t kBlocks = 3;
  LS_ASSIGN_OR_RETURN(const Placement small,
                      place_blocks(report.stages.workers.front().groups, report.stages.order->order,
                                   kBlocks, report.options));
  LS_ASSIGN_OR_RETURN(const WorkerPages pages,
                      worker_pages(small, report.stages.layers, report.options));
  return prove_placement(small, pages);
}

}  // namespace

Result<PlacementReport> make_placement_report(const ModelSpec& model, const PlanOptions& options,
                                              const std::string& engine, const std::string& order,
                                              const LayerSpecs& extra) {
  if (options.pp > 1)
    return fail(fmt::format("--pp {}: the stages of {} are planned from recordings alone",
                            options.pp, engine));
  if (options.attn_pack > 1)
    return fail(fmt::format("--attn-pack {}: {} has no such packing", options.attn_pack, engine));
  PlacementReport report;
  report.model = model.name;
  report.engine = engine;
  LS_ASSIGN_OR_RETURN(LayerSpecs given, layer_specs(model, options));
  given.insert(given.end(), extra.begin(), extra.end());
  report.options = placement_options(options, given, model.dtype, order);
  std::vector<PlacementLayer> layers;
  WorkerShare worker{.layer_names = {}, .memory_bytes = options.memory_bytes};
  for (const NamedSpec& named : given) {
    LS_ASSIGN_OR_RETURN(auto layer, layer_of(named, options.backend));
    layers.push_back(std::move(layer));
    worker.layer_names.push_back(named.name);
  }
  report.stages = plan_stages(layers, false, {worker}, report.options);
  if (report.stages.workers.empty())
    return fail(fmt::format("{}: refused by the engine core ({}): {}", model.name,
                            report.stages.refused_stage, report.stages.refused.message));
  auto pages = worker_pages(report.stages.workers.front(), report.stages.layers, report.options);
  if (!pages)
    return fail(fmt::format("{}: the engine core takes this plan and the worker dies of it: {}",
                            model.name, pages.error().message));
  report.pages = std::move(*pages);
  LS_ASSIGN_OR_RETURN(report.capacity, capacity_of(report.stages.workers.front(), report.options));
  LS_ASSIGN_OR_RETURN(report.proof, proof_of(report));
  return report;
}

std::string placement_table(const PlacementReport& report) {
  const Placement& plan = report.stages.workers.front();
  const BlockAlignment& alignment = *report.stages.alignment;
  std::string out = fmt::format(
      "{}: {}, tp {} dcp {} pcp {}, K/V {}, states in mode {}, {} drafts\n", report.model,
      report.engine, report.options.tp, report.options.dcp, report.options.pcp,
      report.options.kv_dtype, name_of(report.options.mamba_cache_mode), report.options.num_spec);
  out += fmt::format("  block size {}", with_commas(alignment.block_size));
  if (alignment.mamba_page_size_padded)
    out += fmt::format(", state pages padded to {} bytes",
                       with_commas(*alignment.mamba_page_size_padded));
  out += fmt::format("\n  order {}, chosen by {}; the backends take {}\n",
                     name_of(report.stages.order->order),
                     report.stages.order->by == "default" ? "the engine" : report.stages.order->by,
                     orders_text(report.stages.supported));
  const std::int64_t block_bytes = bytes_per_block(plan.groups, plan.order);
  out += fmt::format(
      "  {} blocks of {} bytes in one allocation, {} of {}; the null block is one of them\n",
      with_commas(plan.num_blocks), with_commas(block_bytes),
      gib_text(plan.num_blocks * block_bytes), gib_text(report.options.memory_bytes));
  append_placed_groups(report, out);
  append_placed_tensors(report, out);
  out += fmt::format("\n  capacity {} tokens, {:.2f} requests of {} at once\n",
                     with_commas(report.capacity.tokens), report.capacity.max_concurrency,
                     with_commas(report.options.max_model_len));
  if (report.proof.holds())
    out += "  proved on three blocks: no byte has two owners, zeroing and copies are exact\n";
  for (const PlacementFinding& finding : report.proof.findings)
    out += fmt::format("  {}: {}\n", finding.rule, finding.text);
  return out;
}

namespace {

// What a group keeps in the bytes of one block, those of all regions laid end to end: the number of
// the layer that most bytes of each column belong to, or -1.
std::vector<int> columns_of(const PlacementReport& report, const PlacedGroup& group,
                            std::size_t width) {
  const Placement& plan = report.stages.workers.front();
  const auto block_bytes = static_cast<double>(bytes_per_block(plan.groups, plan.order));
  std::vector<int> columns(width, -1);
  std::int64_t begin = 0;
  int number = 0;
  std::vector<const CacheSpec*> told;
  for (const std::string& first : group.layer_names) {
    const CacheSpec& spec = group.layer_spec(first);
    if (std::ranges::any_of(told, [&](const CacheSpec* one) { return *one == spec; })) continue;
    told.push_back(&spec);
    for (const std::string& name : group.layer_names) {
      if (!(group.layer_spec(name) == spec)) continue;
      const std::int64_t end = begin + unpadded_page_bytes(spec);
      for (std::size_t i = 0; i < width; ++i) {
        const double at = (static_cast<double>(i) + 0.5) / static_cast<double>(width) * block_bytes;
        if (at >= static_cast<double>(begin) && at < static_cast<double>(end)) columns[i] = number;
      }
      begin += page_bytes(spec);
      ++number;
    }
  }
  return columns;
}

}  // namespace

std::string placement_map(const PlacementReport& report) {
  constexpr std::size_t kWidth = 96;
  const Placement& plan = report.stages.workers.front();
  std::string out = fmt::format(
      "A block of {} bytes, {}; a letter is a layer, a dot is padding or nobody's\n",
      with_commas(bytes_per_block(plan.groups, plan.order)),
      is_block_outermost(plan.order) ? "in one piece" : "a page in the region of each layer");
  std::map<std::string, std::vector<std::size_t>> groups_of_bar;
  std::vector<std::string> bars;
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    std::string bar;
    for (const int layer : columns_of(report, plan.groups[g], kWidth))
      bar += layer < 0 ? '.' : static_cast<char>('a' + layer % 26);
    if (!groups_of_bar.contains(bar)) bars.push_back(bar);
    groups_of_bar[bar].push_back(g);
  }
  for (const std::string& bar : bars)
    out += fmt::format("  |{}|  group {}\n", bar, fmt::join(groups_of_bar[bar], ", "));
  return out;
}

}  // namespace lockstep
