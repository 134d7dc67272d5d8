// The recurrences of Mamba2 and of the gated delta rule against doubles: chunks, single tokens,
// drafts with a state of their own, states in every dtype and in padded pages.
#include <algorithm>

#include "cuda_backend/defects/backend_mutants.h"
#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/part_oracle.h"
#include "tests/cuda_backend/recurrence_oracle.h"

namespace lockstep::cuda {
namespace {

enum class Rule { selective, selective_in_pieces, delta, delta_in_pieces };

bool is_delta(Rule rule) { return rule == Rule::delta || rule == Rule::delta_in_pieces; }
bool in_pieces(Rule rule) {
  return rule == Rule::selective_in_pieces || rule == Rule::delta_in_pieces;
}

struct RecurrenceShape {
  std::string name;
  Rule rule = Rule::selective;
  DType dtype = DType::fp32;
  int num_heads = 2;
  int num_groups = 1;  // of B and C, or of q and k
  int rows = 4;
  int columns = 64;
  bool gated = false;      // Mamba2: by z
  bool normalise = false;  // delta rule
  int padding_bytes = 0;

  std::int64_t page_bytes() const {
    return std::int64_t{num_heads} * rows * columns * oracle::itemsize(dtype) + padding_bytes;
  }
  std::int64_t at(int block, int head, int row, int column) const {
    const int index = (head * rows + row) * columns + column;
    return block * page_bytes() + std::int64_t{index} * oracle::itemsize(dtype);
  }
};
std::vector<RecurrenceShape> shapes() {
  const auto delta = Rule::delta, pieces = Rule::selective_in_pieces;
  return {
      {.name = "Mamba2 of 64 columns"},
      {.name = "Mamba2 of 128 columns gated 4 heads in 2 groups",
       .num_heads = 4,
       .num_groups = 2,
       .columns = 128,
       .gated = true},
      {.name = "Mamba2 in bf16 padded", .dtype = DType::bf16, .padding_bytes = 10},
      {.name = "Mamba2 of 16 columns in fp16", .dtype = DType::fp16, .rows = 3, .columns = 16},
      {.name = "Mamba2 of 256 columns", .num_heads = 1, .rows = 2, .columns = 256},
      {.name = "Mamba2 in pieces gated 4 heads in 2 groups",
       .rule = pieces,
       .num_heads = 4,
       .num_groups = 2,
       .rows = 6,
       .columns = 128,
       .gated = true},
      {.name = "Mamba2 in pieces bf16 padded",
       .rule = pieces,
       .dtype = DType::bf16,
       .rows = 9,
       .columns = 16,
       .padding_bytes = 10},
      {.name = "delta rule of 128 columns normalised",
       .rule = delta,
       .columns = 128,
       .normalise = true},
      {.name = "delta rule 4 heads on 2 keys in bf16",
       .rule = delta,
       .dtype = DType::bf16,
       .num_heads = 4,
       .num_groups = 2,
       .columns = 32,
       .padding_bytes = 6},
      {.name = "delta rule in pieces normalised 4 heads on 2 keys",
       .rule = Rule::delta_in_pieces,
       .num_heads = 4,
       .num_groups = 2,
       .rows = 6,
       .columns = 128,
       .normalise = true},
      {.name = "delta rule in pieces of 7 columns in bf16",
       .rule = Rule::delta_in_pieces,
       .dtype = DType::bf16,
       .rows = 9,
       .columns = 7,
       .padding_bytes = 10},
      {.name = "delta rule of 7 columns", .rule = delta, .rows = 5, .columns = 7},
      {.name = "delta rule of 256 columns",
       .rule = delta,
       .num_heads = 1,
       .rows = 2,
       .columns = 256,
       .normalise = true},
  };
}

constexpr int kTokens = 60, kBlocks = 12;

struct Recurrence {
  explicit Recurrence(const RecurrenceShape& of = GENERATE(from_range(shapes()))) : shape(of) {
    const int groups = shape.num_groups * shape.columns;
    for (int i = 0; i < kTokens * groups; ++i) {
      first_vector.push_back(real(61, i, 1.0f));
      second_vector.push_back(real(67, i, 1.0f));
    }
    if (is_delta(shape.rule) && !shape.normalise)  // keys of length one
      for (int n = 0; n < kTokens * shape.num_groups; ++n) {
        float* k = first_vector.data() + n * shape.columns;
        const double size = oracle::length({k, k + shape.columns});
        for (int i = 0; i < shape.columns; ++i) k[i] = static_cast<float>(k[i] / size * 0.9999);
      }
    for (int i = 0; i < kTokens * shape.num_heads * shape.rows; ++i) {
      inputs.push_back(real(71, i, 2.0f));
      gates.push_back(real(73, i, 3.0f));
    }
    for (int i = 0; i < kTokens * shape.num_heads; ++i) {
      steps.push_back(!is_delta(shape.rule) ? real(79, i, 3.0f) : -std::fabs(real(79, i, 0.5f)));
      betas.push_back(std::fabs(real(83, i, 1.0f)));
    }
    for (int head = 0; head < shape.num_heads; ++head) {
      A.push_back(-0.2f - 0.4f * float(head));
      D.push_back(real(89, head, 1.0f));
      dt_bias.push_back(real(97, head, 1.0f));
    }
    states.assign(static_cast<std::size_t>(kBlocks * shape.page_bytes()), 0xEE);
    for (int b = 0, n = 0; b < kBlocks; ++b)
      for (int head = 0; head < shape.num_heads; ++head)
        for (int row = 0; row < shape.rows; ++row)
          for (int column = 0; column < shape.columns; ++column, ++n)
            oracle::put_bits(states.data() + shape.at(b, head, row, column),
                             oracle::rounded(real(101, n, 1.0f), shape.dtype),
                             oracle::itemsize(shape.dtype));
  }
  static float real(int seed, int i, float size) {
    return (static_cast<float>(number(seed, i) % 4001) / 2000.0f - 1.0f) * size;
  }

  struct Work {
    std::vector<RecurrentItem> items;
    std::vector<std::int32_t> targets;  // [kTokens]
  };
  struct Result {
    std::vector<float> outputs;
    oracle::Bytes states;
    bool operator==(const Result&) const = default;
  };

  // A chunk from nothing; a decode in place; a chunk that keeps two boundaries; three drafts, each
  // with a block of its own, from the state of one that was accepted; nothing at all; a long chunk.
  static Work work() {
    Work work{{{0, 0, 9}, {2, 9, 1}, {3, 10, 6}, {6, 16, 3}, {9, 19, 0}, {0, 19, 41}},
              std::vector<std::int32_t>(kTokens, 0)};
    work.targets[8] = 1;
    work.targets[9] = 2;
    work.targets[12] = 4;
    work.targets[15] = 5;
    work.targets[16] = 6;  // over its own source
    work.targets[17] = 7;
    work.targets[18] = 8;
    work.targets[55] = 10;  // 37 tokens into a chunk of 41: no multiple of anything
    work.targets[59] = 11;
    return work;
  }

  Result run(KernelDevice& device, const LaunchPlace& place, const Work& work,
             const oracle::Bytes& before) const {
    const RecurrentStates on_device{reinterpret_cast<std::byte*>(device.put(before, "states")),
                                    shape.page_bytes(),
                                    shape.dtype,
                                    shape.num_heads,
                                    shape.rows,
                                    shape.columns};
    const auto* items = device.put(work.items, "items");
    const auto* targets = device.put(work.targets, "targets");
    const auto count = static_cast<std::int32_t>(work.items.size());
    auto* outputs = device.put(std::vector<float>(inputs.size(), 0.0f), "outputs");
    int error = 0;
    if (!is_delta(shape.rule)) {
      const SelectiveStateParams p{on_device,
                                   items,
                                   targets,
                                   device.put(inputs, "x"),
                                   device.put(steps, "dt"),
                                   device.put(first_vector, "B"),
                                   device.put(second_vector, "C"),
                                   shape.gated ? device.put(gates, "z") : nullptr,
                                   device.put(A, "A"),
                                   device.put(D, "D"),
                                   device.put(dt_bias, "dt_bias"),
                                   outputs,
                                   count,
                                   shape.num_groups};
      error = shape.rule == Rule::selective ? device.engine().selective_state(place, p)
                                            : device.engine().selective_chunks(place, p);
    } else {
      const GatedDeltaParams p{on_device,
                               items,
                               targets,
                               device.put(second_vector, "q"),
                               device.put(first_vector, "k"),
                               device.put(inputs, "v"),
                               device.put(steps, "g"),
                               device.put(betas, "beta"),
                               outputs,
                               0.125f,
                               shape.normalise,
                               count,
                               shape.num_groups};
      error = shape.rule == Rule::delta ? device.engine().gated_delta(place, p)
                                        : device.engine().delta_chunks(place, p);
    }
    CHECK(error == 0);
    return {device.get(outputs, static_cast<std::int64_t>(inputs.size())),
            device.get(reinterpret_cast<std::uint8_t*>(on_device.base),
                       static_cast<std::int64_t>(before.size()))};
  }

  std::vector<double> vector_of(const std::vector<float>& from, int token, int head) const {
    const int group = head / (shape.num_heads / shape.num_groups);
    const auto at = from.begin() + (token * shape.num_groups + group) * shape.columns;
    return {at, at + shape.columns};
  }
  oracle::Output exact_token(oracle::StateRow& state, int token, int head, int row) const {
    const int at = token * shape.num_heads + head, input = at * shape.rows + row;
    if (!is_delta(shape.rule))
      return oracle::advance(
          state,
          oracle::SelectiveToken{inputs[input], steps[at], dt_bias[head], A[head], D[head],
                                 vector_of(first_vector, token, head),
                                 vector_of(second_vector, token, head), shape.gated, gates[input]});
    return oracle::advance(
        state, oracle::DeltaToken{inputs[input], steps[at], betas[at], 0.125, shape.normalise,
                                  vector_of(second_vector, token, head),
                                  vector_of(first_vector, token, head)});
  }
  // A stored number may be off by the error of the state and half a unit of its dtype.
  double rounding_of(double value) const {
    const int bits = shape.dtype == DType::fp32 ? 24 : shape.dtype == DType::fp16 ? 11 : 8;
    return std::ldexp(std::fabs(value), -bits) + std::ldexp(1.0, -25);
  }

  void expect_row_within_bounds(const Work& work, const RecurrentItem& item, int head, int row,
                                const oracle::Bytes& before, const Result& found) const {
    std::vector<double> start(shape.columns, 0.0);
    for (int c = 0; c < shape.columns && item.source != 0; ++c)
      start[c] = oracle::element(before.data() + shape.at(item.source, head, row, c), shape.dtype);
    oracle::StateRow state(start);
    state.in_pieces = in_pieces(shape.rule);
    for (int t = item.first_token; t < item.first_token + item.num_tokens; ++t) {
      const oracle::Output y = exact_token(state, t, head, row);
      const float output = found.outputs[(t * shape.num_heads + head) * shape.rows + row];
      require_near(output, y.value, y.bound, "token ", t, " head ", head, " row ", row);
      for (int c = 0; c < shape.columns && work.targets[t] != 0; ++c) {
        const double stored = oracle::element(
            found.states.data() + shape.at(work.targets[t], head, row, c), shape.dtype);
        const double bound = !is_delta(shape.rule) ? oracle::bound_of_state(state, c) : state.error;
        require_near(stored, state.values[c],
                     bound + rounding_of(std::fabs(state.values[c]) + bound), "token ", t, " head ",
                     head, " row ", row, " column ", c);
      }
    }
  }
  void expect_within_bounds(const Work& work, const oracle::Bytes& before,
                            const Result& found) const {
    for (const RecurrentItem& item : work.items)
      for (int head = 0; head < shape.num_heads; ++head)
        for (int row = 0; row < shape.rows; ++row)
          expect_row_within_bounds(work, item, head, row, before, found);
  }
  // Bytes outside of target states do not change, padding included.
  void expect_nothing_else_touched(const Work& work, const oracle::Bytes& found) const {
    for (int b = 0; b < kBlocks; ++b) {
      const bool target = b != 0 && std::count(work.targets.begin(), work.targets.end(), b) > 0;
      const std::int64_t begin =
          b * shape.page_bytes() + (target ? shape.page_bytes() - shape.padding_bytes : 0);
      INFO("block " << b);
      CHECK(std::equal(found.begin() + begin, found.begin() + (b + 1) * shape.page_bytes(),
                       states.begin() + begin));
    }
  }

  RecurrenceShape shape;
  std::vector<float> inputs, gates, steps, betas, first_vector, second_vector, A, D, dt_bias;
  oracle::Bytes states;
};

TEST_CASE_METHOD(
    Recurrence,
    "recurrence: outputs and states are within the bound, and nothing else is touched") {
  DYNAMIC_SECTION(shape.name) {
    Result first;
    in_every_mode(
        [&](CheckMode mode, std::uint64_t seed) {
          KernelDevice device(mode, seed);
          for (const LaunchPlace& place : device.places()) {
            const Result found = run(device, place, work(), states);
            if (first.outputs.empty()) {
              first = found;
              expect_within_bounds(work(), states, found);
              expect_nothing_else_touched(work(), found.states);
            }
            CHECK((found == first));  // bit for bit in every mode and shape of launch
          }
          device.expect_no_reports();
        },
        1);
  }
}

// With states that keep what registers hold, it makes no difference where a sequence is cut, nor
// which drafts were rejected on the way.
std::vector<RecurrenceShape> fp32_shapes() {
  std::vector<RecurrenceShape> kept;
  for (const RecurrenceShape& shape : shapes())
    if (shape.dtype == DType::fp32 && !in_pieces(shape.rule)) kept.push_back(shape);
  return kept;
}
struct ExactRecurrence : Recurrence {
  ExactRecurrence() : Recurrence(GENERATE(from_range(fp32_shapes()))) {}
};
TEST_CASE_METHOD(ExactRecurrence,
                 "recurrence: however the tokens are cut, the outputs are those of one chunk") {
  DYNAMIC_SECTION(shape.name) {
    KernelDevice device(CheckMode::fast);
    const Result whole = run(device, device->place(),
                             {{{0, 0, kTokens}}, std::vector<std::int32_t>(kTokens, 0)}, states);
    for (int drafts : {1, 4}) {
      std::vector<float> outputs(inputs.size(), 0.0f);
      oracle::Bytes now = states;
      int token = 0, source = 0;
      for (int n = 0; token < kTokens; ++n) {
        const int length = std::min(drafts, kTokens - token);
        Work step{{{source, token, length}}, std::vector<std::int32_t>(kTokens, 0)};
        for (int i = 0; i < length; ++i) step.targets[token + i] = 1 + i;
        const Result found = run(device, device->place(), step, now);
        now = found.states;
        const int accepted = 1 + static_cast<int>(number(59, n) % length);
        const int floats = shape.num_heads * shape.rows;
        std::copy_n(found.outputs.begin() + token * floats, accepted * floats,
                    outputs.begin() + token * floats);
        token += accepted;
        source = accepted;  // the block of the last accepted draft
      }
      INFO(drafts << " at a time");
      CHECK((outputs == whole.outputs));
    }
  }
}

TEST_CASE_METHOD(Recurrence,
                 "recurrence: targets that are all the last leave the states of drafts unwritten",
                 "[executor]") {
  DYNAMIC_SECTION(shape.name) {
    KernelDevice device;
    const Result right = run(device, device->place(), work(), states);
    Work planted = work();
    if (!in_pieces(shape.rule))
      for (const RecurrentItem& item : planted.items) target_last(item, planted.targets);
    const Result found = run(device, device->place(), planted, states);
    CHECK((found.states != right.states) == !in_pieces(shape.rule));
  }
}

TEST_CASE_METHOD(Recurrence, "recurrence: an undecayed carry is seen only in the chunked forms",
                 "[executor]") {
  DYNAMIC_SECTION(shape.name) {
    KernelDevice device;
    const Result right = run(device, device->place(), work(), states);
    device.plant(&EngineKernels::selective_chunks, &DefectKernels::selective_undecayed);
    device.plant(&EngineKernels::delta_chunks, &DefectKernels::delta_undecayed);
    const Result found = run(device, device->place(), work(), states);
    CHECK((found.outputs != right.outputs) == in_pieces(shape.rule));
  }
}

TEST_CASE_METHOD(Recurrence, "recurrence: is the same under a hundred seeds of preemption",
                 "[slow]") {
  DYNAMIC_SECTION(shape.name) {
    Result first;
    in_every_mode(
        [&](CheckMode mode, std::uint64_t seed) {
          KernelDevice device(mode, seed);
          const Result found = run(device, device->place(), work(), states);
          if (mode == CheckMode::fast) first = found;
          CHECK((found == first));
          device.expect_no_reports();
        },
        kHuntsOfSlowTests);
  }
}

}  // namespace
}  // namespace lockstep::cuda
