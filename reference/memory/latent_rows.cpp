#include "reference/memory/latent_rows.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "reference/memory/content.h"

namespace lockstep {
namespace {

constexpr std::int64_t kRope = 64;  // elements

struct Tiles {
  std::int64_t latent = 0, tile = 0;  // elements
};
Tiles tiles_of(LatentFormat format) {
  if (format == LatentFormat::fp8_584) return {448, 64};
  return {512, format == LatentFormat::fp8_656 ? 128 : 16};
}

// What the tile that an element lies in is stored as.
const StoredNumbers& numbers_of_tile(std::uint64_t key, LatentFormat format, std::int64_t first,
                                     std::int64_t tile) {
  float largest = 0;
  for (std::int64_t i = first; i < first + tile; ++i)
    largest = std::max(largest, std::abs(source_number(key, static_cast<std::uint64_t>(i))));
  const auto mantissa = static_cast<std::size_t>((largest - 0.5f) * 256);
  switch (format) {
    case LatentFormat::fp8_656:
      return numbers_of_fp8_tile(mantissa, false);
    case LatentFormat::fp8_584:
      return numbers_of_fp8_tile(mantissa, true);
    default:
      return numbers_of_fp4_tile(mantissa);
  }
}

std::size_t index_of_source(std::uint64_t key, std::int64_t i) {
  const auto at = static_cast<std::uint64_t>(i);
  return bf16_index(row_word(key, at / 4, word_shape(DType::bf16)) >> 16 * (at % 4));
}

// Visits the latent's elements: their number, what they are stored as, and the tile's numbers.
template <class Visit>
void for_each_latent(std::uint64_t key, LatentFormat format, Visit visit) {
  const Tiles tiles = tiles_of(format);
  for (std::int64_t first = 0; first < tiles.latent; first += tiles.tile) {
    const StoredNumbers& numbers = numbers_of_tile(key, format, first, tiles.tile);
    for (std::int64_t i = first; i < first + tiles.tile; ++i)
      visit(i, index_of_source(key, i), numbers);
  }
}

void put_fp32(float number, std::span<std::uint8_t> to) {
  for (int byte = 0; byte < 4; ++byte)
    to[byte] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(number) >> 8 * byte);
}

}  // namespace

LatentFormat latent_format(Numbers numbers, const KVCacheSpec& spec) {
  if (numbers == Numbers::words) return LatentFormat::none;
  if (spec.cache_dtype_str == "nvfp4_ds_mla") return LatentFormat::fp4_352;
  const bool is_v4 = spec.model_version == "deepseek_v4";
  if (is_v4 && is_sliding_window(spec.kind)) return LatentFormat::fp8_584;
  if (spec.cache_dtype_str != "fp8_ds_mla") return LatentFormat::none;
  return is_v4 ? LatentFormat::fp8_584 : LatentFormat::fp8_656;
}

std::int64_t latent_elements(LatentFormat format) { return tiles_of(format).latent + kRope; }

std::int64_t latent_data_bytes(LatentFormat format) {
  switch (format) {
    case LatentFormat::fp8_656:
      return 656;
    case LatentFormat::fp8_584:
      return 576;
    default:
      return 352;
  }
}

void draw_latent_row(std::uint64_t key, LatentFormat format, std::span<std::uint8_t> row) {
  const Tiles tiles = tiles_of(format);
  std::ranges::fill(row, std::uint8_t{0});
  for_each_latent(key, format, [&](std::int64_t i, std::size_t index, const StoredNumbers& tile) {
    const std::int64_t number = i / tiles.tile;
    if (format == LatentFormat::fp4_352) {
      row[i / 2] |= static_cast<std::uint8_t>(tile.bytes[index] << 4 * (i % 2));
      row[320 + number % 4 * 8 + number / 4] = tile.scale_bits;
      return;
    }
    row[i] = tile.bytes[index];
    if (format == LatentFormat::fp8_584)
      row[576 + number] = tile.scale_bits;
    else
      put_fp32(tile.scale, row.subspan(512 + 4 * number));
  });
  const std::int64_t rope = format == LatentFormat::fp8_656   ? 528
                            : format == LatentFormat::fp8_584 ? 448
                                                              : 256;
  for (std::int64_t i = 0; i < kRope; ++i) {
    const std::size_t index = index_of_source(key, tiles.latent + i);
    if (format == LatentFormat::fp4_352) {
      row[rope + i] = e4m3_of_source(index).bits;
      continue;
    }
    const std::size_t bits = (index & 0x80) << 8 | 0x3F00 | (index & 0x7F);
    row[rope + 2 * i] = static_cast<std::uint8_t>(bits);
    row[rope + 2 * i + 1] = static_cast<std::uint8_t>(bits >> 8);
  }
}

void decode_latent_row(std::uint64_t key, LatentFormat format, std::span<double> row) {
  LS_CHECK(std::ssize(row) == latent_elements(format), "{} elements", row.size());
  for_each_latent(key, format, [&](std::int64_t i, std::size_t index, const StoredNumbers& tile) {
    row[i] = tile.worth[index];
  });
  for (std::int64_t i = tiles_of(format).latent; i < std::ssize(row); ++i)
    row[i] = format == LatentFormat::fp4_352
                 ? e4m3_of_source(index_of_source(key, i)).worth
                 : double{source_number(key, static_cast<std::uint64_t>(i))};
}

}  // namespace lockstep
