#include "cuda_backend/plugin/plugin_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <utility>

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
        fmt::format("{}: there is no such file; --backend takes auto, cuda, simt, none or "
                    "the path of a plugin",
                    path));
  // A name without a slash would be looked for where the system's libraries are.
  const std::string absolute = std::filesystem::absolute(path).string();
  void* handle = dlopen(absolute.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return fail(fmt::format("{}: cannot be loaded: {}", path, dlerror()));
  std::unique_ptr<PluginLibrary> library(new PluginLibrary(handle));
  using Open = const lockstep_plugin* (*)();
  const auto entry = reinterpret_cast<Open>(dlsym(handle, "lockstep_plugin_open"));
  if (entry == nullptr)
    return fail(
        fmt::format("{}: exports no lockstep_plugin_open; see cuda_backend/plugin/plugin.h", path));
  library->plugin_ = entry();
  if (library->plugin_ == nullptr)
    return fail(fmt::format("{}: lockstep_plugin_open returned null", path));
  const lockstep_plugin& plugin = *library->plugin_;
  if (plugin.version != LOCKSTEP_PLUGIN_VERSION)
    return fail(
        fmt::format("{}: speaks version {} of the plugin interface, this is version {}; "
                    "compile it with this cuda_backend/plugin/plugin.h",
                    path, plugin.version, LOCKSTEP_PLUGIN_VERSION));
  if (plugin.struct_bytes != sizeof(lockstep_plugin))
    return fail(
        fmt::format("{}: its lockstep_plugin has {} bytes, here it has {}; set struct_bytes "
                    "to sizeof(lockstep_plugin)",
                    path, plugin.struct_bytes, sizeof(lockstep_plugin)));
  if (const std::string missing = missing_function(plugin); !missing.empty())
    return fail(
        fmt::format("{}: the plugin has no function {}, which is not optional", path, missing));
  return library;
}

PluginLibrary::~PluginLibrary() { dlclose(handle_); }

}  // namespace lockstep::cuda
