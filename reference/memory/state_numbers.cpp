#include "reference/memory/state_numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "reference/memory/page_image.h"

namespace lockstep {
namespace {

// u; limits of the kernels; and the numbering of rule (15): inputs of state tensor s are parts 64 +
// 8 s onward.
constexpr double kUnit = 1.0 / (1 << 24);
constexpr std::int64_t kColumnsMax = 256;
constexpr std::int64_t kPieceTokens = 32;
constexpr std::int64_t kPartInputs = 64;
constexpr std::int64_t kPartsOfState = 8;

// Masks of rule (15): numbers that must be negative (logarithms of decays, in (-0.25, -0.125]) or
// positive (shares, in [0.5, 1)).
constexpr std::uint64_t kBothHalves = 0x0000000100000001ull;
constexpr WordShape kDecayShape{.keep = 0x007FFFFF * kBothHalves, .set = 0xBE000000 * kBothHalves};
constexpr WordShape kShareShape{.keep = 0x007FFFFF * kBothHalves, .set = 0x3F000000 * kBothHalves};

// The relative error of rounding to a format; 0 for fp32, whose rounding the bound contains.
double half_ulp(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return std::ldexp(1.0, -8);
    case DType::fp16:
      return std::ldexp(1.0, -11);
    default:
      return 0;
  }
}
// The bound after rounding: half a step of the largest possible number, plus the smallest number of
// the format, for values near zero.
double rounded_bound(double value, double bound, DType dtype) {
  const double least = dtype == DType::fp16 ? std::ldexp(1.0, -25) : std::ldexp(1.0, -140);
  return bound + half_ulp(dtype) * (std::abs(value) + bound) + least;
}

// A row of `count` fp32 numbers that follow from a token's content.
std::vector<double> drawn(ContentId content, const StateNumbers& of, std::int64_t part,
                          std::int64_t head, std::int64_t count,
                          WordShape shape = word_shape(DType::fp32)) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(4 * count));
  draw_row(content, coordinate(of.layer, of.part + part, head), shape, bytes);
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < count; ++i)
    numbers.push_back(number_at(bytes.data() + 4 * i, DType::fp32));
  return numbers;
}

// Euclidean.
double length(std::span<const double> vector) {
  double sum = 0;
  for (const double value : vector) sum += value * value;
  return std::sqrt(sum);
}

// The inputs of a convolution for one token, as stored.
std::vector<std::uint8_t> input_row(const StateNumbers& of, ContentId content) {
  std::vector<std::uint8_t> row(static_cast<std::size_t>(of.row_bytes()));
  draw_row(content, coordinate(of.layer, of.part, of.place), word_shape(of.dtype), row);
  return row;
}

// Row `index` of the sequence: width - 1 kept inputs, then one per token.
std::vector<std::uint8_t> row_of_sequence(const StateNumbers& of, const KeptInputs& kept,
                                          std::span<const ContentId> contents, std::int64_t index) {
  if (index >= of.width - 1) return input_row(of, contents[index - (of.width - 1)]);
  const auto size = static_cast<std::size_t>(of.row_bytes());
  if (kept.state.empty()) return std::vector<std::uint8_t>(size);
  const auto row = kept.state.subspan(static_cast<std::size_t>(kept.offset + index) * size, size);
  return {row.begin(), row.end()};
}

}  // namespace

// fp16 by hand: no conversion of the standard library covers it in C++20.
double number_at(const std::uint8_t* element, DType dtype) {
  if (dtype == DType::fp32) {
    float number = 0;
    std::memcpy(&number, element, 4);
    return number;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, element, 2);
  if (dtype == DType::bf16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  LS_CHECK(dtype == DType::fp16, "elements of {}", name_of(dtype));
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// Drafts lengthen a convolution's state by one row each, so they are subtracted from the width.
Result<StateNumbers> state_numbers(const KVCacheSpec& spec, std::size_t state,
                                   const LayerShare& share) {
  const StateTensorSpec& tensor = spec.states[state];
  StateNumbers of{.dtype = tensor.dtype,
                  .layer = share.layer,
                  .part = kPartInputs + kPartsOfState * static_cast<std::int64_t>(state),
                  .place = share.first_head};
  if (tensor.dtype != DType::fp32 && tensor.dtype != DType::bf16 && tensor.dtype != DType::fp16)
    return fail("state {} holds {}; real numbers are kept in fp32, bf16 or fp16", state,
                name_of(tensor.dtype));
  const std::vector<std::int64_t>& dims = tensor.dims;
  // [width - 1 + drafts, channels]: one row per kept input.
  const std::int64_t width = dims.front() + 1 - spec.num_speculative_blocks;
  if (dims.size() == 2 && width >= 2 && width <= 4) {
    of.width = width;
    of.num_inputs = dims[0];
    of.num_channels = dims[1];
    return of;
  }
  of.rule = share.layer % 2 == 0 ? StateRule::selective : StateRule::gated_delta;
  of.columns = dims.back();
  if (dims.size() >= 2) of.rows = dims[dims.size() - 2];
  for (std::size_t d = 0; d + 2 < dims.size(); ++d) of.heads *= dims[d];
  if (of.columns > kColumnsMax)
    return fail("state {} has rows of {} numbers; the kernels of recurrences take at most {}",
                state, of.columns, kColumnsMax);
  return of;
}

// Collects the rows before writing: `kept` may be the same bytes as `state`.
void keep_inputs(const StateNumbers& of, const KeptInputs& kept,
                 std::span<const ContentId> contents, std::int64_t keep_from,
                 std::span<std::uint8_t> state) {
  const std::int64_t total = of.width - 1 + std::ssize(contents);
  LS_CHECK(keep_from >= 0 && total - keep_from <= of.num_inputs, "{} of {} inputs into {} rows",
           total - keep_from, total, of.num_inputs);
  std::vector<std::uint8_t> rows;
  for (std::int64_t i = keep_from; i < total; ++i) {
    const std::vector<std::uint8_t> row = row_of_sequence(of, kept, contents, i);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  std::ranges::copy(rows, state.begin());
}

// A product with weights (content 0), then SiLU. The bound grows with the sum of absolute products.
Bounded convolve_last(const StateNumbers& of, const KeptInputs& kept,
                      std::span<const ContentId> contents) {
  const std::vector<double> weights = drawn(0, of, 1, of.place, of.num_channels * of.width);
  std::vector<std::vector<std::uint8_t>> inputs;
  for (std::int64_t k = 0; k < of.width; ++k)
    inputs.push_back(row_of_sequence(of, kept, contents, std::ssize(contents) - 1 + k));
  Bounded outputs;
  const std::int64_t item = itemsize_bytes(of.dtype);
  for (std::int64_t channel = 0; channel < of.num_channels; ++channel) {
    double sum = 0, size = 0;
    for (std::int64_t k = 0; k < of.width; ++k) {
      const double product =
          weights[channel * of.width + k] * number_at(inputs[k].data() + channel * item, of.dtype);
      sum += product;
      size += std::abs(product);
    }
    // SiLU.
    const double value = sum / (1 + std::exp(-sum));
    const double bound =
        1.1 * static_cast<double>(of.width + 1) * kUnit * size + 24 * kUnit * std::abs(value);
    outputs.values.push_back(value);
    outputs.bounds.push_back(rounded_bound(value, bound, of.dtype));
  }
  return outputs;
}

// sizes_ starts as absolute values: sums of absolute values bound the rounding of the sums.
Recurrence::Recurrence(const StateNumbers& of, std::span<const std::uint8_t> state, bool in_pieces)
    : of_(of),
      in_pieces_(in_pieces),
      values_(static_cast<std::size_t>(of.heads * of.rows * of.columns)),
      decay_terms_(static_cast<std::size_t>(of.heads)),
      rows_(static_cast<std::size_t>(of.heads * of.rows)) {
  LS_CHECK(of.rule != StateRule::convolution, "a convolution of width {}", of.width);
  const std::int64_t item = itemsize_bytes(of.dtype);
  if (!state.empty())
    for (std::size_t i = 0; i < values_.size(); ++i)
      values_[i] = number_at(state.data() + static_cast<std::int64_t>(i) * item, of.dtype);
  for (const double value : values_) sizes_.push_back(std::abs(value));
}

// A piece of 32 tokens ends by itself.
void Recurrence::advance(ContentId content) {
  outputs_.values.assign(rows_.size(), 0);
  outputs_.bounds.assign(rows_.size(), 0);
  if (of_.rule == StateRule::selective)
    advance_selective(content);
  else
    advance_delta(content);
  tokens_in_piece_ = (tokens_in_piece_ + 1) % kPieceTokens;
}

// Units of rounding in the sums over columns, per form of the kernel.
double Recurrence::units_of_sums() const {
  const auto wide = static_cast<double>(of_.columns);
  return in_pieces_ ? wide + 62 : wide / 32 + 30;
}

// The errors of invariant (2) for one token of the delta rule. The first token of a piece resets
// the sums, not the error.
Recurrence::Added Recurrence::error_of_token(Row& row, double g, double change, double before,
                                             double after, double v) {
  const auto wide = static_cast<double>(of_.columns);
  const double decay = std::exp(g);
  if (!in_pieces_) {
    const double of_lengths = wide / 64 + 6;
    return {
        (6 + std::abs(g) + 2 * (wide / 32 + 8) + 4 * of_lengths) * kUnit * (before + std::abs(v)),
        (wide / 32 + 10 + of_lengths) * kUnit * after};
  }
  if (tokens_in_piece_ == 0) row = {.error = row.error, .decays = 0, .summed = before};
  row.decays += std::abs(g);
  row.summed = decay * row.summed + std::abs(change);
  const double added = (2 * wide + 100 + 40 * row.decays) * kUnit * row.summed;
  return {added, added};
}

// Mamba2: h = h exp(A dt) + dt x B, y = C h + D x. All heads share B and C; dt is per head, x per
// row.
void Recurrence::advance_selective(ContentId content) {
  constexpr double kD = 0.5, kBiasOfDt = -1;
  const auto columns = static_cast<std::size_t>(of_.columns);
  const std::vector<double> B = drawn(content, of_, 1, of_.place, of_.columns);
  const std::vector<double> C = drawn(content, of_, 2, of_.place, of_.columns);
  const std::vector<double> steps = drawn(content, of_, 3, of_.place, of_.heads);
  for (std::int64_t head = 0; head < of_.heads; ++head) {
    const auto h = static_cast<std::size_t>(head);
    const std::vector<double> x = drawn(content, of_, 0, of_.place * of_.heads + head, of_.rows);
    // Rule (15): four decay rates in turn; dt is the softplus of the generated step and its bias.
    const double A = -0.25 * static_cast<double>(1 + head % 4);
    const double dt = std::log1p(std::exp(steps[h] + kBiasOfDt));
    const double decay = std::exp(A * dt);
    decay_terms_[h] += 6 + (in_pieces_ ? 51 : 18) * std::abs(A * dt);
    for (std::size_t r = 0; r < x.size(); ++r) {
      const std::size_t row = h * x.size() + r;
      double y = kD * x[r], size = std::abs(y);
      for (std::size_t c = 0; c < columns; ++c) {
        double& value = values_[row * columns + c];
        double& sum = sizes_[row * columns + c];
        value = value * decay + dt * x[r] * B[c];
        sum = sum * decay + std::abs(dt * x[r] * B[c]);
        y += C[c] * value;
        size += std::abs(C[c]) * sum;
      }
      outputs_.values[row] = y;
      outputs_.bounds[row] = (decay_terms_[h] + units_of_sums()) * kUnit * size;
    }
  }
}

// Gated delta rule: h = h exp(g), h += beta (v - h k) k, o = h q / 8, with k and q of length one.
void Recurrence::advance_delta(ContentId content) {
  constexpr double kScale = 0.125;
  const auto columns = static_cast<std::size_t>(of_.columns);
  std::vector<double> q = drawn(content, of_, 0, of_.place, of_.columns);
  std::vector<double> k = drawn(content, of_, 1, of_.place, of_.columns);
  const std::vector<double> g = drawn(content, of_, 3, of_.place, of_.heads, kDecayShape);
  const std::vector<double> beta = drawn(content, of_, 4, of_.place, of_.heads, kShareShape);
  // Normalized as the kernels do, with 1e-6 under the root.
  for (std::vector<double>* vector : {&q, &k}) {
    const double factor = 1 / std::sqrt(std::pow(length(*vector), 2) + 1e-6);
    for (double& value : *vector) value *= factor;
  }
  // An output is a product with q, so it is off by at most |q| times the row's error.
  const double query = length(q) * kScale;
  std::vector<double> values;
  for (std::int64_t head = 0; head < of_.heads; ++head) {
    const std::vector<double> v = drawn(content, of_, 2, of_.place * of_.heads + head, of_.rows);
    values.insert(values.end(), v.begin(), v.end());
  }
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    const std::size_t h = row / static_cast<std::size_t>(of_.rows);
    const double v = values[row];
    const auto state = std::span(values_).subspan(row * columns, columns);
    Row& at = rows_[row];
    const double before = length(state);
    double read_back = 0, o = 0;
    for (std::size_t c = 0; c < columns; ++c) read_back += (state[c] *= std::exp(g[h])) * k[c];
    for (std::size_t c = 0; c < columns; ++c) {
      state[c] += beta[h] * (v - read_back) * k[c];
      o += state[c] * q[c] * kScale;
    }
    const Added added =
        error_of_token(at, g[h], beta[h] * (v - read_back), before, length(state), v);
    at.error = std::exp(g[h]) * at.error + added.state;
    outputs_.values[row] = o;
    outputs_.bounds[row] = query * (at.error + added.output);
  }
}

// Mamba2 bounds each element by its own sum, the delta rule a whole row by its error's length.
double Recurrence::bound(std::int64_t element) const {
  const std::int64_t row = element / of_.columns;
  const double bound =
      of_.rule == StateRule::selective
          ? (decay_terms_[row / of_.rows] + units_of_sums()) * kUnit * sizes_[element]
          : rows_[row].error;
  return rounded_bound(value(element), bound, of_.dtype);
}

}  // namespace lockstep
