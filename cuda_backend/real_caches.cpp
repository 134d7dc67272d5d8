#include "cuda_backend/real_caches.h"

#include <fmt/format.h>

namespace lockstep::cuda {
namespace {

constexpr std::int32_t kMaxAttendedHeadSize = 576;  // of split_attention.cuh

// What an 8-bit cache of a layer is divided by; the numbers of rule (13).
float scale_of_layer(std::int32_t layer) {
  switch (layer % 4) {
    case 0:
      return 0.0081f;
    case 1:
      return 0.0085f;
    case 2:
      return 0.0089f;
    default:
      return 0.0093f;
  }
}

bool is_scaled(DType dtype) {
  return dtype == DType::fp8_e4m3 || dtype == DType::fp8_e5m2 || dtype == DType::int8;
}

}  // namespace

RealCaches::RealCaches(Device& device, const LayerCaches& layers)
    : layers_(layers), scales_(device, "scales of layers") {
  std::vector<float> scales;
  const bool planted = device.defect() == Defect::scale_of_other_layer;
  for (const RowCache& rows : layers.rows)
    scales.push_back(scale_of_layer(rows.layer + (planted ? 1 : 0)));
  scales_.upload(scales);
}

std::optional<std::string> RealCaches::why_not(const BackendConfig& config,
                                               const LayerCaches& layers) {
  for (const KVCacheGroupSpec& group : config.plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      if (const KVQuantMode mode = group.layer_spec(i).kv_quant_mode;
          mode != KVQuantMode::none && mode != KVQuantMode::fp8_per_tensor)
        return fmt::format("numbers: {} is quantised by {}; a replay has one scale a layer",
                           group.layer_names[i], name_of(mode));
  for (const RowCache& rows : layers.rows)
    if (rows.row_bytes > 0 && rows.head_size > kMaxAttendedHeadSize)
      return fmt::format("numbers: layer {} has heads of {} elements, the kernel takes {}",
                         rows.layer, rows.head_size, kMaxAttendedHeadSize);
  return std::nullopt;
}

DType RealCaches::source_dtype(std::size_t layer) const {
  const DType dtype = layers_.rows[layer].dtype;
  return is_scaled(dtype) ? DType::bf16 : dtype;
}

PartLayout RealCaches::part(std::size_t layer, std::int32_t index) const {
  const RowCache& rows = layers_.rows[layer];
  const bool scaled = is_scaled(rows.dtype);
  return {.base = rows.base + index * rows.part_stride,
          .block_stride = rows.block_stride,
          .token_stride = rows.token_stride,
          .head_stride = rows.head_stride,
          .piece_stride = 0,
          .scales = scaled ? reinterpret_cast<std::byte*>(scales_.data() + layer) : nullptr,
          .scale_block_stride = 0,
          .scale_token_stride = 0,
          .scale_head_stride = 0,
          .block_size = rows.block_size,
          .num_heads = rows.num_kv_heads,
          .head_size = rows.head_size,
          .piece_elements = rows.head_size,
          .dtype = rows.dtype,
          .scaling = scaled ? Scaling::per_tensor : Scaling::none};
}

WritePartsParams RealCaches::write(std::size_t layer, const std::byte* key, const std::byte* value,
                                   const Slot* slots, std::int32_t num_tokens) const {
  const RowCache& rows = layers_.rows[layer];
  const std::int64_t row_bytes = itemsize_bytes(source_dtype(layer)) * rows.head_size;
  WritePartsParams params{};
  for (std::int32_t i = 0; i < rows.num_parts; ++i)
    params.parts[i] = {.to = part(layer, i),
                       .source = i == 0 ? key : value,
                       .source_token_stride = row_bytes * rows.num_kv_heads,
                       .source_head_stride = row_bytes,
                       .source_dtype = source_dtype(layer)};
  params.slots = slots;
  params.num_parts = rows.num_parts;
  params.num_tokens = num_tokens;
  return params;
}

}  // namespace lockstep::cuda
