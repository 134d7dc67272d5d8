// Tensors in the file format of github.com/huggingface/safetensors: eight bytes, little-endian,
// with the header's length; the header, one JSON object with dtype, shape and data_offsets of each
// tensor by its name; then the bytes of the tensors, row-major and back to back.
//
// Invariants
// (1) The header is padded with spaces to a multiple of eight bytes.
// (2) read_safetensors(safetensors_file(tensors)) returns the same tensors. Bytes that are not a
//     complete file, or belong to no tensor, are an error.
//
// Not checked here: what tensors mean, and their values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// A tensor whose bytes the caller owns.
struct SafeTensor {
  std::string name;
  // The format's name: "BF16", "F32", "U64".
  std::string dtype;
  // Empty: a scalar. A size of 0 gives an empty tensor.
  std::vector<std::int64_t> shape;
  std::span<const std::uint8_t> bytes = {};  // not owned
};

// Returns the format's name of a dtype.
std::string_view safetensors_dtype(DType dtype);

// Returns the bytes of a file with the tensors in the given order. REQUIRES: names differ, and
// shapes match bytes.
std::vector<std::uint8_t> safetensors_file(std::span<const SafeTensor> tensors);
// Returns the tensors in the order of their bytes; their spans point into `file`. `__metadata__` is
// ignored. Errors: an incomplete file, an unknown dtype, gaps or overlaps between tensors.
Result<std::vector<SafeTensor>> read_safetensors(std::span<const std::uint8_t> file);

}  // namespace lockstep
