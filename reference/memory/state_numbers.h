// States of real numbers, as plain loops (sim/protocol/backend.h, rule 15). The inputs of a
// convolution are only moved, so their bytes in a page are exact. A recurrence runs in doubles from
// its stored start, together with the distance that fp32 may be off.
//
// Invariants
// (1) Recurrence is one request's state of one layer over the tokens of one step: it starts from
//     stored numbers, and its error grows from zero token by token.
// (2) The distance is a worst case of the form that advances a state, with u = 2^-24: in pieces of
//     up to 32 tokens, which end where a state is stored, or token by token.
//     Mamba2: of its value, a decay is off by 6 + 18 |A dt| units per token (in pieces: 51), sums
//     over columns by columns / 32 + 30 (columns + 62), all relative to sums of absolute values.
//     Delta rule: an error is a row's length. It shrinks with every decay, and a token adds 6 + |g|
//     + 2 (columns / 32 + 8) + 4 (columns / 64 + 6) units of |h| + |v|; in pieces, 2 columns + 100
//     + 40 sum |g| units of what the piece sums: |h| before it and its changes, decayed. An output
//     is off by |q| times the error, and by its own sum over columns.
//     A convolution of width w: (w + 1) u sum |w x|, its activation's slope 1.1 and own error 24 u.
//     Any number stored or returned in a format other than fp32 is rounded again.
// Not here: the position of a state (memory_plan.h), its block (memory_model.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

enum class StateRule : std::uint8_t { convolution, selective, gated_delta };

// One state tensor of a layer.
struct StateNumbers {
  StateRule rule = StateRule::convolution;
  DType dtype = DType::fp32;
  std::int64_t layer = 0;  // of the whole plan
  std::int64_t part = 0;   // of the first of its inputs
  std::int64_t place = 0;  // which of the parts that tensor parallelism makes
  // Convolutions: [num_inputs, num_channels].
  std::int64_t width = 0;
  std::int64_t num_inputs = 0;
  std::int64_t num_channels = 0;
  // Recurrences: [heads, rows, columns].
  std::int64_t heads = 1;
  std::int64_t rows = 1;
  std::int64_t columns = 0;

  std::int64_t row_bytes() const { return num_channels * itemsize_bytes(dtype); }  // of inputs
  std::int64_t num_outputs() const {
    return rule == StateRule::convolution ? num_channels : heads * rows;
  }
};

// State tensor `state` of the layer. Errors: elements that are not numbers, rows too long for the
// kernels of a recurrence.
Result<StateNumbers> state_numbers(const KVCacheSpec& spec, std::size_t state,
                                   const LayerShare& share);

// Numbers, and how far what a kernel gives out may be from each.
struct Bounded {
  std::vector<double> values, bounds;
};

// The inputs of a convolution that a step starts from: rows [offset, offset + width - 1) of a
// state's bytes, or zeros where there are none.
struct KeptInputs {
  std::span<const std::uint8_t> state;  // empty: zeros
  std::int64_t offset = 0;
};
// The sequence (kept inputs, those of the tokens) from `keep_from` on, written to rows 0, 1, ... of
// `state`; rows behind stay. REQUIRES: it fits.
void keep_inputs(const StateNumbers& of, const KeptInputs& kept,
                 std::span<const ContentId> contents, std::int64_t keep_from,
                 std::span<std::uint8_t> state);
// What the convolution gives out for the last of the tokens.
Bounded convolve_last(const StateNumbers& of, const KeptInputs& kept,
                      std::span<const ContentId> contents);

class Recurrence {
 public:
  // `state`: the stored start; empty: zeros. `in_pieces`: the kernel's form.
  Recurrence(const StateNumbers& of, std::span<const std::uint8_t> state, bool in_pieces);

  void advance(ContentId content);
  // The state is stored after the last token.
  void end_piece() { tokens_in_piece_ = 0; }
  // Of the token that came last: [heads, rows].
  const Bounded& outputs() const { return outputs_; }
  // Of the state as it is stored, element by element.
  double value(std::int64_t element) const { return values_[element]; }
  double bound(std::int64_t element) const;

 private:
  // A row of the delta rule.
  struct Row {
    double error = 0;
    double decays = 0;  // in the piece: sum of |g|
    double summed = 0;  // in the piece: |h| before it and its changes, decayed
  };
  void advance_selective(ContentId content);
  void advance_delta(ContentId content);
  // What a token adds to a row's error, and what its output is off by besides.
  struct Added {
    double state, output;
  };
  Added error_of_token(Row& row, double g, double change, double before, double after, double v);
  double units_of_sums() const;  // Mamba2

  const StateNumbers of_;
  const bool in_pieces_;
  std::int64_t tokens_in_piece_ = 0;
  std::vector<double> values_, sizes_;  // [heads, rows, columns]; sizes are of absolute values
  std::vector<double> decay_terms_;     // [heads]: Mamba2
  std::vector<Row> rows_;               // [heads, rows]
  Bounded outputs_;
};

// The element of a format as a number.
double number_at(const std::uint8_t* element, DType dtype);

}  // namespace lockstep
