// The launches of a wave of state updates: buffers, inputs, kernels and gathered outputs.
#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/step/real_states.h"

namespace lockstep::cuda {
namespace {

// Masks of fp32 inputs below zero, and of inputs between 0.5 and 1: rule (15).
constexpr std::uint64_t kBothHalves = 0x0000000100000001ull;
constexpr ShapeMasks kDecayMasks{0x007FFFFF * kBothHalves, 0xBE000000 * kBothHalves};
constexpr ShapeMasks kShareMasks{0x007FFFFF * kBothHalves, 0x3F000000 * kBothHalves};

constexpr std::int64_t kAlignedFloats = 64;
std::int64_t aligned(std::int64_t floats) {
  return (floats + kAlignedFloats - 1) / kAlignedFloats * kAlignedFloats;
}

constexpr int kInputsOfRecurrence = 5;

}  // namespace

// Inputs in order: x, B, C, dt; or q, k, v, g, beta.
std::int64_t RealStates::input_at(const RealState& state, int j, std::int64_t tokens) const {
  const std::int64_t wide = std::int64_t{state.heads} * state.rows;
  const std::int64_t selective[] = {wide, state.columns, state.columns, state.heads, 0};
  const std::int64_t delta[] = {state.columns, state.columns, wide, state.heads, state.heads};
  const std::int64_t* floats = state.kernel == StateKernel::selective_state ? selective : delta;
  std::int64_t at = 0;
  for (int i = 0; i < j; ++i) at += aligned(floats[i] * tokens);
  return at;
}

void RealStates::reserve_buffers(const Shape& shape) {
  std::int64_t input_floats = 0, output_bytes = 0, gathered_bytes = 0;
  for (const RealState& state : states_) {
    const std::int64_t floats = state.is_convolution()
                                    ? (state.input_row_bytes() * shape.tokens + 3) / 4
                                    : input_at(state, kInputsOfRecurrence, shape.tokens);
    input_floats = std::max(input_floats, floats);
    output_bytes = std::max(output_bytes, state.output_bytes() * shape.tokens);
    gathered_bytes += state.output_bytes() * shape.items;
  }
  inputs_.reserve(input_floats);
  outputs_.reserve(output_bytes);
  gathered_.reserve(gathered_bytes);
}

// Uploads the lists of all groups, padded to the wave's shape, and the moves that gather outputs.
void RealStates::upload_work(const Shape& shape) {
  std::vector<ConvItem> convolutions;
  std::vector<RecurrentItem> steps, chunks;
  std::vector<std::int32_t> targets;
  for (const GroupWork& work : work_) {
    const auto items = static_cast<std::size_t>(shape.items);
    const auto append = [items](auto& all, auto padded) {
      LS_CHECK(padded.size() <= items, "{} items padded to {}", padded.size(), items);
      padded.resize(items);
      all.insert(all.end(), padded.begin(), padded.end());
    };
    append(convolutions, work.convolutions);
    append(steps, work.steps);
    append(chunks, work.chunks);
    LS_CHECK(std::cmp_less_equal(work.targets.size(), shape.tokens), "{} targets of {} tokens",
             work.targets.size(), shape.tokens);
    targets.insert(targets.end(), work.targets.begin(), work.targets.end());
    targets.resize(targets.size() + static_cast<std::size_t>(shape.tokens) - work.targets.size());
  }
  std::vector<ByteMove> moves;
  std::byte* to = gathered_.data();
  for (const RealState& state : states_) {
    const GroupWork& work = work_[state.group];
    const std::int64_t bytes = state.output_bytes();
    for (std::size_t i = 0; i < work.last_tokens.size(); ++i)
      moves.push_back({.target = to + static_cast<std::int64_t>(i) * bytes,
                       .source = outputs_.data() + work.last_tokens[i] * bytes,
                       .size_bytes = bytes});
    const auto none = static_cast<std::size_t>(shape.items) - work.last_tokens.size();
    moves.insert(moves.end(), none, {.target = nullptr, .source = nullptr, .size_bytes = 0});
    to += shape.items * bytes;
  }
  moves_.upload(moves);
  convolutions_.upload(convolutions);
  steps_.upload(steps);
  chunks_.upload(chunks);
  targets_.upload(targets);
}

void RealStates::launch_state(std::size_t index, const Shape& shape,
                              const DeviceArray<std::uint64_t>& contents) {
  const RealState& state = states_[index];
  if (!shape.captured && work_[state.group].updates.empty()) return;
  make_inputs(state, shape, contents);
  if (state.is_convolution())
    convolve(state, index, shape);
  else
    recur(state, index, shape);
  gather_outputs(state, index, shape);
}

void RealStates::make_inputs(const RealState& state, const Shape& shape,
                             const DeviceArray<std::uint64_t>& contents) {
  const auto fill = [&](int j, ShapeMasks masks, std::int32_t heads, std::int64_t row_bytes) {
    auto* to = reinterpret_cast<std::byte*>(
        inputs_.data() + (state.is_convolution() ? 0 : input_at(state, j, shape.tokens)));
    const std::int32_t place = state.cache.first_head;
    device_.launch(device_.kernels().fill_rows,
                   FillRowsParams{.contents = contents.data(),
                                  .key = to,
                                  .value = nullptr,
                                  .keep_mask = masks.keep,
                                  .set_mask = masks.set,
                                  .num_rows = shape.tokens,
                                  .num_kv_heads = heads,
                                  .num_parts = 1,
                                  .row_bytes = static_cast<std::int32_t>(row_bytes),
                                  .layer = state.cache.layer,
                                  .first_head = heads == 1 ? place : place * heads,
                                  .first_part = static_cast<std::int32_t>(state.first_part) + j},
                   [&](Operation& operation) {
                     operation.named("fill_rows").read_all(contents).write_all(inputs_);
                   });
  };
  const ShapeMasks fp32 = shape_masks(DType::fp32);
  const std::int64_t columns = 4 * state.columns, heads = 4 * state.heads, rows = 4 * state.rows;
  switch (state.kernel) {
    case StateKernel::causal_conv1d:
      return fill(0, shape_masks(state.dtype), 1, state.input_row_bytes());
    case StateKernel::selective_state:
      fill(0, fp32, state.heads, rows);
      fill(1, fp32, 1, columns);
      fill(2, fp32, 1, columns);
      return fill(3, fp32, 1, heads);
    case StateKernel::gated_delta:
      fill(0, fp32, 1, columns);
      fill(1, fp32, 1, columns);
      fill(2, fp32, state.heads, rows);
      fill(3, kDecayMasks, 1, heads);
      return fill(4, kShareMasks, 1, heads);
  }
}

void RealStates::describe_states(const RealState& state, Operation& operation) const {
  const GroupWork& work = work_[state.group];
  operation.read_all(inputs_, constants_, convolutions_, steps_, chunks_, targets_);
  operation.write_all(outputs_);
  for (const std::int32_t block : work.blocks_read)
    if (block != 0) operation.read(range_in(state, block));
  for (const std::int32_t block : work.blocks_written)
    operation.read(range_in(state, block)).write(range_in(state, block));
}

void RealStates::convolve(const RealState& state, std::size_t index, const Shape& shape) {
  const auto& items = work_[state.group].convolutions;
  const std::int64_t item = itemsize_bytes(state.dtype);
  const auto launch = [&](std::int64_t first, std::int64_t count) {
    device_.launch(
        device_.engine_kernels().causal_conv1d,
        ConvParams{.states = state.cache.base,
                   .page_stride = state.cache.page_stride,
                   .channel_stride = item,
                   .position_stride = state.input_row_bytes(),
                   .inputs = reinterpret_cast<const std::byte*>(inputs_.data()),
                   .outputs = outputs_.data(),
                   .input_token_stride = state.input_row_bytes(),
                   .output_token_stride = state.input_row_bytes(),
                   .weights = constants_.data() + constants_at_[index],
                   .bias = nullptr,
                   .items = convolutions_.data() + state.group * shape.items + first,
                   .dtype = state.dtype,
                   .silu = true,
                   .num_items = static_cast<std::int32_t>(count),
                   .num_channels = state.num_channels,
                   .width = state.width,
                   .max_tokens = shape.tokens},
        [&](Operation& operation) { describe_states(state, operation.named("causal_conv1d")); });
  };
  if (shape.captured) return launch(0, shape.items);
  // In mode all, a chunk continues from the inputs that it kept at the end of each block.
  waves_.for_each_move<ConvItem>(items, [&](std::size_t first, std::size_t count) {
    launch(static_cast<std::int64_t>(first), static_cast<std::int64_t>(count));
  });
}

void RealStates::recur(const RealState& state, std::size_t index, const Shape& shape) {
  const GroupWork& work = work_[state.group];
  const RecurrentStates states{.base = state.cache.base,
                               .page_stride = state.cache.page_stride,
                               .dtype = state.dtype,
                               .num_heads = state.heads,
                               .rows = state.rows,
                               .columns = state.columns};
  const float* constants = constants_.data() + constants_at_[index];
  const std::int32_t* targets = targets_.data() + std::int64_t{state.group} * shape.tokens;
  const auto input = [&](int j) { return inputs_.data() + input_at(state, j, shape.tokens); };
  auto* outputs = reinterpret_cast<float*>(outputs_.data());
  const EngineKernels& kernels = device_.engine_kernels();
  for (const bool chunks : {true, false}) {
    const std::size_t own = chunks ? work.chunks.size() : work.steps.size();
    const std::int32_t count = shape.captured ? shape.items : static_cast<std::int32_t>(own);
    const RecurrentItem* items =
        (chunks ? chunks_ : steps_).data() + std::int64_t{state.group} * shape.items;
    if (state.kernel == StateKernel::selective_state) {
      const SelectiveStateParams params{.states = states,
                                        .items = items,
                                        .state_targets = targets,
                                        .x = input(0),
                                        .dt = input(3),
                                        .B = input(1),
                                        .C = input(2),
                                        .z = nullptr,
                                        .A = constants,
                                        .D = constants + state.heads,
                                        .dt_bias = constants + 2 * state.heads,
                                        .y = outputs,
                                        .num_items = count,
                                        .num_groups = 1};
      device_.launch(chunks ? kernels.selective_chunks : kernels.selective_state, params,
                     [&](Operation& operation) {
                       describe_states(state, operation.named("selective_state"));
                     });
      continue;
    }
    const GatedDeltaParams params{.states = states,
                                  .items = items,
                                  .state_targets = targets,
                                  .q = input(0),
                                  .k = input(1),
                                  .v = input(2),
                                  .g = input(3),
                                  .beta = input(4),
                                  .o = outputs,
                                  .scale = 0.125f,
                                  .normalise = true,
                                  .num_items = count,
                                  .num_key_heads = 1};
    device_.launch(
        chunks ? kernels.delta_chunks : kernels.gated_delta, params,
        [&](Operation& operation) { describe_states(state, operation.named("gated_delta")); });
  }
}

// Gathers the outputs of each update's last token.
void RealStates::gather_outputs(const RealState& state, std::size_t index, const Shape& shape) {
  device_.launch(
      device_.engine_kernels().move_bytes,
      MoveBytesParams{.moves = moves_.data() + static_cast<std::int64_t>(index) * shape.items,
                      .num_moves = shape.items,
                      .max_size_bytes = state.output_bytes()},
      [&](Operation& operation) {
        operation.named("move_bytes").read_all(moves_, outputs_).write_all(gathered_);
      });
}

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
