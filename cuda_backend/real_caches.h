// The layers' rows as the kernels of launch/engine_kernels.h take them: a K and a V part of numbers
// with a format and, where the cache has 8-bit elements, a scale: rule (13) of sim/backend.h.
//
// 1. A layer whose elements are no numbers (uint8) has parts that are moved, never attended to.
// 2. Scales lie in device memory, one for each layer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda_backend/device.h"
#include "cuda_backend/device_array.h"
#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/layer_caches.h"
#include "sim/backend.h"

namespace lockstep::cuda {

class RealCaches {
 public:
  RealCaches(Device& device, const LayerCaches& layers);

  // What these kernels cannot do for this configuration; empty: nothing.
  static std::optional<std::string> why_not(const BackendConfig& config, const LayerCaches& layers);

  // Of the rows that a layer's cache is written from.
  DType source_dtype(std::size_t layer) const;
  // Rows [num_tokens, num_kv_heads, head_size] of source_dtype into the slots.
  WritePartsParams write(std::size_t layer, const std::byte* key, const std::byte* value,
                         const Slot* slots, std::int32_t num_tokens) const;
  // MLA keeps one part, which stands for both.
  PartLayout key(std::size_t layer) const { return part(layer, 0); }
  PartLayout value(std::size_t layer) const {
    return part(layer, layers_.rows[layer].num_parts - 1);
  }
  MemoryRange scales_range() const { return scales_.range(); }

 private:
  PartLayout part(std::size_t layer, std::int32_t index) const;

  const LayerCaches& layers_;
  DeviceArray<float> scales_;  // [num_layers]
};

}  // namespace lockstep::cuda
