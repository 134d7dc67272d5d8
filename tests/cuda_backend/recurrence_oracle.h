// The recurrences of state layers for one row of a state, in doubles, each with the bound that the
// head of its kernel derives for fp32. Plain loops over tokens and columns.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace lockstep::oracle {

inline constexpr double kUnit = 1.0 / (1 << 24);

struct SelectiveToken {
  double x, dt, dt_bias, A, D;
  std::vector<double> B, C;
  bool gated;
  double z;
};
struct DeltaToken {
  double v, g, beta, scale;
  bool normalise;
  std::vector<double> q, k;
};

// A row of a state and how far fp32 may be from it: each column in Mamba2's, the whole row's length
// in the delta rule's.
struct StateRow {
  std::vector<double> values;
  std::vector<double> size;  // sums of absolute values
  double decay_terms = 0;    // rounding steps of the decays so far, in units
  bool in_pieces = false;    // as the kernels for chunks compute it
  double decays = 0;         // delta rule: sum of |g|
  double changes = 0;        // delta rule: |h| at the start and the sum of what tokens changed
  double error = 0;          // delta rule: length of the error so far

  explicit StateRow(std::vector<double> start) : values(start), size(start) {
    for (double& value : size) value = std::fabs(value);
    for (double value : start) changes += value * value;
    changes = std::sqrt(changes);
  }
};
struct Output {
  double value, bound;
};

inline Output advance(StateRow& state, const SelectiveToken& t) {
  const double dt = std::log1p(std::exp(t.dt + t.dt_bias)), decay = std::exp(t.A * dt);
  state.decay_terms += 6 + (state.in_pieces ? 51 : 18) * std::fabs(t.A * dt);
  double y = t.D * t.x, size = std::fabs(y);
  for (std::size_t i = 0; i < state.values.size(); ++i) {
    state.values[i] = state.values[i] * decay + dt * t.x * t.B[i];
    state.size[i] = state.size[i] * decay + std::fabs(dt * t.x * t.B[i]);
    y += t.C[i] * state.values[i];
    size += std::fabs(t.C[i]) * state.size[i];
  }
  const double columns = static_cast<double>(state.values.size());
  const double sums = state.in_pieces ? columns + 62 : columns / 32 + 30;
  double bound = (state.decay_terms + sums) * kUnit * size;
  if (t.gated) {
    const double gate = t.z / (1 + std::exp(-t.z));
    y *= gate;
    bound = bound * std::fabs(gate) + 24 * kUnit * (std::fabs(y) + bound);
  }
  return {y, bound};
}
inline double bound_of_state(const StateRow& state, std::size_t column) {
  const double columns = static_cast<double>(state.values.size());
  const double sums = state.in_pieces ? columns + 62 : 20;
  return (state.decay_terms + sums) * kUnit * state.size[column];
}

inline double length(const std::vector<double>& vector) {
  double sum = 0;
  for (double value : vector) sum += value * value;
  return std::sqrt(sum);
}

inline Output advance(StateRow& state, const DeltaToken& t) {
  const double columns = static_cast<double>(state.values.size());
  const double k_factor = t.normalise ? 1 / std::sqrt(std::pow(length(t.k), 2) + 1e-6) : 1;
  const double q_factor = t.normalise ? 1 / std::sqrt(std::pow(length(t.q), 2) + 1e-6) : 1;
  const double before = length(state.values);
  double read_back = 0, o = 0;
  for (std::size_t i = 0; i < state.values.size(); ++i) {
    state.values[i] *= std::exp(t.g);
    read_back += state.values[i] * t.k[i] * k_factor;
  }
  for (std::size_t i = 0; i < state.values.size(); ++i) {
    state.values[i] += t.beta * (t.v - read_back) * t.k[i] * k_factor;
    o += state.values[i] * t.q[i] * q_factor * t.scale;
  }
  const double factor_error = columns / 64 + 6;
  const double query = length(t.q) * q_factor * std::fabs(t.scale);
  if (state.in_pieces) {
    state.decays += std::fabs(t.g);
    state.changes += std::fabs(t.beta * (t.v - read_back));
    const double local = (2 * columns + 100 + 40 * state.decays) * kUnit * state.changes;
    state.error += local;
    return {o, query * (state.error + local)};
  }
  state.error += (6 + std::fabs(t.g) + 2 * (columns / 32 + 8) + 4 * factor_error) * kUnit *
                 (before + std::fabs(t.v));
  return {
      o, query * (state.error + (columns / 32 + 10 + factor_error) * kUnit * length(state.values))};
}

}  // namespace lockstep::oracle
