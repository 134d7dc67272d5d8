#include "cuda_backend/step/real_states.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/step/block_tables.h"

namespace lockstep::cuda {

static float decoded(const std::byte* element, DType dtype) {
  if (dtype == DType::fp32) {
    float number = 0;
    std::memcpy(&number, element, 4);
    return number;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, element, 2);
  if (dtype == DType::bf16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
  if (rest >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000u | (rest & 0x3FF) << 13);
  // A half's exponent in a single's field is 112 too low. 2^112 corrects it, also below normal
  // numbers.
  return std::ldexp(std::bit_cast<float>(sign | rest << 13), 112);
}

// Masks of fp32 inputs below zero, and of inputs between 0.5 and 1: rule (15).
constexpr std::uint64_t kBothHalves = 0x0000000100000001ull;
constexpr ShapeMasks kDecayMasks{0x007FFFFF * kBothHalves, 0xBE000000 * kBothHalves};
constexpr ShapeMasks kShareMasks{0x007FFFFF * kBothHalves, 0x3F000000 * kBothHalves};

constexpr std::int64_t kAlignedFloats = 64;
static std::int64_t aligned(std::int64_t floats) {
  return (floats + kAlignedFloats - 1) / kAlignedFloats * kAlignedFloats;
}

constexpr int kInputsOfRecurrence = 5;

constexpr std::int32_t kMaxStateColumns = 256;  // of state_rows.cuh
constexpr std::uint32_t kPartInputs = 64, kPartsOfState = 8;

RealStates::RealStates(Device& device, const BackendConfig& config, const LayerCaches& layers)
    : device_(device),
      config_(config),
      waves_(config.plan.num_blocks),
      read_(config.plan.num_blocks),
      written_(config.plan.num_blocks),
      states_(real_states_of(layers)) {
  std::vector<float> constants;
  for (const RealState& state : states_) {
    constants_at_.push_back(constants.size());
    if (state.is_convolution()) {
      std::vector<float> weights(state.num_channels * state.width);
      fill_row(0, state.cache.layer, state.first_part + 1,
               static_cast<std::uint32_t>(state.cache.first_head), DType::fp32,
               std::as_writable_bytes(std::span(weights)));
      constants.insert(constants.end(), weights.begin(), weights.end());
      continue;
    }
    const auto heads = static_cast<std::size_t>(state.heads);
    for (std::int32_t head = 0; head < state.heads; ++head)
      constants.push_back(-static_cast<float>(1 + head % 4) / 4.0f);
    constants.insert(constants.end(), heads, 0.5f);
    constants.insert(constants.end(), heads, -1.0f);
  }
  LS_CHECK(constants_at_.size() == states_.size(), "constants of {} of {} states",
           constants_at_.size(), states_.size());
  constants_.upload(constants);
}

void RealStates::copy(std::span<const BlockCopy> copies) {
  if (copies.empty()) return;
  // Inputs of convolutions and other states are in different bytes, so their order is free.
  for (const bool inputs : {false, true}) {
    std::vector<Copy> moves;
    for (std::size_t i = 0; i < copies.size(); ++i)
      moves.push_back({index_of(inputs ? copies[i].conv_source : copies[i].source),
                       index_of(copies[i].target), i});
    waves_.for_each_move<Copy>(moves, [&](std::size_t first, std::size_t count) {
      copy_wave(copies, std::span(moves).subspan(first, count), inputs);
    });
  }
}

void RealStates::copy_wave(std::span<const BlockCopy> copies, std::span<const Copy> wave,
                           bool inputs) {
  std::vector<ByteMove> moves;
  std::int64_t longest = 0;
  for (const Copy& copy : wave)
    for (const RealState& state : states_) {
      if (state.group != copies[copy.item].group || state.is_convolution() != inputs) continue;
      const std::int64_t skipped =
          inputs ? copies[copy.item].conv_offset * state.input_row_bytes() : 0;
      moves.push_back({.target = state.cache.base + copy.target * state.cache.page_stride,
                       .source = state.cache.base + copy.source * state.cache.page_stride + skipped,
                       .size_bytes = state.cache.size_bytes - skipped});
      longest = std::max(longest, moves.back().size_bytes);
    }
  if (moves.empty()) return;
  const ByteMove* items = copies_.upload(moves);
  device_.launch(device_.engine_kernels().move_bytes,
                 MoveBytesParams{.moves = items,
                                 .num_moves = static_cast<std::int32_t>(moves.size()),
                                 .max_size_bytes = longest},
                 [&](Operation& operation) {
                   operation.named("copy_blocks").read_all(copies_);
                   for (const ByteMove& move : moves)
                     operation.read(range_of(move.source, move.size_bytes))
                         .write(range_of(move.target, move.size_bytes));
                 });
}

// Cuts the updates into chains and the chains into waves (rule 3).
std::vector<std::vector<RealStates::Chain>> RealStates::waves_of(const StepProgram& program) {
  std::vector<std::vector<Chain>> waves(1);
  read_.clear();
  written_.clear();
  const std::span<const StateUpdate> updates = program.state_updates;
  for (std::size_t first = 0; first < updates.size();) {
    std::size_t last = first + 1;
    while (last < updates.size() && updates[last].row == updates[first].row &&
           updates[last].group == updates[first].group)
      ++last;
    const auto own = updates.subspan(first, last - first);
    const StateUpdate& start = own.front();
    bool conflicts =
        written_.contains(index_of(start.source)) || written_.contains(index_of(start.conv_source));
    for (const StateUpdate& update : own)
      conflicts |=
          read_.contains(index_of(update.target)) || written_.contains(index_of(update.target));
    if (conflicts) {
      waves.emplace_back();
      read_.clear();
      written_.clear();
    }
    waves.back().push_back({first, last});
    read_.insert(index_of(start.source));
    read_.insert(index_of(start.conv_source));
    for (const StateUpdate& update : own) written_.insert(index_of(update.target));
    first = last;
  }
  LS_CHECK(waves.back().empty() ? updates.empty() : waves.back().back().last == updates.size(),
           "{} updates in {} waves", updates.size(), waves.size());
  return waves;
}

void RealStates::update(const StepProgram& program, const DeviceArray<std::uint64_t>& contents) {
  host_gathered_.clear();
  gathered_at_.assign(states_.size(), std::vector<Gathered>(program.state_updates.size()));
  if (program.state_updates.empty()) return;
  const auto waves = waves_of(program);
  for (const std::vector<Chain>& wave : waves) run_wave(program, wave, waves.size() == 1, contents);
}

void RealStates::add_chain(const StepProgram& program, const Chain& chain) {
  const auto updates =
      std::span(program.state_updates).subspan(chain.first, chain.last - chain.first);
  LS_CHECK(!updates.empty() && std::cmp_less(updates.front().group, work_.size()),
           "a chain of {} updates", updates.size());
  const StateUpdate& start = updates.front();
  GroupWork& work = work_[start.group];
  RecurrentItem item{index_of(start.source), start.first_token, 0};
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const StateUpdate& update = updates[i];
    LS_CHECK(std::cmp_less_equal(update.first_token + update.num_tokens, work.targets.size()),
             "tokens {} to {} of {}", update.first_token, update.first_token + update.num_tokens,
             work.targets.size());
    item.num_tokens += update.num_tokens;
    work.targets[update.first_token + update.num_tokens - 1] = index_of(update.target);
    work.updates.push_back(chain.first + i);
    work.first_reads.push_back(work.tokens_read.size());
    for (std::int32_t token = 0; token < update.num_tokens; ++token)
      if (update.reads_output(token)) work.tokens_read.push_back(update.first_token + token);
    work.blocks_written.push_back(index_of(update.target));
    if (update.is_draft) continue;
    // One pass covers both updates: the checkpoint's inputs are not read again.
    if (i > 0 && updates[i - 1].is_checkpoint) {
      ConvItem& inputs = work.convolutions.back();
      inputs.checkpoint = std::exchange(inputs.target, index_of(update.target));
      inputs.checkpoint_tokens = std::exchange(inputs.keep_from, item.num_tokens);
      inputs.num_tokens = item.num_tokens;
      continue;
    }
    work.blocks_read.push_back(index_of(update.conv_source));
    work.convolutions.push_back({.source = index_of(update.conv_source),
                                 .target = index_of(update.target),
                                 .first_token = update.first_token,
                                 .num_tokens = update.num_tokens + update.num_drafts,
                                 .offset = update.conv_offset,
                                 .keep_from = update.num_tokens});
  }
  work.blocks_read.push_back(index_of(start.source));
  const bool is_chunk = item.num_tokens > 1 && start.num_drafts == 0;
  (is_chunk ? work.chunks : work.steps).push_back(item);
}

bool RealStates::convolutions_in_one_wave() {
  bool one = true;
  for (const GroupWork& work : work_)
    waves_.for_each_move<ConvItem>(work.convolutions, [&](std::size_t, std::size_t count) {
      one &= count == work.convolutions.size();
    });
  return one;
}

void RealStates::run_wave(const StepProgram& program, std::span<const Chain> chains, bool alone,
                          const DeviceArray<std::uint64_t>& contents) {
  const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
  Shape shape{.tokens = num_tokens};
  const std::int32_t size = step_batch(device_, program);
  work_.assign(config_.plan.groups.size(), {});
  for (GroupWork& work : work_) work.targets.resize(num_tokens);
  for (const Chain& chain : chains) add_chain(program, chain);
  for (const GroupWork& work : work_) {
    shape.items = std::max(shape.items, static_cast<std::int32_t>(work.updates.size()));
    shape.reads = std::max(shape.reads, static_cast<std::int32_t>(work.tokens_read.size()));
  }
  const bool fits = size >= num_tokens && size >= shape.items;
  if (alone && fits && device_.captures(size) && convolutions_in_one_wave())
    shape = {.tokens = size, .items = size, .reads = size, .captured = true};
  reserve_buffers(shape);
  upload_work(shape);
  const auto launch_all = [&] {
    for (std::size_t state = 0; state < states_.size(); ++state)
      launch_state(state, shape, contents);
  };
  if (shape.captured)
    device_.run_captured("real states", size, launch_all);
  else
    launch_all();
  std::int64_t begin = 0;
  for (std::size_t state = 0; state < states_.size(); ++state) {
    const GroupWork& work = work_[states_[state].group];
    for (std::size_t i = 0; i < work.updates.size(); ++i)
      gathered_at_[state][work.updates[i]] = {
          host_gathered_.size(),
          begin + static_cast<std::int64_t>(work.first_reads[i]) * states_[state].output_bytes()};
    begin += shape.reads * states_[state].output_bytes();
  }
  auto& gathered = host_gathered_.emplace_back(begin);
  device_.download(gathered.data(), gathered_.data(), begin);
}

void RealStates::read_back(const StepProgram& program, StepReadback& readback) const {
  readback.state_outputs.clear();
  for (std::size_t u = 0; u < program.state_updates.size(); ++u) {
    const StateUpdate& update = program.state_updates[u];
    const std::int64_t reads = update.num_outputs_read();
    for (std::size_t state = 0; state < states_.size(); ++state) {
      const RealState& of = states_[state];
      if (of.group != update.group) continue;
      const Gathered& at = gathered_at_[state][u];
      LS_CHECK(at.wave < host_gathered_.size() &&
                   at.begin + reads * of.output_bytes() <= std::ssize(host_gathered_[at.wave]),
               "output of state {} at {} of wave {}", state, at.begin, at.wave);
      const std::byte* element = host_gathered_[at.wave].data() + at.begin;
      for (std::int64_t i = 0; i < reads * of.num_outputs(); ++i)
        readback.state_outputs.push_back(
            decoded(element + i * itemsize_bytes(of.output_dtype()), of.output_dtype()));
    }
  }
}

// The launches of a wave of state updates: buffers, inputs, kernels and gathered outputs.

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
    gathered_bytes += state.output_bytes() * shape.reads;
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
    for (std::size_t i = 0; i < work.tokens_read.size(); ++i)
      moves.push_back({.target = to + static_cast<std::int64_t>(i) * bytes,
                       .source = outputs_.data() + work.tokens_read[i] * bytes,
                       .size_bytes = bytes});
    const auto none = static_cast<std::size_t>(shape.reads) - work.tokens_read.size();
    moves.insert(moves.end(), none, {.target = nullptr, .source = nullptr, .size_bytes = 0});
    to += shape.reads * bytes;
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
                   .max_tokens = shape.tokens,
                   .layer = state.layer,
                   .num_blocks = static_cast<std::int32_t>(config_.plan.num_blocks)},
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
                               .columns = state.columns,
                               .layer = state.layer,
                               .num_blocks = static_cast<std::int32_t>(config_.plan.num_blocks)};
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

void RealStates::gather_outputs(const RealState& state, std::size_t index, const Shape& shape) {
  device_.launch(
      device_.engine_kernels().move_bytes,
      MoveBytesParams{.moves = moves_.data() + static_cast<std::int64_t>(index) * shape.reads,
                      .num_moves = shape.reads,
                      .max_size_bytes = state.output_bytes()},
      [&](Operation& operation) {
        operation.named("move_bytes").read_all(moves_, outputs_).write_all(gathered_);
      });
}

std::vector<RealState> real_states_of(const LayerCaches& layers) {
  std::vector<RealState> states;
  for (std::size_t i = 0; i < layers.states.size(); ++i) {
    const StateShape& shape = layers.state_shapes[i];
    RealState state{.cache = layers.states[i],
                    .dtype = shape.dtype,
                    .group = shape.group,
                    .layer = shape.layer};
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
