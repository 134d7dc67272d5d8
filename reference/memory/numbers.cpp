#include "reference/memory/numbers.h"

#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"

namespace lockstep {
namespace {

constexpr std::array<float, 4> kScales{0.0081f, 0.0085f, 0.0089f, 0.0093f};

// What a pattern of an 8-bit float is worth; NaN where it is none or not finite.
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

double worth_of(DType dtype, int pattern) {
  if (dtype == DType::fp8_e4m3) return number_of<4, 3>(pattern);
  if (dtype == DType::fp8_e5m2) return number_of<5, 2>(pattern);
  return static_cast<std::int8_t>(pattern);
}

// The nearest of all; of two as near the even one, of int8 the one farther from zero.
int nearest_pattern(DType dtype, double x) {
  int best = -1;
  double best_distance = std::numeric_limits<double>::infinity();
  for (int pattern = 0; pattern < 256; ++pattern) {
    const double distance = std::abs(worth_of(dtype, pattern) - x);
    if (std::isnan(distance) || distance > best_distance) continue;
    const bool wins_a_tie =
        dtype == DType::int8 ? std::abs(worth_of(dtype, pattern)) > std::abs(worth_of(dtype, best))
                             : pattern % 2 == 0;
    if (distance == best_distance && !wins_a_tie) continue;
    best = pattern;
    best_distance = distance;
  }
  LS_CHECK(best >= 0, "no pattern of {} near {}", name_of(dtype), x);
  return best;
}

// A bf16 number of [0.5, 1) by its mantissa.
float magnitude_of(int mantissa) { return 0.5f + static_cast<float>(mantissa) / 256.0f; }

// scaled(x): x in units of the scale, as fp32 has it.
template <class Scaled>
StoredNumbers stored_in(DType dtype, float scale, Scaled scaled) {
  StoredNumbers stored;
  stored.scale = scale;
  for (int i = 0; i < 256; ++i) {
    const float magnitude = magnitude_of(i % kMantissas);
    const int pattern = nearest_pattern(dtype, scaled(i < kMantissas ? magnitude : -magnitude));
    stored.bytes[i] = static_cast<std::uint8_t>(pattern);
    stored.worth[i] = worth_of(dtype, pattern) * scale;
  }
  return stored;
}

using Tables = std::array<StoredNumbers, kScales.size()>;

Tables tables_of(DType dtype) {
  Tables tables;
  for (std::size_t i = 0; i < kScales.size(); ++i)
    tables[i] = stored_in(dtype, kScales[i], [&](float x) { return x / kScales[i]; });
  return tables;
}

// One scale brings the row's largest element to the format's largest number; what is multiplied
// with is its reciprocal.
std::vector<StoredNumbers> rows_of(DType dtype, float largest_number) {
  std::vector<StoredNumbers> rows;
  for (int mantissa = 0; mantissa < kMantissas; ++mantissa) {
    const float scale = magnitude_of(mantissa) / largest_number;
    const float inverse = 1.0f / scale;
    rows.push_back(stored_in(dtype, scale, [&](float x) { return x * inverse; }));
  }
  return rows;
}

}  // namespace

const StoredNumbers* stored_numbers(Numbers numbers, DType dtype, std::int64_t layer) {
  if (numbers == Numbers::words) return nullptr;
  static const Tables e4m3 = tables_of(DType::fp8_e4m3), e5m2 = tables_of(DType::fp8_e5m2),
                      int8 = tables_of(DType::int8);
  const auto index = static_cast<std::size_t>(layer) % kScales.size();
  switch (dtype) {
    case DType::fp8_e4m3:
      return &e4m3[index];
    case DType::fp8_e5m2:
      return &e5m2[index];
    case DType::int8:
      return &int8[index];
    default:
      return nullptr;
  }
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

}  // namespace lockstep
