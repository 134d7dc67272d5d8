// The layers' rows as the kernels of launch/kernel_table.h take them: a K and a V part of numbers
// with a format and, where the cache has 8-bit elements, scales: rule (13) of
// sim/protocol/backend.h.
//
// 1. A layer whose elements are no numbers (uint8) has parts that are moved, never attended to.
// 2. A layer's one scale lies in device memory of its own; scales for each token and head lie in
//    the pages, behind the elements of their rows.
// 3. Rows of nvfp4 lie in areas of a dense block: elements of all rows of K, their scales, then V;
//    so do V4's rows of MLA, 576 bytes of data each and then 8 of scales.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class RealCaches {
 public:
  RealCaches(Device& device, const BackendConfig& config, const LayerCaches& layers);

  // What these kernels cannot do for this configuration; empty: nothing.
  static std::optional<std::string> why_not(const BackendConfig& config, const LayerCaches& layers);

  // Of the rows that a layer's cache is written from, [num_kv_heads, head_size] for each token.
  DType source_dtype(std::size_t layer) const;
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
  // What the rows of a layer are, scales left out.
  struct RowFormat {
    DType dtype = DType::bf16;
    Scaling scaling = Scaling::none;
    std::int32_t head_size = 0;
  };
  static RowFormat format_of(const RowCache& rows, const KVCacheSpec& spec);
  PartLayout part(std::size_t layer, std::int32_t index) const;

  const LayerCaches& layers_;
  std::vector<RowFormat> formats_;  // [num_layers]
  DeviceArray<float> scales_;       // [num_layers]
};

}  // namespace lockstep::cuda
