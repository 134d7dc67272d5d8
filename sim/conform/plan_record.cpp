#include "sim/conform/conform_layouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "reference/cache/block_hash.h"
#include "reference/placement/worker_pages.h"
#include "reference/plan/capacity.h"
#include "reference/plan/layout.h"
#include "reference/plan/page_size.h"
#include "reference/plan/planner.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

using nlohmann::json;

// The member `key` of a recorded object; an empty object if the recording has something else there,
// so that the comparison reports the mismatch.
json member(const json& recorded, const char* key) {
  const auto found = recorded.find(key);
  return found != recorded.end() && found->is_object() ? *found : json::object();
}

constexpr std::int64_t kCopiedBytesMax = 128 << 20;  // larger allocations were not copied

// A spec with everything that follows from it.
json spec_record(const KVCacheSpec& spec) {
  json record = json::parse(planned_spec_json(spec));
  record["page_size_bytes"] = page_bytes(spec);
  if (!has_layer_views(spec.kind)) return record;
  record["hnc"] = {num_heads(spec), rows_of(spec, spec.block_size), content_bytes(spec)};
  if (const std::int64_t bytes = stride_alignment_bytes(spec); bytes != 1)
    record["stride_alignment_bytes"] = bytes;
  return record;
}

json spec_at(const KVCacheSpec& spec, const json& specs) {
  json own = spec_record(spec);
  for (std::size_t i = 0; i < specs.size(); ++i)
    if (specs[i] == own) return i;
  return own;
}

json group_record(const KVCacheGroupSpec& group, const json& specs) {
  json record = {{"layers", group.layer_names}};
  if (!group.is_uniform_type()) {
    record["spec"] = spec_at(group.spec, specs);
  } else {
    json parts = json::array();
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < group.layer_specs.size(); ++i) {
      json at = spec_at(group.layer_specs[i], specs);
      bytes += page_bytes(group.layer_specs[i]);
      if (parts.empty() || parts.back()["spec"] != at)
        parts.push_back({{"spec", std::move(at)}, {"layers", json::array()}});
      parts.back()["layers"].push_back(group.planned_layers()[i]);
    }
    record["spec"] = {{"type", "uniform_type"},
                      {"block_size", group.spec.block_size},
                      {"page_size_bytes", bytes},
                      {"parts", std::move(parts)}};
    record["spec"]["dcp_sharded"] = group.spec.dcp_sharded;
  }
  if (group.is_eagle_group) record["is_eagle_group"] = true;
  if (is_on_host(group)) record["host_resident"] = true;
  if (keeps_pages(group.spec)) record["enable_kv_transfer"] = false;
  if (!group.role.empty()) record["role"] = group.role;
  return record;
}

json tensor_record(const PlacedTensor& tensor, bool with_names) {
  json record = {{"size", tensor.size_bytes},
                 {"layer_stride", tensor.layer_stride},
                 {"block_stride", tensor.block_stride},
                 {"offset", tensor.offset}};
  if (with_names) record["layers"] = tensor.layers;
  if (tensor.host_resident) record["host_resident"] = true;
  return record;
}

json plan_record(const Placement& plan, const json& specs) {
  json record = {{"num_blocks", plan.num_blocks},
                 {"groups", json::array()},
                 {"tensors", json::array()},
                 {"kv_tp_replicas", plan.kv_tp_replicas}};
  for (const KVCacheGroupSpec& group : plan.groups)
    record["groups"].push_back(group_record(group, specs));
  for (const PlacedTensor& tensor : plan.tensors)
    record["tensors"].push_back(tensor_record(tensor, true));
  if (plan.host) {
    record[kHostBlocksKey] = plan.host->num_blocks;
    record["hisparse_host_block_stride"] = plan.host->block_stride;
    record["hisparse_shared_host_pool"] = plan.host->is_shared;
  }
  return record;
}

json view_record(const TensorView& view) {
  return {{"shape", view.shape},
          {"stride", view.stride},
          {"offset", view.storage_offset},
          {"dtype", torch_name_of(view.dtype)}};
}

// Views in a plan of one tensor per layer, of each layer that `names` has.
json views_record(const KVCacheConfig& pool, const PoolViews& views, const json& names) {
  json record = json::object();
  for (std::size_t g = 0; g < pool.groups.size(); ++g)
    for (std::size_t i = 0; i < pool.groups[g].layer_names.size(); ++i) {
      const std::string& name = pool.groups[g].layer_names[i];
      if (!names.contains(name)) continue;
      json all = json::array();
      for (const TensorView& view : views.groups[g][i].tensors) all.push_back(view_record(view));
      record[name] = is_state_kind(pool.groups[g].layer_spec(i).kind) ? all : all.at(0);
    }
  return record;
}

// With its first byte and the one past its last.
json spanning_view_record(const TensorView& view) {
  const std::int64_t item = itemsize_bytes(view.dtype);
  std::int64_t last = view.storage_offset;
  for (std::size_t d = 0; d < view.shape.size(); ++d) last += (view.shape[d] - 1) * view.stride[d];
  json record = view_record(view);
  record["bytes"] = {view.storage_offset * item, (last + 1) * item};
  return record;
}

json layer_record(const LayerPage& layer) {
  const bool has_rows = is_attention(layer.spec.kind);
  json record = {{"page", spanning_view_record(
                              view_of(layer.page, has_rows ? layer.spec.dtype : DType::int8))}};
  const std::vector<TensorView> bound = bound_views(layer);
  if (bound.empty()) return record;
  if (layer.binding != PageBinding::states) {
    record["bound"] = spanning_view_record(bound[0]);
    return record;
  }
  record["bound"] = json::array();
  for (const TensorView& view : bound) record["bound"].push_back(spanning_view_record(view));
  return record;
}

std::string short_sha256(const std::string& text) {
  const std::vector<std::uint8_t> digest =
      sha256(std::vector<std::uint8_t>(text.begin(), text.end()));
  return fmt::format("{:02x}", fmt::join(digest.begin(), digest.begin() + 16, ""));
}

json segment_record(const BlockRegion& segment) {
  return {segment.begin, segment.block_stride, segment.bytes};
}

json zero_record(const WorkerPages& pages) {
  const auto segments = zero_segments(pages);
  if (!segments) return {{"refused", segments.error().message}};
  if (segments->empty()) return nullptr;
  json first = json::array();
  std::string lines;
  for (const BlockRegion& segment : *segments) {
    if (first.size() < 4) first.push_back(segment_record(segment));
    lines += fmt::format("{},{},{}\n", segment.begin, segment.block_stride, segment.bytes);
  }
  return {{"segments", segments->size()},
          {"first", std::move(first)},
          {"last", segment_record(segments->back())},
          {"sha256", short_sha256(lines)}};
}

json lost_record(const WorkerPages& pages, bool by_layer_index) {
  json amounts = json::array();
  for (const LostBytes& lost : lost_in_copies(pages, by_layer_index))
    amounts.push_back(
        {{"bytes", lost.bytes}, {"of", lost.of}, {"layers", lost.layers}, {"first", lost.first}});
  if (amounts.empty()) return json::object();
  return {{"missing_bytes", std::move(amounts)}};
}

json runner_record(const WorkerPages& pages, const json& recorded, bool zeroes) {
  json record = {{"kernel_block_sizes", pages.kernel_block_sizes},
                 {"allocation_bytes", {pages.device_bytes}},
                 {"views", json::object()}};
  if (pages.host_bytes != 0) record["allocation_bytes"].push_back(pages.host_bytes);
  if (!pages.kernel_block_groups.empty()) record["kernel_block_groups"] = json::array();
  for (const KernelBlockGroup& group : pages.kernel_block_groups)
    record["kernel_block_groups"].push_back({{"group", group.group},
                                             {"first", group.first},
                                             {"kernel_block_size", group.kernel_block_size},
                                             {"kernel_block_stride", group.kernel_block_stride}});
  const json names = member(recorded, "views");
  for (const LayerPage& layer : pages.layers)
    if (names.contains(layer.name)) record["views"][layer.name] = layer_record(layer);
  if (json zero = zeroes ? zero_record(pages) : json(); !zero.is_null())
    record["zero"] = std::move(zero);
  return record;
}

// A pool of that many blocks. Sets `copies_lose` where a copy of a block loses bytes.
json pool_record(const OverlaidPlanInputs& recording, const Placement& plan,
                 const std::vector<PlacementLayer>& layers, std::int64_t num_blocks,
                 const json& recorded, bool& copies_lose) {
  const auto small = place_blocks(plan.groups, plan.order, num_blocks, recording.options);
  if (!small) return {{"refused", small.error().message}};
  json record = {{"tensors", json::array()}};
  for (const PlacedTensor& tensor : small->tensors)
    record["tensors"].push_back(tensor_record(tensor, false));
  const bool has_host = small->host.has_value();
  const char* runner = has_host ? "second_runner" : "first_runner";
  if (!has_host) record["second_runner"] = "same";
  auto pages = worker_pages(*small, layers, recording.options);
  if (!pages) {
    record[runner] = {{"refused", pages.error().message}};
    return record;
  }
  // Bare layers bind nothing.
  if (recording.backend == "by layer")
    for (LayerPage& layer : pages->layers) layer.binding = PageBinding::as_is;
  record[runner] = runner_record(*pages, member(recorded, runner), !has_host);
  if (num_blocks != 3 || has_host) return record;
  json first = lost_record(*pages, true), second = lost_record(*pages, false);
  const bool loses = !first.empty() || !second.empty();
  if (pages->device_bytes > kCopiedBytesMax)
    first = second = {{"skipped", "allocation above 128 MiB"}};
  else if (loses)
    copies_lose = true;
  else
    return record;
  record["copy"] = {{"first_runner", std::move(first)}, {"second_runner", std::move(second)}};
  return record;
}

// The layouts: those that backends declare, the remaining candidates, and what chose.
json layout_record(const PlacementStages& plan, const PlacementOptions& options) {
  json record = {{"supported", json::array()}, {"declared", json::object()}};
  for (const CacheLayout order : plan.supported) record["supported"].push_back(name_of(order));
  for (const PlacementLayer& layer : plan.layers) {
    const CacheBackend* backend = find_cache_backend(layer.backend);
    if (backend == nullptr || record["declared"].contains(layer.backend)) continue;
    json& names = record["declared"][layer.backend];
    for (const CacheLayout order : declared_orders(*backend, options.device))
      names.push_back(name_of(order));
  }
  if (const auto wish = order_wish(plan.layers, options))
    record["connector"] = name_of(*wish);
  else if (!options.connector.empty())
    record["connector"] = nullptr;
  if (!plan.order) return record;
  record["chosen"] = name_of(plan.order->order);
  record["by"] = plan.order->by;
  return record;
}

// A tensor of layers that the worker does not have.
bool has_foreign_tensor(const Placement& plan) {
  return std::ranges::any_of(plan.tensors, [&](const PlacedTensor& tensor) {
    return std::ranges::none_of(plan.groups, [&](const KVCacheGroupSpec& group) {
      return std::ranges::find(group.layer_names, tensor.layers[0]) != group.layer_names.end();
    });
  });
}

json or_null(const std::optional<std::int64_t>& value) { return value ? json(*value) : json(); }

// The distinct specs at the places that the recording has them.
json specs_record(const OverlaidPlanInputs& recording, const std::vector<PlacementLayer>& layers) {
  json specs(recording.specs.size(), nullptr);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (!layers[l].spec) continue;
    const json recorded = spec_record(*recording.layers[l].spec);
    for (std::size_t i = 0; i < specs.size(); ++i)
      if (specs[i].is_null() && spec_record(recording.specs[i]) == recorded)
        specs[i] = spec_record(*layers[l].spec);
  }
  return specs;
}

void add_states(const std::vector<StateTensorSpec>& states, json& record) {
  record["shapes"] = record["dtypes"] = json::array();
  for (const StateTensorSpec& state : states) {
    record["shapes"].push_back(state.dims);
    record["dtypes"].push_back(torch_name_of(state.dtype));
  }
}

// As 0.22.1 prints it.
json tensor_spec_record(const KVCacheSpec& spec) {
  json record = {{"type", name_of(spec.kind)},
                 {"block_size", spec.block_size},
                 {"page_size_bytes", page_size_bytes(spec)}};
  if (spec.page_size_padded) record["page_size_padded"] = *spec.page_size_padded;
  if (is_state_kind(spec.kind)) {
    add_states(spec.states, record);
    record["mamba_cache_mode"] = name_of(spec.mamba_cache_mode);
    record["num_speculative_blocks"] = spec.num_speculative_blocks;
    return record;
  }
  record["num_kv_heads"] = spec.num_kv_heads;
  record["head_size"] = spec.head_size;
  record["dtype"] = torch_name_of(spec.dtype);
  if (spec.attention_chunk_size != 0)
    record["attention_chunk_size"] = spec.attention_chunk_size;
  else
    record["head_size_v"] = head_size_v(spec);
  if (spec.sliding_window != 0) record["sliding_window"] = spec.sliding_window;
  if (!is_one_row(spec.tokens_per_state))
    record["compress_ratio"] = json::parse(json_of(spec.tokens_per_state));
  if (!spec.cache_dtype_str.empty()) record["cache_dtype_str"] = spec.cache_dtype_str;
  if (!spec.model_version.empty()) record["model_version"] = spec.model_version;
  return record;
}

json tensor_group_record(const KVCacheGroupSpec& group) {
  if (!group.is_uniform_type())
    return {{"layers", group.layer_names}, {"spec", tensor_spec_record(group.spec)}};
  json specs = json::object();
  for (std::size_t i = 0; i < group.layer_names.size(); ++i)
    specs[group.layer_names[i]] = tensor_spec_record(group.layer_specs[i]);
  return {{"layers", group.layer_names},
          {"spec",
           {{"type", "uniform_type"},
            {"block_size", group.spec.block_size},
            {"page_size_bytes", page_size_bytes(group)},
            {"layers", std::move(specs)}}}};
}

// "NHD/2": the layout and the pool.
struct PoolKey {
  CacheLayout layout;
  std::int64_t num_blocks;
};
std::optional<PoolKey> pool_key(const std::string& key) {
  constexpr std::int64_t kPoolMax = 1 << 16;  // whose tensors fit in 63 bits
  const std::size_t slash = key.find('/');
  const auto layout = from_name<CacheLayout>(key.substr(0, slash));
  if (!layout || slash == std::string::npos) return std::nullopt;
  std::int64_t blocks = 0;
  const char* const end = key.data() + key.size();
  const auto [last, status] = std::from_chars(key.data() + slash + 1, end, blocks);
  if (status != std::errc{} || last != end || blocks < 1 || blocks > kPoolMax) return std::nullopt;
  return PoolKey{*layout, blocks};
}

json tensor_plan_record(const TensorPlanInputs& inputs, const json& recorded) {
  const LayerSpecs layers = unaligned_layers(inputs);
  json record = json::object();
  if (const auto aligned = aligned_sizes(layers, inputs.options))
    record["aligned"] = {{"block_size", aligned->block_size},
                         {"mamba_block_size", or_null(aligned->mamba_block_size)},
                         {"mamba_page_size_padded", or_null(aligned->mamba_page_size_padded)}};
  const auto plan = plan_memory(layers, inputs.options);
  if (!plan) {
    record["refused"] = plan.error().message;
    return record;
  }
  const KVCacheConfig& config = plan->workers.front();
  json& planned = record["plan"] = {
      {"num_blocks", config.num_blocks}, {"groups", json::array()}, {"tensors", json::array()}};
  for (const KVCacheGroupSpec& group : config.groups)
    planned["groups"].push_back(tensor_group_record(group));
  for (const KVCacheTensor& tensor : config.tensors)
    planned["tensors"].push_back({{"size", tensor.size_bytes}, {"shared_by", tensor.shared_by}});
  if (config.groups.empty()) return record;
  const Capacity capacity = capacity_of(config, inputs.options);
  record["max_concurrency"] = capacity.max_concurrency;
  record["capacity_tokens"] = capacity.capacity_tokens;
  if (recorded.contains("views"))
    record["views"] =
        pools_record(config, inputs.options.backend, recorded,
                     [](const KVCacheConfig& pool, AttentionBackend backend, CacheLayout layout) {
                       return pool_views(pool, backend, layout, LayoutRule::vllm_0_22_1);
                     });
  return record;
}

}  // namespace

PlacementStages plan_of(const OverlaidPlanInputs& recording) {
  std::vector<PlacementLayer> facts;
  const bool is_bare = recording.backend == "by layer";
  for (const PlacementLayer& layer : recording.layers)
    facts.push_back(is_bare ? layer : layer_facts(layer));
  return plan_stages(facts, is_bare, recording.workers, recording.options);
}

static json overlaid_plan_record(const OverlaidPlanInputs& recording, const json& recorded) {
  const PlacementOptions& options = recording.options;
  const PlacementStages memory = plan_of(recording);
  json record = json::object();
  if (!memory.refused_stage.empty())
    record["refused"] = {{"stage", memory.refused_stage}, {"text", memory.refused.message}};
  if (!memory.alignment) return record;
  record["aligned"] = {
      {"block_size", memory.alignment->block_size},
      {"mamba_block_size", memory.alignment->mamba_block_size},
      {"mamba_page_size_padded", or_null(memory.alignment->mamba_page_size_padded)},
      {"skip_page_size_padded", or_null(memory.alignment->skip_page_size_padded)}};
  if (memory.refused_stage == "specs") return record;
  const json specs = specs_record(recording, memory.layers);
  record["specs"] = specs;
  // Only model runner V2 marks a draft model's cache as replicated, and only V2 has host pages.
  const bool is_replicated = std::ranges::any_of(memory.layers, [](const PlacementLayer& layer) {
    return layer.spec && layer.spec->plan.is_draft.value && is_attention(layer.spec->kind) &&
           !layer.spec->dcp_sharded;
  });
  if (!options.has_host_pages())
    record["specs_of_first_runner"] = is_replicated ? "dcp_sharded differs" : "same";
  if (memory.supported.empty()) return record;
  record["layout"] = layout_record(memory, options);
  if (memory.workers.empty()) return record;
  const std::vector<Placement>* plans = &memory.workers;
  const Placement& plan = plans->front();
  record["plan"] = plan_record(plan, specs);
  for (std::size_t w = 1; w < plans->size(); ++w)
    record["plans_of_other_workers"].push_back(plan_record((*plans)[w], specs));
  record["needs_zeroing"] = needs_zeroing(plan);
  record["pools"] = json::object();
  if (plan.groups.empty()) return record;
  const auto capacity = capacity_of(plan, options);
  if (!capacity) {
    record["refused"] = {{"stage", "plan"}, {"text", capacity.error().message}};
    return record;
  }
  record["capacity"] = {{"max_concurrency", capacity->max_concurrency},
                        {"tokens", capacity->tokens}};
  if (const auto sizes = hash_sizes(plan, options))
    record["block_sizes"] = {{"cache_config", cache_config_block(plan)},
                             {"scheduler", sizes->scheduler_block_size},
                             {"hash", sizes->hash_block_size},
                             {"hit_alignment", sizes->cache_hit_alignment_tokens()}};
  else
    record["block_sizes"] = {{"refused", sizes.error().message}};
  bool copies_lose = false;
  const json pools = member(recorded, "pools");
  for (const auto& [name, pool] : pools.items())
    if (const auto num_blocks = std::strtoll(name.c_str(), nullptr, 10); num_blocks > 0)
      record["pools"][name] =
          pool_record(recording, plan, memory.layers, num_blocks, pool, copies_lose);
  if (copies_lose) record["defects"].push_back("copy");
  if (std::ranges::any_of(*plans, has_foreign_tensor)) record["defects"].push_back("stage");
  return record;
}

json plan_record(const PlanRecording& recording, const json& recorded) {
  if (const auto* inputs = std::get_if<TensorPlanInputs>(&recording.inputs))
    return tensor_plan_record(*inputs, recorded);
  return overlaid_plan_record(std::get<OverlaidPlanInputs>(recording.inputs), recorded);
}

json compared_results(const PlanRecording& recording) {
  json results = json::parse(recording.json);
  for (const char* input : {"layout_recording", "engine", "options", "layers", "shared", "workers"})
    results.erase(input);
  if (!std::holds_alternative<TensorPlanInputs>(recording.inputs)) return results;
  json outputs = json::object();
  for (const char* key :
       {"aligned", "plan", "max_concurrency", "capacity_tokens", "views", "refused"})
    if (results.contains(key)) outputs[key] = std::move(results[key]);
  if (outputs.contains("views") && outputs["views"].is_object())
    for (auto& [name, pool] : outputs["views"].items())
      if (pool.is_object()) pool.erase("second_runner");
  return outputs;
}

LayerSpecs unaligned_layers(const TensorPlanInputs& inputs) {
  LayerSpecs layers = inputs.layers;
  if (!is_hybrid(layers)) return layers;
  for (NamedSpec& layer : layers) {
    layer.spec.block_size = 0;
    layer.spec.page_size_padded.reset();
  }
  return layers;
}

json pools_record(const KVCacheConfig& plan, AttentionBackend backend, const json& recorded,
                  const ViewSource& source) {
  json record = json::object();
  for (const auto& [key, pool] : recorded.at("views").items()) {
    const auto at = pool_key(key);
    if (!at) continue;
    const KVCacheConfig small = with_num_blocks(plan, at->num_blocks);
    const auto views = source(small, backend, at->layout);
    if (!views) {
      record[key] = {{"refused", views.error().message}};
      continue;
    }
    record[key] = {{"kernel_block_sizes", views->kernel_block_sizes},
                   {"views", views_record(small, *views, member(pool, "views"))}};
  }
  return record;
}

}  // namespace lockstep
