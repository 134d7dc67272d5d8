#include "sim/conform/conform_layouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "reference/plan/capacity.h"
#include "reference/plan/layout.h"
#include "reference/plan/page_size.h"
#include "reference/plan/planner.h"
#include "sim/conform/placement_record.h"

namespace lockstep {
namespace {

std::string text_of(const std::optional<std::int64_t>& value) {
  return value ? fmt::format("{}", *value) : "null";
}

std::string text_of(const TensorView& view) {
  return fmt::format("{} [{}] strides [{}] offset {}", name_of(view.dtype),
                     fmt::join(view.shape, ", "), fmt::join(view.stride, ", "),
                     view.storage_offset);
}

std::string text_of(const KVCacheSpec& spec) {
  std::string states;
  for (const StateTensorSpec& state : spec.states)
    states += fmt::format(" {}[{}]", name_of(state.dtype), fmt::join(state.dims, ","));
  return fmt::format(
      "{} block_size {} heads {}x{}/{} {} window {} chunk {}{} padded {} mode {} spec {}",
      name_of(spec.kind), spec.block_size, spec.num_kv_heads, spec.head_size, head_size_v(spec),
      name_of(spec.dtype), spec.sliding_window, spec.attention_chunk_size, states,
      text_of(spec.page_size_padded), name_of(spec.mamba_cache_mode), spec.num_speculative_blocks);
}

// Compares one plan; keeps the first difference.
class Comparison {
 public:
  Comparison(const LayoutRecording& recording, const ViewSource& backend)
      : recording_(recording), backend_(backend) {}

  std::optional<ConformMismatch> run() {
    const auto plan = plan_memory(unaligned_layers(recording_), recording_.options);
    if (!plan) {
      if (recording_.refused.empty()) differ("refused", "planned", plan.error().message);
      return mismatch_;
    }
    compare_aligned(plan->aligned);
    if (!recording_.refused.empty()) {
      differ("refused", recording_.refused, "planned");
      return mismatch_;
    }
    const KVCacheConfig& config = plan->workers.front();
    compare("num_blocks", recording_.num_blocks, config.num_blocks);
    compare_groups(config);
    compare_tensors(config);
    if (mismatch_) return mismatch_;
    const Capacity capacity = capacity_of(config, recording_.options);
    if (capacity.max_concurrency != recording_.max_concurrency)
      differ("max_concurrency", fmt::format("{}", recording_.max_concurrency),
             fmt::format("{}", capacity.max_concurrency));
    compare("capacity_tokens", recording_.capacity_tokens, capacity.capacity_tokens);
    for (const RecordedViews& views : recording_.views) compare_pool(config, views);
    return mismatch_;
  }

  std::int64_t views_compared() const { return views_compared_; }

 private:
  void differ(std::string what, std::string recorded, std::string model) {
    if (!mismatch_) mismatch_ = {"", 0, std::move(what), std::move(recorded), std::move(model)};
  }

  void compare(const std::string& what, std::int64_t recorded, std::int64_t model) {
    if (recorded != model) differ(what, fmt::format("{}", recorded), fmt::format("{}", model));
  }

  void compare_aligned(const AlignedSizes& model) {
    const AlignedSizes& recorded = recording_.aligned;
    compare("aligned.block_size", recorded.block_size, model.block_size);
    if (recorded.mamba_block_size != model.mamba_block_size)
      differ("aligned.mamba_block_size", text_of(recorded.mamba_block_size),
             text_of(model.mamba_block_size));
    if (recorded.mamba_page_size_padded != model.mamba_page_size_padded)
      differ("aligned.mamba_page_size_padded", text_of(recorded.mamba_page_size_padded),
             text_of(model.mamba_page_size_padded));
  }

  void compare_spec(const std::string& what, const KVCacheSpec& recorded,
                    const KVCacheSpec& model) {
    if (text_of(recorded) != text_of(model)) differ(what, text_of(recorded), text_of(model));
  }

  void compare_groups(const KVCacheConfig& config) {
    compare("groups", static_cast<std::int64_t>(recording_.groups.size()),
            static_cast<std::int64_t>(config.groups.size()));
    for (std::size_t g = 0; g < config.groups.size() && !mismatch_; ++g) {
      const KVCacheGroupSpec& recorded = recording_.groups[g].group;
      const KVCacheGroupSpec& model = config.groups[g];
      const std::string at = fmt::format("groups[{}]", g);
      if (recorded.layer_names != model.layer_names)
        differ(at + ".layers", fmt::format("{}", fmt::join(recorded.layer_names, " ")),
               fmt::format("{}", fmt::join(model.layer_names, " ")));
      compare(at + ".page_size_bytes", recording_.groups[g].page_size_bytes,
              page_size_bytes(model));
      compare(at + ".layer_specs", static_cast<std::int64_t>(recorded.layer_specs.size()),
              static_cast<std::int64_t>(model.layer_specs.size()));
      if (mismatch_) return;
      if (!model.is_uniform_type()) compare_spec(at + ".spec", recorded.spec, model.spec);
      for (std::size_t i = 0; i < model.layer_specs.size(); ++i)
        compare_spec(fmt::format("{}.spec.layers[{}]", at, i), recorded.layer_specs[i],
                     model.layer_specs[i]);
    }
  }

  void compare_tensors(const KVCacheConfig& config) {
    compare("tensors", static_cast<std::int64_t>(recording_.tensors.size()),
            static_cast<std::int64_t>(config.tensors.size()));
    for (std::size_t t = 0; t < config.tensors.size() && !mismatch_; ++t) {
      const std::string at = fmt::format("tensors[{}]", t);
      compare(at + ".size", recording_.tensors[t].size_bytes, config.tensors[t].size_bytes);
      if (recording_.tensors[t].shared_by != config.tensors[t].shared_by)
        differ(at + ".shared_by",
               fmt::format("{}", fmt::join(recording_.tensors[t].shared_by, " ")),
               fmt::format("{}", fmt::join(config.tensors[t].shared_by, " ")));
    }
  }

  void compare_pool(const KVCacheConfig& config, const RecordedViews& recorded) {
    const KVCacheConfig pool = with_num_blocks(config, recorded.num_blocks);
    const AttentionBackend backend = recording_.options.backend;
    compare_views(pool, recorded, "",
                  pool_views(pool, backend, recorded.layout, LayoutRule::vllm_0_22_1));
    if (backend_)
      compare_views(pool, recorded, " (backend)", backend_(pool, backend, recorded.layout));
  }

  void compare_views(const KVCacheConfig& pool, const RecordedViews& recorded,
                     const std::string& who, const Result<PoolViews>& views) {
    const std::string at = fmt::format("views[{}]{}", recorded.name, who);
    if (!views) return differ(at, "views", views.error().message);
    if (views->kernel_block_sizes != recorded.kernel_block_sizes)
      differ(at + ".kernel_block_sizes",
             fmt::format("{}", fmt::join(recorded.kernel_block_sizes, ", ")),
             fmt::format("{}", fmt::join(views->kernel_block_sizes, ", ")));
    for (const auto& [name, tensors] : recorded.views) {
      const LayerViews* layer = find_layer(pool, *views, name);
      if (layer == nullptr) return differ(at + "." + name, "a layer", "no such layer");
      compare(fmt::format("{}.{}.tensors", at, name), static_cast<std::int64_t>(tensors.size()),
              static_cast<std::int64_t>(layer->tensors.size()));
      for (std::size_t t = 0; t < tensors.size() && !mismatch_; ++t) {
        ++views_compared_;
        if (tensors[t] != layer->tensors[t])
          differ(fmt::format("{}.{}[{}]", at, name, t), text_of(tensors[t]),
                 text_of(layer->tensors[t]));
      }
    }
  }

  static const LayerViews* find_layer(const KVCacheConfig& pool, const PoolViews& views,
                                      const std::string& name) {
    for (std::size_t g = 0; g < pool.groups.size(); ++g) {
      const auto& names = pool.groups[g].layer_names;
      const auto at = std::ranges::find(names, name);
      if (at != names.end()) return &views.groups[g][static_cast<std::size_t>(at - names.begin())];
    }
    return nullptr;
  }

  const LayoutRecording& recording_;
  const ViewSource& backend_;
  std::optional<ConformMismatch> mismatch_;
  std::int64_t views_compared_ = 0;
};

// Inputs of a line, and what it says of another part of the engine.
bool is_compared(const std::string& key) {
  static const std::set<std::string> inputs = {"layout_recording", "engine", "options",
                                               "layers",           "shared", "workers"};
  return !inputs.contains(key);
}

// The first value that differs. A refusal is one in any words; that the recorder's own machine had
// too little memory for a pool says nothing about the plan.
std::optional<ConformMismatch> first_difference(const nlohmann::json& recorded,
                                                const nlohmann::json& model,
                                                const std::string& at) {
  if (recorded.is_object() && model.is_object()) {
    const bool is_refused = recorded.contains("refused");
    if (is_refused && recorded["refused"].is_string() &&
        recorded["refused"].get<std::string>().find("DefaultCPUAllocator") != std::string::npos)
      return std::nullopt;
    for (const auto& [key, value] : recorded.items()) {
      if (at.empty() && !is_compared(key)) continue;
      const std::string name = at.empty() ? key : at + "." + key;
      if (!model.contains(key)) return ConformMismatch{"", 0, name, value.dump(), "nothing"};
      if ((key == "refused" && value.is_string()) || name == "refused.text") continue;
      if (auto difference = first_difference(value, model[key], name)) return difference;
    }
    for (const auto& [key, value] : model.items())
      if (!recorded.contains(key))
        return ConformMismatch{"", 0, at.empty() ? key : at + "." + key, "nothing", value.dump()};
    return std::nullopt;
  }
  if (recorded.is_array() && model.is_array() && recorded.size() == model.size()) {
    for (std::size_t i = 0; i < recorded.size(); ++i)
      if (auto difference = first_difference(recorded[i], model[i], fmt::format("{}[{}]", at, i)))
        return difference;
    return std::nullopt;
  }
  // "copy: what it is": the word tells.
  const bool is_defect = at.starts_with("defects[") && recorded.is_string() && model.is_string();
  if (is_defect && recorded.get<std::string>().starts_with(model.get<std::string>() + ":"))
    return std::nullopt;
  if (recorded == model) return std::nullopt;
  return ConformMismatch{"", 0, at, recorded.dump(), model.dump()};
}

// One more plan of result.file.
template <class PlanRecording>
void count(std::optional<ConformMismatch> mismatch, const PlanRecording& recording,
           LayoutConformance& result) {
  ++result.plans;
  if (!mismatch) {
    ++result.agreed;
    return;
  }
  mismatch->file = result.file;
  mismatch->step = recording.line;
  result.mismatches.push_back({std::move(*mismatch), recording.model});
}

Result<LayoutConformance> conform_placements(const std::string& path) {
  const auto recordings = read_placement_recordings(path);
  if (!recordings) return tl::unexpected(recordings.error());
  LayoutConformance result;
  result.file = path;
  for (const PlacementRecording& recording : *recordings) {
    const auto recorded = nlohmann::json::parse(recording.json);
    const auto model = placement_record(recording, recorded);
    const auto pools = recorded.value("pools", nlohmann::json::object());
    for (const auto& [name, pool] : pools.items())
      for (const char* runner : {"first_runner", "second_runner"})
        if (pool.contains(runner) && pool[runner].is_object())
          result.views += static_cast<std::int64_t>(
              pool[runner].value("views", nlohmann::json::object()).size());
    auto mismatch = first_difference(recorded, model, "");
    count(std::move(mismatch), recording, result);
  }
  return result;
}

}  // namespace

LayerSpecs unaligned_layers(const LayoutRecording& recording) {
  LayerSpecs layers = recording.layers;
  if (!is_hybrid(layers)) return layers;
  for (NamedSpec& layer : layers) {
    layer.spec.block_size = 0;
    layer.spec.page_size_padded.reset();
  }
  return layers;
}

Result<LayoutConformance> conform_layouts(const std::string& path, const ViewSource& backend) {
  if (is_placement_recording(path)) return conform_placements(path);
  const auto recordings = read_layout_recordings(path);
  if (!recordings) return tl::unexpected(recordings.error());
  LayoutConformance result;
  result.file = path;
  for (const LayoutRecording& recording : *recordings) {
    Comparison comparison(recording, backend);
    auto mismatch = comparison.run();
    result.views += comparison.views_compared();
    count(std::move(mismatch), recording, result);
  }
  return result;
}

}  // namespace lockstep
