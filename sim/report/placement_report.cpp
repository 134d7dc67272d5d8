#include "sim/report/placement_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/number_text.h"

namespace lockstep {
namespace {

std::string share_text(std::int64_t part, std::int64_t whole) {
  return fmt::format("{:.1f} %", 100.0 * static_cast<double>(part) /
                                     static_cast<double>(std::max<std::int64_t>(1, whole)));
}

std::string gib_text(std::int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

std::string kind_of_rows(const KVCacheSpec& spec) {
  if (spec.sliding_window != 0) return fmt::format("window {}", spec.sliding_window);
  if (spec.attention_chunk_size != 0) return fmt::format("chunk {}", spec.attention_chunk_size);
  if (is_state_kind(spec.kind)) return fmt::format("mamba {}", name_of(spec.mamba_cache_mode));
  return std::string(planned_name_of(spec.kind));
}

std::string orders_text(const std::vector<CacheLayout>& orders) {
  std::vector<std::string_view> names;
  for (const CacheLayout order : orders) names.push_back(name_of(order));
  return fmt::format("{}", fmt::join(names, " "));
}

std::int64_t kernel_size_of(const WorkerPages& pages, const std::string& layer) {
  const auto at = std::ranges::find(pages.layers, layer, &LayerPage::name);
  if (at == pages.layers.end()) return 0;
  return at->page.rows * at->spec.compress_ratio;
}

void append_placed_groups(const Placement& plan, const WorkerPages& pages, std::string& out) {
  constexpr std::string_view kRow = "  {:>6} {:>6}  {:<12}{:>8}{:>8}{:>13}{:>8}  {:<20}{}\n";
  out += "\n" + fmt::format(fmt::runtime(kRow), "group", "layers", "keeps", "tokens", "kernel",
                            "page bytes", "padding", "[H, N, C]", "first layer");
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const PlacedGroup& group = plan.groups[g];
    std::vector<const KVCacheSpec*> told;
    for (const std::string& name : group.layer_names) {
      const KVCacheSpec& spec = group.layer_spec(name);
      if (std::ranges::any_of(told, [&](const KVCacheSpec* one) { return *one == spec; })) continue;
      told.push_back(&spec);
      const auto layers = std::ranges::count_if(group.layer_names, [&](const std::string& other) {
        return group.layer_spec(other) == spec;
      });
      out += fmt::format(fmt::runtime(kRow), g, layers, kind_of_rows(spec),
                         with_commas(spec.block_size),
                         is_state_kind(spec.kind) ? "-" : with_commas(kernel_size_of(pages, name)),
                         with_commas(page_bytes(spec)),
                         share_text(page_bytes(spec) - unpadded_page_bytes(spec), page_bytes(spec)),
                         fmt::format("[{}, {}, {}]", num_heads(spec),
                                     rows_of(spec, spec.block_size), content_bytes(spec)),
                         name);
    }
  }
}

void append_placed_tensors(const Placement& plan, std::string& out) {
  constexpr std::string_view kRow = "  {:>16}{:>18}{:>16}{:>8}  {}\n";
  out += "\n" + fmt::format(fmt::runtime(kRow), "offset", "layer stride", "block stride", "layers",
                            "first layer");
  const auto& tensors = plan.tensors;
  constexpr std::size_t kToldMax = 24;
  for (std::size_t t = 0; t < std::min(tensors.size(), kToldMax); ++t)
    out += fmt::format(fmt::runtime(kRow), with_commas(tensors[t].offset),
                       with_commas(tensors[t].layer_stride), with_commas(tensors[t].block_stride),
                       tensors[t].layers.size(), tensors[t].layers.front());
  if (tensors.size() > kToldMax)
    out += fmt::format("  and {} tensors more\n", tensors.size() - kToldMax);
}

// Of the same groups in a pool of three.
Result<PlacementProof> proof_of(const ModelPlacement& placed, const Placement& worker) {
  constexpr std::int64_t kBlocks = 3;
  LS_ASSIGN_OR_RETURN(const Placement small,
                      place_blocks(worker.groups, worker.order, kBlocks, placed.options));
  LS_ASSIGN_OR_RETURN(const WorkerPages pages,
                      worker_pages(small, placed.stages.layers, placed.options));
  return prove_placement(small, pages);
}

void append_stage(const PlacementReport& report, std::size_t w, std::string& out) {
  const Placement& plan = report.placed.stages.workers[w];
  const PlacementOptions& options = report.placed.options;
  if (options.pp > 1) out += fmt::format("\nstage {} of {}\n", w, options.pp);
  const std::int64_t block_bytes = bytes_per_block(plan.groups, plan.order);
  out += fmt::format(
      "  {} blocks of {} bytes in one allocation, {} of {}; the null block is one of them\n",
      with_commas(plan.num_blocks), with_commas(block_bytes),
      gib_text(plan.num_blocks * block_bytes), gib_text(options.memory_bytes));
  append_placed_groups(plan, report.placed.pages[w], out);
  append_placed_tensors(plan, out);
  for (const KernelBlockGroup& group : report.placed.pages[w].kernel_block_groups)
    out += fmt::format("  {}: a table of its own, kernel block j of block b is {} b + j\n",
                       group.first, group.kernel_block_stride);
  out += fmt::format("\n  capacity {} tokens, {:.2f} requests of {} at once\n",
                     with_commas(report.capacity[w].tokens), report.capacity[w].max_concurrency,
                     with_commas(options.max_model_len));
  if (report.proofs[w].holds())
    out +=
        "  proved on three blocks: the plan is consistent (no byte has two owners, zeroing and "
        "copies are exact); not proved: that the engine makes this plan\n";
  for (const PlacementFinding& finding : report.proofs[w].findings)
    out += fmt::format("  {}: {}\n", finding.rule, finding.text);
  for (const PlacementFinding& finding : report.proofs[w].with_connectors)
    out += fmt::format("  {} (with that connector): {}\n", finding.rule, finding.text);
}

}  // namespace

Result<PlacementReport> make_placement_report(const ModelSpec& model, const PlanOptions& options,
                                              const std::string& engine, const std::string& order,
                                              const LayerSpecs& extra) {
  PlacementReport report;
  report.model = model.name;
  report.engine = engine;
  auto placed = place_served_model(model, options, engine, order, extra);
  if (!placed) return fail(fmt::format("{}: {}", model.name, placed.error().message));
  report.placed = std::move(*placed);
  for (const Placement& worker : report.placed.stages.workers) {
    if (worker.groups.empty()) return fail(fmt::format("{} keeps no cache", model.name));
    LS_ASSIGN_OR_RETURN(report.capacity.emplace_back(), capacity_of(worker, report.placed.options));
    LS_ASSIGN_OR_RETURN(report.proofs.emplace_back(), proof_of(report.placed, worker));
  }
  return report;
}

std::string placement_table(const PlacementReport& report) {
  const PlacementStages& stages = report.placed.stages;
  const PlacementOptions& options = report.placed.options;
  const BlockAlignment& alignment = *stages.alignment;
  std::string out =
      fmt::format("{}: {}, tp {} pp {} dcp {} pcp {}, K/V {}, states in mode {}, {} drafts\n",
                  report.model, report.engine, options.tp, options.pp, options.dcp, options.pcp,
                  options.kv_dtype, name_of(options.mamba_cache_mode), options.num_spec);
  out += fmt::format("  block size {}", with_commas(alignment.block_size));
  if (alignment.mamba_page_size_padded)
    out += fmt::format(", state pages padded to {} bytes",
                       with_commas(*alignment.mamba_page_size_padded));
  out += fmt::format("\n  order {}, chosen by {}; the backends take {}\n",
                     name_of(stages.order->order),
                     stages.order->by == "default" ? "the engine" : stages.order->by,
                     orders_text(stages.supported));
  for (std::size_t w = 0; w < stages.workers.size(); ++w) append_stage(report, w, out);
  for (const std::string& warning : report.warnings) out += fmt::format("  warning: {}\n", warning);
  return out;
}

std::int64_t hit_step_tokens(const ModelPlacement& placed) {
  const Placement& plan = placed.stages.workers.front();
  const auto keeps_no_state = [](const PlacedGroup& group) {
    return is_state_kind(group.spec.kind) && group.spec.mamba_cache_mode == MambaCacheMode::none;
  };
  if (std::ranges::any_of(plan.groups, keeps_no_state)) return 0;
  const auto sizes = hash_sizes(plan, placed.options);
  return sizes ? sizes->hit_alignment : 0;
}

}  // namespace lockstep
