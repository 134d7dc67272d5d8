#include "reference/memory/attention_oracle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "reference/memory/row_words.h"

namespace lockstep {
namespace {

// The value of a shaped element as a double: its number is in +-[0.5, 1), whose exponent field is
// 1022. Sign and mantissa move to the top of their fields.
template <int kExponentBits, int kMantissaBits>
double shaped_number(std::uint64_t bits) {
  const std::uint64_t mantissa = bits & ((std::uint64_t{1} << kMantissaBits) - 1);
  const std::uint64_t sign = (bits >> (kExponentBits + kMantissaBits)) & 1;
  return std::bit_cast<double>(sign << 63 | std::uint64_t{1022} << 52 |
                               mantissa << (52 - kMantissaBits));
}

// Decodes a row of words in pieces. Element: an unsigned integer of the element's size.
template <class Element, int kExponentBits, int kMantissaBits>
void decode_words(std::uint64_t key, const WordShape& shape, std::span<double> row) {
  static_assert(8 * sizeof(Element) == 1 + kExponentBits + kMantissaBits);
  constexpr std::size_t kPerWord = 8 / sizeof(Element);
  std::array<std::uint64_t, kWordsAtOnce> words;
  std::array<Element, kWordsAtOnce * kPerWord> elements;
  for (std::size_t first = 0; first < row.size(); first += elements.size()) {
    const std::size_t count = std::min(elements.size(), row.size() - first);
    fill_row_words(key, first / kPerWord, shape,
                   std::span(words).first((count + kPerWord - 1) / kPerWord));
    std::memcpy(elements.data(), words.data(), count * sizeof(Element));
    for (std::size_t i = 0; i < count; ++i)
      row[first + i] = shaped_number<kExponentBits, kMantissaBits>(elements[i]);
  }
}

// Decodes a row of words in a floating-point dtype.
void decode_row(std::uint64_t key, DType dtype, std::span<double> row) {
  const WordShape shape = word_shape(dtype);
  switch (dtype) {
    case DType::bf16:
      return decode_words<std::uint16_t, 8, 7>(key, shape, row);
    case DType::fp16:
      return decode_words<std::uint16_t, 5, 10>(key, shape, row);
    case DType::fp32:
      return decode_words<std::uint32_t, 8, 23>(key, shape, row);
    case DType::fp8_e4m3:
      return decode_words<std::uint8_t, 4, 3>(key, shape, row);
    case DType::fp8_e5m2:
      return decode_words<std::uint8_t, 5, 2>(key, shape, row);
    default:
      LS_CHECK(false, "dtype {} holds no fractions", name_of(dtype));
  }
}

// Decodes a row of the layer as attention reads it from the cache: quantized and read back.
void decode_row(std::uint64_t key, const ModelLayer& layer, std::span<double> row) {
  if (layer.latent != LatentFormat::none) return decode_latent_row(key, layer.latent, row);
  const WordShape& of = layer.words;
  // Most rows, without a copy of the shape.
  if (of.stored == nullptr && of.by_largest == nullptr && of.by_group == nullptr && !of.is_int4)
    return decode_row(key, layer.dtype, row);
  const WordShape shape = shape_of_row(key, of);
  for (std::size_t i = 0; shape.is_int4 && i < row.size(); ++i)
    row[i] = shape.int4.worth(shape.int4.nearest(source_number(key, i)));
  // An int4 row has no other elements.
  if (shape.is_int4) return;
  const StoredNumbers* stored = shape.stored;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (of.by_group != nullptr && i % 16 == 0) stored = &numbers_of_group(key, i / 16, of);
    row[i] = stored->worth(source_index(row_word(key, i / 4, {}) >> 16 * (i % 4)));
  }
}

// Dot products of one row with kRowsAtOnce consecutive rows, each a sum in order. Independent sums
// hide the latency of an addition.
constexpr std::size_t kRowsAtOnce = 8;
using Dots = std::array<double, kRowsAtOnce>;
Dots dots_with(const double* query, const double* rows, std::size_t size) {
  Dots sums{};
  for (std::size_t i = 0; i < size; ++i)
    for (std::size_t r = 0; r < kRowsAtOnce; ++r) sums[r] += query[i] * rows[r * size + i];
  return sums;
}

}  // namespace

std::span<const double> DecodedRows::read(std::uint64_t key, const ModelLayer& layer,
                                          std::span<double> room) {
  if (!keeps_rows_) {
    decode_row(key, layer, room);
    return room;
  }
  slots_.resize(kSlots);
  Slot& slot = slots_[key % kSlots];
  if (slot.key != key || slot.row.size() != room.size()) {
    slot.key = key;
    slot.row.resize(room.size());
    decode_row(key, layer, slot.row);
  }
  return slot.row;
}

double row_element(std::uint64_t key, std::int64_t i, DType dtype) {
  std::vector<double> row(static_cast<std::size_t>(i) + 1);
  decode_row(key, dtype, row);
  return row.back();
}

// Integer caches have values only with a scale (`stored`, by row, by group or int4).
bool has_attention_oracle(const ModelLayer& layer) {
  return layer.num_kv > 0 && !is_hidden_state(layer.kind) &&
         (layer.latent != LatentFormat::none || layer.words.stored != nullptr ||
          layer.words.by_largest != nullptr || layer.words.by_group != nullptr ||
          layer.words.is_int4 || (layer.dtype != DType::int8 && layer.dtype != DType::uint8));
}

// Scores of all query heads, softmax with the maximum subtracted, then the mean of V. MLA uses the
// latent as K and V.
void attend(const ModelLayer& layer, std::int32_t kv_head, std::span<const ContentId> contents,
            ContentId query, std::int32_t queries_per_kv, DecodedRows& decoded, DType query_dtype,
            double first_factor, std::span<double> output) {
  LS_CHECK(has_attention_oracle(layer) && !contents.empty(), "layer {}", layer.name);
  const auto d = static_cast<std::size_t>(layer.head_size);
  const std::size_t count = contents.size(), heads = static_cast<std::size_t>(queries_per_kv);
  LS_CHECK(output.size() == heads * d, "{} elements for {} heads of {}", output.size(), heads, d);
  std::vector<double> queries(heads * d), rows(kRowsAtOnce * d), weights(heads * count);
  for (std::size_t h = 0; h < heads; ++h) {
    const std::int64_t head = std::int64_t{kv_head} * queries_per_kv + static_cast<std::int64_t>(h);
    const std::uint64_t q_coord =
        coordinate(layer.share.layer, kPartQ, layer.share.first_query_head + head);
    decode_row(row_key(query, q_coord), query_dtype, std::span(queries).subspan(h * d, d));
    queries[h * d] *= first_factor;
  }
  for (std::size_t p = 0; p < count; p += kRowsAtOnce) {
    const std::size_t n = std::min(kRowsAtOnce, count - p);
    for (std::size_t r = 0; r < n; ++r) {
      const auto room = std::span(rows).subspan(r * d, d);
      const auto row = decoded.read(row_key(contents[p + r], layer.coords[kv_head]), layer, room);
      if (row.data() != room.data()) std::ranges::copy(row, room.begin());
    }
    for (std::size_t h = 0; h < heads; ++h) {
      // Rows past n hold those of the previous round: their dots are computed and not used.
      const Dots dots = dots_with(queries.data() + h * d, rows.data(), d);
      for (std::size_t r = 0; r < n; ++r)
        weights[h * count + p + r] = dots[r] / std::sqrt(static_cast<double>(d));
    }
  }
  for (std::size_t h = 0; h < heads; ++h) {
    const auto of_head = std::span(weights).subspan(h * count, count);
    // Subtracting the maximum keeps every exponent at or below 0, as the kernels do.
    const double top = *std::ranges::max_element(of_head);
    double total = 0;
    for (double& weight : of_head) total += weight = std::exp(weight - top);
    for (double& weight : of_head) weight /= total;
  }
  // MLA stores one row, which is K and V.
  const std::int64_t v_part = layer.num_kv == 2 ? kPartV : kPartK;
  const std::uint64_t v_coord = layer.coords[v_part * layer.num_kv_heads + kv_head];
  for (std::size_t p = 0; p < count; ++p) {
    const auto row = decoded.read(row_key(contents[p], v_coord), layer, std::span(rows).first(d));
    for (std::size_t h = 0; h < heads; ++h) {
      const double share = weights[h * count + p];
      double* mean = output.data() + h * d;
      for (std::size_t i = 0; i < d; ++i) mean[i] += share * row[i];
    }
  }
}

// The bound of the header for rows as generated: scores enter twice, once in the weight and once in
// its divisor.
double attention_tolerance(std::int64_t head_size, std::int64_t positions) {
  const double u = std::ldexp(1.0, -24);
  const auto d = static_cast<double>(head_size);
  const auto n = static_cast<double>(positions);
  const double score = (d + 2) * std::sqrt(d) * u;
  return 2 * (2 * score + 4 * u + 2 * n * u + 2 * u);
}

double real_attention_tolerance(std::int64_t head_size, std::int64_t positions,
                                double first_factor) {
  const double u = std::ldexp(1.0, -24);
  const auto d = static_cast<double>(head_size);
  const auto n = static_cast<double>(positions);
  const double tiles = n / 32 + 1;
  const double score = kStoredMax * (first_factor + d - 1) / std::sqrt(d);
  return 2 * ((d + 4) * score + 4 * (2 * tiles + 1) + 2 * score + n + 4) * u * kStoredMax;
}

double rounding_tolerance(DType query_dtype) {
  if (query_dtype == DType::fp32) return 0;
  return 3 * kStoredMax * std::ldexp(1.0, query_dtype == DType::bf16 ? -9 : -12);
}

}  // namespace lockstep
