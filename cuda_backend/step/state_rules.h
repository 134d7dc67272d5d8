// Which kernel a state tensor of real numbers belongs to, and how large its inputs and outputs are:
// rule (15) of sim/protocol/backend.h, worked out from shapes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda_backend/kernels/params.h"
#include "cuda_backend/views/layer_caches.h"

namespace lockstep::cuda {

enum class StateKernel : std::uint8_t { causal_conv1d, selective_state, gated_delta };

// One state tensor of a layer, of real numbers.
struct RealState {
  StateCache cache;
  StateKernel kernel = StateKernel::causal_conv1d;
  DType dtype = DType::fp32;
  std::int32_t group = 0;
  std::uint32_t first_part = 0;  // of its inputs
  // Convolutions: rows of inputs, [num_inputs, num_channels].
  std::int32_t width = 0, num_inputs = 0, num_channels = 0;
  // Recurrences: [heads, rows, columns].
  std::int32_t heads = 1, rows = 1, columns = 0;

  bool is_convolution() const { return kernel == StateKernel::causal_conv1d; }
  std::int64_t input_row_bytes() const { return num_channels * itemsize_bytes(dtype); }
  // Of one token.
  std::int64_t num_outputs() const { return is_convolution() ? num_channels : heads * rows; }
  DType output_dtype() const { return is_convolution() ? dtype : DType::fp32; }
  std::int64_t output_bytes() const { return num_outputs() * itemsize_bytes(output_dtype()); }
};

// In the order of layers.states.
std::vector<RealState> real_states_of(const LayerCaches& layers);
// What the kernels cannot do with these; empty: nothing.
std::optional<std::string> why_not_real(const LayerCaches& layers);

}  // namespace lockstep::cuda
