// Tensors in a file as other people's libraries read them (github.com/huggingface/safetensors):
// eight bytes, little-endian, that say how long the header is; the header, one JSON object that
// gives dtype, shape and data_offsets of each tensor by its name; then the bytes of the tensors,
// row-major, one after the other.
//
// (1) The header is filled with spaces to a multiple of eight bytes.
// (2) read(text(tensors)) are the same tensors; of any bytes that are not a whole file, or have
//     bytes that belong to no tensor, read() says what is wrong.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

struct SafeTensor {
  std::string name;
  std::string dtype;  // "BF16", "F32", "U64", ...
  std::vector<std::int64_t> shape;
  std::span<const std::uint8_t> bytes = {};  // not owned
};

// What the format calls it.
std::string_view safetensors_dtype(DType dtype);

// REQUIRES: names differ, shapes and bytes fit.
std::vector<std::uint8_t> safetensors_file(std::span<const SafeTensor> tensors);
// The tensors, in the order of their bytes; these lie in `file`.
Result<std::vector<SafeTensor>> read_safetensors(std::span<const std::uint8_t> file);

}  // namespace lockstep
