// Cache writes against loops over elements: every layout, dtype and scaling, down to the last byte
// of every page, in shapes that engines use and shapes that break them.
#include <fmt/core.h>

#include <algorithm>
#include <functional>

#include "cuda_backend/defects/backend_mutants.h"
#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/matrices/every_mode.h"
#include "tests/cuda_backend/part_oracle.h"

namespace lockstep::cuda {
namespace {

using oracle::Arrangement;
using oracle::Part;

struct WriteShape {
  std::string name;
  DType source = DType::bf16;
  Part first = {};
  Part second = {};
  int num_parts = 2;
  int num_blocks = 5;
  int padding_bytes = 0;
  int num_tokens = 21;
  int source_gap_bytes = 0;  // behind the heads of a token: a slice of a wider projection
};

// K, then V of the same shape in a page, then padding.
WriteShape pair(WriteShape shape) {
  const Part key = shape.first;
  shape.second = key;
  if (key.arrangement == Arrangement::x_split_key)
    shape.second.arrangement = Arrangement::x_split_value;
  shape.second.offset = key.bytes_of_block();
  shape.first.page_bytes = shape.second.page_bytes = 2 * key.bytes_of_block() + shape.padding_bytes;
  return shape;
}
// Two parts of one row, as MLA has them.
WriteShape one_row(WriteShape shape, int row_bytes, int rope_offset) {
  shape.first.row_bytes = shape.second.row_bytes = row_bytes;
  shape.second.offset = rope_offset;
  shape.first.page_bytes = shape.second.page_bytes =
      std::int64_t{row_bytes} * shape.first.block_size + shape.padding_bytes;
  return shape;
}

std::vector<WriteShape> shapes() {
  const auto fp8 = DType::fp8_e4m3, e5m2 = DType::fp8_e5m2, int8 = DType::int8;
  const auto hnd = Arrangement::hnd, x_split = Arrangement::x_split_key;
  const auto tensor = Scaling::per_tensor, row = Scaling::per_token_head;
  const Part small{.num_heads = 2, .head_size = 16};
  return {
      pair({.name = "NHD bf16 8x128", .first = {.num_heads = 8, .head_size = 128}}),
      pair({.name = "HND fp16 3x80",
            .source = DType::fp16,
            .first = {.arrangement = hnd, .dtype = DType::fp16, .num_heads = 3, .head_size = 80}}),
      pair({.name = "x split bf16 8x128",
            .first = {.arrangement = x_split, .num_heads = 8, .head_size = 128}}),
      pair({.name = "x split bf16 1x64 two blocks of 1",
            .first = {.arrangement = x_split, .block_size = 1},
            .num_blocks = 2,
            .num_tokens = 3}),
      pair({.name = "x split fp32 2x80",
            .source = DType::fp32,
            .first =
                {.arrangement = x_split, .dtype = DType::fp32, .num_heads = 2, .head_size = 80}}),
      pair({.name = "x split e4m3 per tensor 4x64",
            .first = {.arrangement = x_split, .dtype = fp8, .scaling = tensor, .num_heads = 4}}),
      pair({.name = "NHD e4m3 per tensor 8x128 from fp16",
            .source = DType::fp16,
            .first = {.dtype = fp8, .scaling = tensor, .num_heads = 8, .head_size = 128}}),
      pair({.name = "HND e5m2 per tensor 2x256 from fp32",
            .source = DType::fp32,
            .first = {.arrangement = hnd,
                      .dtype = e5m2,
                      .scaling = tensor,
                      .num_heads = 2,
                      .head_size = 256}}),
      pair({.name = "NHD int8 per tensor 2x6",
            .source = DType::fp32,
            .first = {.dtype = int8, .scaling = tensor, .num_heads = 2, .head_size = 6}}),
      pair({.name = "NHD int8 per token and head 8x128",
            .first = {.dtype = int8,
                      .scaling = row,
                      .num_heads = 8,
                      .head_size = 128,
                      .row_bytes = 132,
                      .scale_offset = 128}}),
      pair({.name = "HND e4m3 per token and head 4x64 rows of 80",
            .first = {.arrangement = hnd,
                      .dtype = fp8,
                      .scaling = row,
                      .num_heads = 4,
                      .row_bytes = 80,
                      .scale_offset = 64}}),
      pair({.name = "NHD e5m2 per token and head 3x6 from fp16",
            .source = DType::fp16,
            .first = {.dtype = e5m2,
                      .scaling = row,
                      .num_heads = 3,
                      .head_size = 6,
                      .row_bytes = 12,
                      .scale_offset = 8}}),
      one_row({.name = "MLA bf16 512 and 64",
               .first = {.head_size = 512, .block_size = 64},
               .second = {.head_size = 64, .block_size = 64},
               .num_blocks = 3},
              1152, 1024),
      one_row({.name = "MLA e4m3 per tensor 512 and 64",
               .first = {.dtype = fp8, .scaling = tensor, .head_size = 512, .block_size = 64},
               .second = {.dtype = fp8, .scaling = tensor, .head_size = 64, .block_size = 64},
               .num_blocks = 2},
              576, 512),
      one_row({.name = "MLA with a scale for each 128 of the latent and a bf16 rope",
               .first = {.dtype = fp8,
                         .scaling = row,
                         .num_heads = 4,
                         .head_size = 128,
                         .head_bytes = 128,
                         .scale_offset = 512,
                         .scale_stride = 4},
               .second = {.head_size = 64}},
              656, 528),
      pair({.name = "rows of 12 bytes padded by 4",
            .first = {.num_heads = 2, .head_size = 6},
            .padding_bytes = 4}),
      pair({.name = "misaligned source rows", .first = small, .source_gap_bytes = 2}),
      pair({.name = "a slice of a projection", .first = small, .source_gap_bytes = 128}),
      pair({.name = "blocks of 2096 padded",
            .first = {.head_size = 256, .block_size = 2096},
            .num_blocks = 2,
            .padding_bytes = 4096,
            .num_tokens = 40}),
      pair({.name = "two blocks two heads", .first = small, .num_blocks = 2}),
      pair({.name = "no tokens", .first = small, .num_tokens = 0}),
      pair({.name = "one token", .first = small, .num_tokens = 1}),
  };
}

// Rows of numbers: many sizes, ties of every format, zeros, and a row of only zeros.
oracle::Bytes source_rows(const WriteShape& shape, const Part& part, int which) {
  const int item = oracle::itemsize(shape.source);
  const int token_bytes = part.num_heads * part.head_size * item + shape.source_gap_bytes;
  oracle::Bytes bytes(std::size_t(token_bytes) * std::max(shape.num_tokens, 1), 0xEE);
  for (int t = 0; t < shape.num_tokens; ++t)
    for (int i = 0; i < part.num_heads * part.head_size; ++i) {
      const std::uint64_t n = number(31 + which, t * 100003 + i);
      float value = std::ldexp(float(n % 1024) / 64.0f - 8.0f, int(n >> 20 & 15) - 8);
      if (t == 2) value = 0.0f;
      if (t == 3 && i == 0) value = 60000.0f;  // saturates
      oracle::put_bits(bytes.data() + std::size_t(t) * token_bytes + i * item,
                       oracle::rounded(value, shape.source), item);
    }
  return bytes;
}

constexpr float kTensorScales[] = {0.037f, 1.75f};

// What the write makes of one row, element by element.
void expect_row(oracle::Bytes& expected, const Part& part, std::int64_t block, int token, int head,
                const std::uint8_t* source, DType source_dtype, float tensor_scale) {
  const int from = oracle::itemsize(source_dtype), to = oracle::itemsize(part.dtype);
  float scale = tensor_scale;
  if (part.scaling == Scaling::per_token_head) {
    double largest = 0;
    for (int e = 0; e < part.head_size; ++e)
      largest = std::max(largest, std::fabs(oracle::element(source + e * from, source_dtype)));
    const double top = part.dtype == DType::int8       ? 127
                       : part.dtype == DType::fp8_e4m3 ? 448
                                                       : 57344;
    scale =
        std::max(static_cast<float>(static_cast<float>(largest) / static_cast<float>(top)), 1e-6f);
    std::memcpy(expected.data() + part.scale_at(block, token, head), &scale, 4);
  }
  for (int e = 0; e < part.head_size; ++e) {
    std::uint8_t* target = expected.data() + part.element_at(block, token, head, e);
    if (part.scaling == Scaling::none) {
      std::copy_n(source + e * from, from, target);
      continue;
    }
    const auto value = static_cast<float>(oracle::element(source + e * from, source_dtype));
    const float inverse = 1.0f / scale;
    const float scaled = part.scaling == Scaling::per_tensor ? value / scale : value * inverse;
    oracle::put_bits(target, oracle::rounded(scaled, part.dtype), to);
  }
}

struct CacheWrite {
  explicit CacheWrite(const WriteShape& of = GENERATE(from_range(shapes()))) : shape(of) {
    const int count = shape.num_blocks * shape.first.block_size;
    for (int i = 0; i < count; ++i) slots.push_back(i);
    for (int i = count - 1; i > 0; --i) std::swap(slots[i], slots[number(7, i) % (i + 1)]);
    slots.resize(static_cast<std::size_t>(std::min(shape.num_tokens, count)));
    shape.num_tokens = static_cast<int>(slots.size());
    if (slots.size() > 2) slots[slots.size() / 2] = PAD_SLOT_ID;
    sources[0] = source_rows(shape, shape.first, 0);
    sources[1] = source_rows(shape, shape.second, 1);
    background.resize(std::size_t(shape.num_blocks) * shape.first.page_bytes);
    for (std::size_t i = 0; i < background.size(); ++i)
      background[i] = static_cast<std::uint8_t>(number(3, i));
    expected = background;
    for (int t = 0; t < shape.num_tokens; ++t)
      for (int i = 0; i < shape.num_parts && slots[t] >= 0; ++i)
        for (int head = 0; head < part(i).num_heads; ++head)
          expect_row(expected, part(i), slots[t] / part(i).block_size,
                     static_cast<int>(slots[t] % part(i).block_size), head,
                     sources[i].data() + std::size_t(t) * token_bytes(i) + head * head_bytes(i),
                     shape.source, kTensorScales[i]);
  }
  const Part& part(int i) const { return i == 0 ? shape.first : shape.second; }
  int head_bytes(int i) const { return part(i).head_size * oracle::itemsize(shape.source); }
  int token_bytes(int i) const {
    return part(i).num_heads * head_bytes(i) + shape.source_gap_bytes;
  }

  oracle::Bytes written(KernelDevice& device, const LaunchPlace& place,
                        const std::function<void(PartLayout&)>& plant = nullptr) {
    auto* memory = reinterpret_cast<std::byte*>(device.put(background, "cache"));
    auto* scales = device.put(
        std::vector<float>(std::begin(kTensorScales), std::end(kTensorScales)), "scales");
    WritePartsParams params{};
    params.slots = device.put(slots, "slots");
    params.num_parts = shape.num_parts;
    params.num_rows = shape.num_tokens;
    for (int i = 0; i < shape.num_parts; ++i)
      params.parts[i] = {part(i).layout(memory, scales + i),
                         reinterpret_cast<std::byte*>(device.put(sources[i], "rows")),
                         token_bytes(i), head_bytes(i), shape.source};
    for (PartWrite& part : params.parts)
      if (plant) plant(part.to);
    CHECK(device.engine().write_parts(place, params) == 0);
    return device.get(reinterpret_cast<std::uint8_t*>(memory),
                      static_cast<std::int64_t>(background.size()));
  }
  void expect_exact_in_every_mode(int hunts) {
    expect_bytes_in_every_mode(
        expected, hunts,
        [&](KernelDevice& device, const LaunchPlace& place) { return written(device, place); });
  }

  WriteShape shape;
  std::vector<Slot> slots;
  oracle::Bytes sources[2], background, expected;
};

TEST_CASE_METHOD(CacheWrite,
                 "cache write: every byte lies where the layout says, and no other is touched") {
  DYNAMIC_SECTION(shape.name) { expect_exact_in_every_mode(1); }
}

std::vector<WriteShape> small_shapes() {
  std::vector<WriteShape> kept;
  for (WriteShape& shape : shapes())
    if (shape.first.block_size <= 16 && shape.num_tokens > 0) kept.push_back(shape);
  return kept;
}
struct SmallCacheWrite : CacheWrite {
  SmallCacheWrite() : CacheWrite(GENERATE(from_range(small_shapes()))) {}
};
TEST_CASE_METHOD(SmallCacheWrite, "cache write: holds under a hundred seeds of preemption",
                 "[slow]") {
  DYNAMIC_SECTION(shape.name) { expect_exact_in_every_mode(kHuntsOfSlowTests); }
}

// ---- every layout with every dtype, head size and block size

WriteShape regular_shape() {
  const auto arrangement = GENERATE(Arrangement::nhd, Arrangement::hnd, Arrangement::x_split_key);
  const DType dtype = GENERATE(DType::bf16, DType::fp16, DType::fp32, DType::fp8_e4m3,
                               DType::fp8_e5m2, DType::int8);
  const int head_size = GENERATE(64, 80, 128);
  const int block_size = GENERATE(1, 16, 48);
  const bool scaled = oracle::itemsize(dtype) == 1;
  return pair({.name = fmt::format("layout {} dtype {} heads of {} blocks of {}",
                                   static_cast<int>(arrangement), static_cast<int>(dtype),
                                   head_size, block_size),
               .source = scaled ? DType::bf16 : dtype,
               .first = {.arrangement = arrangement,
                         .dtype = dtype,
                         .scaling = scaled ? Scaling::per_tensor : Scaling::none,
                         .num_heads = 2,
                         .head_size = head_size,
                         .block_size = block_size},
               .padding_bytes = 64,
               .num_tokens = 7});
}
struct RegularCacheWrite : CacheWrite {
  RegularCacheWrite() : CacheWrite(regular_shape()) {}
};
TEST_CASE_METHOD(RegularCacheWrite, "cache write: any dtype in any layout lies where it should") {
  DYNAMIC_SECTION(shape.name) { expect_exact_in_every_mode(1); }
}

// ---- rounding

TEST_CASE(
    "cache write: rounds every number of a format, its neighbours and the ties between them") {
  const DType dtype =
      GENERATE(DType::fp8_e4m3, DType::fp8_e5m2, DType::fp16, DType::bf16, DType::int8);
  DYNAMIC_SECTION("dtype " << static_cast<int>(dtype)) {
    std::vector<float> values = {0.0f, -0.0f, 1e30f, -1e30f, 1e-30f, 0.49999997f, -0.5f, 127.6f};
    const int step = oracle::itemsize(dtype) == 1 ? 1 : 97;
    const int end = oracle::itemsize(dtype) == 1 ? 0x7B : 0x7B00;
    for (int i = 0; i < end; i += step) {
      const double low = oracle::number_of(i, dtype), high = oracle::number_of(i + 1, dtype);
      const auto tie = static_cast<float>((low + high) / 2);
      for (float value :
           {static_cast<float>(low), tie, std::nextafter(tie, 1e30f), std::nextafter(tie, -1e30f)})
        values.insert(values.end(), {value, -value});
    }
    const auto count = static_cast<int>(values.size());
    Part part{.dtype = dtype, .scaling = Scaling::per_tensor, .head_size = count, .block_size = 1};
    part.page_bytes = std::int64_t{count} * oracle::itemsize(dtype);
    KernelDevice device(CheckMode::fast);
    auto* memory = device.room<std::byte>(2 * part.page_bytes, "cache");
    WritePartsParams params{};
    params.parts[0] = {part.layout(memory, device.put(std::vector<float>{1.0f}, "scale")),
                       reinterpret_cast<std::byte*>(device.put(values, "values")), 4 * count,
                       4 * count, DType::fp32};
    params.slots = device.put(std::vector<Slot>{1}, "slots");
    params.num_parts = params.num_rows = 1;
    device->launch(device.engine().write_parts, params);
    const auto bytes =
        device.get(reinterpret_cast<std::uint8_t*>(memory) + part.page_bytes, part.page_bytes);
    for (int i = 0; i < count; ++i) {
      std::uint32_t found = 0;
      std::memcpy(&found, bytes.data() + i * oracle::itemsize(dtype),
                  static_cast<std::size_t>(oracle::itemsize(dtype)));
      if (found != oracle::rounded(values[i], dtype))
        FAIL(values[i] << " as dtype " << static_cast<int>(dtype) << " is " << found);
    }
  }
}

// ---- planted defects

std::vector<WriteShape> shapes_with_scales() {
  std::vector<WriteShape> kept;
  for (const WriteShape& shape : shapes())
    if (shape.first.scaling == Scaling::per_token_head) kept.push_back(shape);
  return kept;
}
struct ScaledCacheWrite : CacheWrite {
  ScaledCacheWrite() : CacheWrite(GENERATE(from_range(shapes_with_scales()))) {}
};

TEST_CASE_METHOD(ScaledCacheWrite,
                 "cache write: the scale of another head and a scale that is lost are seen",
                 "[executor]") {
  DYNAMIC_SECTION(shape.name) {
    KernelDevice device;
    CHECK((written(device, device->place(), reverse_scales) != expected));
    device.plant(&EngineKernels::write_parts, &DefectKernels::lose_scales);
    CHECK((written(device, device->place()) != expected));
  }
}

TEST_CASE("cache write: one slot for two tokens is reported as a race", "[executor]") {
  KernelDevice device;
  Part part{.head_size = 64, .page_bytes = 16 * 128};
  auto* memory = device.room<std::byte>(2 * part.page_bytes, "cache");
  WritePartsParams params{};
  params.parts[0] = {part.layout(memory, nullptr), device.room<std::byte>(256, "rows"), 128, 128,
                     DType::bf16};
  device->zero(const_cast<std::byte*>(params.parts[0].source), 256);
  params.slots = device.put(std::vector<Slot>{5, 5}, "slots");
  params.num_parts = 1;
  params.num_rows = 2;
  LaunchPlace place = device.places()[1];
  place.items_per_thread = 1;
  CHECK(device.engine().write_parts(place, params) == 0);
  CHECK(device->finish());
  const auto reports = device.reports();
  REQUIRE(!reports.empty());
  CHECK(reports.front().kernel == "write_rows");
}

// ---- far pages

TEST_CASE("cache write: quantised rows beyond 2 and 4 GiB lie where they belong", "[far]") {
  constexpr std::int64_t kPage = std::int64_t{1} << 30;
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed, 6 * kPage);
    Part part{.dtype = DType::fp8_e4m3,
              .scaling = Scaling::per_token_head,
              .page_bytes = kPage,
              .row_bytes = 68,
              .scale_offset = 64};
    auto* memory = device.room<std::byte>(6 * kPage, "cache");
    const std::vector<Slot> slots = {2 * 16 + 3, 4 * 16 + 15, 5 * 16};
    std::vector<float> rows(64 * slots.size(), 7.0f);
    WritePartsParams params{};
    params.parts[0] = {part.layout(memory, nullptr),
                       reinterpret_cast<std::byte*>(device.put(rows, "rows")), 256, 256,
                       DType::fp32};
    params.slots = device.put(slots, "slots");
    params.num_parts = 1;
    params.num_rows = static_cast<std::int32_t>(slots.size());
    device->launch(device.engine().write_parts, params);
    for (Slot slot : slots) {
      const std::int64_t at = part.element_at(slot / 16, int(slot % 16), 0, 0);
      oracle::Bytes expected(68, 0x7E);  // 448 at a scale of 7 / 448
      const float scale = 7.0f / 448.0f;
      std::memcpy(expected.data() + 64, &scale, 4);
      INFO("slot " << slot);
      CHECK((device.get(reinterpret_cast<std::uint8_t*>(memory) + at, 68) == expected));
    }
    device.expect_no_reports();
  });
}

}  // namespace
}  // namespace lockstep::cuda
