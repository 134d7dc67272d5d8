// A block of 4-bit rows as its engine's tensors describe it, byte by byte, and the rounding of
// numbers by a search of all numbers of the format. No code and no arithmetic of cuda_backend/.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "tests/cuda_backend/part_oracle.h"

namespace lockstep::oracle {

// The eight magnitudes of e2m1; a sign makes the other eight.
inline constexpr std::array<double, 8> kE2m1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
inline double e2m1(int pattern) { return pattern & 8 ? -kE2m1[pattern & 7] : kE2m1[pattern & 7]; }
inline int nearest_e2m1(double value) {
  int best = 0;
  for (int i = 1; i < 8; ++i) {
    const double now = std::fabs(std::fabs(value) - kE2m1[i]);
    const double before = std::fabs(std::fabs(value) - kE2m1[best]);
    if (now < before || (now == before && i % 2 == 0)) best = i;
  }
  return best | (std::signbit(value) ? 8 : 0);
}

enum class Packing { int4, fp4, fp4_swizzled };  // of V's scales, as kernels of sm_100 read them

// Rows of K and V in pages of page_bytes: int4 as [data | fp32 scale] of each row, fp4 as the areas
// [K data | K scales | V data | V scales]. by_token: the heads of a token follow each other.
struct PackedBlocks {
  Packing packing = Packing::fp4;
  bool by_token = false;
  int num_heads = 1;
  int head_size = 16;
  int block_size = 16;
  int padding = 0;
  int offset = 0;  // of the layer in its page

  bool is_fp4() const { return packing != Packing::int4; }
  int data() const { return head_size / 2; }
  int scales() const { return is_fp4() ? head_size / 16 : 4; }
  int part_bytes() const { return num_heads * block_size * (data() + scales()); }
  std::int64_t page_bytes() const { return offset + 2 * part_bytes() + padding; }

  // Which byte of a page each byte of a row's data and scales is, by walking over the page.
  std::vector<int> data_at = {}, scale_at = {};
  int index(int kv, int token, int head, int byte, int bytes) const {
    return ((kv * block_size + token) * num_heads + head) * bytes + byte;
  }
  int data_byte(int kv, int token, int head, int byte) const {
    return data_at[index(kv, token, head, byte, data())];
  }
  int scale_byte(int kv, int token, int head, int byte) const {
    return scale_at[index(kv, token, head, byte, scales())];
  }
  void walk() {
    data_at.assign(2 * num_heads * block_size * data(), -1);
    scale_at.assign(2 * num_heads * block_size * scales(), -1);
    int at = offset;
    const auto each_row = [&](auto visit) {
      for (int outer = 0; outer < (by_token ? block_size : num_heads); ++outer)
        for (int inner = 0; inner < (by_token ? num_heads : block_size); ++inner)
          by_token ? visit(outer, inner) : visit(inner, outer);
    };
    const auto take = [&](std::vector<int>& places, int kv, int token, int head, int bytes) {
      for (int byte = 0; byte < bytes; ++byte) places[index(kv, token, head, byte, bytes)] = at++;
    };
    for (int kv = 0; kv < 2; ++kv) {
      each_row([&](int token, int head) {
        take(data_at, kv, token, head, data());
        if (!is_fp4()) take(scale_at, kv, token, head, scales());
      });
      if (is_fp4())
        each_row([&](int token, int head) { take(scale_at, kv, token, head, scales()); });
    }
    if (packing == Packing::fp4_swizzled) swizzle();
  }
  // [T/4, 4, 4, S/4], its axes taken in the order 0, 2, 3, 1, is what lies in [T, S].
  void swizzle() {
    std::vector<int> dealt = scale_at;
    for (int head = 0; head < num_heads; ++head) {
      std::vector<std::pair<int, int>> order;  // (token, scale) that lies at each place in turn
      for (int four = 0; four < block_size / 4; ++four)
        for (int column = 0; column < 4; ++column)
          for (int piece = 0; piece < scales() / 4; ++piece)
            for (int token = 0; token < 4; ++token)
              order.emplace_back(4 * four + token, column * (scales() / 4) + piece);
      for (int i = 0; i < static_cast<int>(order.size()); ++i) {
        const auto [token, scale] = order[i];
        dealt[index(1, token, head, scale, scales())] =
            scale_byte(1, i / scales(), head, i % scales());
      }
    }
    scale_at = dealt;
  }

  // The same addresses as the strides that a kernel receives.
  cuda::PartLayout layout(std::byte* memory, int kv, const float* layer_scale) const {
    cuda::PartLayout part;
    const int first = kv * part_bytes() + offset;
    part.base = memory + first;
    part.block_stride = part.scale_block_stride = page_bytes();
    const int tokens = by_token ? num_heads : 1, heads = by_token ? 1 : block_size;  // in rows
    const int row = is_fp4() ? data() : data() + scales();
    part.token_stride = tokens * row;
    part.head_stride = heads * row;
    part.scale_token_stride = tokens * (is_fp4() ? scales() : row);
    part.scale_head_stride = heads * (is_fp4() ? scales() : row);
    part.scales = part.base + (is_fp4() ? num_heads * block_size * data() : data());
    part.block_size = cuda::make_divisor(static_cast<std::uint32_t>(block_size));
    part.num_heads = num_heads;
    part.head_size = part.piece_elements = head_size;
    part.dtype = DType::uint8;
    part.scaling = is_fp4() ? cuda::Scaling::fp4_groups : cuda::Scaling::int4_rows;
    part.swizzled_scales = packing == Packing::fp4_swizzled && kv == 1;
    part.layer_scale = layer_scale;
    return part;
  }

  // What a write makes of one row of numbers.
  void put_row(std::uint8_t* page, int kv, int token, int head, const std::vector<float>& row,
               float layer_scale) const {
    is_fp4() ? put_groups(page, kv, token, head, row, layer_scale)
             : put_int4(page, kv, token, head, row);
  }
  void put_element(std::uint8_t* page, int kv, int token, int head, int e, int bits) const {
    std::uint8_t& byte = page[data_byte(kv, token, head, e / 2)];
    byte = static_cast<std::uint8_t>(e % 2 == 0 ? (byte & 0xF0) | bits : (byte & 0x0F) | bits << 4);
  }
  void put_groups(std::uint8_t* page, int kv, int token, int head, const std::vector<float>& row,
                  float layer_scale) const {
    const float g = 1.0f / layer_scale, sixth = 1.0f / 6.0f, unit = 1.0f / g;
    for (int group = 0; group < head_size / 16; ++group) {
      float largest = 0;
      for (int i = 0; i < 16; ++i) largest = std::fmax(largest, std::fabs(row[16 * group + i]));
      const float share = largest * sixth;
      const std::uint32_t scale = rounded(g * share, DType::fp8_e4m3);
      page[scale_byte(kv, token, head, group)] = static_cast<std::uint8_t>(scale);
      const auto worth = static_cast<float>(number_of(scale, DType::fp8_e4m3));
      const float whole = worth * unit;
      const float inverse = worth == 0 ? 0 : 1.0f / whole;
      for (int i = 0; i < 16; ++i) {
        const float scaled = row[16 * group + i] * inverse;
        put_element(page, kv, token, head, 16 * group + i, nearest_e2m1(scaled));
      }
    }
  }
  // Half away from zero by a sum in fp32, among 0 to 15.
  static int nearest_int4(float value) {
    const float away = value >= 0 ? value + 0.5f : value - 0.5f;
    int best = 0;
    while (best < 15 && away >= static_cast<float>(best + 1)) ++best;
    return best;
  }
  void put_int4(std::uint8_t* page, int kv, int token, int head,
                const std::vector<float>& row) const {
    float low = row[0], high = row[0];
    for (const float value : row) {
      low = std::fmin(low, value);
      high = std::fmax(high, value);
    }
    const float range = high - low;
    const float scale = std::fmax(range / 15.0f, 1e-6f);
    const int zero = nearest_int4(-low / scale);
    std::uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    bits = bits / 16 * 16 + static_cast<std::uint32_t>(zero);
    for (int byte = 0; byte < 4; ++byte)
      page[scale_byte(kv, token, head, byte)] = static_cast<std::uint8_t>(bits >> (8 * byte));
    const float inverse = 1.0f / scale;
    for (int e = 0; e < head_size; ++e) {
      const float product = row[e] * inverse;
      put_element(page, kv, token, head, e, nearest_int4(product + static_cast<float>(zero)));
    }
  }

  // What an element stands for.
  double value(const std::uint8_t* page, int kv, int token, int head, int e,
               float layer_scale) const {
    const int byte = page[data_byte(kv, token, head, e / 2)];
    const int bits = e % 2 == 0 ? byte % 16 : byte / 16;
    if (is_fp4())
      return e2m1(bits) * number_of(page[scale_byte(kv, token, head, e / 16)], DType::fp8_e4m3) *
             layer_scale;
    std::uint32_t pattern = 0;
    for (int i = 0; i < 4; ++i)
      pattern |= static_cast<std::uint32_t>(page[scale_byte(kv, token, head, i)]) << (8 * i);
    return (bits - static_cast<int>(pattern % 16)) * number_of(pattern / 16 * 16, DType::fp32);
  }
};

}  // namespace lockstep::oracle
