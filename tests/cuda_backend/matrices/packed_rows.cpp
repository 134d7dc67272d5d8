// Rows of 4-bit elements, written and attended to: nvfp4 with its areas of scales, in both orders
// and swizzled, and int4 with a scale and a zero after each row. Every byte of every page, in
// every mode of the executor.
#include <algorithm>
#include <functional>

#include "cuda_backend/defects/backend_mutants.h"
#include "tests/cuda_backend/attention_oracle.h"
#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/matrices/every_mode.h"
#include "tests/cuda_backend/matrices/one_request.h"
#include "tests/cuda_backend/packed_oracle.h"

namespace lockstep::cuda {
namespace {

using oracle::PackedBlocks;
using oracle::Packing;

struct PackedShape {
  std::string name;
  PackedBlocks blocks = {};
  DType source = DType::bf16;
  int num_blocks = 4;
  int num_tokens = 19;
  int queries_per_kv = 2;
};

std::vector<PackedShape> shapes() {
  const auto fp4 = Packing::fp4, swizzled = Packing::fp4_swizzled, int4 = Packing::int4;
  return {
      {"fp4 by heads 4x128", {.packing = fp4, .num_heads = 4, .head_size = 128}},
      {"fp4 by tokens 4x128", {.packing = fp4, .by_token = true, .num_heads = 4, .head_size = 128}},
      {"fp4 one group, blocks of 3, at an odd byte",
       {.packing = fp4, .num_heads = 2, .block_size = 3, .padding = 5, .offset = 7}},
      {"fp4 by tokens 1x48 from fp16",
       {.packing = fp4, .by_token = true, .head_size = 48, .block_size = 8, .padding = 16},
       DType::fp16},
      {"fp4 two blocks of one token, from fp32",
       {.packing = fp4, .num_heads = 3, .head_size = 32, .block_size = 1},
       DType::fp32,
       2,
       2},
      {"fp4 8x256 in blocks of 64",
       {.packing = fp4, .num_heads = 8, .head_size = 256, .block_size = 64},
       DType::bf16,
       2},
      {"fp4 swizzled 2x64", {.packing = swizzled, .num_heads = 2, .head_size = 64, .padding = 32}},
      {"fp4 swizzled 1x256 in blocks of 8",
       {.packing = swizzled, .head_size = 256, .block_size = 8}},
      {"int4 by tokens 2x128",
       {.packing = int4, .by_token = true, .num_heads = 2, .head_size = 128}},
      {"int4 by heads 3x64 from fp16",
       {.packing = int4, .num_heads = 3, .head_size = 64, .padding = 12},
       DType::fp16},
      {"int4 2x8 from fp32, blocks of 3",
       {.packing = int4, .by_token = true, .num_heads = 2, .head_size = 8, .block_size = 3},
       DType::fp32},
      {"no tokens", {.packing = fp4}, DType::bf16, 2, 0},
  };
}

constexpr float kLayerScales[] = {0.0085f, 0.31f};

struct PackedRows {
  explicit PackedRows(const PackedShape& of = GENERATE(from_range(shapes()))) : shape(of) {
    shape.blocks.walk();
    const PackedBlocks& at = shape.blocks;
    const int count = shape.num_blocks * at.block_size;
    for (int i = 0; i < count; ++i) slots.push_back(i);
    for (int i = count - 1; i > 0; --i) std::swap(slots[i], slots[number(7, i) % (i + 1)]);
    slots.resize(static_cast<std::size_t>(std::min(shape.num_tokens, count)));
    if (slots.size() > 4) slots[4] = PAD_SLOT_ID;
    background.resize(shape.num_blocks * at.page_bytes());
    for (std::size_t i = 0; i < background.size(); ++i)
      background[i] = static_cast<std::uint8_t>(number(3, i));
    expected = background;
    for (int kv = 0; kv < 2; ++kv) make_part(kv);
  }

  // Many sizes, a row of zeros, one of a single number, and one that is beyond all scales.
  float source_number(int kv, int token, int head, int e) const {
    const std::uint64_t n = number(31 + kv, (token * 64 + head) * 512 + e);
    if (token == 1) return 0.0f;
    if (token == 2) return 0.75f;
    const float value = std::ldexp(float(n % 1024) / 64.0f - 8.0f, int(n >> 20 & 7) - 4);
    return token == 3 && e % 16 == 0 ? 60000.0f : value;
  }
  void make_part(int kv) {
    const PackedBlocks& at = shape.blocks;
    const int item = oracle::itemsize(shape.source);
    oracle::Bytes& rows = sources[kv];
    rows.resize(std::max<std::size_t>(1, slots.size()) * at.num_heads * at.head_size * item);
    std::uint8_t* to = rows.data();
    for (std::size_t token = 0; token < slots.size(); ++token)
      for (int head = 0; head < at.num_heads; ++head) {
        std::vector<float> row;
        for (int e = 0; e < at.head_size; ++e, to += item) {
          const float value = source_number(kv, static_cast<int>(token), head, e);
          oracle::put_bits(to, oracle::rounded(value, shape.source), item);
          row.push_back(static_cast<float>(oracle::element(to, shape.source)));
        }
        if (slots[token] < 0) continue;
        at.put_row(expected.data() + slots[token] / at.block_size * at.page_bytes(), kv,
                   static_cast<int>(slots[token] % at.block_size), head, row, kLayerScales[kv]);
      }
  }

  oracle::Bytes written(KernelDevice& device, const LaunchPlace& place) {
    const PackedBlocks& at = shape.blocks;
    auto* memory = reinterpret_cast<std::byte*>(device.put(background, "cache"));
    const float* scales =
        device.put(std::vector<float>(std::begin(kLayerScales), std::end(kLayerScales)), "scales");
    WritePartsParams params{};
    params.slots = device.put(slots, "slots");
    params.num_parts = 2;
    params.num_rows = static_cast<std::int32_t>(slots.size());
    const int head_bytes = at.head_size * oracle::itemsize(shape.source);
    for (int kv = 0; kv < 2; ++kv)
      params.parts[kv] = {at.layout(memory, kv, scales + kv),
                          reinterpret_cast<std::byte*>(device.put(sources[kv], "rows")),
                          std::int64_t{head_bytes} * at.num_heads, head_bytes, shape.source};
    CHECK(device.engine().write_parts(place, params) == 0);
    return device.get(reinterpret_cast<std::uint8_t*>(memory),
                      static_cast<std::int64_t>(background.size()));
  }
  void expect_written_in_every_mode(int hunts) {
    expect_bytes_in_every_mode(
        expected, hunts,
        [&](KernelDevice& device, const LaunchPlace& place) { return written(device, place); });
  }

  // ---- reading: every page full of numbers, one request over all blocks in scattered order

  static constexpr float kScale = 0.11f;
  struct Query {
    std::vector<float> numbers;
    int position;
  };
  void fill_pages() {
    const PackedBlocks& at = shape.blocks;
    pages = background;
    for (int block = 0; block < shape.num_blocks; ++block)
      for (int kv = 0; kv < 2; ++kv)
        for (int token = 0; token < at.block_size; ++token)
          for (int head = 0; head < at.num_heads; ++head) {
            std::vector<float> row;
            for (int e = 0; e < at.head_size; ++e)
              row.push_back(
                  float(number(41 + kv, ((block * 97 + token) * 8 + head) * 512 + e) % 2001) /
                      1000.0f -
                  1.0f);
            at.put_row(pages.data() + block * at.page_bytes(), kv, token, head, row,
                       kLayerScales[kv]);
          }
    for (int block = shape.num_blocks - 1; block >= 0; --block) table.push_back(block);
    const int last = shape.num_blocks * at.block_size - 1;
    for (const int position : {last, 0, last / 2}) positions.push_back(position);
  }
  int heads() const { return shape.blocks.num_heads * shape.queries_per_kv; }
  float query_number(std::size_t token, int head, int e) const {
    return float(number(53, (token * 64 + head) * 512 + e) % 2001) / 1000.0f - 1.0f;
  }

  std::vector<float> attended(KernelDevice& device,
                              const std::function<void(SplitAttentionParams&)>& plant = nullptr) {
    const PackedBlocks& at = shape.blocks;
    auto* memory = reinterpret_cast<std::byte*>(device.put(pages, "cache"));
    const float* scales =
        device.put(std::vector<float>(std::begin(kLayerScales), std::end(kLayerScales)), "scales");
    SplitAttentionParams params{};
    params.key = at.layout(memory, 0, scales);
    params.value = at.layout(memory, 1, scales + 1);
    if (plant) plant(params);
    return cuda::attended(
        device, {table, positions, at.block_size, heads(), at.head_size, kSplitKeys, kScale},
        params,
        [this](std::size_t token, int head, int e) { return query_number(token, head, e); });
  }

  int outputs_out_of_bounds(const std::vector<float>& found) const {
    const PackedBlocks& at = shape.blocks;
    int wrong = 0;
    for (std::size_t token = 0; token < positions.size(); ++token)
      for (int head = 0; head < heads(); ++head) {
        const int kv_head = head / shape.queries_per_kv, keys = positions[token] + 1;
        std::vector<oracle::Numbers> rows[2];
        for (int kv = 0; kv < 2; ++kv)
          for (int p = 0; p < keys; ++p) {
            const std::uint8_t* page = pages.data() + table[p / at.block_size] * at.page_bytes();
            oracle::Numbers& row = rows[kv].emplace_back();
            for (int e = 0; e < at.head_size; ++e)
              row.push_back(at.value(page, kv, p % at.block_size, kv_head, e, kLayerScales[kv]));
          }
        oracle::Numbers query;
        for (int e = 0; e < at.head_size; ++e) query.push_back(query_number(token, head, e));
        const oracle::Attention exact =
            oracle::attend(query, rows[0], rows[1], kScale, static_cast<std::size_t>(at.head_size));
        const int splits = (keys + kSplitKeys - 1) / kSplitKeys;
        const double bound =
            oracle::attention_bound(exact, at.head_size, keys, keys / 64 + splits, splits);
        const float* output = found.data() + (token * heads() + head) * at.head_size;
        for (int e = 0; e < at.head_size; ++e)
          wrong += !(std::fabs(double{output[e]} - exact.output[e]) <= bound);
      }
    return wrong;
  }
  void expect_attended_in_every_mode(int hunts) {
    fill_pages();
    expect_numbers_in_every_mode(
        hunts, [&](KernelDevice& device) { return attended(device); },
        [&](const std::vector<float>& found) { return outputs_out_of_bounds(found); });
  }

  static constexpr int kSplitKeys = 32;
  PackedShape shape;
  std::vector<Slot> slots;
  oracle::Bytes sources[2], background, expected, pages;
  std::vector<std::int32_t> table, positions;
};

TEST_CASE_METHOD(PackedRows, "packed rows: every byte is written where its area is, and no other") {
  DYNAMIC_SECTION(shape.name) { expect_written_in_every_mode(1); }
}
TEST_CASE_METHOD(PackedRows, "packed rows: attention is softmax of what they stand for") {
  DYNAMIC_SECTION(shape.name) { expect_attended_in_every_mode(1); }
}
TEST_CASE_METHOD(PackedRows, "packed rows: hold under a hundred seeds of preemption", "[slow]") {
  DYNAMIC_SECTION(shape.name) {
    if (shape.blocks.block_size > 16) return;
    expect_written_in_every_mode(kHuntsOfSlowTests);
    expect_attended_in_every_mode(kHuntsOfSlowTests);
  }
}

TEST_CASE_METHOD(PackedRows, "packed rows: planted defects are seen where a shape exposes them",
                 "[executor]") {
  DYNAMIC_SECTION(shape.name) {
    fill_pages();
    KernelDevice device(CheckMode::fast);
    const bool is_swizzled = shape.blocks.packing == Packing::fp4_swizzled;
    const bool can_swizzle = shape.blocks.is_fp4() && shape.blocks.head_size % 64 == 0 &&
                             shape.blocks.block_size % 4 == 0;
    if (can_swizzle)
      CHECK(outputs_out_of_bounds(attended(device, [&](SplitAttentionParams& params) {
              params.value.swizzled_scales = !is_swizzled;
            })) > 0);
    if (shape.blocks.num_heads > 1) {
      CHECK(outputs_out_of_bounds(attended(device, [](SplitAttentionParams& params) {
              reverse_scales(params.key);
              reverse_scales(params.value);
            })) > 0);
    }
    CHECK(outputs_out_of_bounds(attended(device)) == 0);
    device.plant(&EngineKernels::write_parts, &DefectKernels::lose_scales);
    for (const LaunchPlace& place : device.places())
      CHECK((written(device, place) == expected) == slots.empty());
  }
}

// Every number of e2m1, the ties between two and the floats next to each tie, in a group whose
// largest element is 6 and whose scale is 1.
TEST_CASE("packed rows: e2m1 rounds to the nearest, ties to the even pattern") {
  std::vector<float> values;
  for (int i = 0; i < 8; ++i) {
    values.push_back(static_cast<float>(oracle::kE2m1[i]));
    if (i == 7) break;
    const auto tie = static_cast<float>((oracle::kE2m1[i] + oracle::kE2m1[i + 1]) / 2);
    for (const float value : {tie, std::nextafter(tie, 9.0f), std::nextafter(tie, -9.0f)})
      values.push_back(value);
  }
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) values.push_back(-values[i]);
  PackedBlocks at{.packing = Packing::fp4, .head_size = 16 * static_cast<int>(values.size())};
  at.walk();
  std::vector<float> row;
  for (const float value : values) {
    row.insert(row.end(), 16, value);
    row[row.size() - 16] = 6.0f;
  }
  oracle::Bytes expected(at.page_bytes(), 0x11);
  at.put_row(expected.data(), 0, 0, 0, row, 1.0f);
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK(expected[at.scale_byte(0, 0, 0, static_cast<int>(i))] == 0x38);  // 1
    CHECK(expected[at.data_byte(0, 0, 0, static_cast<int>(8 * i + 1))] ==
          17 * oracle::nearest_e2m1(values[i]));
  }
  KernelDevice device(CheckMode::fast);
  auto* memory =
      reinterpret_cast<std::byte*>(device.put(oracle::Bytes(at.page_bytes(), 0x11), "cache"));
  WritePartsParams params{};
  params.slots = device.put(std::vector<Slot>{0}, "slots");
  params.num_parts = params.num_rows = 1;
  params.parts[0] = {at.layout(memory, 0, device.put(std::vector<float>{1.0f}, "scale")),
                     reinterpret_cast<std::byte*>(device.put(row, "rows")), 0, 0, DType::fp32};
  device->launch(device.engine().write_parts, params);
  CHECK(device.get(reinterpret_cast<std::uint8_t*>(memory), at.page_bytes()) == expected);
}

}  // namespace
}  // namespace lockstep::cuda
