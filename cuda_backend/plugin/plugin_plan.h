// Both sides of a plugin's C interface (plugin.h): the shared library, and the plan that it
// receives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "cuda_backend/plugin/plugin.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// A loaded shared library with a plugin. The destructor closes it.
//
// Invariants:
// 1. The library exports the entry, has this version, and has every function that is not optional.
// Not checked: the functions' behaviour.
class PluginLibrary {
 public:
  // Errors, each starting with the path: no such file; not a shared library; no
  // lockstep_plugin_open; another version; a missing function.
  static Result<std::unique_ptr<PluginLibrary>> open(const std::string& path);
  ~PluginLibrary();
  PluginLibrary(const PluginLibrary&) = delete;
  PluginLibrary& operator=(const PluginLibrary&) = delete;

  const lockstep_plugin& plugin() const { return *plugin_; }

 private:
  explicit PluginLibrary(void* handle) : handle_(handle) {}

  void* handle_;
  const lockstep_plugin* plugin_ = nullptr;
};

// Groups, layers, states and regions with offsets in their tensors, from the views that the CUDA
// backend derives (layer_caches.h).
//
// 1. The C structs point into this object, which does not move.
class PluginPlan {
 public:
  // Errors: those of layer_caches().
  static Result<std::unique_ptr<PluginPlan>> create(const BackendConfig& config,
                                                    std::span<const LayerOfModel> places);
  PluginPlan(const PluginPlan&) = delete;
  PluginPlan& operator=(const PluginPlan&) = delete;

  const lockstep_plan& c_plan() const { return plan_; }
  // A byte of a tensor.
  struct Place {
    std::int32_t tensor;
    std::int64_t offset;
  };
  Place place_of(const void* address) const;
  const LayerCaches& layers() const { return layers_; }

 private:
  PluginPlan() = default;
  void fill(const BackendConfig& config);

  std::vector<std::byte*> bases_;
  LayerCaches layers_;
  std::vector<std::string> names_;  // kinds, dtypes, layers
  std::vector<std::int64_t> tensor_bytes_;
  std::vector<lockstep_group> groups_;
  std::vector<lockstep_layer> c_layers_;
  std::vector<lockstep_state> states_;
  std::vector<lockstep_region> regions_;
  lockstep_plan plan_{};
};

}  // namespace lockstep::cuda
