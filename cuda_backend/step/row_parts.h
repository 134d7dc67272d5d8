// The layers' rows as the kernels of launch/kernel_table.h take them: a K and a V part with a
// format and, where the cache is quantised, scales. Rule (13) of sim/protocol/backend.h.
//
// Invariants:
// 1. In a replay of words, and for layers whose elements are not numbers (uint8), a part is bytes
//    that are moved.
// 2. A layer's one scale is in a device array. Scales per token and head are in the pages, after
//    the elements of their rows.
// 3. Rows of nvfp4 are in areas of a dense block: elements of all K rows, their scales, then V.
//    V4's rows of MLA have 576 bytes of data each and then 8 bytes of scales.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class RowParts {
 public:
  RowParts(Device& device, const BackendConfig& config, const LayerCaches& layers);

  // Why these kernels cannot compute with this configuration's numbers; empty: they can.
  static std::optional<std::string> why_not(const BackendConfig& config, const LayerCaches& layers);

  // Of the rows that a layer's cache is written from, [num_kv_heads, head_size] for each token.
  DType source_dtype(std::size_t layer) const;
  ShapeMasks source_masks(std::size_t layer) const;
  std::int32_t head_size(std::size_t layer) const { return formats_[layer].head_size; }
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
  // Format of a layer's rows, scales excluded.
  struct RowFormat {
    DType dtype = DType::bf16;
    Scaling scaling = Scaling::none;
    std::int32_t head_size = 0;
  };
  RowFormat format_of(const RowCache& rows, const KVCacheSpec& spec) const;
  PartLayout part(std::size_t layer, std::int32_t index) const;

  // Kernel blocks that the layer's table may name.
  std::int64_t num_kernel_blocks(std::size_t layer) const;

  const bool is_real_;
  const std::int64_t num_blocks_;
  const LayerCaches& layers_;
  std::vector<RowFormat> formats_;  // [num_layers]
  DeviceArray<float> scales_;       // [num_layers]
};

}  // namespace lockstep::cuda
