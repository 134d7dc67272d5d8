#include "cuda_backend/step/real_states.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "cuda_backend/device/protocol.h"
#include "cuda_backend/step/block_tables.h"

namespace lockstep::cuda {
namespace {

float decoded(const std::byte* element, DType dtype) {
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

}  // namespace

RealStates::RealStates(Device& device, const BackendConfig& config, const LayerCaches& layers)
    : device_(device),
      config_(config),
      waves_(config.plan.num_blocks),
      read_(config.plan.num_blocks),
      written_(config.plan.num_blocks),
      states_(real_states_of(layers)),
      constants_(device, "constants of states"),
      inputs_(device, "inputs of states"),
      outputs_(device, "outputs of states"),
      gathered_(device, "gathered outputs of states"),
      convolutions_(device, "convolutions"),
      steps_(device, "recurrences of tokens"),
      chunks_(device, "recurrences of chunks"),
      targets_(device, "targets of states"),
      moves_(device, "moves of outputs"),
      copies_(device, "moves of states") {
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
    work.last_tokens.push_back(update.first_token + update.num_tokens - 1);
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
  for (const GroupWork& work : work_)
    shape.items = std::max(shape.items, static_cast<std::int32_t>(work.updates.size()));
  const bool fits = size >= num_tokens && size >= shape.items;
  if (alone && fits && device_.captures(size) && convolutions_in_one_wave())
    shape = {.tokens = size, .items = size, .captured = true};
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
          begin + static_cast<std::int64_t>(i) * states_[state].output_bytes()};
    begin += shape.items * states_[state].output_bytes();
  }
  auto& gathered = host_gathered_.emplace_back(begin);
  device_.download(gathered.data(), gathered_.data(), begin);
}

void RealStates::read_back(const StepProgram& program, StepReadback& readback) const {
  readback.state_outputs.clear();
  for (std::size_t u = 0; u < program.state_updates.size(); ++u)
    for (std::size_t state = 0; state < states_.size(); ++state) {
      const RealState& of = states_[state];
      if (of.group != program.state_updates[u].group) continue;
      const Gathered& at = gathered_at_[state][u];
      LS_CHECK(at.wave < host_gathered_.size() &&
                   at.begin + of.output_bytes() <= std::ssize(host_gathered_[at.wave]),
               "output of state {} at {} of wave {}", state, at.begin, at.wave);
      const std::byte* element = host_gathered_[at.wave].data() + at.begin;
      for (std::int64_t i = 0; i < of.num_outputs(); ++i)
        readback.state_outputs.push_back(
            decoded(element + i * itemsize_bytes(of.output_dtype()), of.output_dtype()));
    }
}

}  // namespace lockstep::cuda
