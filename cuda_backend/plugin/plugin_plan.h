// A plan as plugins are told it (plugin.h): groups, layers, states and regions with offsets in
// their tensors, taken from the views that the CUDA backend derives (layer_caches.h).
//
// 1. The C structs point into this object, which does not move.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "cuda_backend/plugin/plugin.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class PluginPlan {
 public:
  // Errors: those of layer_caches().
  static Result<std::unique_ptr<PluginPlan>> create(const BackendConfig& config,
                                                    std::span<const LayerOfModel> places);
  PluginPlan(const PluginPlan&) = delete;
  PluginPlan& operator=(const PluginPlan&) = delete;

  const lockstep_plan& c_plan() const { return plan_; }
  // Bytes from offset on of a tensor.
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
  std::vector<std::string> names_;  // kinds, dtypes and layers, one after the other
  std::vector<std::int64_t> tensor_bytes_;
  std::vector<lockstep_group> groups_;
  std::vector<lockstep_layer> c_layers_;
  std::vector<lockstep_state> states_;
  std::vector<lockstep_region> regions_;
  lockstep_plan plan_{};
};

}  // namespace lockstep::cuda
