// Rows of sparse MLA in layouts of bytes, written and attended to: every byte of every page, in
// every mode of the executor.
#include <algorithm>
#include <functional>

#include "tests/cuda_backend/attention_oracle.h"
#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/matrices/every_mode.h"
#include "tests/cuda_backend/matrices/one_request.h"
#include "tests/cuda_backend/packed_oracle.h"

namespace lockstep::cuda {
namespace {

constexpr float kScale = 0.05f;
constexpr int kSplitKeys = 32, kQueryHeads = 2, kRope = 64;

// Pages of one format, and what its bytes are, from the tables of its engine.
struct LatentPages {
  std::string name;
  Scaling format = Scaling::latent_fp8_rows;
  int block_size = 16;
  int padding = 0, offset = 0;  // bytes after the rows of a page, and before them
  DType source = DType::bf16;
  int num_blocks = 4, num_tokens = 19;

  bool is_fp4() const { return format == Scaling::latent_fp4_rows; }
  bool is_apart() const { return format == Scaling::latent_fp8_areas; }
  int latent() const { return is_apart() ? 448 : 512; }
  int tile() const { return is_fp4() ? 16 : is_apart() ? 64 : 128; }
  int elements() const { return latent() + kRope; }
  int row() const { return is_fp4() ? 352 : is_apart() ? 576 : 656; }
  int page() const { return offset + block_size * (row() + (is_apart() ? 8 : 0)) + padding; }
  // Bytes in a page.
  int element_at(int token, int e) const { return offset + token * row() + (is_fp4() ? e / 2 : e); }
  int rope_at(int token, int e) const {
    const int item = is_fp4() ? 1 : 2, begin = is_fp4() ? 256 : is_apart() ? 448 : 528;
    return offset + token * row() + begin + item * e;
  }
  int scale_at(int token, int t) const {
    if (is_apart()) return offset + block_size * 576 + 8 * token + t;
    if (is_fp4()) return offset + token * 352 + 320 + t % 4 * 8 + t / 4;
    return offset + token * 656 + 512 + 4 * t;
  }

  PartLayout layout(std::byte* memory) const {
    PartLayout part;
    part.base = memory + offset;
    part.block_stride = part.scale_block_stride = page();
    part.token_stride = row();
    part.scales = memory + scale_at(0, 0);
    part.scale_token_stride = is_apart() ? 8 : row();
    part.block_size = make_divisor(static_cast<std::uint32_t>(block_size));
    part.head_size = part.piece_elements = elements();
    part.dtype = DType::uint8;
    part.scaling = format;
    return part;
  }

  static void put(std::uint8_t* to, std::uint32_t bits, int bytes) {
    for (int i = 0; i < bytes; ++i) to[i] = static_cast<std::uint8_t>(bits >> (8 * i));
  }
  // The smallest power of two that is no less.
  static int exponent_above(float x) {
    int exponent = -140;
    while (std::ldexp(1.0, exponent) < double{x}) ++exponent;
    return exponent;
  }
  void put_row(std::uint8_t* page, int token, const std::vector<float>& row) const {
    for (int t = 0; t < latent() / tile(); ++t) {
      float largest = 0;
      for (int i = 0; i < tile(); ++i) largest = std::fmax(largest, std::fabs(row[t * tile() + i]));
      is_fp4() ? put_fp4_tile(page, token, t, row, largest)
               : put_fp8_tile(page, token, t, row, largest);
    }
    if (is_apart()) page[scale_at(token, 7)] = 0;
    for (int e = 0; e < kRope; ++e) {
      const DType dtype = is_fp4() ? DType::fp8_e4m3 : DType::bf16;
      put(page + rope_at(token, e), oracle::rounded(row[latent() + e], dtype),
          oracle::itemsize(dtype));
    }
  }
  void put_fp8_tile(std::uint8_t* page, int token, int t, const std::vector<float>& row,
                    float largest) const {
    constexpr float kReciprocal = 1.0f / 448.0f;
    const float wanted =
        is_apart() ? std::fmax(largest, 1e-4f) / 448.0f : std::fmax(largest * kReciprocal, 1e-4f);
    const int exponent = exponent_above(wanted);
    const auto scale = static_cast<float>(std::ldexp(1.0, exponent));
    if (is_apart())
      page[scale_at(token, t)] = static_cast<std::uint8_t>(exponent + 127);
    else
      std::memcpy(page + scale_at(token, t), &scale, 4);
    for (int e = t * tile(); e < (t + 1) * tile(); ++e)
      page[element_at(token, e)] =
          static_cast<std::uint8_t>(oracle::rounded(row[e] / scale, DType::fp8_e4m3));
  }
  void put_fp4_tile(std::uint8_t* page, int token, int t, const std::vector<float>& row,
                    float largest) const {
    constexpr float kSixth = 1.0f / 6.0f;
    const float share = largest * kSixth;
    const std::uint32_t bits = oracle::rounded(std::fmax(share, 0.001953125f), DType::fp8_e4m3);
    page[scale_at(token, t)] = static_cast<std::uint8_t>(bits);
    const float inverse = 1.0f / static_cast<float>(oracle::number_of(bits, DType::fp8_e4m3));
    for (int e = t * tile(); e < (t + 1) * tile(); ++e) {
      const float scaled = row[e] * inverse;
      std::uint8_t& byte = page[element_at(token, e)];
      const int half = oracle::nearest_e2m1(scaled);
      byte =
          static_cast<std::uint8_t>(e % 2 == 0 ? (byte & 0xF0) | half : (byte & 0x0F) | half << 4);
    }
  }
  double value(const std::uint8_t* page, int token, int e) const {
    if (e >= latent()) {
      const std::uint8_t* at = page + rope_at(token, e - latent());
      return is_fp4() ? oracle::number_of(*at, DType::fp8_e4m3)
                      : oracle::number_of(at[0] | at[1] << 8, DType::bf16);
    }
    const std::uint8_t byte = page[element_at(token, e)];
    const std::uint8_t* scale_of = page + scale_at(token, e / tile());
    if (is_fp4())
      return oracle::e2m1(e % 2 == 0 ? byte % 16 : byte / 16) *
             oracle::number_of(*scale_of, DType::fp8_e4m3);
    const double number = oracle::number_of(byte, DType::fp8_e4m3);
    if (is_apart()) return number * std::ldexp(1.0, *scale_of - 127);  // a scale is one byte
    float scale;
    std::memcpy(&scale, scale_of, 4);
    return number * double{scale};
  }
};

std::vector<LatentPages> pages_of_every_format() {
  const auto rows = Scaling::latent_fp8_rows, areas = Scaling::latent_fp8_areas,
             fp4 = Scaling::latent_fp4_rows;
  return {
      {"656 bytes", rows},
      {"656 bytes, blocks of 64", rows, 64, 0, 0, DType::bf16, 2},
      {"656 bytes behind 12, from fp32", rows, 3, 8, 12, DType::fp32},
      {"584 bytes in areas", areas},
      {"584 bytes, blocks of 64 padded to 576", areas, 64, 128, 0, DType::bf16, 2},
      {"584 bytes behind 2, from fp16", areas, 3, 10, 2, DType::fp16},
      {"584 bytes, blocks of one token", areas, 1, 0, 0, DType::bf16, 2, 2},
      {"352 bytes", fp4},
      {"352 bytes, blocks of 64", fp4, 64, 0, 0, DType::bf16, 2},
      {"352 bytes at an odd byte, from fp32", fp4, 3, 5, 7, DType::fp32},
      {"no tokens", areas, 16, 0, 0, DType::bf16, 2, 0},
  };
}

struct LatentRows {
  LatentRows() : at(GENERATE(from_range(pages_of_every_format()))) {
    const int count = at.num_blocks * at.block_size;
    for (int i = 0; i < count; ++i) slots.push_back(i);
    for (int i = count - 1; i > 0; --i) std::swap(slots[i], slots[number(7, i) % (i + 1)]);
    slots.resize(static_cast<std::size_t>(std::min(at.num_tokens, count)));
    if (slots.size() > 4) slots[4] = PAD_SLOT_ID;
    background.resize(static_cast<std::size_t>(at.num_blocks * at.page()));
    for (std::size_t i = 0; i < background.size(); ++i)
      background[i] = static_cast<std::uint8_t>(number(3, i));
    expected = background;
    const int item = oracle::itemsize(at.source);
    source.resize(std::max<std::size_t>(1, slots.size()) * at.elements() * item);
    std::uint8_t* to = source.data();
    for (std::size_t token = 0; token < slots.size(); ++token) {
      std::vector<float> row;
      for (int e = 0; e < at.elements(); ++e, to += item) {
        oracle::put_bits(to, oracle::rounded(source_number(token, e), at.source), item);
        row.push_back(static_cast<float>(oracle::element(to, at.source)));
      }
      if (slots[token] < 0) continue;
      at.put_row(expected.data() + slots[token] / at.block_size * at.page(),
                 static_cast<int>(slots[token] % at.block_size), row);
    }
  }

  // Many sizes, a row of zeros, one of a single number, one of powers of two, whose tiles need no
  // rounding up, and one beyond all scales of four bits.
  static float source_number(std::size_t token, int e) {
    const std::uint64_t n = number(31, token * 1024 + e);
    if (token == 1) return 0.0f;
    if (token == 2) return 0.75f;
    if (token == 5) return e % 16 == 0 ? 448.0f : 1.0f;
    const float value = std::ldexp(float(n % 1024) / 64.0f - 8.0f, int(n >> 20 & 7) - 4);
    return token == 3 && e % 16 == 0 ? 60000.0f : value;
  }

  oracle::Bytes written(KernelDevice& device, const LaunchPlace& place) const {
    auto* memory = reinterpret_cast<std::byte*>(device.put(background, "cache"));
    WritePartsParams params{};
    params.slots = device.put(slots, "slots");
    params.num_parts = 1;
    params.num_rows = static_cast<std::int32_t>(slots.size());
    const int row_bytes = at.elements() * oracle::itemsize(at.source);
    params.parts[0] = {at.layout(memory), reinterpret_cast<std::byte*>(device.put(source, "rows")),
                       row_bytes, row_bytes, at.source};
    CHECK(device.engine().write_parts(place, params) == 0);
    return device.get(reinterpret_cast<std::uint8_t*>(memory),
                      static_cast<std::int64_t>(background.size()));
  }

  // One request over all blocks, the last one first, whose rows are all there.
  void fill_pages() {
    pages = background;
    for (int block = 0; block < at.num_blocks; ++block)
      for (int token = 0; token < at.block_size; ++token) {
        std::vector<float> row;
        for (int e = 0; e < at.elements(); ++e)
          row.push_back(float(number(41, (block * 97 + token) * 1024 + e) % 2001) / 1000.0f - 1.0f);
        at.put_row(pages.data() + block * at.page(), token, row);
      }
  }
  static float query_number(std::size_t token, int head, int e) {
    return float(number(53, (token * 64 + head) * 1024 + e) % 2001) / 1000.0f - 1.0f;
  }
  std::vector<std::int32_t> positions() const {
    const int last = at.num_blocks * at.block_size - 1;
    return {last, 0, last / 2};
  }
  std::vector<float> attended(KernelDevice& device, int shift = 0) const {
    auto* memory = reinterpret_cast<std::byte*>(device.put(pages, "cache"));
    std::vector<std::int32_t> table;
    for (int block = at.num_blocks; block-- > 0;) table.push_back(block);
    SplitAttentionParams params{};
    params.key = params.value = at.layout(memory);
    params.key.scales += shift;
    return cuda::attended(
        device, {table, positions(), at.block_size, kQueryHeads, at.elements(), kSplitKeys, kScale},
        params, query_number);
  }
  int outputs_out_of_bounds(const std::vector<float>& found) const {
    int wrong = 0;
    const float* output = found.data();
    for (std::size_t token = 0; token < positions().size(); ++token)
      for (int head = 0; head < kQueryHeads; ++head, output += at.elements()) {
        const int keys = positions()[token] + 1;
        std::vector<oracle::Numbers> rows(keys);
        for (int p = 0; p < keys; ++p)
          for (int e = 0; e < at.elements(); ++e)
            rows[p].push_back(
                at.value(pages.data() + (at.num_blocks - 1 - p / at.block_size) * at.page(),
                         p % at.block_size, e));
        oracle::Numbers query;
        for (int e = 0; e < at.elements(); ++e) query.push_back(query_number(token, head, e));
        const oracle::Attention exact =
            oracle::attend(query, rows, rows, kScale, static_cast<std::size_t>(at.elements()));
        const int splits = (keys + kSplitKeys - 1) / kSplitKeys;
        const double bound =
            oracle::attention_bound(exact, at.elements(), keys, keys / 64 + splits, splits);
        for (int e = 0; e < at.elements(); ++e)
          wrong += !(std::fabs(double{output[e]} - exact.output[e]) <= bound);
      }
    return wrong;
  }

  void expect_written_in_every_mode(int hunts) {
    expect_bytes_in_every_mode(
        expected, hunts,
        [&](KernelDevice& device, const LaunchPlace& place) { return written(device, place); });
  }
  void expect_attended_in_every_mode(int hunts) {
    fill_pages();
    expect_numbers_in_every_mode(
        hunts, [&](KernelDevice& device) { return attended(device); },
        [&](const std::vector<float>& found) { return outputs_out_of_bounds(found); });
  }

  LatentPages at;
  std::vector<Slot> slots;
  oracle::Bytes source, background, expected, pages;
};

TEST_CASE_METHOD(LatentRows, "latent rows: every byte is written where it belongs, and no other") {
  DYNAMIC_SECTION(at.name) { expect_written_in_every_mode(1); }
}
TEST_CASE_METHOD(LatentRows, "latent rows: attention is softmax of what they stand for") {
  DYNAMIC_SECTION(at.name) { expect_attended_in_every_mode(1); }
}
TEST_CASE_METHOD(LatentRows, "latent rows: hold under a hundred seeds of preemption", "[slow]") {
  DYNAMIC_SECTION(at.name) {
    if (at.block_size > 16) return;
    expect_written_in_every_mode(kHuntsOfSlowTests);
    expect_attended_in_every_mode(kHuntsOfSlowTests);
  }
}
TEST_CASE_METHOD(LatentRows, "latent rows: planted defects are seen in every format",
                 "[executor]") {
  DYNAMIC_SECTION(at.name) {
    fill_pages();
    KernelDevice device(CheckMode::fast);
    CHECK(outputs_out_of_bounds(attended(device)) == 0);
    // The scale of the next tile: a byte on, or four.
    const int next = at.format == Scaling::latent_fp8_rows ? 4 : 1;
    CHECK(outputs_out_of_bounds(attended(device, next)) > 0);
    device.plant(&EngineKernels::write_parts, &DefectKernels::lose_scales);
    for (const LaunchPlace& place : device.places())
      CHECK((written(device, place) == expected) == slots.empty());
  }
}

}  // namespace
}  // namespace lockstep::cuda
