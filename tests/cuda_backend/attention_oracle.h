// Attention over rows of numbers in doubles, and the largest distance of fp32 from it. The rows
// come from part_oracle.h. Independent of blocks, tables, splits and warps.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace lockstep::oracle {

using Numbers = std::vector<double>;

struct Attention {
  Numbers output;
  double score_size = 0;   // largest scale * sum of |q k| over the keys
  double score_range = 0;  // highest score minus lowest
  double value_size = 0;   // largest |v|
};

inline Attention attend(const Numbers& query, const std::vector<Numbers>& keys,
                        const std::vector<Numbers>& values, double scale,
                        std::size_t value_head_size) {
  Attention result;
  result.output.assign(value_head_size, 0.0);
  if (keys.empty()) return result;
  Numbers scores;
  for (const Numbers& key : keys) {
    double score = 0, size = 0;
    for (std::size_t d = 0; d < query.size(); ++d) {
      score += query[d] * key[d];
      size += std::fabs(query[d] * key[d]);
    }
    scores.push_back(score * scale);
    result.score_size = std::max(result.score_size, size * scale);
  }
  const auto [lowest, highest] = std::minmax_element(scores.begin(), scores.end());
  const double top = *highest;
  result.score_range = top - *lowest;
  double total = 0;
  for (double& score : scores) total += score = std::exp(score - top);
  for (std::size_t j = 0; j < values.size(); ++j)
    for (std::size_t d = 0; d < value_head_size; ++d) {
      result.output[d] += scores[j] / total * values[j][d];
      result.value_size = std::max(result.value_size, std::fabs(values[j][d]));
    }
  return result;
}

// The tolerance that kernels/split_attention.cuh derives.
inline double attention_bound(const Attention& exact, double head_size, double keys, double tiles,
                              double splits) {
  const double u = std::ldexp(1.0, -24);
  const double score_error = (head_size + 4) * u * exact.score_size;
  const double weight_error = (4 * (tiles + splits + 1) + exact.score_range + keys + 4) * u;
  return 2 * (score_error + weight_error) * exact.value_size;
}

}  // namespace lockstep::oracle
