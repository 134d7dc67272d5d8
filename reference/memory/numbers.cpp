#include "reference/memory/numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "reference/memory/content.h"

namespace lockstep {
namespace {

// The elements that layers, in turn, store as their format's largest number: larger ones saturate.
// A layer that uses another layer's scale gets other bytes.
constexpr std::array<float, 4> kLargest{0.81f, 0.85f, 0.89f, 0.93f};

// The value of a pattern of an 8-bit float; NaN for NaN and infinity.
template <int kExponentBits, int kMantissaBits>
double number_of(int pattern) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const int exponent = (pattern >> kMantissaBits) & ((1 << kExponentBits) - 1);
  const int mantissa = pattern & ((1 << kMantissaBits) - 1);
  const double sign = pattern >= 128 ? -1 : 1;
  const bool top = exponent == (1 << kExponentBits) - 1;
  // e4m3 has one NaN and no infinity, e5m2 has both as IEEE formats do.
  if (top && (kExponentBits == 5 || mantissa == (1 << kMantissaBits) - 1))
    return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - kBias - kMantissaBits);
  return sign * std::ldexp((1 << kMantissaBits) + mantissa, exponent - kBias - kMantissaBits);
}

// int8 patterns are two's complement.
double worth_of(DType dtype, int pattern) {
  if (dtype == DType::fp8_e4m3) return number_of<4, 3>(pattern);
  if (dtype == DType::fp8_e5m2) return number_of<5, 2>(pattern);
  return static_cast<std::int8_t>(pattern);
}

using Worths = std::array<double, 256>;  // by pattern

Worths worths_of(DType dtype) {
  Worths worths;
  for (int pattern = 0; pattern < 256; ++pattern) worths[pattern] = worth_of(dtype, pattern);
  return worths;
}

// The value of an e2m1 pattern, from the list of its numbers; bit 3 is the sign.
double worth_of_e2m1(int pattern) {
  constexpr std::array<double, 8> kMagnitudes{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return pattern < 8 ? kMagnitudes[pattern] : -kMagnitudes[pattern - 8];
}

// The nearest e2m1 pattern of a number. Half-way numbers go to the even pattern; larger ones than 6
// to 6.
int nearest_e2m1(double x) {
  int best = 0;
  while (best < 7) {
    const double half_way = (worth_of_e2m1(best) + worth_of_e2m1(best + 1)) / 2;
    // An odd pattern loses a tie to the next one.
    const bool goes_up = best % 2 == 1 ? std::abs(x) >= half_way : std::abs(x) > half_way;
    if (!goes_up) break;
    ++best;
  }
  return std::signbit(x) ? best + 8 : best;
}

// The nearest pattern of all; of two equally near the even one, or for int8 the one farther from
// zero. A binary search finds the neighbours, then the distances decide.
int nearest_pattern(DType dtype, const Worths& worths, double x) {
  // Worths of one sign rise or fall with their patterns; 0 and 128 are the zeros of floats.
  const int begin = x < 0 ? 128 : 0;
  const bool rises = worths[begin] < worths[begin + 1];
  // Of 128 patterns of one sign, the first whose value is not before x.
  int end = begin;
  for (int step = 64; step > 0; step /= 2)
    if (rises ? worths[end + step - 1] < x : worths[end + step - 1] > x) end += step;
  int best = -1;
  double best_distance = std::numeric_limits<double>::infinity();
  // Both neighbours, and the zero of the number's sign.
  const int zero = dtype == DType::int8 ? 0 : begin;
  for (const int pattern : {zero, std::max(end - 1, begin), end}) {
    const double distance = std::abs(worths[pattern] - x);
    if (std::isnan(distance) || distance > best_distance) continue;
    const auto wins_a_tie = [&] {
      return dtype == DType::int8 ? std::abs(worths[pattern]) > std::abs(worths[best])
                                  : pattern % 2 == 0;
    };
    if (distance == best_distance && !wins_a_tie()) continue;
    best = pattern;
    best_distance = distance;
  }
  LS_CHECK(best >= 0, "no pattern of {} near {}", name_of(dtype), x);
  return best;
}

// The number with this source_index(): exact in fp32.
float source_of(std::size_t index) { return std::bit_cast<float>(source_bits(index) << 16); }

// The table of a format with one scale. scaled(x): x in units of the scale, in fp32 as a kernel
// computes it, so both round the same number.
template <class Scaled>
StoredNumbers stored_in(DType dtype, float scale, Scaled scaled) {
  StoredNumbers stored;
  stored.scale = scale;
  const Worths worths = worths_of(dtype);
  for (std::size_t pattern = 0; pattern < worths.size(); ++pattern)
    stored.values[pattern] = worths[pattern] * scale;
  for (std::size_t i = 0; i < stored.bytes.size(); ++i)
    stored.bytes[i] =
        static_cast<std::uint8_t>(nearest_pattern(dtype, worths, scaled(source_of(i))));
  return stored;
}

using Tables = std::array<StoredNumbers, kLargest.size()>;

// Elements are divided by the layer's scale, in fp32.
Tables tables_of(DType dtype, float largest_number) {
  Tables tables;
  for (std::size_t i = 0; i < kLargest.size(); ++i) {
    const float scale = kLargest[i] / largest_number;
    tables[i] = stored_in(dtype, scale, [&](float x) { return x / scale; });
  }
  return tables;
}

// One table per largest element: its scale maps that element to the format's largest number.
// Kernels multiply with the reciprocal of the scale, which rounds differently from a division.
std::vector<StoredNumbers> rows_of(DType dtype, float largest_number) {
  std::vector<StoredNumbers> rows;
  for (std::size_t magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
    const float scale = std::max(source_of(magnitude) / largest_number, 1e-6f);
    const float inverse = 1.0f / scale;
    rows.push_back(stored_in(dtype, scale, [&](float x) { return x * inverse; }));
  }
  return rows;
}

// Stores elements as e2m1 after multiplication with `inverse`; a stored 1 stands for `unit`.
void store_e2m1(float inverse, double unit, StoredNumbers& stored) {
  for (int pattern = 0; pattern < 16; ++pattern)
    stored.values[pattern] = worth_of_e2m1(pattern) * unit;
  for (std::size_t i = 0; i < stored.bytes.size(); ++i)
    stored.bytes[i] = static_cast<std::uint8_t>(nearest_e2m1(source_of(i) * inverse));
}

// One table per largest element of a group. Group scales are in units of the layer's, rounded to
// e4m3. An element is multiplied with the reciprocal of both.
std::vector<StoredNumbers> groups_of(float layer_scale) {
  const float per_unit = 1.0f / layer_scale;
  const float sixth = 1.0f / 6.0f, unit = 1.0f / per_unit;
  const Worths worths = worths_of(DType::fp8_e4m3);
  std::vector<StoredNumbers> groups;
  for (std::size_t magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
    // The scale maps the largest element to 6, e2m1's largest number.
    const float wanted = source_of(magnitude) * sixth;
    StoredNumbers& group = groups.emplace_back();
    group.scale_bits =
        static_cast<std::uint8_t>(nearest_pattern(DType::fp8_e4m3, worths, per_unit * wanted));
    const auto in_units = static_cast<float>(worths[group.scale_bits]);
    group.scale = in_units * layer_scale;
    store_e2m1(in_units == 0 ? 0 : 1.0f / (in_units * unit), double{in_units} * layer_scale, group);
  }
  return groups;
}

// The nearest whole number from 0 to 15; half-way numbers go up.
int nearest_step(float in_steps) {
  int step = 0;
  while (step < 15 && in_steps + 0.5f >= static_cast<float>(step + 1)) ++step;
  return step;
}

}  // namespace

const StoredNumbers* stored_numbers(Numbers numbers, DType dtype, std::int64_t layer) {
  if (numbers == Numbers::words) return nullptr;
  static const Tables e4m3 = tables_of(DType::fp8_e4m3, 448.0f),
                      e5m2 = tables_of(DType::fp8_e5m2, 57344.0f),
                      int8 = tables_of(DType::int8, 127.0f);
  const auto index = static_cast<std::size_t>(layer) % kLargest.size();
  if (dtype == DType::fp8_e4m3) return &e4m3[index];
  if (dtype == DType::fp8_e5m2) return &e5m2[index];
  return dtype == DType::int8 ? &int8[index] : nullptr;
}

const StoredNumbers* numbers_by_largest(Numbers numbers, KVQuantMode mode) {
  if (numbers == Numbers::words) return nullptr;
  if (mode == KVQuantMode::int8_per_token_head) {
    static const std::vector<StoredNumbers> int8 = rows_of(DType::int8, 127.0f);
    return int8.data();
  }
  if (mode == KVQuantMode::fp8_per_token_head) {
    static const std::vector<StoredNumbers> e4m3 = rows_of(DType::fp8_e4m3, 448.0f);
    return e4m3.data();
  }
  return nullptr;
}

Int4Row int4_row(float lowest, float highest) {
  Int4Row row;
  row.scale = std::max((highest - lowest) / 15.0f, 1e-6f);
  row.zero = nearest_step(-lowest / row.scale);
  return row;
}
std::uint32_t Int4Row::bits() const {
  return std::bit_cast<std::uint32_t>(scale) / 16 * 16 + static_cast<std::uint32_t>(zero);
}
int Int4Row::nearest(float x) const {
  const float inverse = 1.0f / scale;
  const float steps = x * inverse;
  return nearest_step(steps + static_cast<float>(zero));
}
double Int4Row::worth(int stored) const {
  const auto read_with = std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) / 16 * 16);
  return (stored - zero) * static_cast<double>(read_with);
}

// One set of tables per layer scale, for layers in turn.
const StoredNumbers* numbers_by_group(Numbers numbers, KVQuantMode mode, std::int64_t layer) {
  if (numbers == Numbers::words || mode != KVQuantMode::nvfp4) return nullptr;
  constexpr float kLargestNumber = 448.0f * 6.0f;
  static const std::array<std::vector<StoredNumbers>, kLargest.size()> groups{
      groups_of(kLargest[0] / kLargestNumber), groups_of(kLargest[1] / kLargestNumber),
      groups_of(kLargest[2] / kLargestNumber), groups_of(kLargest[3] / kLargestNumber)};
  return groups[static_cast<std::size_t>(layer) % kLargest.size()].data();
}

// The loop finds the smallest power of two that is not below the quotient.
static std::vector<StoredNumbers> fp8_tiles(bool divides) {
  std::vector<StoredNumbers> tiles;
  for (std::size_t magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
    const float largest = source_of(magnitude);
    const float wanted =
        divides ? std::max(largest, 1e-4f) / 448.0f : std::max(largest * (1.0f / 448.0f), 1e-4f);
    int exponent = -126;
    while (std::ldexp(1.0f, exponent) < wanted) ++exponent;
    const float scale = std::ldexp(1.0f, exponent);
    tiles.push_back(stored_in(DType::fp8_e4m3, scale, [&](float x) { return x / scale; }));
    tiles.back().scale_bits = static_cast<std::uint8_t>(exponent + 127);
  }
  return tiles;
}

// 1 / 512 is e4m3's smallest number: a smaller scale would be 0.
static std::vector<StoredNumbers> fp4_tiles() {
  std::vector<StoredNumbers> tiles;
  const Worths worths = worths_of(DType::fp8_e4m3);
  for (std::size_t magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
    const float wanted = std::max(source_of(magnitude) * (1.0f / 6.0f), 1.0f / 512.0f);
    StoredNumbers& tile = tiles.emplace_back();
    tile.scale_bits = static_cast<std::uint8_t>(nearest_pattern(DType::fp8_e4m3, worths, wanted));
    tile.scale = static_cast<float>(worths[tile.scale_bits]);
    store_e2m1(1.0f / tile.scale, tile.scale, tile);
  }
  return tiles;
}

const StoredNumbers& numbers_of_fp8_tile(std::size_t magnitude, bool divides) {
  static const std::vector<StoredNumbers> products = fp8_tiles(false), quotients = fp8_tiles(true);
  return (divides ? quotients : products)[magnitude];
}

const StoredNumbers& numbers_of_fp4_tile(std::size_t magnitude) {
  static const std::vector<StoredNumbers> tiles = fp4_tiles();
  return tiles[magnitude];
}

E4m3 e4m3_of_source(std::size_t index) {
  static const StoredNumbers whole = stored_in(DType::fp8_e4m3, 1.0f, [](float x) { return x; });
  return {whole.bytes[index], whole.worth(index)};
}

namespace {

constexpr std::int64_t kRope = 64;  // elements

struct Tiles {
  std::int64_t latent = 0, tile = 0;  // elements
};
Tiles tiles_of(LatentFormat format) {
  if (format == LatentFormat::fp8_584) return {448, 64};
  return {512, format == LatentFormat::fp8_656 ? 128 : 16};
}

// source_index() of element i of the row.
std::size_t index_of_source(std::uint64_t key, std::int64_t i) {
  const auto at = static_cast<std::uint64_t>(i);
  return source_index(row_word(key, at / 4, {}) >> 16 * (at % 4));
}

// The stored numbers of the tile [first, first + tile): they follow from its largest element.
const StoredNumbers& numbers_of_tile(std::uint64_t key, LatentFormat format, std::int64_t first,
                                     std::int64_t tile) {
  std::size_t largest = 0;
  for (std::int64_t i = first; i < first + tile; ++i)
    largest = std::max(largest, index_of_source(key, i) % kMagnitudes);
  switch (format) {
    case LatentFormat::fp8_656:
      return numbers_of_fp8_tile(largest, false);
    case LatentFormat::fp8_584:
      return numbers_of_fp8_tile(largest, true);
    default:
      return numbers_of_fp4_tile(largest);
  }
}

// Visits the latent's elements: number in the row, source_index(), and the tile's stored numbers.
template <class Visit>
void for_each_latent(std::uint64_t key, LatentFormat format, Visit visit) {
  const Tiles tiles = tiles_of(format);
  for (std::int64_t first = 0; first < tiles.latent; first += tiles.tile) {
    const StoredNumbers& numbers = numbers_of_tile(key, format, first, tiles.tile);
    for (std::int64_t i = first; i < first + tiles.tile; ++i)
      visit(i, index_of_source(key, i), numbers);
  }
}

// Little-endian.
void put_fp32(float number, std::span<std::uint8_t> to) {
  for (int byte = 0; byte < 4; ++byte)
    to[byte] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(number) >> 8 * byte);
}

}  // namespace

// DeepSeek-V4's sliding windows use the 584-byte row, unless cache_dtype_str is nvfp4_ds_mla.
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

// The latent with its scales, then the rope part. Byte positions are those of the table in the
// header: scales of 352-byte rows are interleaved in four groups of eight.
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
    const std::uint32_t bits = source_bits(index);
    row[rope + 2 * i] = static_cast<std::uint8_t>(bits);
    row[rope + 2 * i + 1] = static_cast<std::uint8_t>(bits >> 8);
  }
}

// The rope part of 584- and 656-byte rows is stored in bf16, without loss.
void decode_latent_row(std::uint64_t key, LatentFormat format, std::span<double> row) {
  LS_CHECK(std::ssize(row) == latent_elements(format), "{} elements", row.size());
  for_each_latent(key, format, [&](std::int64_t i, std::size_t index, const StoredNumbers& tile) {
    row[i] = tile.worth(index);
  });
  for (std::int64_t i = tiles_of(format).latent; i < std::ssize(row); ++i)
    row[i] = format == LatentFormat::fp4_352
                 ? e4m3_of_source(index_of_source(key, i)).worth
                 : double{source_number(key, static_cast<std::uint64_t>(i))};
}

}  // namespace lockstep
