#include "sim/report/plan_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "reference/plan/grouping.h"
#include "reference/plan/layout.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

std::string thousands(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string gib(std::int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return fmt::format(
      "{:.1f} %",
      whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string kind_text(const KVCacheSpec& spec) {
  switch (spec.kind) {
    case CacheKind::mamba:
      return fmt::format("mamba {}", name_of(spec.mamba_cache_mode));
    case CacheKind::sliding_window:
      return fmt::format("window {}", spec.sliding_window);
    case CacheKind::chunked_local:
      return fmt::format("chunk {}", spec.attention_chunk_size);
    default:
      return std::string(name_of(spec.kind));
  }
}

// All of a few names; of many the first and the last.
std::string names_text(const std::vector<std::string>& names) {
  if (names.size() <= 4) return fmt::format("{}", fmt::join(names, " "));
  return fmt::format("{} .. {}", names.front(), names.back());
}

// The groups from `first` on that are alike but for their layers' names: one past the last.
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
        is_state_kind(group.spec.kind) ? "-" : thousands(report.views[w].kernel_block_sizes[g]);
    out += fmt::format(
        fmt::runtime(kRow), range_text(g, end), group.layer_names.size(), kind_text(group.spec),
        thousands(group.spec.block_size), kernel, thousands(pool_page_size_bytes(group)),
        percent(figures.used_bytes, block_bytes), percent(figures.padding_bytes, block_bytes),
        percent(figures.pack_waste_bytes + figures.absent_layer_bytes, block_bytes),
        thousands(figures.blocks_per_request),
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
                     thousands(config.num_blocks), config.tensors.size(), gib(allocated),
                     gib(report.options.memory_bytes));
  const auto& sharers = config.tensors.front().shared_by;
  out += fmt::format("  tensor 0: {} bytes, {} layer{}: {}\n",
                     thousands(config.tensors.front().size_bytes), sharers.size(),
                     sharers.size() == 1 ? "" : "s", names_text(sharers));
  append_groups(report, w, out);
  append_views(report, w, out);
  out += fmt::format(
      "\n  capacity {} tokens, {:.2f} requests of {} at once; {} bytes a token, {} fixed "
      "a request\n",
      thousands(capacity.capacity_tokens), capacity.max_concurrency,
      thousands(report.options.max_model_len),
      thousands(static_cast<std::int64_t>(capacity.bytes_per_token)),
      thousands(capacity.fixed_bytes_per_request));
  for (const Formula& formula : capacity.formulas)
    out += fmt::format("    {:<22} {}\n", formula.figure, formula.formula);
}

}  // namespace

Result<PlanReport> make_plan_report(const ModelSpec& model, const PlanOptions& options,
                                    CacheLayout layout, const LayerSpecs& extra) {
  PlanReport report;
  report.model = model.name;
  report.options = options;
  report.layout = layout;
  auto layers = layer_specs(model, options);
  if (!layers) return tl::unexpected(layers.error());
  layers->insert(layers->end(), extra.begin(), extra.end());
  auto plan = plan_memory(*layers, options);
  if (!plan) return tl::unexpected(plan.error());
  report.plan = std::move(*plan);
  for (const KVCacheConfig& worker : report.plan.workers) {
    auto pool = pool_layout(worker, options.backend, layout);
    if (!pool) return tl::unexpected(pool.error());
    auto views = pool_views(worker, options.backend, layout);
    if (!views) return tl::unexpected(views.error());
    report.pools.push_back(std::move(*pool));
    report.views.push_back(std::move(*views));
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
  out += fmt::format("  block size {}", thousands(aligned.block_size));
  if (aligned.mamba_page_size_padded)
    out +=
        fmt::format(", state pages padded to {} bytes", thousands(*aligned.mamba_page_size_padded));
  out += "\n";
  for (std::size_t w = 0; w < report.plan.workers.size(); ++w) append_worker(report, w, out);
  for (const std::string& warning : report.plan.warnings)
    out += fmt::format("\n  warning: {}\n", warning);
  return out;
}

}  // namespace lockstep
