#include "cuda_backend/step/row_parts.h"

#include <fmt/format.h>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

constexpr std::int32_t kMaxAttendedHeadSize = 576;  // of split_attention.cuh
constexpr std::int32_t kScaleBytes = sizeof(float);

// The scale of a layer's quantised cache: rule (13).
float scale_of_layer(std::int32_t layer, DType dtype, Scaling scaling) {
  constexpr float kStoredAsLargest[] = {0.81f, 0.85f, 0.89f, 0.93f};
  const float largest = scaling == Scaling::fp4_groups ? 2688.0f
                        : dtype == DType::fp8_e4m3     ? 448.0f
                        : dtype == DType::fp8_e5m2     ? 57344.0f
                                                       : 127.0f;
  return kStoredAsLargest[layer % 4] / largest;
}

bool is_scaled(DType dtype) {
  return dtype == DType::fp8_e4m3 || dtype == DType::fp8_e5m2 || dtype == DType::int8;
}

bool has_row_scales(KVQuantMode mode) {
  return mode == KVQuantMode::int8_per_token_head || mode == KVQuantMode::fp8_per_token_head ||
         mode == KVQuantMode::int4_per_token_head;
}

// Elements of a row that is followed by its scale.
std::int32_t elements_before_scale(KVQuantMode mode, std::int32_t row_bytes) {
  return (row_bytes - kScaleBytes) * (mode == KVQuantMode::int4_per_token_head ? 2 : 1);
}

// The format of sparse MLA's rows and their elements; none: another kind of row.
struct LatentRows {
  Scaling scaling = Scaling::none;
  std::int32_t elements = 0;
};
LatentRows latent_rows(const KVCacheSpec& spec, const RowCache& rows) {
  if (spec.cache_dtype_str == "nvfp4_ds_mla") return {Scaling::latent_fp4_rows, 576};
  if (rows.num_parts != 1 || rows.dtype != DType::uint8) return {};
  if (rows.row_bytes == 584 && spec.model_version == "deepseek_v4")
    return {Scaling::latent_fp8_areas, 512};
  if (rows.row_bytes == 656 && spec.cache_dtype_str == "fp8_ds_mla")
    return {Scaling::latent_fp8_rows, 576};
  return {};
}

// Visits each layer in the order of LayerCaches::rows.
template <class Visit>
void for_each_layer(const KVCacheConfig& plan, const LayerCaches& layers, Visit visit) {
  std::size_t layer = 0;
  for (const KVCacheGroupSpec& group : plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i, ++layer)
      visit(group.layer_names[i], group.layer_spec(i), layers.rows[layer]);
}

// Elements of a row of e2m1 pairs followed by the scales of their groups.
std::int32_t elements_of_fp4(std::int32_t row_bytes) { return row_bytes * 16 / 9; }

// The areas of a layer's nvfp4 rows in a dense block, in FlashInfer's order: [K data | K scales |
// V data | V scales], each by tokens or by heads like the tensor.
struct Fp4Areas {
  std::int32_t tokens, heads, data, scales;  // of one part of a block; bytes of a row
  bool is_by_token;
  explicit Fp4Areas(const RowCache& rows)
      : tokens(static_cast<std::int32_t>(rows.block_size.value)),
        heads(rows.num_kv_heads),
        data(elements_of_fp4(rows.row_bytes) / 2),
        scales(rows.row_bytes - data),
        is_by_token(rows.token_stride != rows.row_bytes) {}
  std::int64_t part_bytes() const { return std::int64_t{tokens} * heads * (data + scales); }
};

bool is_dense_block(const RowCache& rows) {
  const Fp4Areas areas(rows);
  const std::int64_t slots = 2 * rows.num_kv_heads;
  const std::int64_t slot_stride =
      areas.is_by_token ? rows.row_bytes : std::int64_t{areas.tokens} * rows.row_bytes;
  if (areas.is_by_token && rows.token_stride != slots * rows.row_bytes) return false;
  return rows.part_stride == rows.num_kv_heads * slot_stride &&
         (rows.num_kv_heads == 1 || rows.head_stride == slot_stride);
}

std::string why_not_fp4(const std::string& name, const KVCacheSpec& spec, const RowCache& rows,
                        CacheLayout layout) {
  if (rows.num_parts != 2)
    return fmt::format("numbers: {} is quantised by nvfp4, which takes K and V rows", name);
  if (elements_of_fp4(rows.row_bytes) != spec.head_size || spec.head_size > kMaxAttendedHeadSize)
    return fmt::format(
        "numbers: {} has heads of {} elements; nvfp4 takes a multiple of 16, up to {}", name,
        spec.head_size, kMaxAttendedHeadSize);
  if (!is_overlaid(layout))
    return fmt::format(
        "numbers: {} is quantised by nvfp4, whose scales lie where vLLM 0.33.0 puts them for a "
        "Hopper GPU; choose --engine vllm-0.33.0",
        name);
  if (is_dense_block(rows)) return {};
  return fmt::format(
      "numbers: {} is quantised by nvfp4, whose areas take a block that is dense in its layer; "
      "choose LBNHC, LBHNC, BLNHC or BLHNC",
      name);
}

std::string why_not_layer(const std::string& name, const KVCacheSpec& spec, const RowCache& rows,
                          CacheLayout layout) {
  if (rows.row_bytes == 0) return {};
  const KVQuantMode mode = spec.kv_quant_mode;
  if (const LatentRows latent = latent_rows(spec, rows); latent.scaling != Scaling::none) {
    const std::int32_t unit = latent.scaling == Scaling::latent_fp8_rows    ? 4
                              : latent.scaling == Scaling::latent_fp8_areas ? 2
                                                                            : 1;
    if (rows.unit_bytes % unit == 0) return {};
    return fmt::format("numbers: rows of {} must be aligned to {} bytes; choose such a page size",
                       name, unit);
  }
  if (mode == KVQuantMode::nvfp4) return why_not_fp4(name, spec, rows, layout);
  const std::int32_t head_size =
      has_row_scales(mode) ? elements_before_scale(mode, rows.head_size) : rows.head_size;
  if (head_size > kMaxAttendedHeadSize)
    return fmt::format("numbers: {} has heads of {} elements, the kernel takes {}", name, head_size,
                       kMaxAttendedHeadSize);
  if (mode == KVQuantMode::none || mode == KVQuantMode::fp8_per_tensor) return {};
  if (!has_row_scales(mode))
    return fmt::format("numbers: {} is quantised by {}, which has no kernel here", name,
                       name_of(mode));
  if (rows.num_parts != 2 || itemsize_bytes(rows.dtype) != 1)
    return fmt::format("numbers: {} is quantised by {}, which takes K and V rows of 8-bit elements",
                       name, name_of(mode));
  if (head_size != spec.head_size)
    return fmt::format("numbers: {} has heads of {} elements, an odd number for {}", name,
                       spec.head_size, name_of(mode));
  if (rows.unit_bytes % kScaleBytes != 0)
    return fmt::format(
        "numbers: rows of {} have {} elements followed by a scale, which must be aligned to 4 "
        "bytes; choose head and page sizes that are multiples of 4",
        name, head_size);
  return {};
}

}  // namespace

RowParts::RowParts(Device& device, const BackendConfig& config, const LayerCaches& layers)
    : is_real_(config.numbers == Numbers::real),
      num_blocks_(config.plan.num_blocks),
      layers_(layers),
      scales_(device, "scales of layers") {
  std::vector<float> scales;
  for_each_layer(
      config.plan, layers, [&](const std::string&, const KVCacheSpec& spec, const RowCache& rows) {
        formats_.push_back(format_of(rows, spec));
        const RowFormat& format = formats_.back();
        LS_CHECK(is_real_ || itemsize_bytes(format.dtype) * format.head_size == rows.row_bytes,
                 "layer {}: {} elements in rows of {} bytes", rows.layer, format.head_size,
                 rows.row_bytes);
        scales.push_back(scale_of_layer(rows.layer, format.dtype, format.scaling));
      });
  if (is_real_) scales_.upload(scales);
}

std::optional<std::string> RowParts::why_not(const BackendConfig& config,
                                             const LayerCaches& layers) {
  std::string reason;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    if (group.spec.bounded_replay || is_ring(group.spec.kind) || has_compressed_rows(group))
      return "numbers: rings, compressed rows and windows that are computed again have no kernel "
             "of an engine here; replay them with --numbers words";
    else if (reads_beside_tokens(group.spec))
      return "numbers: cross attention, sinks and reference windows have no kernel of an engine "
             "here; replay them with --numbers words";
  for_each_layer(config.plan, layers,
                 [&](const std::string& name, const KVCacheSpec& spec, const RowCache& rows) {
                   if (reason.empty()) reason = why_not_layer(name, spec, rows, config.layout);
                 });
  if (reason.empty()) return std::nullopt;
  return reason;
}

RowParts::RowFormat RowParts::format_of(const RowCache& rows, const KVCacheSpec& spec) const {
  const KVQuantMode mode = spec.kv_quant_mode;
  if (!is_real_)
    return {.dtype = rows.dtype, .scaling = Scaling::none, .head_size = rows.head_size};
  if (const LatentRows latent = latent_rows(spec, rows); latent.scaling != Scaling::none)
    return {.dtype = DType::uint8, .scaling = latent.scaling, .head_size = latent.elements};
  if (has_row_scales(mode))
    return {.dtype = rows.dtype,
            .scaling = mode == KVQuantMode::int4_per_token_head ? Scaling::int4_rows
                                                                : Scaling::per_token_head,
            .head_size = elements_before_scale(mode, rows.head_size)};
  if (mode == KVQuantMode::nvfp4)
    return {.dtype = DType::uint8,
            .scaling = Scaling::fp4_groups,
            .head_size = elements_of_fp4(rows.row_bytes)};
  return {.dtype = rows.dtype,
          .scaling = is_scaled(rows.dtype) ? Scaling::per_tensor : Scaling::none,
          .head_size = rows.head_size};
}

DType RowParts::source_dtype(std::size_t layer) const {
  const RowFormat& format = formats_[layer];
  return format.scaling == Scaling::none ? format.dtype : DType::bf16;
}

ShapeMasks RowParts::source_masks(std::size_t layer) const {
  if (formats_[layer].scaling == Scaling::none) return shape_masks(source_dtype(layer));
  return {0x8A7F8A7F8A7F8A7Full, 0x3500350035003500ull};
}

std::int64_t RowParts::num_kernel_blocks(std::size_t layer) const {
  const auto table = static_cast<std::size_t>(layers_.table_of_layer[layer]);
  const std::size_t num_groups = layers_.blocks_per_kv_block.size();
  if (table < num_groups) return num_blocks_ * layers_.blocks_per_kv_block[table];
  const MappedTable& mapped = layers_.mapped_tables[table - num_groups];
  return (num_blocks_ - 1) * mapped.kernel_block_stride + mapped.blocks_per_kv_block;
}

PartLayout RowParts::part(std::size_t layer, std::int32_t index) const {
  const RowCache& rows = layers_.rows[layer];
  const RowFormat& format = formats_[layer];
  PartLayout part{.base = rows.base + index * rows.part_stride,
                  .block_stride = rows.block_stride,
                  .token_stride = rows.token_stride,
                  .head_stride = rows.head_stride,
                  .piece_stride = 0,
                  .block_size = rows.block_size,
                  .num_heads = rows.num_kv_heads,
                  .head_size = format.head_size,
                  .piece_elements = format.head_size,
                  .dtype = format.dtype,
                  .scaling = format.scaling,
                  .layer = static_cast<std::int32_t>(layer),
                  .num_blocks = static_cast<std::int32_t>(num_kernel_blocks(layer))};
  if (format.scaling == Scaling::per_tensor)
    part.scales = reinterpret_cast<std::byte*>(scales_.data() + layer);
  if (format.scaling == Scaling::per_token_head || format.scaling == Scaling::int4_rows) {
    part.scales = part.base + rows.row_bytes - kScaleBytes;
    part.scale_block_stride = rows.block_stride;
    part.scale_token_stride = rows.token_stride;
    part.scale_head_stride = rows.head_stride;
  }
  if (format.scaling >= kFirstLatent) {
    const bool is_apart = format.scaling == Scaling::latent_fp8_areas;
    constexpr std::int64_t kData = 576, kScalesOfRow = 8;
    part.scales = part.base + (is_apart ? kData * rows.block_size.value
                               : format.scaling == Scaling::latent_fp8_rows ? 512
                                                                            : 320);
    if (is_apart) part.token_stride = kData;
    part.scale_block_stride = rows.block_stride;
    part.scale_token_stride = is_apart ? kScalesOfRow : rows.token_stride;
  }
  if (format.scaling == Scaling::fp4_groups) {
    const Fp4Areas areas(rows);
    const std::int64_t tokens = areas.is_by_token ? areas.heads : 1;  // in rows
    const std::int64_t heads = areas.is_by_token ? 1 : areas.tokens;
    part.base = rows.base + index * areas.part_bytes();
    part.token_stride = tokens * areas.data;
    part.head_stride = heads * areas.data;
    part.scales = part.base + std::int64_t{areas.tokens} * areas.heads * areas.data;
    part.scale_block_stride = rows.block_stride;
    part.scale_token_stride = tokens * areas.scales;
    part.scale_head_stride = heads * areas.scales;
    part.layer_scale = scales_.data() + layer;
  }
  return part;
}

WritePartsParams RowParts::write(std::size_t layer, const std::byte* key, const std::byte* value,
                                 const Slot* slots, std::int32_t num_tokens) const {
  const RowCache& rows = layers_.rows[layer];
  const std::int64_t row_bytes = itemsize_bytes(source_dtype(layer)) * head_size(layer);
  WritePartsParams params{};
  for (std::int32_t i = 0; i < rows.num_parts; ++i)
    params.parts[i] = {.to = part(layer, i),
                       .source = i == 0 ? key : value,
                       .source_row_stride = row_bytes * rows.num_kv_heads,
                       .source_head_stride = row_bytes,
                       .source_dtype = source_dtype(layer)};
  params.slots = slots;
  params.token_rows = rows.token_rows;
  params.num_parts = rows.num_parts;
  params.num_rows = source_rows(rows.token_rows, num_tokens);
  return params;
}

}  // namespace lockstep::cuda
