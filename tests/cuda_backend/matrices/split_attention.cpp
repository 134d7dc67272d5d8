// Attention over paged caches against doubles: every layout and scaling, windows and local chunks,
// prefill chunks and decodes in one batch, one split and many.
#include <fmt/core.h>

#include <algorithm>
#include <functional>

#include "cuda_backend/defects/backend_mutants.h"
#include "tests/cuda_backend/attention_oracle.h"
#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/matrices/every_mode.h"
#include "tests/cuda_backend/part_oracle.h"

namespace lockstep::cuda {
namespace {

using oracle::Arrangement;
using oracle::Numbers;
using oracle::Part;

struct Request {
  int num_computed_tokens, num_tokens;
};

struct AttentionShape {
  std::string name;
  Part key = {};
  Part value = {};
  bool one_row = false;  // MLA: V is the beginning of K
  int queries_per_kv = 1;
  int blocks_per_kv_block = 1;  // part.block_size is the kernel's
  DType query_dtype = DType::bf16;
  bool causal = true;
  int window = 0;
  int chunk = 0;
  int split_keys = 64;
  std::vector<Request> requests = {{150, 1}, {0, 5}, {33, 3}, {0, 1}};
};

std::vector<AttentionShape> shapes() {
  const auto fp8 = DType::fp8_e4m3, int8 = DType::int8;
  const auto hnd = Arrangement::hnd, x_split = Arrangement::x_split_key;
  const auto tensor = Scaling::per_tensor, row = Scaling::per_token_head;
  return {
      {.name = "NHD bf16 2x128 with 4 queries each",
       .key = {.num_heads = 2, .head_size = 128},
       .queries_per_kv = 4},
      {.name = "HND fp16 3x80",
       .key = {.arrangement = hnd, .dtype = DType::fp16, .num_heads = 3, .head_size = 80}},
      {.name = "x split bf16 2x64",
       .key = {.arrangement = x_split, .num_heads = 2},
       .queries_per_kv = 2},
      {.name = "x split e4m3 per tensor 2x64",
       .key = {.arrangement = x_split, .dtype = fp8, .scaling = tensor, .num_heads = 2}},
      {.name = "e5m2 per tensor 1x256",
       .key = {.dtype = DType::fp8_e5m2, .scaling = tensor, .head_size = 256}},
      {.name = "int8 per token and head 2x64 rows of 68",
       .key = {.dtype = int8, .scaling = row, .num_heads = 2, .row_bytes = 68, .scale_offset = 64}},
      {.name = "e4m3 per token and head 2x64 rows of 80",
       .key = {.arrangement = hnd,
               .dtype = fp8,
               .scaling = row,
               .num_heads = 2,
               .row_bytes = 80,
               .scale_offset = 64},
       .queries_per_kv = 2},
      {.name = "MLA 576 and 512 with 4 queries",
       .key = {.head_size = 576, .block_size = 64},
       .one_row = true,
       .queries_per_kv = 4},
      {.name = "MLA e4m3 per tensor",
       .key = {.dtype = fp8, .scaling = tensor, .head_size = 576, .block_size = 64},
       .one_row = true,
       .queries_per_kv = 2},
      {.name = "fp32 heads of 6 in blocks of 3",
       .key = {.dtype = DType::fp32, .num_heads = 2, .head_size = 6, .block_size = 3},
       .query_dtype = DType::fp32},
      {.name = "sliding window of 40", .key = {.num_heads = 2}, .window = 40, .split_keys = 16},
      {.name = "window longer than any context", .key = {}, .window = 1000},
      {.name = "chunked local of 32", .key = {.num_heads = 2}, .chunk = 32, .split_keys = 16},
      {.name = "cross attention",
       .key = {},
       .causal = false,
       .requests = {{149, 1}, {0, 2}, {0, 0}}},
      {.name = "splits of one key", .key = {}, .split_keys = 1, .requests = {{40, 2}}},
      {.name = "one split", .key = {.num_heads = 2}, .split_keys = 1000},
      {.name = "blocks of 1", .key = {.block_size = 1}},
      {.name = "blocks of 560 as 35 of 16",
       .key = {},
       .blocks_per_kv_block = 35,
       .requests = {{700, 2}, {3, 1}}},
      {.name = "blocks of 2096",
       .key = {.head_size = 16, .block_size = 2096},
       .requests = {{2100, 1}, {5, 2}}},
      {.name = "two blocks two heads",
       .key = {.num_heads = 2, .head_size = 16},
       .requests = {{20, 3}}},
      {.name = "no requests", .key = {}, .requests = {}},
  };
}

struct SplitAttention {
  static constexpr float kScale = 0.11f;
  static constexpr int kPadded = 2;  // tokens at the end of the batch
  const std::vector<float> tensor_scales = {0.21f, 0.6f};

  explicit SplitAttention(const AttentionShape& of = GENERATE(from_range(shapes()))) : shape(of) {
    shape.value = shape.key;
    if (shape.key.arrangement == Arrangement::x_split_key)
      shape.value.arrangement = Arrangement::x_split_value;
    if (shape.one_row) {
      shape.value.head_size = 512;
      shape.value.row_bytes = shape.key.row();
    } else {
      shape.value.offset = shape.key.bytes_of_block();
    }
    shape.key.page_bytes = shape.value.page_bytes =
        shape.value.offset + shape.key.bytes_of_block() + 32;
    lay_out_blocks();
    fill_cache();
    for (const Request& request : shape.requests) {
      seq_lens.push_back(request.num_computed_tokens + request.num_tokens);
      for (int i = 0; i < request.num_tokens; ++i) {
        token_rows.push_back(static_cast<int>(seq_lens.size()) - 1);
        positions.push_back(request.num_computed_tokens + i);
      }
    }
    for (int i = 0; i < kPadded && !token_rows.empty(); ++i) {
      token_rows.push_back(-1);
      positions.push_back(0);
    }
    const int item = oracle::itemsize(shape.query_dtype);
    queries.resize(token_rows.size() * heads() * shape.key.head_size * item);
    for (std::size_t i = 0; i < queries.size(); ++i)
      queries[i] = static_cast<std::uint8_t>(number(23, i));
    for (std::size_t i = 0; i < queries.size(); i += item)
      oracle::shape_element(queries.data() + i, shape.query_dtype);
  }
  int heads() const { return shape.key.num_heads * shape.queries_per_kv; }

  // Manager blocks in scattered order, each as its kernel blocks. What no query of the step sees is
  // no block at all.
  void lay_out_blocks() {
    const int split = shape.blocks_per_kv_block, manager_size = shape.key.block_size * split;
    int manager_blocks = 1;
    for (const Request& r : shape.requests)
      manager_blocks += (r.num_computed_tokens + r.num_tokens + manager_size - 1) / manager_size;
    std::vector<int> ids;
    for (int i = 1; i < manager_blocks; ++i) ids.push_back(i);
    std::sort(ids.begin(), ids.end(), [](int a, int b) { return number(5, a) < number(5, b); });
    num_blocks = manager_blocks * split;
    for (const Request& r : shape.requests)
      width = std::max(width, (r.num_computed_tokens + r.num_tokens) / shape.key.block_size + 2);
    for (const Request& r : shape.requests) {
      std::vector<std::int32_t> row(width, -1);
      const int first_seen = first_visible(r.num_computed_tokens) / shape.key.block_size;
      const int last = r.num_computed_tokens + r.num_tokens;
      for (int i = 0; i * manager_size < last; ++i) {
        const int id = ids.back();
        ids.pop_back();
        for (int k = 0; k < split && (i * split + k) * shape.key.block_size < last; ++k)
          if (i * split + k >= first_seen) row[i * split + k] = id * split + k;
      }
      table.insert(table.end(), row.begin(), row.end());
    }
  }
  int first_visible(int position) const {
    if (!shape.causal) return 0;
    int first = 0;
    while (shape.window > 0 && position - first >= shape.window) ++first;
    while (shape.chunk > 0 && first / shape.chunk != position / shape.chunk) ++first;
    return first;
  }

  void fill_cache() {
    bytes.resize(std::size_t(num_blocks) * shape.key.page_bytes);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::uint8_t>(number(29, i));
    for (const Part* part : {&shape.key, &shape.value})
      for (int block = 0; block < num_blocks; ++block)
        for (int token = 0; token < part->block_size; ++token)
          for (int head = 0; head < part->num_heads; ++head) {
            for (int e = 0; e < part->head_size; ++e)
              oracle::shape_element(bytes.data() + part->element_at(block, token, head, e),
                                    part->dtype);
            const float scale =
                0.004f * float(1 + number(37, part->element_at(block, token, head, 0)) % 5);
            if (part->scaling == Scaling::per_token_head)
              std::memcpy(bytes.data() + part->scale_at(block, token, head), &scale, 4);
          }
  }

  Numbers row_of(const Part& part, int request, int position, int head) const {
    const int block = table[std::size_t(request) * width + position / part.block_size];
    const int token = position % part.block_size;
    float scale = 1.0f;
    if (part.scaling == Scaling::per_tensor) scale = tensor_scales[&part == &shape.value];
    if (part.scaling == Scaling::per_token_head)
      std::memcpy(&scale, bytes.data() + part.scale_at(block, token, head), 4);
    Numbers row;
    for (int e = 0; e < part.head_size; ++e)
      row.push_back(scale * oracle::element(bytes.data() + part.element_at(block, token, head, e),
                                            part.dtype));
    return row;
  }

  oracle::Attention exact(int token, int head) const {
    const int request = token_rows[token], kv_head = head / shape.queries_per_kv;
    const int first = first_visible(positions[token]);
    const int last = shape.causal ? positions[token] + 1 : seq_lens[request];
    std::vector<Numbers> keys, values;
    for (int p = first; p < last; ++p) {
      keys.push_back(row_of(shape.key, request, p, kv_head));
      values.push_back(row_of(shape.value, request, p, kv_head));
    }
    Numbers query;
    const int item = oracle::itemsize(shape.query_dtype);
    for (int e = 0; e < shape.key.head_size; ++e)
      query.push_back(oracle::element(
          queries.data() + ((std::size_t(token) * heads() + head) * shape.key.head_size + e) * item,
          shape.query_dtype));
    return oracle::attend(query, keys, values, kScale,
                          static_cast<std::size_t>(shape.value.head_size));
  }

  std::vector<float> run(KernelDevice& device,
                         const std::function<void(SplitAttentionParams&)>& plant = nullptr) {
    auto* memory = reinterpret_cast<std::byte*>(device.put(bytes, "cache"));
    float* scales = device.put(tensor_scales, "scales");
    SplitAttentionParams params{};
    params.key = shape.key.layout(memory, scales);
    params.value = shape.value.layout(memory, scales + 1);
    params.queries = reinterpret_cast<std::byte*>(device.put(queries, "queries"));
    params.block_table = device.put(table, "block_table");
    params.token_rows = device.put(token_rows, "rows");
    params.positions = device.put(positions, "positions");
    params.seq_lens = device.put(seq_lens, "seq_lens");
    params.table_width = width;
    params.scale = kScale;
    params.query_dtype = shape.query_dtype;
    params.causal = shape.causal;
    params.window = shape.window;
    params.chunk = shape.chunk;
    params.num_tokens = static_cast<std::int32_t>(token_rows.size());
    params.num_query_heads = heads();
    params.split_keys = shape.split_keys;
    const int longest = seq_lens.empty() ? 0 : *std::max_element(seq_lens.begin(), seq_lens.end());
    params.num_splits = (longest + shape.split_keys - 1) / shape.split_keys;
    const std::int64_t rows = std::int64_t{params.num_tokens} * heads();
    params.partials =
        device.room<float>(rows * params.num_splits * (2 + shape.value.head_size), "partials");
    const std::int64_t count = rows * shape.value.head_size;
    params.outputs = device.put(std::vector<float>(count, -77.0f), "outputs");
    if (plant) plant(params);
    device->launch(device.engine().split_attention, params);
    return device.get(params.outputs, count);
  }

  // Outputs that are further from the exact value than the bound allows.
  int outputs_out_of_bounds(const std::vector<float>& found) const {
    int wrong = 0;
    for (std::size_t token = 0; token < token_rows.size(); ++token)
      for (int head = 0; head < heads(); ++head) {
        const float* output = found.data() + (token * heads() + head) * shape.value.head_size;
        if (token_rows[token] < 0) {
          wrong += std::any_of(output, output + shape.value.head_size,
                               [](float value) { return value != -77.0f; });
          continue;
        }
        const oracle::Attention expected = exact(static_cast<int>(token), head);
        const int keys = shape.causal ? positions[token] + 1 - first_visible(positions[token])
                                      : seq_lens[token_rows[token]];
        const int splits = (keys + shape.split_keys - 1) / shape.split_keys;
        const double bound = oracle::attention_bound(expected, shape.key.head_size, keys,
                                                     keys / 64 + splits, splits);
        for (int e = 0; e < shape.value.head_size; ++e)
          wrong += !(std::fabs(double{output[e]} - expected.output[e]) <= bound);
      }
    return wrong;
  }

  void expect_right_in_every_mode(int hunts) {
    expect_numbers_in_every_mode(
        hunts, [&](KernelDevice& device) { return run(device); },
        [&](const std::vector<float>& found) { return outputs_out_of_bounds(found); });
  }

  AttentionShape shape;
  int num_blocks = 0, width = 1;
  oracle::Bytes bytes, queries;
  std::vector<std::int32_t> table, token_rows, positions, seq_lens;
};

TEST_CASE_METHOD(SplitAttention,
                 "split attention: is softmax of what each query sees, within the derived bound") {
  DYNAMIC_SECTION(shape.name) { expect_right_in_every_mode(1); }
}

std::vector<AttentionShape> short_shapes() {
  std::vector<AttentionShape> kept;
  for (AttentionShape& shape : shapes()) {
    if (shape.key.block_size > 16 || shape.key.head_size > 80) continue;
    shape.requests = {{40, 1}, {0, 2}};
    shape.split_keys = std::min(shape.split_keys, 16);
    kept.push_back(shape);
  }
  return kept;
}
struct ShortSplitAttention : SplitAttention {
  ShortSplitAttention() : SplitAttention(GENERATE(from_range(short_shapes()))) {}
};
TEST_CASE_METHOD(ShortSplitAttention, "split attention: holds under a hundred seeds of preemption",
                 "[slow]") {
  DYNAMIC_SECTION(shape.name) { expect_right_in_every_mode(kHuntsOfSlowTests); }
}

// ---- every layout with every dtype, head size and block size

AttentionShape regular_shape() {
  const auto arrangement = GENERATE(Arrangement::nhd, Arrangement::hnd, Arrangement::x_split_key);
  const DType dtype = GENERATE(DType::bf16, DType::fp16, DType::fp32, DType::fp8_e4m3, DType::int8);
  const int head_size = GENERATE(64, 80, 128);
  const int block_size = GENERATE(1, 16, 48);
  AttentionShape shape{.name = fmt::format("layout {} dtype {} heads of {} blocks of {}",
                                           static_cast<int>(arrangement), static_cast<int>(dtype),
                                           head_size, block_size),
                       .key = {.arrangement = arrangement,
                               .dtype = dtype,
                               .num_heads = 2,
                               .head_size = head_size,
                               .block_size = block_size},
                       .queries_per_kv = 2,
                       .split_keys = 16,
                       .requests = {{20, 1}, {0, 2}}};
  if (oracle::itemsize(dtype) == 1) shape.key.scaling = Scaling::per_tensor;
  return shape;
}
struct RegularSplitAttention : SplitAttention {
  RegularSplitAttention() : SplitAttention(regular_shape()) {}
};
TEST_CASE_METHOD(RegularSplitAttention, "split attention: reads any dtype in any layout") {
  DYNAMIC_SECTION(shape.name) { expect_right_in_every_mode(1); }
}

// ---- planted defects: each is out of bounds in the shapes that expose it, and in no other

TEST_CASE_METHOD(
    SplitAttention,
    "split attention: planted defects are out of bounds exactly where the shape exposes them",
    "[executor]") {
  DYNAMIC_SECTION(shape.name) {
    int longest = 0;
    for (std::size_t i = 0; i < token_rows.size(); ++i)
      if (token_rows[i] >= 0)
        longest = std::max(longest, shape.causal ? positions[i] + 1 - first_visible(positions[i])
                                                 : seq_lens[token_rows[i]]);
    KernelDevice device(CheckMode::fast);
    const auto other_scales = [](SplitAttentionParams& params) {
      reverse_scales(params.key);
      reverse_scales(params.value);
    };
    CHECK((outputs_out_of_bounds(run(device, other_scales)) > 0) ==
          (shape.key.scaling == Scaling::per_token_head && shape.key.num_heads > 1));
    CHECK((outputs_out_of_bounds(run(device, widen_window)) > 0) ==
          (shape.window > 0 && shape.window <= longest));
    device.plant(&EngineKernels::split_attention, &DefectKernels::combine_unscaled);
    CHECK((outputs_out_of_bounds(run(device)) > 0) == (longest > shape.split_keys));
  }
}

// ---- far pages

TEST_CASE("split attention: blocks beyond 2 and 4 GiB are read", "[far]") {
  constexpr std::int64_t kPage = std::int64_t{1} << 30;
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed, 6 * kPage);
    Part part{.dtype = DType::fp32, .head_size = 16, .page_bytes = kPage};
    auto* memory = device.room<std::byte>(6 * kPage, "cache");
    for (int token = 0; token < 32; ++token) {
      const std::vector<float> row(16, token < 16 ? 2.0f : 4.0f);
      device->upload(memory + part.element_at(token < 16 ? 5 : 3, token % 16, 0, 0), row.data(),
                     64);
    }
    SplitAttentionParams params{};
    params.key = params.value = part.layout(memory, nullptr);
    params.queries =
        reinterpret_cast<std::byte*>(device.put(std::vector<float>(16, 0.0f), "queries"));
    params.block_table = device.put(std::vector<std::int32_t>{5, 3}, "block_table");
    params.token_rows = device.put(std::vector<std::int32_t>{0}, "rows");
    params.positions = device.put(std::vector<std::int32_t>{31}, "positions");
    params.table_width = 2;
    params.scale = 1.0f;
    params.query_dtype = DType::fp32;
    params.causal = true;
    params.num_tokens = params.num_query_heads = 1;
    params.num_splits = 2;
    params.split_keys = 16;
    params.partials = device.room<float>(2 * 18, "partials");
    params.outputs = device.room<float>(16, "outputs");
    device->launch(device.engine().split_attention, params);
    CHECK(device.get(params.outputs, 16) == std::vector<float>(16, 3.0f));
    device.expect_no_reports();
  });
}

}  // namespace
}  // namespace lockstep::cuda
