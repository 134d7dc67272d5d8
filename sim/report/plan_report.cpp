#include "sim/report/plan_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/number_text.h"
#include "reference/plan/grouping.h"
#include "reference/plan/page_size.h"
#include "reference/profiles/releases.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBlocksProved = 3;

std::string share_text(std::int64_t part, std::int64_t whole) {
  return fmt::format("{:.1f} %", 100.0 * static_cast<double>(part) /
                                     static_cast<double>(std::max<std::int64_t>(1, whole)));
}

// What a layer keeps; `kind`: its kind's name.
std::string keeps_text(const KVCacheSpec& spec, std::string_view kind) {
  if (spec.sliding_window != 0) return fmt::format("window {}", spec.sliding_window);
  if (spec.attention_chunk_size != 0) return fmt::format("chunk {}", spec.attention_chunk_size);
  if (is_state_kind(spec.kind)) return fmt::format("mamba {}", name_of(spec.mamba_cache_mode));
  return std::string(kind);
}

// All of a few names; of many the first and the last.
std::string names_text(const std::vector<std::string>& names) {
  if (names.size() <= 4) return fmt::format("{}", fmt::join(names, " "));
  return fmt::format("{} .. {}", names.front(), names.back());
}

void append_row(std::string_view group, std::string_view layers, std::string_view keeps,
                std::string_view tokens, std::string_view kernel, std::string_view page,
                std::string_view padding, std::string_view more, std::string_view first,
                std::string& out) {
  out += fmt::format("  {:>6} {:>6}  {:<12}{:>8}{:>8}{:>13}{:>8}  {:<26}{}\n", group, layers, keeps,
                     tokens, kernel, page, padding, more, first);
}

void append_head(std::string_view more, std::string& out) {
  out += "\n";
  append_row("group", "layers", "keeps", "tokens", "kernel", "page bytes", "padding", more,
             "first layer", out);
}

// ---- One tensor per layer of a group.

// One past the last of the groups from `first` that are equal except for their layers' names.
std::size_t alike_until(const KVCacheConfig& config, std::size_t first) {
  const auto& groups = config.groups;
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

void append_details(const TensorDetails& details, std::size_t w, std::string& out) {
  const KVCacheConfig& config = details.plan.workers[w];
  const Capacity& capacity = details.capacity[w];
  const PoolViews& views = details.views[w];
  append_head(fmt::format("{:>8}{:>8}{:>9}", "used", "empty", "blocks/r"), out);
  const std::int64_t block_bytes = capacity.pool_bytes / capacity.num_blocks;
  std::string views_text;
  for (std::size_t g = 0; g < config.groups.size();) {
    const KVCacheGroupSpec& group = config.groups[g];
    const GroupCapacity& figures = capacity.groups[g];
    const std::size_t end = alike_until(config, g);
    append_row(
        range_text(g, end), fmt::format("{}", group.layer_names.size()),
        keeps_text(group.spec, name_of(group.spec.kind)), with_commas(group.spec.block_size),
        is_state_kind(group.spec.kind) ? "-" : with_commas(views.kernel_block_sizes[g]),
        with_commas(pool_page_size_bytes(group)), share_text(figures.padding_bytes, block_bytes),
        fmt::format("{:>8}{:>8}{:>9}", share_text(figures.used_bytes, block_bytes),
                    share_text(figures.pack_waste_bytes + figures.absent_layer_bytes, block_bytes),
                    with_commas(figures.blocks_per_request)),
        group.layer_names.empty() ? "none here" : group.layer_names.front(), out);
    if (!views.groups[g].empty())
      for (const TensorView& view : views.groups[g].front().tensors)
        views_text +=
            fmt::format("  {:>6}  {:<5} [{}]  strides [{}]  offset {}\n", range_text(g, end),
                        name_of(view.dtype), fmt::join(view.shape, ", "),
                        fmt::join(view.stride, ", "), view.storage_offset);
    g = end;
  }
  const KVCacheTensor& first = config.tensors.front();
  out += fmt::format("\n  tensor 0: {} bytes, {} layer{}: {}\n", with_commas(first.size_bytes),
                     first.shared_by.size(), first.shared_by.size() == 1 ? "" : "s",
                     names_text(first.shared_by));
  out += "\n  views of the first layer of each group, in elements\n" + views_text;
}

void append_capacity(const TensorDetails& details, std::size_t w, std::string& out) {
  const Capacity& capacity = details.capacity[w];
  out += fmt::format("; {} bytes per token, {} fixed per request\n",
                     with_commas(static_cast<std::int64_t>(capacity.bytes_per_token)),
                     with_commas(capacity.fixed_bytes_per_request));
  for (const Formula& formula : capacity.formulas)
    out += fmt::format("    {:<22} {}\n", formula.figure, formula.formula);
}

std::string order_text(const TensorDetails& details) {
  const PlanOptions& o = details.options;
  return fmt::format("layout {} of {}, states of dtype {}, packs of {}", name_of(details.layout),
                     name_of(o.backend), o.ssm_dtype ? name_of(*o.ssm_dtype) : "as the model",
                     o.attn_pack);
}

std::string tensors_text(const TensorDetails& details, std::size_t w) {
  return fmt::format("in {} tensors", details.plan.workers[w].tensors.size());
}

Result<WorkerReport> worker_report(const KVCacheConfig& config, const TensorDetails& details) {
  WorkerReport worker;
  if (config.groups.empty()) return worker;
  const Capacity& capacity = details.capacity.back();
  worker.num_blocks = capacity.num_blocks;
  worker.block_bytes = capacity.pool_bytes / capacity.num_blocks;
  worker.max_concurrency = capacity.max_concurrency;
  worker.capacity_tokens = capacity.capacity_tokens;
  for (const KVCacheGroupSpec& group : config.groups)
    worker.groups.push_back(
        {fmt::format("{}, {} tokens per block", name_of(group.spec.kind), group.spec.block_size),
         group.layer_names});
  for (const KVCacheTensor& tensor : config.tensors)
    worker.tensors.push_back({fmt::format("{} bytes", tensor.size_bytes), tensor.shared_by});
  const KVCacheConfig small = with_num_blocks(config, kBlocksProved);
  LS_ASSIGN_OR_RETURN(worker.memory, pool_layout(small, details.options.backend, details.layout));
  worker.proof = prove_rows(worker.memory);
  return worker;
}

Result<void> plan_tensors(const ModelSpec& model, const PlanOptions& options,
                          const std::string& layout, const LayerSpecs& extra, PlanReport& report) {
  const auto known = from_name<CacheLayout>(layout);
  if (!known || is_overlaid(*known))
    return fail("--layout: '{}' is not NHD or HND; --engine vllm-0.33.0 has six layouts", layout);
  TensorDetails details;
  details.options = options;
  details.layout = *known;
  LS_ASSIGN_OR_RETURN(auto layers, layer_specs(model, options));
  layers.insert(layers.end(), extra.begin(), extra.end());
  LS_ASSIGN_OR_RETURN(details.plan, plan_memory(layers, options));
  for (const KVCacheConfig& worker : details.plan.workers) {
    LS_ASSIGN_OR_RETURN(details.pools.emplace_back(), pool_layout(worker, options.backend, *known));
    LS_ASSIGN_OR_RETURN(details.views.emplace_back(), pool_views(worker, options.backend, *known));
    details.capacity.push_back(worker.groups.empty() ? Capacity{} : capacity_of(worker, options));
    LS_ASSIGN_OR_RETURN(report.workers.emplace_back(), worker_report(worker, details));
  }
  report.aligned = details.plan.aligned;
  report.hit_step_tokens = details.capacity.front().hit_step_tokens;
  report.warnings = details.plan.warnings;
  report.details = std::move(details);
  return {};
}

// ---- Groups that overlay one allocation.

std::int64_t kernel_size_of(const WorkerPages& pages, const std::string& layer) {
  const auto at = std::ranges::find(pages.layers, layer, &LayerPage::name);
  if (at == pages.layers.end()) return 0;
  return tokens_in(at->spec.tokens_per_state, at->page.rows);
}

void append_group(const KVCacheGroupSpec& group, std::size_t g, const WorkerPages& pages,
                  std::string& out) {
  for (const LayerSpecs& alike : by_equal_spec(layers_of({&group, 1}))) {
    const std::string& name = alike.front().name;
    const KVCacheSpec& spec = alike.front().spec;
    append_row(fmt::format("{}", g), fmt::format("{}", alike.size()),
               keeps_text(spec, planned_name_of(spec.kind)), with_commas(spec.block_size),
               is_state_kind(spec.kind) ? "-" : with_commas(kernel_size_of(pages, name)),
               with_commas(page_bytes(spec)),
               share_text(page_bytes(spec) - unpadded_page_bytes(spec), page_bytes(spec)),
               fmt::format("[{}, {}, {}]", num_heads(spec), rows_of(spec, spec.block_size),
                           content_bytes(spec)),
               name, out);
  }
}

void append_details(const ModelPlacement& placed, std::size_t w, std::string& out) {
  const Placement& plan = placed.stages.workers[w];
  append_head("[H, N, C]", out);
  for (std::size_t g = 0; g < plan.groups.size(); ++g)
    append_group(plan.groups[g], g, placed.pages[w], out);
  constexpr std::string_view kRow = "  {:>16}{:>18}{:>16}{:>8}  {}\n";
  constexpr std::size_t kShownMax = 24;
  out += "\n" + fmt::format(fmt::runtime(kRow), "offset", "layer stride", "block stride", "layers",
                            "first layer");
  for (std::size_t t = 0; t < std::min(plan.tensors.size(), kShownMax); ++t) {
    const PlacedTensor& tensor = plan.tensors[t];
    out += fmt::format(fmt::runtime(kRow), with_commas(tensor.offset),
                       with_commas(tensor.layer_stride), with_commas(tensor.block_stride),
                       tensor.layers.size(), tensor.layers.front());
  }
  if (plan.tensors.size() > kShownMax)
    out += fmt::format("  and {} more tensors\n", plan.tensors.size() - kShownMax);
  for (const KernelBlockGroup& group : placed.pages[w].kernel_block_groups)
    out += fmt::format("  {}: its own block table, kernel block j of block b is {} b + j\n",
                       group.first, group.kernel_block_stride);
}

void append_capacity(const ModelPlacement&, std::size_t, std::string& out) { out += "\n"; }

std::string_view format_of(const PlacementOptions& o) { return o.format; }

std::string order_text(const ModelPlacement& placed) {
  const ChosenOrder& order = *placed.stages.order;
  return fmt::format("layout {}, chosen by {}; the backends accept {}", name_of(order.order),
                     order.by == "default" ? "the engine" : order.by,
                     joined(placed.stages.supported, &name_of<CacheLayout>, " "));
}

std::string tensors_text(const ModelPlacement&, std::size_t) { return "in one allocation"; }

Result<WorkerReport> worker_report(const Placement& plan, const ModelPlacement& placed) {
  WorkerReport worker;
  LS_ASSIGN_OR_RETURN(const PlacementCapacity capacity, capacity_of(plan, placed.options));
  worker.num_blocks = plan.num_blocks;
  worker.block_bytes = bytes_per_block(plan.groups, plan.order);
  worker.max_concurrency = capacity.max_concurrency;
  worker.capacity_tokens = capacity.tokens;
  for (const KVCacheGroupSpec& group : plan.groups)
    worker.groups.push_back({fmt::format("{}, {} tokens per block",
                                         planned_name_of(group.spec.kind), group.spec.block_size),
                             group.layer_names});
  for (const PlacedTensor& tensor : plan.tensors)
    worker.tensors.push_back({fmt::format("from byte {}, layers every {}, blocks every {}",
                                          tensor.offset, tensor.layer_stride, tensor.block_stride),
                              tensor.layers});
  LS_ASSIGN_OR_RETURN(const Placement small,
                      place_blocks(plan.groups, plan.order, kBlocksProved, placed.options));
  LS_ASSIGN_OR_RETURN(const WorkerPages pages,
                      worker_pages(small, placed.stages.layers, placed.options));
  worker.memory = memory_plan(small, pages);
  worker.proof = prove_pages(small, pages);
  return worker;
}

// Prefix hits are multiples of it; 0: nothing is hit (Capacity::hit_step_tokens).
std::int64_t hit_step_tokens(const ModelPlacement& placed) {
  const Placement& plan = placed.stages.workers.front();
  const auto keeps_no_state = [](const KVCacheGroupSpec& group) {
    return is_state_kind(group.spec.kind) && group.spec.mamba_cache_mode == MambaCacheMode::none;
  };
  if (std::ranges::any_of(plan.groups, keeps_no_state)) return 0;
  const auto sizes = hash_sizes(plan, placed.options);
  return sizes ? sizes->cache_hit_alignment_tokens() : 0;
}

Result<void> plan_overlaid(const ModelSpec& model, const PlanOptions& options,
                           const std::string& layout, const LayerSpecs& extra, PlanReport& report) {
  auto placed = place_served_model(model, options, report.engine, layout, extra);
  if (!placed) return fail("{}: {}", model.name, placed.error().message);
  for (const Placement& worker : placed->stages.workers) {
    if (worker.groups.empty()) return fail("{} keeps no cache", model.name);
    LS_ASSIGN_OR_RETURN(report.workers.emplace_back(), worker_report(worker, *placed));
  }
  const BlockAlignment& alignment = *placed->stages.alignment;
  report.aligned = {alignment.block_size, alignment.mamba_block_size,
                    alignment.mamba_page_size_padded};
  report.hit_step_tokens = hit_step_tokens(*placed);
  report.details = std::move(*placed);
  return {};
}

// ---- Both.

template <class Options>
std::string options_text(const Options& o) {
  return fmt::format("tp {} pp {} dcp {} pcp {}, K/V {}, states in mode {}, {} drafts{}", o.tp,
                     o.pp, o.dcp, o.pcp, format_of(o), name_of(o.mamba_cache_mode), o.num_spec,
                     o.async_scheduling ? ", async" : "");
}

void append_proof(const PlanReport& report, const PlanProof& proof, std::string& out) {
  if (proof.holds())
    out += fmt::format(
        "  proved on three blocks: the plan is consistent (no byte has two owners{}); not proved: "
        "that the engine makes this plan\n",
        std::holds_alternative<ModelPlacement>(report.details) ? ", zeroing and copies are exact"
                                                               : "");
  for (const PlanFinding& finding : proof.findings)
    out += fmt::format("  {}: {}\n", finding.rule, finding.text);
  for (const PlanFinding& finding : proof.with_connectors)
    out += fmt::format("  {} (with that connector): {}\n", finding.rule, finding.text);
}

void append_worker(const PlanReport& report, std::size_t w, std::string& out) {
  const WorkerReport& worker = report.workers[w];
  if (report.workers.size() > 1) out += fmt::format("\nstage {} of {}\n", w, report.workers.size());
  if (worker.num_blocks == 0) {
    out += "  keeps no cache\n";
    return;
  }
  const auto visit = [&](const auto& of) { return std::visit(of, report.details); };
  out +=
      fmt::format("  {} blocks of {} bytes {}, {} of {}; the null block is one of them\n",
                  with_commas(worker.num_blocks), with_commas(worker.block_bytes),
                  visit([&](const auto& details) { return tensors_text(details, w); }),
                  gib_text(worker.num_blocks * worker.block_bytes), gib_text(report.memory_bytes));
  visit([&](const auto& details) { append_details(details, w, out); });
  out += fmt::format("\n  capacity {} tokens, {:.2f} requests of {} at once",
                     with_commas(worker.capacity_tokens), worker.max_concurrency,
                     with_commas(report.max_model_len));
  visit([&](const auto& details) { append_capacity(details, w, out); });
  append_proof(report, worker.proof, out);
}

}  // namespace

Result<PlanReport> make_plan_report(const ModelSpec& model, const PlanOptions& options,
                                    const std::string& engine, const std::string& layout,
                                    const LayerSpecs& extra) {
  PlanReport report;
  report.model = model.name;
  report.engine = engine;
  report.max_model_len = options.max_model_len;
  report.memory_bytes = options.memory_bytes;
  const bool is_placed = overlays_groups(engine);
  if (model.layers.empty() && extra.empty()) {
    PlanOptions& given = is_placed ? report.details.emplace<ModelPlacement>().options
                                   : report.details.emplace<TensorDetails>().options;
    given = options;
    return report;
  }
  LS_RETURN_IF_ERROR(is_placed ? plan_overlaid(model, options, layout, extra, report)
                               : plan_tensors(model, options, layout, extra, report));
  for (const LayerKind& kind : model.kinds) {
    if (is_served_uncached(kind.spec)) report.hit_step_tokens = 0;
    if (kind.spec.bounded_replay)
      report.replayed_tokens = std::max(report.replayed_tokens, kind.spec.sliding_window);
  }
  return report;
}

std::string plan_table(const PlanReport& report) {
  if (report.workers.empty()) return fmt::format("{}: no layer keeps a cache\n", report.model);
  std::string out = fmt::format(
      "{}: {}, {}\n  block size {}", report.model, report.engine,
      std::visit([](const auto& details) { return options_text(details.options); }, report.details),
      with_commas(report.aligned.block_size));
  if (report.aligned.mamba_page_size_padded)
    out += fmt::format(", state pages padded to {} bytes",
                       with_commas(*report.aligned.mamba_page_size_padded));
  out += fmt::format("\n  {}\n", std::visit([](const auto& details) { return order_text(details); },
                                            report.details));
  for (std::size_t w = 0; w < report.workers.size(); ++w) append_worker(report, w, out);
  for (const std::string& warning : report.warnings) out += fmt::format("  warning: {}\n", warning);
  return out;
}

}  // namespace lockstep
