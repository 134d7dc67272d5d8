#include "cuda_backend/device/protocol.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/seeded_random.h"

namespace lockstep::cuda {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;

static std::uint64_t coordinate(std::int32_t layer, std::uint32_t part, std::uint32_t head) {
  return splitmix64((std::uint64_t{static_cast<std::uint32_t>(layer)} << 32) | (part << 16) | head);
}

ShapeMasks shape_masks(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {0x807F807F807F807Full, 0x3F003F003F003F00ull};
    case DType::fp16:
      return {0x83FF83FF83FF83FFull, 0x3800380038003800ull};
    case DType::fp32:
      return {0x807FFFFF807FFFFFull, 0x3F0000003F000000ull};
    case DType::fp8_e4m3:
      return {0x8787878787878787ull, 0x3030303030303030ull};
    case DType::fp8_e5m2:
      return {0x8383838383838383ull, 0x3838383838383838ull};
    case DType::int8:
    case DType::uint8:
      return {~0ull, 0};
  }
  LS_CHECK(false, "dtype {}", static_cast<int>(dtype));
  return {};
}

void fill_row(std::uint64_t content, std::int32_t layer, std::uint32_t part, std::uint32_t head,
              DType dtype, std::span<std::byte> row) {
  const std::uint64_t key = splitmix64(content ^ coordinate(layer, part, head));
  const ShapeMasks masks = shape_masks(dtype);
  for (std::size_t at = 0; at < row.size(); at += 8) {
    const std::uint64_t word = (splitmix64(key + (at / 8 + 1) * kGolden) & masks.keep) | masks.set;
    std::memcpy(row.data() + at, &word, std::min<std::size_t>(8, row.size() - at));
  }
}

// Adds 12 to the exponent of the first element, whose lowest bit follows the mantissa.
void enlarge_query(std::uint64_t content, DType dtype, std::span<std::byte> row) {
  if (content % 8 != 0) return;
  const int mantissa_bits = dtype == DType::fp32 ? 23 : dtype == DType::fp16 ? 10 : 7;
  std::uint32_t bits = 0;
  const auto size = static_cast<std::size_t>(itemsize_bytes(dtype));
  std::memcpy(&bits, row.data(), size);
  bits += 12u << mantissa_bits;
  std::memcpy(row.data(), &bits, size);
}

void fill_poison(std::uint64_t kind, std::int32_t tensor, std::int64_t page, std::int64_t first,
                 std::span<std::byte> bytes) {
  const std::uint64_t key =
      splitmix64(0x706F69736F6E0000ull + kind) ^
      splitmix64(static_cast<std::uint64_t>(tensor) << 32 | static_cast<std::uint64_t>(page));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(first) + i;
    bytes[i] = static_cast<std::byte>((key ^ (at / 8)) >> (8 * (at % 8)));
  }
}

}  // namespace lockstep::cuda
