#include "reference/memory/attention_oracle.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace lockstep {
namespace {

// What a shaped element is worth, as a double: its exponent says [0.5, 1), which is 1022 there;
// sign and mantissa keep their place at the top of their fields.
template <int kExponentBits, int kMantissaBits>
double shaped_number(std::uint64_t bits) {
  const std::uint64_t mantissa = bits & ((std::uint64_t{1} << kMantissaBits) - 1);
  const std::uint64_t sign = (bits >> (kExponentBits + kMantissaBits)) & 1;
  return std::bit_cast<double>(sign << 63 | std::uint64_t{1022} << 52 |
                               mantissa << (52 - kMantissaBits));
}

// Whole words first: a fixed number of elements is decoded without a loop.
template <int kExponentBits, int kMantissaBits>
void decode_words(std::uint64_t key, WordShape shape, std::span<double> row) {
  constexpr int bits = 1 + kExponentBits + kMantissaBits;
  constexpr std::size_t per_word = 64 / bits;
  const std::size_t num_whole = row.size() / per_word;
  double* out = row.data();
  for (std::size_t i = 0; i < num_whole; ++i, out += per_word) {
    const std::uint64_t word = row_word(key, i, shape);
    for (std::size_t j = 0; j < per_word; ++j)
      out[j] = shaped_number<kExponentBits, kMantissaBits>(word >> (j * bits));
  }
  if (num_whole * per_word == row.size()) return;
  std::uint64_t word = row_word(key, num_whole, shape);
  for (double* const end = row.data() + row.size(); out < end; ++out, word >>= bits)
    *out = shaped_number<kExponentBits, kMantissaBits>(word);
}

// A whole row, word by word.
void decode_row(std::uint64_t key, DType dtype, std::span<double> row) {
  const WordShape shape = word_shape(dtype);
  switch (dtype) {
    case DType::bf16:
      return decode_words<8, 7>(key, shape, row);
    case DType::fp16:
      return decode_words<5, 10>(key, shape, row);
    case DType::fp32:
      return decode_words<8, 23>(key, shape, row);
    case DType::fp8_e4m3:
      return decode_words<4, 3>(key, shape, row);
    case DType::fp8_e5m2:
      return decode_words<5, 2>(key, shape, row);
    default:
      LS_CHECK(false, "dtype {} holds no fractions", name_of(dtype));
  }
}

// A row of the layer as attention gets it from the cache.
void decode_row(std::uint64_t key, const ModelLayer& layer, std::span<double> row) {
  if (layer.latent != LatentFormat::none) return decode_latent_row(key, layer.latent, row);
  const WordShape shape = shape_of_row(key, layer.words);
  for (std::size_t i = 0; shape.is_int4 && i < row.size(); ++i)
    row[i] = shape.int4.worth(shape.int4.nearest(source_number(key, i)));
  if (shape.is_int4) return;
  const StoredNumbers* stored = shape.stored;
  const bool by_group = layer.words.by_group != nullptr;
  if (stored == nullptr && !by_group) return decode_row(key, layer.dtype, row);
  const WordShape bf16 = word_shape(DType::bf16);
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (by_group && i % 16 == 0) stored = &numbers_of_group(key, i / 16, layer.words);
    row[i] = stored->worth[bf16_index(row_word(key, i / 4, bf16) >> 16 * (i % 4))];
  }
}

}  // namespace

double row_element(std::uint64_t key, std::int64_t i, DType dtype) {
  std::vector<double> row(static_cast<std::size_t>(i) + 1);
  decode_row(key, dtype, row);
  return row.back();
}

bool has_attention_oracle(const ModelLayer& layer) {
  return layer.layout.num_kv > 0 && !is_hidden_state(layer.layout.kind) &&
         (layer.latent != LatentFormat::none || layer.words.stored != nullptr ||
          layer.words.by_largest != nullptr || layer.words.by_group != nullptr ||
          layer.words.is_int4 || (layer.dtype != DType::int8 && layer.dtype != DType::uint8));
}

std::vector<double> attention_output(const ModelLayer& layer, std::span<const ContentId> contents,
                                     ContentId query, std::int32_t queries_per_kv,
                                     DType query_dtype) {
  LS_CHECK(has_attention_oracle(layer) && !contents.empty(), "layer {}", layer.name);
  const LayerLayout& at = layer.layout;
  const auto d = static_cast<std::size_t>(layer.head_size);
  std::vector<double> output;
  std::vector<double> q(d), row(d), mean(d), weights(contents.size());
  for (std::int64_t head = 0; head < at.num_kv_heads * queries_per_kv; ++head) {
    const std::int64_t kv_head = head / queries_per_kv;
    decode_row(
        row_key(query, coordinate(layer.share.layer, kPartQ, layer.share.first_query_head + head)),
        query_dtype, q);
    const std::uint64_t k_coord = layer.coords[kv_head];
    for (std::size_t p = 0; p < contents.size(); ++p) {
      decode_row(row_key(contents[p], k_coord), layer, row);
      weights[p] = std::inner_product(q.begin(), q.end(), row.begin(), 0.0) /
                   std::sqrt(static_cast<double>(d));
    }
    const double top = *std::ranges::max_element(weights);
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(weight - top);
    const std::int64_t v_part = at.num_kv == 2 ? kPartV : kPartK;
    const std::uint64_t v_coord = layer.coords[v_part * at.num_kv_heads + kv_head];
    std::ranges::fill(mean, 0.0);
    for (std::size_t p = 0; p < contents.size(); ++p) {
      decode_row(row_key(contents[p], v_coord), layer, row);
      const double share = weights[p] / total;
      for (std::size_t i = 0; i < d; ++i) mean[i] += share * row[i];
    }
    output.insert(output.end(), mean.begin(), mean.end());
  }
  return output;
}

double attention_tolerance(std::int64_t head_size, std::int64_t positions) {
  const double u = std::ldexp(1.0, -24);
  const auto d = static_cast<double>(head_size);
  const auto n = static_cast<double>(positions);
  const double score = (d + 2) * std::sqrt(d) * u;
  return 2 * (2 * score + 4 * u + 2 * n * u + 2 * u);
}

double real_attention_tolerance(std::int64_t head_size, std::int64_t positions) {
  const double u = std::ldexp(1.0, -24);
  const auto d = static_cast<double>(head_size);
  const auto n = static_cast<double>(positions);
  const double tiles = n / 32 + 1;
  const double score = kStoredMax * std::sqrt(d);
  return 2 * ((d + 4) * score + 4 * (2 * tiles + 1) + 2 * score + n + 4) * u * kStoredMax;
}

double rounding_tolerance(DType query_dtype) {
  if (query_dtype == DType::fp32) return 0;
  return 3 * kStoredMax * std::ldexp(1.0, query_dtype == DType::bf16 ? -9 : -12);
}

}  // namespace lockstep
