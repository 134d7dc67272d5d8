// Reads of the cache through block tables: digests against loops over bytes, exactly; softmax
// attention against doubles, within a bound from the number of operations.
#include <algorithm>
#include <cmath>

#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/protocol_oracle.h"

namespace lockstep::cuda {
namespace {

struct Shape {
  std::string name;
  DType dtype = DType::bf16;
  int num_kv_heads = 1;
  int head_size = 16;
  int block_size = 16;
  int num_parts = 2;
  int queries_per_kv = 1;
  bool head_major = false;  // a page is [part][head][token]
};

std::vector<Shape> shapes() {
  return {
      {.name = "bf16, 2 heads of 128, 4 queries each",
       .num_kv_heads = 2,
       .head_size = 128,
       .queries_per_kv = 4},
      {.name = "fp16, blocks of 1", .dtype = DType::fp16, .num_kv_heads = 2, .block_size = 1},
      {.name = "fp32, heads of 80", .dtype = DType::fp32, .num_kv_heads = 2, .head_size = 80},
      {.name = "fp8 e4m3, heads of 256", .dtype = DType::fp8_e4m3, .head_size = 256},
      {.name = "fp8 e5m2, heads of 8",
       .dtype = DType::fp8_e5m2,
       .num_kv_heads = 3,
       .head_size = 8,
       .queries_per_kv = 2},
      {.name = "int8, heads of 6: rows of 6 bytes",
       .dtype = DType::int8,
       .num_kv_heads = 2,
       .head_size = 6},
      {.name = "bf16, heads of 6, blocks of 3", .num_kv_heads = 2, .head_size = 6, .block_size = 3},
      {.name = "bf16, heads before tokens",
       .num_kv_heads = 3,
       .queries_per_kv = 2,
       .head_major = true},
      {.name = "MLA: one latent of 576, 16 queries",
       .head_size = 576,
       .num_parts = 1,
       .queries_per_kv = 16},
  };
}

// Attention in one split over rows that are looked up in the layer's own table.
SplitAttentionParams of_rows(KernelDevice& device, const RowCache& rows, std::int32_t num_heads) {
  SplitAttentionParams params{};
  params.key = part_of(rows, 0);
  params.value = part_of(rows, rows.num_parts - 1);
  params.rows = device.put(std::vector<RowCache>{rows}, "layer");
  params.query_dtype = DType::fp32;
  params.num_query_heads = num_heads;
  params.num_splits = 1;
  params.split_keys = 1 << 20;
  return params;
}

struct Attention {
  static constexpr int kPositions = 275;
  static constexpr int kLayer = 2;

  // A cache of rows that are the positions' contents, in blocks of scattered order; a page is
  // [part][token][head], or [part][head][token].
  explicit Attention(const Shape& of = GENERATE(from_range(shapes()))) : shape(of) {
    const int blocks = (kPositions + shape.block_size - 1) / shape.block_size;
    for (int i = 0; i < blocks; ++i) table.push_back(1 + (i * 7 + 3) % blocks);
    std::sort(table.begin(), table.end(), [](int a, int b) { return number(5, a) < number(5, b); });
    bytes.assign(std::size_t(blocks + 1) * shape.num_parts * part_bytes(), 0);
    for (int p = 0; p < kPositions; ++p) contents.push_back(number(13, p));
    for (int p = 0; p < kPositions; ++p)
      for (int part = 0; part < shape.num_parts; ++part)
        for (int head = 0; head < shape.num_kv_heads; ++head) {
          const oracle::Bytes values = row(p, part, head);
          std::copy(values.begin(), values.end(), bytes.begin() + place_of(p, part, head));
        }
  }

  int row_bytes() const { return shape.head_size * oracle::itemsize(shape.dtype); }
  int part_bytes() const { return shape.block_size * shape.num_kv_heads * row_bytes(); }
  std::size_t place_of(int position, int part, int head) const {
    const int block = table[position / shape.block_size], offset = position % shape.block_size;
    return std::size_t(block) * shape.num_parts * part_bytes() + std::size_t(part) * part_bytes() +
           std::size_t(shape.head_major ? head * shape.block_size + offset
                                        : offset * shape.num_kv_heads + head) *
               row_bytes();
  }
  oracle::Bytes row(int position, int part, int head) const {
    return oracle::row(contents[position], kLayer, part, head, shape.head_size, shape.dtype);
  }

  RowCache cache(KernelDevice& device) {
    RowCache rows;
    rows.base = reinterpret_cast<std::byte*>(device.put(bytes, "cache"));
    rows.block_stride = std::int64_t{shape.num_parts} * part_bytes();
    rows.token_stride = std::int64_t{shape.head_major ? 1 : shape.num_kv_heads} * row_bytes();
    rows.head_stride = std::int64_t{shape.head_major ? shape.block_size : 1} * row_bytes();
    rows.part_stride = part_bytes();
    rows.block_size = make_divisor(shape.block_size);
    rows.num_parts = shape.num_parts;
    rows.num_kv_heads = shape.num_kv_heads;
    rows.head_size = shape.head_size;
    rows.row_bytes = row_bytes();
    rows.layer = kLayer;
    rows.queries_per_kv = shape.queries_per_kv;
    rows.dtype = shape.dtype;
    rows.unit_bytes = std::min(row_bytes() & -row_bytes(), 16);
    // The table of row 1 of two.
    std::vector<std::int32_t> entries(table.size(), 0);
    entries.insert(entries.end(), table.begin(), table.end());
    rows.table = device.put(entries, "table");
    rows.table_width = static_cast<std::int64_t>(table.size());
    return rows;
  }

  Shape shape;
  std::vector<std::int32_t> table;
  std::vector<std::uint64_t> contents;
  oracle::Bytes bytes;
};

// What a digest should be follows from the rows and their positions: blocks and layouts, of which
// each shape has its own, have no part in it.
TEST_CASE_METHOD(Attention, "attention: the digest of a range is the sum over its rows") {
  DYNAMIC_SECTION(shape.name) {
    in_every_mode([&](CheckMode mode, std::uint64_t seed) {
      KernelDevice device(mode, seed);
      const RowCache* layers = device.put(std::vector<RowCache>{cache(device)}, "layers");
      const std::vector<DigestPiece> pieces = {{0, 1, 0, 0, kPositions},
                                               {1, 1, 0, 17, 18},
                                               {2, 1, 0, 0, 40},
                                               {2, 1, 0, 40, kPositions},
                                               {3, 1, 0, 5, 5}};
      std::vector<unsigned long long> expected(4, 0);
      for (const DigestPiece& piece : pieces)
        for (int p = piece.first; p < piece.last; ++p)
          for (int part = 0; part < shape.num_parts; ++part)
            for (int head = 0; head < shape.num_kv_heads; ++head)
              expected[piece.probe] += oracle::digest_of_row(row(p, part, head), p, part, head);
      const auto* on_device = device.put(pieces, "pieces");
      for (const LaunchPlace& place : device.places()) {
        auto* digests = device.put(std::vector<unsigned long long>(4, 0), "digests");
        const DigestParams params{layers, on_device, digests, std::int32_t(pieces.size()),
                                  kPositions};
        REQUIRE(device.kernels().attention_digest(place, params) == 0);
        CHECK(device.get(digests, 4) == expected);
      }
      CHECK(expected[0] == expected[2]);  // in one piece or in two
      device.expect_no_reports();
    });
  }
}

// A replay of words names each query's range and reads rows as the layer's own table says.
TEST_CASE_METHOD(Attention, "attention: outputs are softmax of scaled scores, times values") {
  DYNAMIC_SECTION(shape.name) {
    const int num_heads = shape.num_kv_heads * shape.queries_per_kv;
    const std::int64_t floats = std::int64_t{num_heads} * shape.head_size;
    const std::vector<std::uint64_t> queried = {number(17, 0), number(17, 1), number(17, 2),
                                                number(17, 3)};
    const std::vector<KeyRange> ranges = {
        {0, kPositions}, {30, 31}, {10, 42, 20, 7}, {10, 10}};  // the third skips 20 to 26
    oracle::Bytes queries;
    for (const std::uint64_t content : queried)
      for (int q = 0; q < num_heads; ++q) {
        const auto one = oracle::row(content, kLayer, 2, q, shape.head_size, DType::fp32);
        queries.insert(queries.end(), one.begin(), one.end());
      }
    std::vector<std::vector<float>> found;
    in_every_mode([&](CheckMode mode, std::uint64_t seed) {
      KernelDevice device(mode, seed);
      const RowCache rows = cache(device);
      SplitAttentionParams params = of_rows(device, rows, num_heads);
      params.queries = reinterpret_cast<std::byte*>(device.put(queries, "queries"));
      params.ranges = device.put(ranges, "ranges");
      params.token_rows = device.put(std::vector<std::int32_t>(4, 1), "token rows");
      params.outputs = device.room<float>(4 * floats, "outputs");
      params.num_tokens = 4;
      params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_size));
      device->launch(device.engine().split_attention, params);
      found.push_back(device.get(params.outputs, 4 * floats));
      device.expect_no_reports();
    });
    for (const std::vector<float>& one : found) CHECK((one == found[0]));  // bit for bit

    for (std::size_t i = 0; i < ranges.size(); ++i)
      for (int q = 0; q < num_heads; ++q) {
        const oracle::Bytes query =
            oracle::row(queried[i], kLayer, 2, q, shape.head_size, DType::fp32);
        std::vector<double> numbers;
        for (int d = 0; d < shape.head_size; ++d)
          numbers.push_back(oracle::element(query.data() + 4 * d, DType::fp32));
        std::vector<oracle::Bytes> keys, values;
        double largest = 0;
        for (int n = ranges[i].first; n < ranges[i].last; ++n) {
          const int p = n < ranges[i].gap_first ? n : n + ranges[i].gap;
          keys.push_back(row(p, 0, q / shape.queries_per_kv));
          values.push_back(row(p, shape.num_parts - 1, q / shape.queries_per_kv));
          for (int d = 0; d < shape.head_size; ++d)
            largest = std::max(
                largest,
                std::abs(oracle::element(values.back().data() + d * oracle::itemsize(shape.dtype),
                                         shape.dtype)));
        }
        const std::vector<double> expected = oracle::attention(numbers, keys, values, shape.dtype);
        // A score is a sum of head_size terms and may be off by head_size/2 roundings of its size,
        // which the exponential turns into a relative error of a weight; then a sum over all keys.
        const double score_size =
            shape.head_size * std::max(1.0, largest) / std::sqrt(shape.head_size);
        const double bound =
            std::ldexp(largest, -24) * (2.0 * score_size * shape.head_size + kPositions + 16.0);
        for (int d = 0; d < shape.head_size; ++d)
          require_near(found[0][i * floats + q * shape.head_size + d], expected[d], bound, "query ",
                       i, " head ", q, " element ", d);
      }
  }
}

// Every bit pattern of the narrow formats, as the value of the one key that a query attends to.
TEST_CASE("attention: every finite pattern of a narrow format is read as its value") {
  const DType dtype = GENERATE(DType::fp8_e4m3, DType::fp8_e5m2, DType::int8, DType::uint8,
                               DType::fp16, DType::bf16);
  DYNAMIC_SECTION("dtype " << static_cast<int>(dtype)) {
    const int item = oracle::itemsize(dtype), count = item == 1 ? 256 : 512;
    KernelDevice device(CheckMode::fast);
    oracle::Bytes values(std::size_t(count) * item);
    for (int i = 0; i < count; ++i) {
      const int pattern = item == 1 ? i : i * 128 + i % 128;
      for (int k = 0; k < item; ++k)
        values[i * item + k] = static_cast<std::uint8_t>(pattern >> 8 * k);
    }
    RowCache rows;
    rows.base = reinterpret_cast<std::byte*>(device.put(values, "cache"));
    rows.table = device.put(std::vector<std::int32_t>{0}, "table");
    rows.table_width = 1;
    rows.block_size = make_divisor(1);
    rows.num_parts = 2;  // V is K: part_stride 0
    rows.head_size = count;
    rows.row_bytes = count * item;
    rows.unit_bytes = 16;
    rows.dtype = dtype;
    // Scores against a query of zeros are zero, or NaN where a key is: only the finite can be
    // compared.
    float* outputs = device.room<float>(count, "outputs");
    const auto is_finite = [&](int i) {
      const double value = oracle::element(values.data() + i * item, dtype);
      if (dtype == DType::fp8_e4m3) return (values[i] & 0x7F) != 0x7F;
      if (dtype == DType::fp8_e5m2) return (values[i] & 0x7C) != 0x7C;
      if (dtype == DType::fp16) return (values[2 * i + 1] & 0x7C) != 0x7C;
      if (dtype == DType::bf16)
        return !((values[2 * i + 1] & 0x7F) == 0x7F && (values[2 * i] & 0x80));
      return std::isfinite(value);
    };
    oracle::Bytes finite_only = values;
    for (int i = 0; i < count; ++i)
      if (!is_finite(i)) std::fill_n(finite_only.begin() + i * item, item, 0);
    device->upload(rows.base, finite_only.data(), static_cast<std::int64_t>(finite_only.size()));
    SplitAttentionParams params = of_rows(device, rows, 1);
    params.queries = reinterpret_cast<std::byte*>(
        device.put(std::vector<float>(static_cast<std::size_t>(count), 0.0f), "queries"));
    params.ranges = device.put(std::vector<KeyRange>{{0, 1}}, "ranges");
    params.token_rows = device.put(std::vector<std::int32_t>{0}, "token rows");
    params.outputs = outputs;
    params.num_tokens = 1;
    params.scale = 1.0f;
    device->launch(device.engine().split_attention, params);
    const std::vector<float> found = device.get(outputs, count);
    for (int i = 0; i < count; ++i)
      if (double(found[i]) != oracle::element(finite_only.data() + i * item, dtype))
        FAIL_CHECK("pattern " << i << " is read as " << found[i]);
  }
}

}  // namespace
}  // namespace lockstep::cuda
