// A step's state updates by the kernels of an engine: inputs made from content ids, convolutions
// and recurrences over them, copies of states between blocks. Rule (15) of sim/protocol/backend.h.
//
// Invariants:
// 1. states_ and constants_at_ have one entry per state tensor, in the order of
//    LayerCaches::states.
// 2. A request's updates in a group are one chain, which is one item of a launch. A recurrence
//    writes a state after every token that has a block for it. A convolution keeps one sequence of
//    inputs for all drafts, and for a checkpoint its inputs at that token.
// 3. Chains of one wave may run at the same time: no block is written that another chain reads or
//    writes.
// 4. Chunks run in the kernels that work in pieces; single tokens and drafts run token by token.
//    Layers run one after the other and share inputs and outputs.
// 5. The outputs that an update reads back are gathered after each launch, one after the other;
//    gathered_at_ finds the first in host_gathered_.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda_backend/device/device.h"
#include "cuda_backend/kernels/params.h"
#include "cuda_backend/pool/block_waves.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// The kernel of a state tensor of real numbers, derived from its shape: rule (15).
enum class StateKernel : std::uint8_t { causal_conv1d, selective_state, gated_delta };

// One state tensor of a layer, of real numbers.
struct RealState {
  StateCache cache;
  StateKernel kernel = StateKernel::causal_conv1d;
  DType dtype = DType::fp32;
  std::int32_t group = 0, layer = 0;  // of the rank's plan
  std::uint32_t first_part = 0;       // of its inputs
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
// Why the kernels cannot compute these states; empty: they can.
std::optional<std::string> why_not_real(const LayerCaches& layers);

class RealStates {
 public:
  RealStates(Device& device, const BackendConfig& config, const LayerCaches& layers);

  void copy(std::span<const BlockCopy> copies);
  void update(const StepProgram& program, const DeviceArray<std::uint64_t>& contents);
  // After finish().
  void read_back(const StepProgram& program, StepReadback& readback) const;

 private:
  // Updates [first, last) of the program.
  struct Chain {
    std::size_t first, last;
  };
  // A group's part in a wave of chains.
  struct GroupWork {
    std::vector<ConvItem> convolutions;
    std::vector<RecurrentItem> steps, chunks;
    std::vector<std::int32_t> targets;  // per token of the step
    std::vector<std::size_t> updates;
    std::vector<std::size_t> first_reads;   // of each update, in tokens_read
    std::vector<std::int32_t> tokens_read;  // tokens whose outputs are gathered
    std::vector<std::int32_t> blocks_read, blocks_written;
  };
  // The padded size of a wave, so that every captured wave of a size has the same launches.
  struct Shape {
    std::int32_t tokens = 0;  // that inputs are made for
    std::int32_t items = 0;   // of every list
    std::int32_t reads = 0;   // gathered outputs of a state
    bool captured = false;
  };
  struct Copy {
    std::int32_t source, target;
    std::size_t item;
  };

  void copy_wave(std::span<const BlockCopy> copies, std::span<const Copy> wave, bool inputs);
  std::vector<std::vector<Chain>> waves_of(const StepProgram& program);
  void run_wave(const StepProgram& program, std::span<const Chain> chains, bool alone,
                const DeviceArray<std::uint64_t>& contents);
  void add_chain(const StepProgram& program, const Chain& chain);
  bool convolutions_in_one_wave();
  void upload_work(const Shape& shape);
  void reserve_buffers(const Shape& shape);
  void launch_state(std::size_t state, const Shape& shape,
                    const DeviceArray<std::uint64_t>& contents);
  void make_inputs(const RealState& state, const Shape& shape,
                   const DeviceArray<std::uint64_t>& contents);
  void convolve(const RealState& state, std::size_t index, const Shape& shape);
  void recur(const RealState& state, std::size_t index, const Shape& shape);
  void gather_outputs(const RealState& state, std::size_t index, const Shape& shape);
  void describe_states(const RealState& state, Operation& operation) const;
  // First float of input `j` of a recurrence.
  std::int64_t input_at(const RealState& state, int j, std::int64_t tokens) const;
  MemoryRange range_in(const RealState& state, std::int32_t block) const {
    return range_of(state.cache.base + block * state.cache.page_stride, state.cache.size_bytes);
  }

  Device& device_;
  const BackendConfig& config_;
  BlockWaves waves_;
  BlockMarks read_, written_;  // of the wave in progress
  std::vector<RealState> states_;
  std::vector<std::size_t> constants_at_;                         // of each state
  DeviceArray<float> constants_{device_, "constants of states"};  // weights; or A, D and dt_bias
  DeviceArray<float> inputs_{device_, "inputs of states"};
  DeviceArray<std::byte> outputs_{device_, "outputs of states"};
  DeviceArray<std::byte> gathered_{device_, "gathered outputs of states"};
  DeviceArray<ConvItem> convolutions_{device_, "convolutions"};  // [num_groups, items]
  DeviceArray<RecurrentItem> steps_{device_, "recurrences of tokens"};
  DeviceArray<RecurrentItem> chunks_{device_, "recurrences of chunks"};  // likewise
  DeviceArray<std::int32_t> targets_{device_, "targets of states"};      // [num_groups, tokens]
  DeviceArray<ByteMove> moves_{device_, "moves of outputs"};             // [num_states, reads]
  DeviceArray<ByteMove> copies_{device_, "moves of states"};
  // Of the wave.
  std::vector<GroupWork> work_;
  // Of the step: the gathered outputs of each wave, and the place of each update's first one.
  struct Gathered {
    std::size_t wave = 0;
    std::int64_t begin = 0;
  };
  std::vector<std::vector<std::byte>> host_gathered_;
  std::vector<std::vector<Gathered>> gathered_at_;  // [states][updates]
};

}  // namespace lockstep::cuda
