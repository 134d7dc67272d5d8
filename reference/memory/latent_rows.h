// Rows of sparse MLA in layouts of bytes, as numbers: a latent in tiles that share a scale, and a
// rope behind it, written from bf16 elements. Sources: vllm/models/deepseek_v32/common/kernels.py
// and vllm/models/deepseek_v4/common/ops/cache_utils.py.
//
// | bytes | latent                 | its scales                     | rope    |
// |-------|------------------------|--------------------------------|---------|
// | 656   | 512 e4m3, tiles of 128 | fp32 powers of two, behind it  | 64 bf16 |
// | 584   | 448 e4m3, tiles of 64  | their exponents, 7 bytes and 0 | 64 bf16 |
// | 352   | 512 e2m1, tiles of 16  | e4m3, four interleaved         | 64 e4m3 |
//
// 1. The row of 352 bytes has its rope in front of its scales.
// 2. Of rows of 584 bytes a page has the data of all, 576 bytes each, and then the scales of all.
#pragma once

#include <cstdint>
#include <span>

#include "reference/memory/numbers.h"

namespace lockstep {

enum class LatentFormat : std::uint8_t { none, fp8_656, fp8_584, fp4_352 };

// none where the rows are words, or have another layout.
LatentFormat latent_format(Numbers numbers, const KVCacheSpec& spec);
std::int64_t latent_elements(LatentFormat format);    // of a row, rope included
std::int64_t latent_data_bytes(LatentFormat format);  // of a row, without scales of an area

// The row that a token's elements make (`key`: content.h). REQUIRES: row has all its bytes.
void draw_latent_row(std::uint64_t key, LatentFormat format, std::span<std::uint8_t> row);
// What its elements are worth. REQUIRES: latent_elements(format) of them.
void decode_latent_row(std::uint64_t key, LatentFormat format, std::span<double> row);

}  // namespace lockstep
