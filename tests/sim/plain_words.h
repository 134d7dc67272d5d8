// The words of rule (1) of sim/protocol/backend.h for the plain backend, from the rule only.
//
// 1. Shares nothing with the reference or the kernels, mix64() included.
// 2. If the byte count is not a multiple of 8, the last word is padded with zeros.
// Not checked: that `i` is a word of the bytes.
#pragma once

#include <cstdint>

#include "reference/types/kv_cache_spec.h"

namespace lockstep::plain {

using u64 = std::uint64_t;

u64 mix64(u64 x);
u64 coordinate_of(u64 layer, u64 part, u64 head);
// Word i of a row, its elements shaped to numbers of the dtype.
u64 content_word(u64 content, u64 layer, u64 part, u64 head, u64 i, DType dtype);

// Word i in and out of `size` bytes.
u64 word_at(const std::uint8_t* bytes, std::int64_t size, std::int64_t i);
void put_word(std::uint8_t* bytes, std::int64_t size, std::int64_t i, u64 word);

}  // namespace lockstep::plain
