#include "sim/report/memory_diff.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/number_text.h"
#include "reference/memory/model_placement.h"
#include "reference/plan/capacity.h"
#include "reference/plan/planner.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

// Plans with tensors per layer, as releases before the overlaid plan do. Pipeline stages share the
// smallest number of blocks; a stage without caches is skipped.
Result<void> plan_by_tensors(const LayerSpecs& layers, const PlanOptions& options,
                             ReleaseMemory& memory) {
  LS_ASSIGN_OR_RETURN(const TensorPlan plan, plan_memory(layers, options));
  for (const KVCacheConfig& worker : plan.workers) {
    if (worker.groups.empty()) continue;
    const Capacity capacity = capacity_of(worker, options);
    const std::int64_t block_bytes = capacity.pool_bytes / capacity.num_blocks;
    memory.num_blocks = capacity.num_blocks;
    memory.bytes_per_block = std::max(memory.bytes_per_block, block_bytes);
    if (memory.groups != 0 && capacity.capacity_tokens > memory.capacity_tokens) continue;
    memory.capacity_tokens = capacity.capacity_tokens;
    memory.at_once = capacity.max_concurrency;
    memory.groups = std::ssize(worker.groups);
  }
  memory.block_size = plan.aligned.block_size;
  return {};
}

// Plans one overlaid allocation per worker (0.33.0). The layout is chosen once for all stages.
Result<void> plan_overlaid(const LayerSpecs& layers, DType dtype, const PlanOptions& options,
                           ReleaseMemory& memory) {
  LS_ASSIGN_OR_RETURN(const ModelPlacement placed, place_model(layers, dtype, options, ""));
  const Placement& first = placed.stages.workers.front();
  if (first.groups.empty()) return fail("keeps no cache");
  memory.order = name_of(first.order);
  memory.block_size = cache_config_block(first);
  memory.groups = std::ssize(first.groups);
  memory.num_blocks = first.num_blocks;
  for (const Placement& worker : placed.stages.workers) {
    LS_ASSIGN_OR_RETURN(const auto capacity, capacity_of(worker, placed.options));
    memory.bytes_per_block =
        std::max(memory.bytes_per_block, bytes_per_block(worker.groups, worker.order));
    if (memory.capacity_tokens != 0 && capacity.tokens > memory.capacity_tokens) continue;
    memory.capacity_tokens = capacity.tokens;
    memory.at_once = capacity.max_concurrency;
  }
  return {};
}

// "+12.5 %", or "=" without a change.
std::string percent_change(std::int64_t before, std::int64_t now) {
  if (before == now) return "=";
  return fmt::format("{:+.1f} %", 100.0 * static_cast<double>(now - before) /
                                      static_cast<double>(std::max<std::int64_t>(1, before)));
}

}  // namespace

// A refused plan is a row of the table, not an error: other releases may serve the model.
Result<std::vector<ReleaseMemory>> memory_of_releases(const ModelSpec& model,
                                                      const PlanOptions& given, bool says_mode,
                                                      EngineConfig engine,
                                                      std::span<const std::string> engines) {
  std::vector<ReleaseMemory> releases;
  for (const std::string& name : engines) {
    const EngineProfile* profile = find_engine_profile(name);
    if (profile == nullptr) return fail("{}: no engine has this name", name);
    ReleaseMemory& memory = releases.emplace_back();
    memory.engine = name;
    engine.engine = name;
    PlanOptions options = given;
    options.async_scheduling = plans_async(engine);
    // The default mode differs between releases, so it is chosen for each.
    if (!says_mode) options.mamba_cache_mode = served_cache_mode(engine, model);
    memory.states = options.mamba_cache_mode;
    const Release& release = *profile->release;
    const bool overlays = options.overlays_groups = overlays_groups(release);
    LS_ASSIGN_OR_RETURN(LayerSpecs layers, layer_specs(model, options));
    LS_RETURN_IF_ERROR(take_served_checkpoints(name, model, options, layers));
    memory.by_older_planner = !overlays && release.page_format != PageFormat::keys_first;
    const auto planned = overlays ? plan_overlaid(layers, model.dtype, options, memory)
                                  : plan_by_tensors(layers, options, memory);
    if (!planned) memory.refused = planned.error().message;
  }
  return releases;
}

// The change of a release is relative to the previous one that starts.
std::string memory_table(const ModelSpec& model, const PlanOptions& options,
                         std::span<const ReleaseMemory> releases) {
  std::string out =
      fmt::format("Memory of {}, {:.1f} GiB per worker, requests of up to {} tokens, tp {}\n",
                  model.name, static_cast<double>(options.memory_bytes) / (1 << 30),
                  with_commas(options.max_model_len), options.tp);
  constexpr std::string_view kRow = "  {:<14}{:>7}{:>8}{:>8}{:>8}{:>10}{:>14}{:>14}{:>9}{:>10}\n";
  out += fmt::format(fmt::runtime(kRow), "", "order", "states", "groups", "tokens", "blocks",
                     "bytes/block", "capacity", "at once", "change");
  const ReleaseMemory* before = nullptr;
  bool has_other_planner = false;
  for (const ReleaseMemory& one : releases) {
    const std::string name = one.engine + (one.by_older_planner ? "*" : "");
    has_other_planner |= one.by_older_planner;
    if (!one.refused.empty()) {
      out += fmt::format("  {:<14}  does not start: {}\n", name, one.refused);
      continue;
    }
    out += fmt::format(
        fmt::runtime(kRow), name, one.order.empty() ? "-" : one.order, name_of(one.states),
        one.groups, with_commas(one.block_size), with_commas(one.num_blocks),
        with_commas(one.bytes_per_block), with_commas(one.capacity_tokens),
        fmt::format("{:.2f}", one.at_once),
        before == nullptr ? "" : percent_change(before->capacity_tokens, one.capacity_tokens));
    before = &one;
  }
  if (has_other_planner)
    out += "  * planned as earlier releases do; it lays out the rows of a page differently\n";
  return out;
}

}  // namespace lockstep
