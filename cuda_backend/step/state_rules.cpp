#include "cuda_backend/step/state_rules.h"

#include <fmt/format.h>

namespace lockstep::cuda {
namespace {

constexpr std::int32_t kMaxStateColumns = 256;  // of state_rows.cuh
constexpr std::uint32_t kPartInputs = 64, kPartsOfState = 8;

}  // namespace

std::vector<RealState> real_states_of(const LayerCaches& layers) {
  std::vector<RealState> states;
  for (std::size_t i = 0; i < layers.states.size(); ++i) {
    const StateShape& shape = layers.state_shapes[i];
    RealState state{.cache = layers.states[i], .dtype = shape.dtype, .group = shape.group};
    state.first_part = kPartInputs + kPartsOfState * static_cast<std::uint32_t>(state.cache.state);
    const auto dim = [&](std::size_t from_the_end) {
      return from_the_end > shape.dims.size()
                 ? 1
                 : static_cast<std::int32_t>(shape.dims[shape.dims.size() - from_the_end]);
    };
    const std::int32_t kept = shape.dims.size() == 2 ? dim(2) - shape.num_drafts : 0;
    if (kept >= 1 && kept <= 3) {
      state.width = kept + 1;
      state.num_inputs = dim(2);
      state.num_channels = dim(1);
    } else {
      state.kernel =
          state.cache.layer % 2 == 0 ? StateKernel::selective_state : StateKernel::gated_delta;
      state.columns = dim(1);
      state.rows = dim(2);
      for (std::size_t d = 3; d <= shape.dims.size(); ++d) state.heads *= dim(d);
    }
    states.push_back(state);
  }
  return states;
}

std::optional<std::string> why_not_real(const LayerCaches& layers) {
  for (const RealState& state : real_states_of(layers)) {
    if (state.dtype != DType::fp32 && state.dtype != DType::bf16 && state.dtype != DType::fp16)
      return fmt::format("numbers: state {} of layer {} holds {}, which a recurrence cannot",
                         state.cache.state, state.cache.layer, name_of(state.dtype));
    if (state.columns > kMaxStateColumns)
      return fmt::format("numbers: state {} of layer {} has {} columns, the kernel takes {}",
                         state.cache.state, state.cache.layer, state.columns, kMaxStateColumns);
  }
  return std::nullopt;
}

}  // namespace lockstep::cuda
