#include "cuda_backend/plugin/plugin_plan.h"

#include <dlfcn.h>

#include <filesystem>
#include <utility>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

// The first function that must be there and is not; empty: none.
std::string missing_function(const lockstep_plugin& plugin) {
  const std::pair<const char*, bool> functions[] = {
      {"create", plugin.create != nullptr},
      {"destroy", plugin.destroy != nullptr},
      {"write_bytes", plugin.write_bytes != nullptr},
      {"read_bytes", plugin.read_bytes != nullptr},
      {"zero_blocks", plugin.zero_blocks != nullptr},
      {"update_tables", plugin.update_tables != nullptr},
      {"read_table", plugin.read_table != nullptr},
      {"map_slots", plugin.map_slots != nullptr},
      {"write_rows", plugin.write_rows != nullptr},
      {"read_rows", plugin.read_rows != nullptr},
      {"copy_blocks (read_state is there)",
       plugin.read_state == nullptr || plugin.copy_blocks != nullptr},
      {"write_state (read_state is there)",
       plugin.read_state == nullptr || plugin.write_state != nullptr},
      {"read_state (write_state is there)",
       plugin.write_state == nullptr || plugin.read_state != nullptr},
  };
  for (const auto& [name, present] : functions)
    if (!present) return name;
  return {};
}

}  // namespace

Result<std::unique_ptr<PluginLibrary>> PluginLibrary::open(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    return fail(
        "{}: there is no such file; --backend takes auto, cuda, simt, none or the path of a plugin",
        path);
  // A name without a slash would be looked for where the system's libraries are.
  const std::string absolute = std::filesystem::absolute(path).string();
  void* handle = dlopen(absolute.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return fail("{}: cannot be loaded: {}", path, dlerror());
  std::unique_ptr<PluginLibrary> library(new PluginLibrary(handle));
  using Open = const lockstep_plugin* (*)();
  const auto entry = reinterpret_cast<Open>(dlsym(handle, "lockstep_plugin_open"));
  if (entry == nullptr)
    return fail("{}: exports no lockstep_plugin_open; see cuda_backend/plugin/plugin.h", path);
  library->plugin_ = entry();
  if (library->plugin_ == nullptr) return fail("{}: lockstep_plugin_open returned null", path);
  const lockstep_plugin& plugin = *library->plugin_;
  if (plugin.version != LOCKSTEP_PLUGIN_VERSION)
    return fail(
        "{}: speaks version {} of the plugin interface, this is version {}; compile it with this "
        "cuda_backend/plugin/plugin.h",
        path, plugin.version, LOCKSTEP_PLUGIN_VERSION);
  if (plugin.struct_bytes != sizeof(lockstep_plugin))
    return fail(
        "{}: its lockstep_plugin has {} bytes, here it has {}; set struct_bytes to "
        "sizeof(lockstep_plugin)",
        path, plugin.struct_bytes, sizeof(lockstep_plugin));
  if (const std::string missing = missing_function(plugin); !missing.empty())
    return fail("{}: the plugin has no function {}, which is not optional", path, missing);
  return library;
}

PluginLibrary::~PluginLibrary() { dlclose(handle_); }

namespace {

// Tensors lie where no memory is: addresses in them are only ever turned back into offsets.
constexpr unsigned kTensorShift = 44;

}  // namespace

Result<std::unique_ptr<PluginPlan>> PluginPlan::create(const BackendConfig& config,
                                                       std::span<const LayerOfModel> places) {
  std::unique_ptr<PluginPlan> plan(new PluginPlan);
  for (std::uintptr_t t = 0; t < config.plan.tensors.size(); ++t) {
    LS_CHECK(config.plan.tensors[t].size_bytes < std::int64_t{1} << kTensorShift, "tensor {}", t);
    plan->bases_.push_back(reinterpret_cast<std::byte*>((t + 1) << kTensorShift));
  }
  LS_ASSIGN_OR_RETURN(plan->layers_, layer_caches(config, places, plan->bases_));
  plan->fill(config);
  return plan;
}

PluginPlan::Place PluginPlan::place_of(const void* address) const {
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  const auto mask = (std::uintptr_t{1} << kTensorShift) - 1;
  return {static_cast<std::int32_t>((number >> kTensorShift) - 1),
          static_cast<std::int64_t>(number & mask)};
}

void PluginPlan::fill(const BackendConfig& config) {
  std::size_t num_names = config.plan.groups.size();
  for (const KVCacheGroupSpec& group : config.plan.groups)
    num_names += 2 * group.layer_names.size();
  names_.reserve(num_names);
  const auto name = [this](std::string_view text) { return names_.emplace_back(text).c_str(); };
  for (const KVCacheTensor& tensor : config.plan.tensors)
    tensor_bytes_.push_back(tensor.size_bytes);
  std::size_t layer = 0;
  for (std::size_t g = 0; g < config.plan.groups.size(); ++g) {
    const KVCacheGroupSpec& group = config.plan.groups[g];
    const auto split = static_cast<std::int32_t>(layers_.blocks_per_kv_block[g]);
    groups_.push_back({name(name_of(group.spec.kind)),
                       static_cast<std::int32_t>(group.spec.block_size),
                       static_cast<std::int32_t>(group.spec.block_size / split), split,
                       config.max_blocks_per_row[g]});
    for (std::size_t i = 0; i < group.layer_names.size(); ++i, ++layer) {
      const RowCache& rows = layers_.rows[layer];
      lockstep_layer one{};
      one.name = name(group.layer_names[i]);
      one.dtype = name(name_of(rows.dtype));
      one.group = static_cast<std::int32_t>(g);
      one.tensor = layers_.tensor_of_layer[layer];
      if (rows.row_bytes > 0) {
        one.num_parts = rows.num_parts;
        one.num_kv_heads = rows.num_kv_heads;
        one.head_size = rows.head_size;
        one.row_bytes = rows.row_bytes;
        one.offset = place_of(rows.base).offset;
        one.block_stride = rows.block_stride;
        one.token_stride = rows.token_stride;
        one.head_stride = rows.head_stride;
        one.part_stride = rows.part_stride;
      }
      c_layers_.push_back(one);
    }
    const RegionRange regions = layers_.regions_of_group[g];
    for (std::int32_t r = regions.begin; r < regions.end; ++r) {
      const BlockRegion& region = layers_.regions[r];
      regions_.push_back({static_cast<std::int32_t>(g), region.tensor, region.tensor_offset,
                          region.block_stride, region.size_bytes});
    }
  }
  for (const StateCache& state : layers_.states) {
    const Place place = place_of(state.base);
    states_.push_back({state.layer, state.state, place.tensor, place.offset, state.page_stride,
                       state.size_bytes});
  }
  plan_ = {.num_blocks = config.plan.num_blocks,
           .num_rows = config.num_rows,
           .max_tokens_per_step = config.max_tokens_per_step,
           .queries_per_kv = config.queries_per_kv,
           .num_tensors = static_cast<std::int32_t>(tensor_bytes_.size()),
           .num_groups = static_cast<std::int32_t>(groups_.size()),
           .num_layers = static_cast<std::int32_t>(c_layers_.size()),
           .num_states = static_cast<std::int32_t>(states_.size()),
           .num_regions = static_cast<std::int32_t>(regions_.size()),
           .tensor_bytes = tensor_bytes_.data(),
           .groups = groups_.data(),
           .layers = c_layers_.data(),
           .states = states_.data(),
           .regions = regions_.data()};
}

}  // namespace lockstep::cuda
